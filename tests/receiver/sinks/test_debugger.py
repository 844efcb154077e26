"""The debugger of a breakpoint at a console."""

from __future__ import annotations

from checkout import HELPERS
from hostcallback.receiver.sinks.debugger import Debugger, Frame, open_console
from python_process import python_output
from scripted import Script


def test_the_end_of_the_input_ends_the_line_of_the_prompt_and_the_program() -> None:
    script = Script("x + 1")
    debugger = Debugger(
        [Frame("train.py", 3, "step", [], {"x": 5}, {})], open_console(script, script, "here")
    )
    debugger.run()
    assert script.text.endswith("(hcb) 6\n(hcb) \n")
    assert debugger.quitted


FORK = """
import os, signal, sys, threading
sys.path.insert(0, sys.argv[1])
from hostcallback.receiver.sinks.debugger import Frame, open_session
from scripted import Script

class Typing(Script):
    def readline(self):
        asked.set()
        typed.wait()
        return super().readline()

def stop(script):
    open_session([Frame("train.py", 3, "step", [], {"x": 5}, {})], "stop in step", "here", script, script)
    return script.answers[0]

asked, typed = threading.Event(), threading.Event()
thread = threading.Thread(target=stop, args=(Typing("c"),))
thread.start()
asked.wait()
if not os.fork():
    signal.alarm(20)  # ends a child that waits for the stop of the parent
    print("child", stop(Script("x + 1", "c")), flush=True)
    os._exit(0)
os.wait()
typed.set()
thread.join()
print("parent", stop(Script("x + 2", "c")))
"""


def test_a_forked_child_stops_though_the_parent_is_at_a_breakpoint() -> None:
    printed = python_output("-W", "ignore", "-c", FORK, HELPERS, timeout_sec=60)
    assert printed.splitlines() == ["child 6", "parent 7"]

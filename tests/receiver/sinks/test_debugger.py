"""The debugger of a breakpoint at a console."""

from __future__ import annotations

import sys
import threading
import traceback

from checkout import HELPERS
from hostcallback.receiver.sinks.debugger import Debugger, Frame, open_console, open_session
from python_process import python_output
from scripted import Script
from threads import wait_for


def test_the_end_of_the_input_ends_the_line_of_the_prompt_and_the_program() -> None:
    script = Script("x + 1")
    debugger = Debugger(
        [Frame("train.py", 3, "step", [], {"x": 5}, {})], open_console(script, script, "here")
    )
    debugger.run()
    assert script.text.endswith("(hcb) 6\n(hcb) \n")
    assert debugger.quitted


def test_the_prompt_comes_back_when_the_stops_within_an_expression_are_over() -> None:
    main = threading.current_thread()

    class Inner(Script):
        def readline(self) -> str:
            typing.set()
            wait_for(waits, "the outer debugger")
            return super().readline()

    def waits() -> bool:
        (frame,) = [frame for ident, frame in sys._current_frames().items() if ident == main.ident]
        names = [f.f_code.co_name for f, _ in traceback.walk_stack(frame)]
        return "wait_for" in names and "__exit__" in names

    def stop() -> None:
        open_session([Frame("inner.py", 3, "inner", [], {"y": 7}, {})], "stop within", "there", inner, inner)

    def start() -> str:
        thread.start()
        assert typing.wait(60)
        return "started"

    typing, inner, outer = threading.Event(), Inner("y", "c"), Script("start()", "len(said.text)", "c")
    thread = threading.Thread(target=stop)
    names = {"start": start, "said": inner}
    open_session([Frame("train.py", 3, "step", [], names, {})], "stop in step", "here", outer, outer)
    thread.join(60)
    assert inner.answers == ["7", ""]
    assert outer.answers == ["'started'", str(len(inner.text)), ""]


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

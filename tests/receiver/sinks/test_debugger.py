"""The debugger of a breakpoint at a console."""

from __future__ import annotations

from hostcallback.receiver.sinks.debugger import Debugger, Frame, open_console
from scripted import Script


def test_the_end_of_the_input_ends_the_line_of_the_prompt_and_the_program() -> None:
    script = Script("x + 1")
    debugger = Debugger(
        [Frame("train.py", 3, "step", [], {"x": 5}, {})], open_console(script, script, "here")
    )
    debugger.run()
    assert script.text.endswith("(hcb) 6\n(hcb) \n")
    assert debugger.quitted

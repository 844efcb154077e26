"""A breakpoint at a real terminal, and its message if no terminal exists."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

import pytest

PROGRAM = Path(__file__).with_name("stopping_program.py")
LIMIT_SEC = 60.0


# A session leader that opens a terminal has it for its own: Ctrl-C is for this process then.
START = """
import os, runpy, sys
os.open(os.ttyname(0), os.O_RDWR)
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Terminal:
    """A program at a separate terminal, from which it also receives Ctrl-C."""

    def __init__(self, jit: str) -> None:
        self.text = ""
        self.fd, end = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", START, str(PROGRAM), jit],
            stdin=end,
            stdout=end,
            stderr=end,
            env={**os.environ, "TERM": "dumb"},
            start_new_session=True,
        )
        os.close(end)

    def wait_for(self, text: str, again: str = "") -> str:
        """Waits until the program has printed `text`, and returns what it printed before.

        Types `again` once more when nothing comes for a while.
        """
        deadline = monotonic() + LIMIT_SEC
        while text not in self.text:
            assert monotonic() < deadline, self.text
            if not select.select([self.fd], [], [], 1.0)[0]:
                self.type(again)
                continue
            try:
                read = os.read(self.fd, 4096).decode()
            except OSError:  # the program has ended
                read = ""
            assert read, self.text
            self.text += read
        before, _, self.text = self.text.partition(text)
        return before

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def end(self) -> int:
        """Waits for the program's end; its exit status."""
        return self.process.wait(LIMIT_SEC)

    def close(self) -> None:
        os.close(self.fd)
        self.process.kill()
        self.process.wait()


@pytest.fixture(params=["hcb.jit", "no jit"])
def terminal(request: pytest.FixtureRequest) -> Iterator[Terminal]:
    terminal = Terminal(request.param)
    yield terminal
    terminal.close()


def test_a_terminal_is_asked(terminal: Terminal) -> None:
    terminal.wait_for("(hcb) ")
    terminal.type("p float(total)\n")
    assert "1.0" in terminal.wait_for("(hcb) ")
    terminal.type("l\n")
    assert "->     hcb.breakpoint()" in terminal.wait_for("(hcb) ")
    terminal.type("c\n")
    assert "hcb.breakpoint()" in terminal.wait_for("(hcb) ")
    terminal.type("p float(total)\n")
    assert "3.0" in terminal.wait_for("(hcb) ")
    terminal.type("c\n")
    terminal.wait_for("total 3.0")
    terminal.wait_for("next 2.0")
    assert terminal.end() == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("terminal", "command"), [("hcb.jit", "q\n"), ("jax.jit", "\x04")], indirect=["terminal"]
)
def test_quitting_ends_the_program_and_the_next_one_works(terminal: Terminal, command: str) -> None:
    terminal.wait_for("(hcb) ")
    terminal.type(command)
    terminal.wait_for("ended: ")
    assert "BreakpointQuit" in terminal.wait_for("next 2.0")
    assert terminal.end() == 0


@pytest.mark.slow
def test_ctrl_c_at_the_prompt_cancels_the_line(terminal: Terminal) -> None:
    terminal.wait_for("(hcb) ")
    terminal.type("p nons")
    terminal.wait_for("nons")
    terminal.type("\x03")
    terminal.wait_for("--KeyboardInterrupt--", again="\x03")  # Python itself may miss it on the main thread
    terminal.wait_for("(hcb) ")
    terminal.type("p float(total)\n")
    assert "1.0" in terminal.wait_for("(hcb) ")
    for _ in range(2):
        terminal.type("c\n")
    terminal.wait_for("total 3.0")
    terminal.wait_for("next 2.0")
    assert terminal.end() == 0


@pytest.mark.slow
@pytest.mark.parametrize(("jit", "stdin"), [("jax.jit", "pipe"), ("hcb.jit", "closed"), ("no jit", "null")])
def test_without_a_terminal_it_warns_with_the_line(jit: str, stdin: str) -> None:
    command = [sys.executable, str(PROGRAM), jit]
    if stdin == "closed":
        command = ["/bin/sh", "-c", 'exec "$@" <&-', "sh", *command]
    given = subprocess.PIPE if stdin == "pipe" else subprocess.DEVNULL
    # The pipe stays open until the program has ended: nothing waits for its end.
    with subprocess.Popen(command, stdin=given, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = process.stdout.read()
        assert process.wait(LIMIT_SEC) == 0
    reason = (
        "the process has no standard input" if stdin == "closed" else "the standard input is not a terminal"
    )
    assert f"hcb.breakpoint stopped at {PROGRAM}:16 (step), and cannot read commands: {reason}" in said
    assert "BreakpointError" in said
    assert "give commands with hcb.breakpoint(stdin=...)" in said
    assert said.endswith("next 2.0\n")

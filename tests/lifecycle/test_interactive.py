"""Failures of taps show at the next prompt of Python, and in the next cell of IPython."""

from __future__ import annotations

import gc
import os
import pty
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import hostcallback as hcb
from hostcallback.receiver.runtime import interactive
from hostcallback.receiver.runtime.interactive import HEADLINE, show_new_failures
from hostcallback.receiver.runtime.runtime import runtime
from python_process import run_python

SETUP = """
import jax
import hostcallback as hcb

def bad(value):
    raise ValueError("bad step")

f = jax.jit(lambda x: hcb.id_tap(bad, x))
f(1.0).block_until_ready()
from hostcallback.receiver.runtime.runtime import runtime
runtime.wait_delivered()
"""

IPYTHON = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()

def run(cell):
    print("cell", flush=True)
    shell.run_cell(cell).raise_error()
    import sys
    sys.stderr.flush()

run({setup!r})
run("1 + 1")
run("f(2.0).block_until_ready(); runtime.wait_delivered()")
run("1 + 1")
run("try: hcb.barrier_wait()\\nexcept* ValueError as group: print(len(group.failures), 'raised')")
run("1 + 1")
"""
REPORT = "hostcallback: tap functions raised"


def test_the_next_prompt_of_python_shows_a_failure_once(tmp_path: Path) -> None:
    script = tmp_path / "setup.py"
    script.write_text(SETUP)
    leader, follower = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-i", str(script)], stdin=follower, stdout=follower, stderr=follower,
        env={**os.environ, "PYTHON_BASIC_REPL": "1", "PYTHON_COLORS": "0"}, close_fds=True,
    ) as process:  # fmt: skip
        os.close(follower)
        text = read_until(leader, ">>> ")
        for line in ("1 + 41", "f(2.0).block_until_ready(); runtime.wait_delivered()", "2 + 41"):
            os.write(leader, line.encode() + b"\n")
            text += read_until(leader, ">>> ")
        os.write(leader, b"hcb.barrier_wait()\n")
        text += read_until(leader, ">>> ")
        os.write(leader, b"exit()\n")
        assert process.wait(60) == 0
    os.close(leader)
    first, second, third, fourth, barrier = text.split(">>> ")[:5]
    assert [part.count(REPORT) for part in (first, second, third, fourth, barrier)] == [1, 0, 1, 0, 0]
    assert "ValueError: bad step" in first
    assert "TapFunctionException: 2 tap function call(s) raised" in barrier


def read_until(leader: int, end: str) -> str:
    text = ""
    while not text.endswith(end):
        text += os.read(leader, 4096).decode()
    return text


@pytest.mark.slow
def test_the_cell_of_ipython_shows_a_failure_once(tmp_path: Path) -> None:
    pytest.importorskip("IPython")
    done = subprocess.run(
        [sys.executable, "-c", IPYTHON.format(setup=SETUP)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60, check=True,
        env={**os.environ, "IPYTHONDIR": str(tmp_path)},
    )  # fmt: skip
    cells = done.stdout.split("cell\n")[1:]
    assert [cell.count(REPORT) for cell in cells] == [1, 0, 1, 0, 0, 0], done.stdout
    assert "ValueError: bad step" in cells[0]
    assert "2 raised" in cells[4]


def refuse(value: object) -> None:
    raise ValueError(f"refused {value}")


def test_receivers_that_were_left_are_forgotten() -> None:
    def show() -> int:
        show_new_failures()
        gc.collect()
        return len(interactive._shown.counts)

    known = show()
    for _ in range(8):
        with hcb.outfeed_receiver():
            assert known < show() <= known + 2  # a device may still have the last one


def test_new_failures_are_shown_once_and_stay_for_the_barrier(capsys: pytest.CaptureFixture[str]) -> None:
    step = jax.jit(lambda x: hcb.id_tap(refuse, x))

    def shown() -> str:
        runtime.wait_delivered()
        show_new_failures()
        return capsys.readouterr().err

    with hcb.outfeed_receiver():
        step(1).block_until_ready()
        first = shown()
        assert (first.count(HEADLINE), first.count("1 tap function call(s) raised")) == (1, 1)
        assert "ValueError: refused 1" in first
        assert REPORT not in shown()
        step(2).block_until_ready()
        second = shown()
        assert (second.count(HEADLINE), second.count("2 tap function call(s) raised")) == (1, 1)
        with pytest.raises(hcb.TapFunctionException, match=r"2 tap function call\(s\) raised"):
            hcb.barrier_wait()
        assert REPORT not in shown()
        step(3).block_until_ready()
        assert "ValueError: refused 3" in shown()
        with pytest.raises(hcb.TapFunctionException):
            hcb.barrier_wait()


INTERRUPTED = """
import sys, threading
import jax
import hostcallback as hcb

sys.ps1 = ">>> "
begun, go = threading.Event(), threading.Event()

def slow(value):
    begun.set()
    go.wait(30)

try:
    with hcb.outfeed_receiver():
        jax.jit(lambda x: hcb.tap(slow, x, name="slow"))(1.0)
        begun.wait(30)
        raise KeyboardInterrupt
except KeyboardInterrupt:
    print("the prompt", flush=True)
go.set()
hcb.barrier_wait()
"""


@pytest.mark.native_only
def test_an_interrupt_at_a_prompt_does_not_say_that_another_one_ends_the_program() -> None:
    done = run_python("-c", INTERRUPTED, timeout_sec=60)
    assert (done.returncode, done.stdout) == (0, "the prompt\n"), done.stderr
    (told,) = [line for line in done.stderr.splitlines() if "waiting at most" in line]
    assert told.endswith("; another interrupt ends the wait"), told


@pytest.mark.slow
def test_a_program_that_is_not_interactive_shows_nothing_before_its_end() -> None:
    done = run_python("-c", SETUP + "import sys; assert not hasattr(sys, 'ps1')", timeout_sec=60)
    assert done.returncode == 1
    assert REPORT not in done.stderr

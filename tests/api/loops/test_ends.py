"""How bars end: with a wrong total, in a replay, if the program fails, and at Ctrl-C in a terminal."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import hostcallback as hcb
from hostcallback import receiver
from hostcallback.receiver.sinks.progress.bars import Bars, Look, Phase, Place, Step
from terminals import in_terminal, screen

pytest.importorskip("tqdm")  # environments of other JAX versions may lack it

PROGRAM = Path(__file__).parent / "interrupted_program.py"


def anywhere(total: Any, desc: str) -> Any:
    def body(i: Any, x: Any) -> Any:
        hcb.progress(total, step=i, desc=desc, x=x)
        return x + 1

    return jax.jit(lambda x: jax.lax.fori_loop(0, 300, body, x))


@pytest.mark.parametrize(("total", "shown"), [(500, "300/500"), (None, "300it")])
def test_with_a_wrong_total_the_last_step_is_shown(
    total: Any, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    anywhere(total, "wrong")(jnp.float32(0))
    hcb.barrier_wait()
    (line,) = screen(capsys.readouterr().err)
    assert shown in line
    assert "x=299" in line


def test_beyond_a_total_that_is_too_small_the_bar_counts_on(capsys: pytest.CaptureFixture[str]) -> None:
    anywhere(100, "small")(jnp.float32(0))
    hcb.barrier_wait()
    lines = screen(capsys.readouterr().err)
    assert "100/100" in lines[0]
    assert "300it" in lines[-1]
    assert "x=299" in lines[-1]
    assert len(lines) <= 2


@pytest.mark.parametrize("held_back", [120, 299])
def test_a_message_that_a_rate_held_back_opens_no_second_bar(
    held_back: int, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = Bars()
    place, look = Place("loop", "cpu:0", ()), Look("late", "it", "tqdm", leave=True)
    for phase, step, time_ns in ((Phase.BEGIN, 0, 10), (Phase.END, 300, 30), (Phase.UPDATE, held_back, 20)):
        shown.take(place, look, 1, Step(phase, step, 300, {}), "cpu:0", time_ns)
    (line,) = screen(capsys.readouterr().err)
    assert "300/300" in line
    # An inner loop that runs again has later messages.
    shown.take(place, look, 1, Step(Phase.UPDATE, 7, 300, {}), "cpu:0", 40)
    shown.close_all()
    assert "7/300" in screen(capsys.readouterr().err)[-1]


def test_in_a_file_a_bar_is_a_line_every_ten_seconds_and_one_at_its_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = Bars()
    place, look = Place("loop", "cpu:0", ()), Look("train", "step", "tqdm", leave=True)
    steps = [(Phase.BEGIN, 0), *((Phase.UPDATE, n) for n in range(1, 260)), (Phase.END, 260)]
    for phase, step in steps:  # ten a second
        shown.take(place, look, 1, Step(phase, step, 260, {"loss": step}), "cpu:0", step * 10**8)
    assert capsys.readouterr().err.splitlines() == [
        "train:  38%|###8      | 100/260 [00:10<00:16, 10.00step/s, loss=100]",
        "train:  77%|#######6  | 200/260 [00:20<00:06, 10.00step/s, loss=200]",
        "train: 100%|##########| 260/260 [00:26<00:00, 10.00step/s, loss=260]",
    ]


def test_in_a_file_a_bar_that_goes_leaves_no_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    shown = Bars()
    place, look = Place("loop", "cpu:0", ()), Look("train", "step", "tqdm", leave=False)
    for phase, step in ((Phase.BEGIN, 0), (Phase.UPDATE, 7), (Phase.END, 9)):
        shown.take(place, look, 1, Step(phase, step, 9, {}), "cpu:0", step * 2 * 10**9)
    (line,) = capsys.readouterr().err.splitlines()
    assert "7/9" in line


def test_a_replay_shows_the_bars_again_and_closes_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with hcb.outfeed_receiver(record=tmp_path):
        jax.jit(lambda: hcb.scan(lambda c, _: (c + 1, None), 0, length=40, progress="whole")[0])()
        anywhere(500, "left open")(jnp.float32(0))
    capsys.readouterr()
    receiver.replay(tmp_path)
    text = capsys.readouterr().err
    whole, left_open = screen(text)
    assert "whole: 100%" in whole
    assert "left open:  60%" in left_open
    assert text.endswith("\n")


INTERRUPTED = """
import os, signal
import jax, jax.numpy as jnp, hostcallback as hcb

def wait(c):
    if c == 40:
        os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.01)
    return c

import time
jax.jit(lambda: hcb.scan(lambda c, _: (jax.pure_callback(wait, c, c) + 1, None), 0, length=300, progress="train"))()
hcb.barrier_wait()
"""


@pytest.mark.slow
def test_in_a_file_the_step_that_an_interrupted_loop_has_reached_is_shown(tmp_path: Path) -> None:
    program = tmp_path / "interrupted.py"
    program.write_text(INTERRUPTED)
    with (tmp_path / "train.log").open("w") as log:
        subprocess.run([sys.executable, program], stderr=log, check=False, timeout=60)
    (line,) = screen((tmp_path / "train.log").read_text())
    assert line.startswith("train: ")
    assert "/300 [" in line


@pytest.mark.slow
@pytest.mark.parametrize("how", ["waits", "fails"])
def test_the_traceback_comes_after_the_bars_which_stay_where_they_were(how: str) -> None:
    status, shown = in_terminal(PROGRAM, how, interrupted_after=rb"inner: +[1-9]" if how == "waits" else None)
    assert status != 0
    bars, last = shown.rsplit("\nTraceback (most recent call last)", 1)
    bars += "\n"
    assert "inner: " not in last, "a bar was drawn into the traceback"
    assert "outer: " not in last
    *_, after = bars.rsplit("outer: ", 1)
    assert re.match(r" +\d+%\|[^\n]*\n", after), "the bar of the outer loop stays, closed by a line end"
    assert "it/s]" not in after.partition("\n")[2], "no bar is drawn below it"
    assert ("KeyboardInterrupt" if how == "waits" else "step 8") in last


EAGER = """
import time
import jax, jax.numpy as jnp, hostcallback as hcb

def wait(c):
    time.sleep(0.002)
    return c

def slow(c, x):
    return jax.pure_callback(wait, c, c) + x, None

hcb.scan(slow, jnp.float32(0), jnp.ones(100), progress="scan")
hcb.barrier_wait()
hcb.fori_loop(0, 300, lambda i, x: jnp.cos(x), 1.0, progress="fori")
hcb.barrier_wait()
hcb.while_loop(lambda value: value > 1e-6, lambda value: value / 2, 1.0, progress="while")
hcb.barrier_wait()
"""


@pytest.mark.slow
def test_loops_outside_of_jit_leave_one_bar_each_with_the_rate_of_the_device(tmp_path: Path) -> None:
    program = tmp_path / "eager.py"
    program.write_text(EAGER)
    status, shown = in_terminal(program, "")
    assert status == 0
    scan, fori, loop = screen(shown)
    assert scan.startswith("scan: 100%")
    assert fori.startswith("fori: 100%")
    assert loop.startswith("while: 20it [00:00, ")
    (rate,) = re.findall(r"([\d.]+)it/s", scan)
    assert 50 < float(rate) < 500  # at least 2 ms a step


@pytest.mark.slow
def test_a_terminal_without_a_size_shows_the_bar(tmp_path: Path) -> None:
    program = tmp_path / "fori.py"
    program.write_text(
        "import hostcallback as hcb\nhcb.fori_loop(0, 300, lambda i, x: x + 1, 0, progress='fori')\n"
    )
    status, shown = in_terminal(program, "", columns=0)
    assert status == 0
    assert screen(shown)[-1].startswith("fori: 100%|")


def test_a_stream_that_does_not_say_whether_it_is_a_terminal_gets_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Stream:
        """Hands lines to a logger, as programs of clusters do."""

        def __init__(self) -> None:
            self.text = ""

        def write(self, text: str) -> None:
            self.text += text

        def flush(self) -> None:
            pass

    stream = Stream()
    monkeypatch.setattr(sys, "stderr", stream)
    jax.jit(lambda: hcb.fori_loop(0, 5, lambda i, x: x + 1, 0, progress="plain"))()
    hcb.barrier_wait()
    assert stream.text.startswith("plain: 100%|##########| 5/5 [")
    assert stream.text.count("\n") == 1

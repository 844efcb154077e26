"""Ctrl-C in a program with slow taps: the traceback comes soon and last, below one line about what was lost."""

from __future__ import annotations

import re
import signal
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import hostcallback as hcb
from hostcallback.lifecycle.receivers import device_name
from hostcallback.receiver.runtime.runtime import runtime
from hostcallback.receiver.taplog.reading.logged_message import LoggedMessage
from hostcallback.receiver.taplog.reading.reader import LogReader
from python_process import python_output, start_python
from threads import wait_for

PROGRAM = """
import os, sys, threading
import jax, jax.numpy as jnp
from jax import lax
import hostcallback as hcb

loop, folder, *kinds = sys.argv[1:]
never = threading.Event()
emitted = 0

def slow(x):
    never.wait(1000 if "stuck" in sys.argv else 0.1)
    sys.stdout.write(f"got {float(x)}\\n")
    sys.stdout.flush()

f = jax.jit(lambda x: hcb.id_tap(slow, x, name="slow"))
g = jax.jit(lambda x: lax.scan(lambda c, _: (hcb.id_tap(slow, c, name="slow") + 1, None), x, None, length=100_000)[0])

def tell_when_full():
    from hostcallback.receiver.runtime.runtime import runtime
    while not runtime.holds_programs():
        never.wait(0.02)
    print("ready", flush=True)

def run():
    global emitted
    if loop == "scan":
        threading.Thread(target=tell_when_full, daemon=True).start()
        g(jnp.float32(0)).block_until_ready()
    for i in range(100_000):
        f(jnp.float32(i))
        emitted = i + 1
        if i == 20:
            print("ready", flush=True)
        never.wait(0.002)

options = {"record": {"record": folder + "/log"}, "receiver": {}, "stuck": {},
           "forward": {"forward": "localhost:1", "spool": folder + "/spool"}}
try:
    if not {*kinds} - {"stuck"}:
        run()
    else:
        with hcb.outfeed_receiver(**{name: value for kind in kinds for name, value in options[kind].items()}):
            run()
finally:
    with open(folder + "/emitted", "w") as file:
        file.write(str(emitted))
"""

ANNOUNCED = "hostcallback: interrupted: waiting at most 0.8 s for "
LOSSES = ("hostcallback: interrupted: lost: ", "hostcallback: interrupted: not delivered: ")


@dataclass
class Outcome:
    """What a program showed, by the seconds since the first Ctrl-C, and how it ended."""

    lines: list[tuple[float, str]]
    status: int
    emitted: int

    @property
    def text(self) -> str:
        return "\n".join(line for _, line in self.lines)

    def after(self) -> list[tuple[float, str]]:
        return [(when, line) for when, line in self.lines if when >= 0]


def interrupted(folder: Path, loop: str, *kinds: str, again: bool = False) -> Outcome:
    """Runs the program, sends SIGINT once it taps, and a second one when the first one is announced if `again`.

    A program that has not ended after 90 s is ended, and shows what its threads do.
    """
    lines: list[tuple[float, str]] = []
    first, sent_again = 0.0, False
    variables = {"XLA_FLAGS": "", "PYTHONFAULTHANDLER": "1"}
    with start_python("-c", PROGRAM, loop, folder, *kinds, stderr=subprocess.STDOUT, **variables) as process:
        assert process.stdout is not None
        hangs = threading.Timer(90, process.send_signal, [signal.SIGABRT])
        hangs.start()
        try:
            for line in process.stdout:
                lines.append((time.monotonic(), line.rstrip("\n")))
                if line == "ready\n":
                    first = time.monotonic()
                    process.send_signal(signal.SIGINT)
                if again and not sent_again and line.startswith(ANNOUNCED):
                    sent_again = True
                    process.send_signal(signal.SIGINT)
            status = process.wait(60)
        finally:
            hangs.cancel()
            process.kill()
    assert status != -signal.SIGABRT, "\n".join(line for _, line in lines)
    emitted = int((folder / "emitted").read_text())
    return Outcome([(when - first, line) for when, line in lines], status, emitted)


def check(outcome: Outcome, *, within_sec: float = 2.0) -> str:
    """Checks what every interrupted program shows. Returns the line about what was lost."""
    trace = [place for place, (_, line) in enumerate(outcome.lines) if line.startswith("Traceback")]
    assert len(trace) == 1, outcome.text
    assert outcome.lines[trace[0]][0] < within_sec, outcome.text
    assert outcome.lines[-1][1].startswith("KeyboardInterrupt"), outcome.text
    below = [line for _, line in outcome.lines[trace[0] + 1 :]]
    assert not [line for line in below if line.startswith(("got", "hostcallback"))], outcome.text
    above = [line for _, line in outcome.lines[: trace[0]]]
    (lost,) = [line for line in above if line.startswith(LOSSES)]
    # A tap that runs when a block ends may still print.
    assert all(line.startswith("got") for line in above[above.index(lost) + 1 :]), outcome.text
    assert "message(s) of cpu:0, at the tap slow (" in lost
    return lost


def test_a_bare_loop_ends_with_its_traceback(tmp_path: Path) -> None:
    outcome = interrupted(tmp_path, "loop")
    line = check(outcome)
    assert sum(line.startswith(ANNOUNCED) for _, line in outcome.after()) == 1
    assert "another Ctrl-C ends the program at once" in outcome.text
    lost = re.search(r"lost: ([\d,]+) message", line)
    assert lost is not None
    got = sum(line.startswith("got") for _, line in outcome.lines)
    # One may have been emitted by the call that was interrupted, and one may run when the program ends.
    assert abs(int(lost[1].replace(",", "")) + got - outcome.emitted) <= 2


SIGNAL_TO_ANOTHER_THREAD = """
import signal, threading
import jax
import hostcallback as hcb

jax.jit(lambda x: hcb.id_tap(lambda v: None, x))(1.0)
hcb.barrier_wait()

def send():
    threading.Event().wait(0.5)
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)

threading.Thread(target=send, daemon=True).start()
try:
    print(threading.Event().wait(50))
except KeyboardInterrupt:
    print("interrupted")
"""


def test_a_wait_that_misses_its_signal_ends() -> None:
    # As with a signal that comes between Python's check for signals and the beginning of the wait.
    assert python_output("-c", SIGNAL_TO_ANOTHER_THREAD, timeout_sec=40) == "interrupted\n"


@pytest.mark.slow_variants
@pytest.mark.parametrize("kinds", [["receiver", "stuck"], ["stuck"]], ids="-".join)
def test_a_tap_that_does_not_return_keeps_nobody(tmp_path: Path, kinds: list[str]) -> None:
    outcome = interrupted(tmp_path, "loop", *kinds)
    check(outcome)
    assert outcome.status == -signal.SIGINT


@pytest.mark.slow
def test_a_second_interrupt_ends_at_once_and_all_is_recorded(tmp_path: Path) -> None:
    outcome = interrupted(tmp_path, "loop", "record", again=True)
    assert "not delivered: " in check(outcome)
    shown = [when for when, line in outcome.after() if line.startswith(("Traceback", ANNOUNCED))]
    assert len(shown) == 2
    assert shown[1] - shown[0] < 0.6  # without the second one it is 0.8 s
    recorded = [r for r in LogReader(tmp_path / "log").values() if isinstance(r, LoggedMessage)]
    values = [float(logged.message.arrays[0]) for logged in recorded]
    assert values == [float(k) for k in range(len(values))]
    assert len(values) - outcome.emitted in (0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [["forward"], ["record", "forward"]], ids="-".join)
def test_the_same_however_messages_are_kept(tmp_path: Path, kinds: list[str]) -> None:
    outcome = interrupted(tmp_path, "loop", *kinds)
    line = check(outcome, within_sec=3.0)
    if "forward" in kinds:
        assert "bytes of messages were not forwarded yet" in line
        assert str(tmp_path / "spool") in line
    for kind, name in {"record": "log", "forward": "spool"}.items():
        if kind in kinds:
            folders = {path.parent for path in (tmp_path / name).rglob("*.hcblog")}
            kept = [
                r for folder in folders for r in LogReader([folder]).values() if isinstance(r, LoggedMessage)
            ]
            assert len(kept) - outcome.emitted in (0, 1)


@pytest.mark.slow
@pytest.mark.native_only  # on the callback transport a Python callback takes the interrupt
@pytest.mark.parametrize("kind", ["receiver", "stuck"])
def test_a_program_that_waits_for_its_taps_is_interrupted(tmp_path: Path, kind: str) -> None:
    outcome = interrupted(tmp_path, "scan", kind)
    assert "hostcallback: interrupted while the program waits for its taps" in outcome.text
    check(outcome, within_sec=4.0)


@pytest.mark.slow
def test_prints_into_a_closed_pipe_end_with_one_line() -> None:
    program = """
import jax, hostcallback as hcb
f = jax.jit(lambda x: hcb.id_print(x))
for i in range(3000):
    f(float(i))
hcb.barrier_wait()
"""
    with start_python("-c", program, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        errors = process.stderr.read()
        assert process.wait(60) == 0
    assert errors.splitlines() == [
        "the reader of the standard output has ended: what taps print is dropped from here on"
    ]


BACK_MEANWHILE = """
import os, threading, time
from hostcallback.receiver.runtime.signals import InterruptWatch

read, write = os.pipe()
is_back = threading.Event()

class Receivers:
    def holds_programs(self):
        is_back.wait()
        time.sleep(0.1)       # the watching thread waits for a core, and meanwhile
        os.write(write, b"x")  # the next Ctrl-C arrives
        return True
    def skip_taps(self, on): print("skip", on, flush=True)
    def let_go(self, on): pass
    def describe_backlog(self): return "1 message"

watch = threading.Timer(0.2, InterruptWatch()._wait_for_main_thread, args=(Receivers(), read))
watch.start()
time.sleep(0.9)  # in C: the watching thread finds that the main thread is not back
is_back.set()
for _ in range(100_000):  # in Python
    pass
watch.join()
print("goes on", os.read(read, 10))
"""


def test_the_next_interrupt_of_a_program_that_is_back_does_not_end_it() -> None:
    assert python_output("-c", BACK_MEANWHILE, timeout_sec=30).splitlines() == [
        "skip True",
        "skip False",
        "goes on b'x'",
    ]


BEFORE_THE_TEXT = """
import os, sys, threading
from hostcallback.receiver.runtime import signals

read, write = os.pipe()
back = threading.Event()
signals._main_thread_is_back = lambda: back

class Receivers:
    def holds_programs(self): return True
    def skip_taps(self, on): print("skip", on, flush=True)
    def let_go(self, on): back.set()  # after several looks at the pipe
    def describe_backlog(self):
        if sys.argv[1] == "while it is made":
            os.write(write, b"x")
        return "1 message"

if sys.argv[1] == "before it":
    os.write(write, b"x")  # a second Ctrl-C
signals.InterruptWatch()._wait_for_main_thread(Receivers(), read)
print("goes on")
"""


@pytest.mark.parametrize("when", ["before it", "while it is made"])
def test_only_an_interrupt_that_comes_after_the_text_ends_the_process(when: str) -> None:
    assert python_output("-c", BEFORE_THE_TEXT, when, timeout_sec=30).splitlines() == [
        "skip True",
        "skip False",
        "goes on",
    ]


@pytest.mark.native_only  # Python callbacks take longer than the messages
@pytest.mark.parametrize("records", [False, True], ids=["alone", "recorded"])
def test_messages_that_are_left_out_are_emitted_for_recorders_only(tmp_path: Path, records: bool) -> None:
    count, go = 300_000, threading.Event()

    def stuck(value: object) -> None:
        go.wait(60)

    def body(x: Any, _: Any) -> Any:
        return hcb.id_tap(stuck, x) + 1, None

    program = jax.jit(lambda x: lax.scan(body, x, None, length=count)[0])
    options = {"record": tmp_path} if records else {}
    with hcb.outfeed_receiver(devices=jax.devices()[:1], **options) as receiver:
        (device,) = runtime.receivers([device_name(jax.devices()[0])])
        before = device.source.counters().emitted
        thread = threading.Thread(target=lambda: program(jnp.float32(0)).block_until_ready())
        thread.start()
        wait_for(runtime.holds_programs)
        runtime.skip_taps(True)
        go.set()
        thread.join(100)
        runtime.skip_taps(False)
        emitted = device.source.counters().emitted - before
    (row,) = receiver.stats
    assert row.delivered + row.dropped == count
    assert row.delivered < count / 2
    assert emitted == count if records else emitted < count / 2
    if records:
        (recorded,) = hcb.read(tmp_path).values()
        assert sum(map(len, recorded)) == count


@pytest.mark.native_only
def test_a_recorder_that_comes_while_messages_are_left_out_gets_them(tmp_path: Path) -> None:
    program = jax.jit(lambda x: hcb.id_tap(lambda value: None, x, name="late"))
    program(jnp.int32(0))
    hcb.barrier_wait()
    runtime.skip_taps(True)
    try:
        with hcb.outfeed_receiver(record=tmp_path):
            program(jnp.int32(1))
            hcb.barrier_wait()
    finally:
        runtime.skip_taps(False)
    assert hcb.read(tmp_path)["late"].to_numpy()["late"].tolist() == [1]


@pytest.mark.parametrize("fails", [False, True])
def test_an_interrupted_block_tells_what_its_taps_raised_and_nothing_else(
    fails: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    def tap(value: object) -> None:
        if fails:
            raise ValueError("planted")

    receiver = hcb.outfeed_receiver().__enter__()
    hcb.id_tap(tap, jnp.float32(1), name="interrupted")
    interrupt = KeyboardInterrupt()
    receiver.__exit__(KeyboardInterrupt, interrupt, None)
    said = capsys.readouterr().err.splitlines()
    lost = [line for line in said if "waiting at most" not in line]
    assert ["planted" in line for line in lost] == [True] * fails
    hcb.barrier_wait()  # the failure was told

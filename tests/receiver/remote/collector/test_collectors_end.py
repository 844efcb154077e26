"""How a collector ends, when its consumers are slow or raise: Ctrl-C and SIGTERM, once and twice."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest

from checkout import ROOT
from collecting import WAIT_SEC, CollectorProcess, Emitter, forwarder, only, stored, wait_for
from python_process import start_python

COUNT = 300

SLOW = r"""
import sys
import threading

pause = threading.Event()

def take(value, *, device):
    pause.wait(0.01)
    sys.stdout.write(f"took {int(value['step'])}\n")  # one write: no half line is left when the process ends at once
    sys.stdout.flush()

TAPS = {"loss": take}
"""

RAISING = """
taken = 0

def take(value, *, device):
    raise ValueError(f"step {value['step']}")

def count(message):
    global taken
    taken += 1
    print("counted", taken)

TAPS = {"loss": take}
SINKS = [count]
"""


def collector_with(folder: Path, consumers: str) -> CollectorProcess:
    path = folder / "my_taps.py"
    path.write_text(consumers)
    return CollectorProcess(folder, "--quiet", "--consumers", str(path))


def taken(collector: CollectorProcess) -> list[int]:
    return [int(line.split()[1]) for line in collector.lines]


def emit(collector: CollectorProcess, folder: Path, count: int = COUNT) -> float:
    """Emits messages; how long it took until they were acknowledged."""
    began = time.monotonic()
    with forwarder(collector.address, folder / "spool", drain_sec=60.0) as recorder:
        emitter = Emitter(recorder)
        for _ in range(count // 20):
            emitter.losses(20)
            recorder.flush()
    assert not recorder.unsent_bytes
    return time.monotonic() - began


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_slow_consumer_gets_everything_before_the_collector_ends(
    tmp_path: Path, number: signal.Signals
) -> None:
    with collector_with(tmp_path, SLOW) as collector:
        emit(collector, tmp_path)
        assert len(taken(collector)) < COUNT  # it was acknowledged before
        collector.process.send_signal(number)
        assert collector.process.wait(WAIT_SEC) == 0
        collector._join()
    assert taken(collector) == list(range(COUNT))
    assert any("delivering the remaining" in line for line in collector.errors)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_the_second_time_it_ends_at_once_and_goes_on_there_when_it_is_started_again(
    tmp_path: Path, number: signal.Signals
) -> None:
    with collector_with(tmp_path, SLOW) as collector:
        emit(collector, tmp_path)
        wait_for(lambda: taken(collector), "a first message")
        collector.process.send_signal(number)
        wait_for(
            lambda: any("delivering the remaining" in line for line in collector.errors), "that it says so"
        )
        collector.process.send_signal(number)
        assert collector.process.wait(WAIT_SEC) != 0
        collector._join()
        first = taken(collector)
        assert first == list(range(len(first)))
        assert len(first) < COUNT
        collector.start()
        assert collector.stop() == 0
    again = taken(collector)[len(first) :]
    assert again == list(range(again[0], COUNT))
    assert 0 <= len(first) - again[0] <= 150  # messages of the last second are delivered again
    assert only(stored(collector.log)[0]) == list(range(COUNT))


@pytest.mark.slow
def test_a_consumer_that_raises_each_time_disturbs_no_other(tmp_path: Path) -> None:
    with collector_with(tmp_path, RAISING) as collector:
        emit(collector, tmp_path, 3_000)
        assert collector.stop() == 0
    assert collector.lines == [f"counted {number}\n" for number in range(1, 3_001)]
    raised = [line for line in collector.errors if "ValueError: step" in line]
    assert raised
    assert "step 0" in raised[0]
    assert len(collector.errors) < 200, len(collector.errors)
    assert only(stored(collector.log)[0]) == list(range(3_000))


OF_ANOTHER_THREAD = """
import signal, sys, threading
from hostcallback.receiver.remote.collector.service import run_until_told

class Service:
    def __init__(self):
        self.told = threading.Event()
    def serve(self, on_ready):
        on_ready()
        self.told.wait()
    def end(self):
        self.told.set()

threading.Thread(target=sys.stdin.read, daemon=True).start()  # the only thread that the system can give the signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
run_until_told([Service()], lambda service: print("ready", flush=True))
"""


def test_a_signal_that_another_thread_receives_ends_it() -> None:
    with start_python("-c", OF_ANOTHER_THREAD, cwd=ROOT, stdin=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
        finally:
            process.kill()

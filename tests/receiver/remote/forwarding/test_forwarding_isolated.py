"""Isolated receivers that forward: every message reaches the collector, even if any process was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkout import HELPERS
from collecting import CollectorProcess
from hostcallback.receiver.remote.streams import StreamKey
from hostcallback.receiver.taplog.reading.reader import LogReader

pytestmark = pytest.mark.native_only

PROGRAM = HELPERS / "isolated_program.py"


@pytest.fixture
def collector(tmp_path: Path) -> Iterator[CollectorProcess]:
    with CollectorProcess(tmp_path, "--quiet") as process:
        yield process


def run(collector: CollectorProcess, scenario: str, count: int) -> subprocess.CompletedProcess[str]:
    """Runs the program to its end, and until no process has its output open any more."""
    return subprocess.run(
        [sys.executable, str(PROGRAM), scenario],
        env={
            **os.environ, "COUNT": str(count), "COLLECTOR": collector.address,
            "SPOOL": str(collector.log.parent / "spool"),
        },
        capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip


def numbers(collector: CollectorProcess) -> dict[str, list[int]]:
    """The stored messages, by stream."""
    found: dict[str, list[int]] = {}
    for logged in LogReader(collector.log / "run").messages():
        found.setdefault(logged.writer.process, []).append(int(logged.message.arrays[0]))
    return found


def spooled(collector: CollectorProcess) -> list[StreamKey]:
    """The streams that are in the spool."""
    return [
        key for path in (collector.log.parent / "spool").iterdir() if (key := StreamKey.of_folder(path.name))
    ]


@pytest.mark.slow
def test_messages_the_other_process_delivers_are_forwarded(collector: CollectorProcess) -> None:
    done = run(collector, "plain", 2000)
    assert done.returncode == 0, done.stderr
    assert "ForwardingWarning" not in done.stderr
    assert done.stdout.count("line ") == 2000
    collector.stop()
    assert list(numbers(collector).values()) == [list(range(2000))]
    assert not spooled(collector)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["program dies", "program dies emitting"])
def test_the_other_process_forwards_the_messages_of_a_killed_program(
    collector: CollectorProcess, scenario: str
) -> None:
    done = run(collector, scenario, 20_000)
    assert done.returncode == -signal.SIGKILL
    printed = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("line ")]
    collector.stop()
    assert (list(numbers(collector).values()) or [[]]) == [printed]
    assert printed == list(range(len(printed)))
    if scenario == "program dies":
        assert len(printed) == 20_000


@pytest.mark.slow
def test_the_program_sends_the_messages_a_killed_reader_left(collector: CollectorProcess) -> None:
    done = run(collector, "reader dies", 30_000)
    assert done.returncode == 0, done.stderr
    assert "its taps are delivered in this process from now on" in done.stderr
    collector.stop()
    assert not spooled(collector)
    found = sorted(numbers(collector).values())
    assert 1 <= len(found) <= 2
    for those in found:
        assert those == list(range(those[0], those[0] + len(those)))
    assert found[-1][-1] == 29_999
    counts = Counter(number for those in found for number in those)
    assert max(counts.values()) <= 2
    assert sum(count == 2 for count in counts.values()) <= 1024
    assert counts.keys() == {*range(30_000)}


@pytest.mark.slow
def test_a_preempted_program_has_everything_sent(collector: CollectorProcess) -> None:
    done = run(collector, "preempted", 20_000)
    assert done.returncode == -signal.SIGTERM, done.stderr
    assert list(numbers(collector).values()) == [list(range(20_000))]
    collector.stop()


@pytest.mark.slow
def test_a_collector_that_is_away_is_reported_once_for_each_process(
    collector: CollectorProcess, tmp_path: Path
) -> None:
    collector.kill()
    program = """
import sys, jax.numpy as jnp, hostcallback as hcb
show = hcb.jit(lambda x: hcb.id_tap(lambda v: None, hcb.id_print(x), name="here"))
with hcb.outfeed_receiver(process=True, forward=hcb.Forward(sys.argv[1], spool=sys.argv[2], drain_sec=0.5)):
    for _ in range(10):
        show(jnp.float32(1))
"""
    line = [sys.executable, "-c", program, collector.address, str(tmp_path / "spool")]
    done = subprocess.run(line, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("ForwardingWarning: ") == 2
    assert len(spooled(collector)) == 2
    collector.start()
    done = run(collector, "plain", 10)
    assert done.returncode == 0, done.stderr
    collector.stop()
    assert sorted(map(len, numbers(collector).values())) == [10, 10, 10]
    assert not spooled(collector)

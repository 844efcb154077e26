"""Processes and collectors are killed: a sharded value whose shards are all stored is delivered, others are not."""

from __future__ import annotations

import json
import os
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from collecting import CollectorProcess
from hostcallback.receiver.taplog.reading.reader import LogReader
from training_run import TrainingRun

PROGRAM = Path(__file__).with_name("sharded_stepping_program.py")
CONSUMERS = """
import json, sys

def take(value, *, device):
    assert device == "run p0 cpu:0", device
    row = [int(value["life"]), int(value["step"]), value["x"].tolist()]
    sys.stdout.write(json.dumps(row) + "\\n")  # at once: it may be killed

TAPS = {"x": take}
"""
LAST_STEPS = 20
MORE = int(os.environ.get("HOSTCALLBACK_TEST_KILLS", "0"))


@contextmanager
def training(folder: Path, count: int) -> Iterator[tuple[CollectorProcess, TrainingRun]]:
    path = folder / "my_taps.py"
    path.write_text(CONSUMERS)
    with CollectorProcess(folder, "--quiet", "--consumers", str(path)) as collector:
        run = TrainingRun(folder, collector.address, count, shares_spool=False, program=PROGRAM)
        try:
            yield collector, run
        finally:
            run.end()


def finish(collector: CollectorProcess, run: TrainingRun, life: int) -> None:
    """Ends the run properly, and compares the delivered values with the stored ones."""
    run.start(LAST_STEPS, life)
    run.check_ended_well()
    assert run.spools_are_empty()
    assert collector.stop() == 0
    processes: dict[tuple[int, int], set[int | None]] = {}
    for logged in LogReader(collector.log / "run").messages():
        if logged.message.consumer.name == "x":
            key = int(logged.value["life"]), int(logged.value["step"])
            processes.setdefault(key, set()).add(logged.writer.process_index)
    complete = {key for key, found in processes.items() if len(found) == run.count}
    delivered: dict[int, list[int]] = {}
    for line in collector.lines:
        of_life, step, values = json.loads(line)
        assert values == (np.arange(4.0 * run.count) + step + 1).tolist()
        delivered.setdefault(of_life, []).append(step)
    print({of_life: len(steps) for of_life, steps in delivered.items()}, len(processes) - len(complete))
    assert {(of_life, step) for of_life, steps in delivered.items() for step in steps} == complete
    # After a kill, a collector delivers again the values that it had not noted yet.
    for steps in delivered.values():
        first = list(dict.fromkeys(steps))
        assert first == sorted(first)
    assert delivered[life] == list(range(LAST_STEPS))


@pytest.mark.slow
def test_complete_values_are_delivered_after_any_kill(tmp_path: Path) -> None:
    with training(tmp_path, 2) as (collector, run):
        run.start(1_000_000, 1)
        run.wait_for_steps(30)
        collector.kill()
        run.wait_for_steps(run.living[0].steps() + 100)
        collector.start()
        run.wait_for_steps(run.living[0].steps() + 30)
        collector.kill()
        run.kill([1])
        run.kill([0])
        run.wait_for_end()
        collector.start()
        finish(collector, run, 2)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("count", "seed"), [(4, 0), *((count, seed) for count in (2, 4) for seed in range(1, 1 + MORE))]
)
def test_killed_at_random(tmp_path: Path, count: int, seed: int) -> None:
    chance, pause = random.Random(f"{count}/{seed}"), threading.Event()
    with training(tmp_path, count) as (collector, run):
        for life in range(3):
            run.start(1_000_000, life)
            run.wait_for_steps(1)
            for _ in range(chance.randrange(4)):
                pause.wait(chance.uniform(0.0, 1.5))
                if collector.process.poll() is None:
                    collector.kill()
                else:
                    collector.start()
            pause.wait(chance.uniform(0.0, 0.7))
            run.kill(chance.choice([[0], [chance.randrange(1, count)], list(range(count))]))
            pause.wait(chance.choice([0.0, 0.05, 1.0]))  # the others find out
            run.kill(range(count))
            run.wait_for_end()
        if collector.process.poll() is not None:
            collector.start()
        finish(collector, run, 3)

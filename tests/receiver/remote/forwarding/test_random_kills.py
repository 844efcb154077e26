"""Processes of a JAX program, its coordinator and its collector, killed at random: each message is stored once."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from collecting import CollectorProcess
from hostcallback.receiver.cli import main
from training_run import LATE_SEC, PER_STEP, TrainingRun, messages_in

LAST_STEPS = 20

MORE = int(os.environ.get("HOSTCALLBACK_TEST_KILLS", "0"))
"""Number of seeds that are tried in addition to the fixed ones."""

SEEDS = [(4, 0), *((count, seed) for count in (2, 4) for seed in range(1, 1 + MORE))]


@contextmanager
def training(
    collector: CollectorProcess, folder: Path, count: int, *, shares_spool: bool
) -> Iterator[TrainingRun]:
    run = TrainingRun(folder, collector.address, count, shares_spool)
    try:
        yield run
    finally:
        run.end()


def finish(run: TrainingRun, collector: CollectorProcess) -> None:
    """Ends the run properly, and compares the stored messages with the steps of the processes."""
    before = run.spooled()
    run.start(LAST_STEPS)
    run.check_ended_well()
    assert run.spools_are_empty()
    assert collector.stop() == 0
    stored = messages_in(collector.log / "run", run.count)
    for life in run.lives:
        numbers = stored.pop(life.process.pid, [])
        assert numbers == list(range(len(numbers))), life  # once, in order, without gaps
        assert set(numbers) >= before.get(life.process.pid, set()), life
        print(f"process {life.process.pid}: {len(numbers)} messages, {life.missing_ms(len(numbers))} ms lost")
        certain = life.steps(life.killed_ns - int(LATE_SEC * 1e9)) if life.killed_ns else LAST_STEPS
        assert PER_STEP * certain <= len(numbers) <= PER_STEP * (life.steps() + 1), life
    assert not stored


@pytest.mark.slow
def test_a_coordinator_that_dies_takes_the_others_along_and_no_message(tmp_path: Path) -> None:
    with CollectorProcess(tmp_path, "--quiet") as collector:
        with training(collector, tmp_path, 2, shares_spool=True) as run:
            run.start(1_000_000, seed=1)
            run.wait_for_steps(10)
            collector.kill()
            run.wait_for_steps(run.living[0].steps() + 10)
            run.kill([0])
            run.wait_for_end()  # JAX ends the other one, before it can report anything
            assert not run.spools_are_empty()
            collector.start()
            finish(run, collector)


@pytest.mark.slow
@pytest.mark.native_only
def test_messages_that_no_spool_had_yet_are_in_the_flight_recorder(tmp_path: Path) -> None:
    flights, recovered = tmp_path / "flights", tmp_path / "recovered"
    with CollectorProcess(tmp_path, "--quiet") as collector:
        with training(collector, tmp_path, 2, shares_spool=True) as run:
            run.start(1_000_000, seed=2, HOSTCALLBACK_FLIGHT_RECORDER=str(flights))
            run.wait_for_steps(10)
            run.kill([0, 1])
            run.wait_for_end()
            assert main(["recover", str(flights), "--to", str(recovered)]) == 0
            finish(run, collector)
            forwarded = messages_in(collector.log / "run", 2)
            emitted = messages_in(recovered, 2)
            for life in run.lives[:2]:
                pid = life.process.pid
                found = {*forwarded.get(pid, ()), *emitted[pid]}
                assert found == set(range(len(found)))
                assert len(found) >= PER_STEP * life.steps()  # with none too young


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("count", "seed"), SEEDS)
def test_after_random_kills_no_message_is_lost_or_doubled(tmp_path: Path, count: int, seed: int) -> None:
    chance = random.Random(f"{count}/{seed}")
    pause = threading.Event()
    with CollectorProcess(tmp_path, "--quiet") as collector:
        with training(collector, tmp_path, count, shares_spool=chance.random() < 0.5) as run:
            for turn in range(4):
                run.start(1_000_000, seed=10 * seed + turn)
                run.wait_for_steps(1)
                is_there = collector.process.poll() is None
                for _ in range(chance.randrange(4)):
                    pause.wait(chance.uniform(0.0, 0.7))
                    if is_there:
                        collector.kill()
                    else:
                        collector.start()
                    is_there = not is_there
                pause.wait(chance.uniform(0.0, 0.7))
                victims = chance.choice([[0], [chance.randrange(1, count)], list(range(count))])
                print(
                    f"turn {turn}: the collector is {'' if is_there else 'not '}there, killed are {victims}"
                )
                run.kill(victims)
                pause.wait(chance.choice([0.0, 0.05, 1.0]))  # the others notice, and report it
                run.kill(range(count))
                run.wait_for_end()
            if collector.process.poll() is not None:
                collector.start()
            finish(run, collector)

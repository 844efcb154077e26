"""Programs of several JAX processes: the taps of all of them arrive at one collector, once and in order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from collecting import CollectorProcess
from hostcallback.receiver.taplog.reading.reader import LogReader
from ports import free_port
from python_process import run_pythons

PROGRAM = Path(__file__).with_name("distributed_program.py")


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_taps_of_all_processes_arrive_once_and_in_order(tmp_path: Path, count: int) -> None:
    steps, port = 40, str(free_port())
    with CollectorProcess(tmp_path) as collector:
        arguments = [str(count), port, collector.address, tmp_path / "spool", str(steps)]
        commands = [[PROGRAM, str(n), *arguments] for n in range(count)]
        run_pythons(commands, 110, XLA_FLAGS="--xla_force_host_platform_device_count=1")
        assert collector.stop() == 0
    found: dict[int | None, list[tuple[int | None, float]]] = {}
    for logged in LogReader(collector.log / "run").messages():
        if logged.message.consumer.name == "total":
            found.setdefault(logged.writer.process_index, []).append(
                (logged.step, float(np.squeeze(logged.value["total"])))
            )
    first = sum(range(count))
    expected = [(step, float(first + count * step)) for step in range(steps)]
    assert found == dict.fromkeys(range(count), expected)
    numbers = " ".join(f"{n}." for n in range(count))
    whole = [line for line in collector.lines if "a whole one" in line]
    assert whole == [f"[p0 d0 distributed_program.py:40] a whole one: [{numbers}]\n"]

"""Arrays that are sharded over the devices of several JAX processes reach a collector's consumers once and whole."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from collecting import CollectorProcess
from ports import free_port
from python_process import run_pythons

PROGRAM = Path(__file__).with_name("sharded_program.py")
CONSUMERS = """
import json

def sink(message):
    values = [array.tolist() for array in message.arrays]
    place = message.shard_index and [[[s.start, s.stop] for s in index] for index in message.shard_index]
    row = [message.consumer.name, message.device, place, values]
    print("got " + json.dumps(row), flush=True)

SINKS = [sink]
"""


def consumers(folder: Path) -> str:
    path = folder / "my_taps.py"
    path.write_text(CONSUMERS)
    return str(path)


def run_program(count: int, collector: CollectorProcess, spool: Path, steps: int) -> None:
    arguments = [str(count), str(free_port()), collector.address, spool, str(steps)]
    commands = [[PROGRAM, str(n), *arguments] for n in range(count)]
    run_pythons(commands, 240, XLA_FLAGS="--xla_force_host_platform_device_count=2")


def got(lines: Sequence[str]) -> list[list[Any]]:
    rows = [json.loads(line[4:]) for line in lines if line.startswith("got ")]
    return [
        [name.partition("@")[0], *rest] for name, *rest in rows
    ]  # unnamed taps have their line in the name


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_values_arrive_once_and_whole_and_in_order(tmp_path: Path, count: int) -> None:
    steps = 7
    with CollectorProcess(tmp_path, "--consumers", consumers(tmp_path)) as collector:
        run_program(count, collector, tmp_path / "spool", steps)
        assert collector.stop() == 0
    found = got(collector.lines)
    whole = np.arange(8.0 * count).reshape(2 * count, 4)
    first = "run p0 cpu:0"
    expected: list[Any] = []
    for _ in range(2):
        for step in range(steps):
            carry = whole + step + 1
            expected.append(["scan", first, None, [step, carry.tolist()]])
            expected.append(["replicated", first, None, [[float(step)] * 3]])
            expected.append(["print", first, None, [carry.sum().item(), carry.tolist()]])
        x = whole + steps
        expected.append(["batched", first, None, [x.tolist()]])
        expected.append(["last", "run p1 cpu:2048", None, [(2 * x).tolist()]])
        expected.append(["plain", first, None, [(-2 * x).tolist()]])
    expected.append(["explicit", first, None, [(whole + 5).tolist()]])
    assert [row for row in found if row[0] not in ("partly", "local")] == expected
    # A group of a partly manual program has one half of the columns. The groups are of different devices, and there is
    # no order between devices.
    halves = sorted(row[1:] for row in found if row[0] == "partly")
    columns = [[device, None, [(-2 * (whole + steps))[:, part].tolist()]] for device, part in (
        (first, slice(0, 2)), ("run p0 cpu:1", slice(2, 4)))]  # fmt: skip
    assert halves == [columns[0]] * 2 + [columns[1]] * 2
    local = [row for row in found if row[0] == "local"]
    assert len(local) == 2 * 2 * count
    for _, device, place, (part,) in local:
        process = int(device.split()[1][1:])
        rows, columns = place[0]
        assert rows == [2 * process, 2 * process + 2]
        assert part == (2 * (whole + steps))[slice(*rows), slice(*columns)].tolist()
    printed = [line for line in collector.lines if line.startswith("[")]
    assert len(printed) == 2 * steps
    for number, line in enumerate(printed):
        # A print that comes before the step of its iteration has none yet.
        beginnings = ("[p0 d0 sharded_program.py:", f"[p0 d0 step {number % steps} sharded_program.py:")
        assert line.startswith(beginnings), line

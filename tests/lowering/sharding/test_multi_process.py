"""Programs of two processes: shards arrive in their own process, and a value is delivered once."""

from __future__ import annotations

import json
import socket
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.export
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import hostcallback as hcb
from hostcallback import receiver
from hostcallback.lifecycle.receivers import use_native
from hostcallback.receiver.sinks.metric_writers.reduction import NO_STEP
from hostcallback.receiver.taplog.reading.logged_message import LoggedMessage
from hostcallback.receiver.taplog.reading.reader import LogReader
from python_process import run_pythons

PROGRAM = Path(__file__).with_name("multi_process_program.py")

pytestmark = pytest.mark.slow


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port: int = probe.getsockname()[1]
        return port


Found = dict[str, Any]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    """What each process of the program found."""
    folder = tmp_path_factory.mktemp("program")
    port = free_port()
    exported = export_programs(folder) if use_native("cpu") else []
    commands = [[PROGRAM, str(n), str(port), folder / str(n), *exported] for n in range(2)]
    run_pythons(commands, 120, XLA_FLAGS="--xla_force_host_platform_device_count=2")
    return [
        {**json.loads((folder / str(number)).read_text()), "log": folder / f"{number}.taps"}
        for number in range(2)
    ]


def export_programs(folder: Path) -> list[Path]:
    """Exports programs for four devices, all of this process; each taps its argument."""
    mesh = Mesh(np.reshape(jax.devices(), (2, 2)), ("i", "j"))
    paths = []
    for name, spec, processes in (
        ("loss", P(), None), ("loss-all", P(), "all"), ("loss-first", P(), "first"), ("rows", P("i"), None),
        ("rows-first", P("i"), "first"),
    ):  # fmt: skip
        shape = (4, 4) if name.startswith("rows") else ()
        x = jax.device_put(np.zeros(shape, np.float32), NamedSharding(mesh, spec))
        f = jax.jit(partial(hcb.id_tap, print, name="exported", processes=processes))
        path = folder / f"{name}.exported"
        path.write_bytes(jax.export.export(f, disabled_checks=hcb.export_checks())(x).serialize())
        paths.append(path)
    return paths


def test_each_process_gets_its_own_devices_shards_with_their_place(found: list[Found]) -> None:
    whole = np.arange(16.0).reshape(4, 4)
    for number in range(2):
        for device in range(2):
            rows, columns = [2 * number, 2 * number + 2], [2 * device, 2 * device + 2]
            part = whole[slice(*rows), slice(*columns)]
            mine = [entry for entry in found[number]["found"] if entry[1] == device]
            automatic = [["automatic", device, [rows, columns], (part + k).tolist()] for k in (1, 2, 3)]
            manual = [["manual", device, None, part.tolist()]]
            assert mine == 2 * (automatic + manual)


def test_each_process_prints_the_lines_that_jax_prints_there(found: list[Found]) -> None:
    for process in found:
        assert process["printed"]["hcb"] == process["printed"]["jax"]
    assert "replicated 3.0" in found[0]["printed"]["jax"]
    assert "replicated 3.0" not in found[1]["printed"]["jax"]


def test_with_all_each_process_prints_a_replicated_value_once(found: list[Found]) -> None:
    for process in found:
        assert process["printed"]["all"].count("replicated 3.0") == 1
        assert process["printed"]["all"].count("shard_map 3.0") == 2


def test_with_first_only_the_first_process_prints(found: list[Found]) -> None:
    assert found[0]["printed"]["first"] == found[0]["printed"]["jax"]
    assert found[1]["printed"]["first"] == []


def test_partitioned_prints_once_per_device(found: list[Found]) -> None:
    assert [process["printed"]["per device"] for process in found] == 2 * [["3.0", "3.0"]]


def test_a_shard_that_several_devices_of_a_process_have_arrives_once_with_its_place(
    found: list[Found],
) -> None:
    whole = np.arange(16.0).reshape(4, 4)
    for number, process in enumerate(found):
        rows = slice(2 * number, 2 * number + 2)
        assert process["kept"] == [[str(((rows, slice(0, 4)),)), whole[rows].tolist()]]


@pytest.mark.native_only  # the others are not exported
def test_taps_of_a_program_that_one_process_exported_follow_the_processes_that_run_it(
    found: list[Found],
) -> None:
    first, second = (process["exported"] for process in found)
    scalar = ["None", 3.0]
    assert (first["loss"], second["loss"]) == ([scalar], [])
    assert (first["loss-first"], second["loss-first"]) == ([scalar], [])
    assert (first["loss-all"], second["loss-all"]) == ([scalar], [scalar])
    for process in found:
        # The same as from the traced program: no process has the whole array.
        assert process["exported"]["rows"] == process["exported"]["rows-first"] == process["kept"]


def test_programs_without_taps_are_observed_and_watched(found: list[Found]) -> None:
    first, second = (process["observed"] for process in found)
    for name in (
        "inputs", "results", "within", "explicit mesh", "explicit mesh, no inputs", "auto mesh", "auto mesh, no inputs",
        "mesh of pjit",
    ):  # fmt: skip
        assert (first[name], second[name]) == ([1.0], []), name
    assert first["failed"] == second["failed"]
    assert len(first["failed"]) == 1


def test_programs_whose_devices_are_not_known_run_as_they_are_and_one_line_says_so(
    found: list[Found],
) -> None:
    for process in found:
        gone = process["observed"]["gone"]
        (line,) = gone["logged"]
        assert "do nothing in the program jit(cosine_of_zeros): its devices, which may be those of" in line
        assert "within the jax.set_mesh(mesh) in which it was traced" in line
        assert gone["totals"] == [4.0, 8.0]
        assert process["observed"]["mesh that is gone"] == []


def test_metrics_of_replicated_values_are_written_once(found: list[Found]) -> None:
    assert found[0]["written"] == [[NO_STEP, {"loss": 3.0}], [NO_STEP, {"everywhere": 3.0}]]
    assert found[1]["written"] == [[NO_STEP, {"everywhere": 3.0}]]


def test_readers_of_the_logs_show_a_replicated_value_once(found: list[Found]) -> None:
    def values(*logs: Path) -> list[tuple[str, list[float]]]:
        records = [record for record in LogReader(logs).values() if isinstance(record, LoggedMessage)]
        return [(r.message.consumer.name, [a.tolist() for a in r.message.arrays]) for r in records]

    def replayed(*logs: Path) -> list[float]:
        got: list[float] = []
        receiver.replay(logs, bind={"loss": lambda value: got.append(float(value))})
        return got

    one, other = found[0]["log"], found[1]["log"]
    for logs in ((one,), (other,), (one, other)):
        assert values(*logs) == [("loss", [3.0]), ("everywhere", [3.0])]
        assert replayed(*logs) == [3.0]
    assert sum(1 for _ in LogReader([one, other]).records()) == 8  # a message of each device

"""The step of a message without one: that of its launch and iteration, or none, in each tool that shows it."""

from __future__ import annotations

import csv
import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P

import hostcallback as hcb
from collecting import CollectorProcess
from hcb_command import hcb as command
from hostcallback import receiver
from hostcallback.receiver.processes import own_run
from hostcallback.receiver.sinks.scalars import scalars_into
from hostcallback.receiver.ui.index.log_index import LogIndex
from hostcallback.receiver.ui.texts import Wanted, lines

COUNT = 6


def before(i: Any) -> None:
    hcb.print("before {}", i)


def after(i: Any) -> None:
    hcb.print("after {}", i)


def metrics(i: Any) -> None:
    hcb.metrics({"loss": i * 0.5}, step=i)


def check(i: Any) -> None:
    hcb.check(i % 3 != 1, "fails {}", i)


def seldom(emit: Callable[[Any], None], every: int, at: int) -> Callable[[Any], None]:
    return lambda i: lax.cond(i % every == at, emit, lambda i: None, i)


def looped(*parts: Callable[[Any], None]) -> Callable[[int], None]:
    """A jitted step that a loop of Python calls."""

    @jax.jit
    def step(i: Any) -> Any:
        for part in parts:
            part(i)
        return i + 1

    def run(count: int) -> None:
        for i in range(count):
            step(i)

    return run


def scanned(*parts: Callable[[Any], None]) -> Callable[[int], None]:
    """A scan over all steps in one launch."""

    def body(carry: Any, i: Any) -> Any:
        for part in parts:
            part(i)
        return carry + 1, None

    return lambda count: jax.jit(lambda x: lax.scan(body, x, jnp.arange(count))[0])(0)


def recorded(folder: Path, run: Callable[[int], None], count: int = COUNT) -> Path:
    with hcb.outfeed_receiver(record=folder, on_error="warn"):
        run(count)
    return folder


Told = dict[str, list[tuple[int, int | None]]]
"""By kind of message: the step at which it was sent, which is the last array of each, and the step that is told."""


def told(path: Path, **selection: Any) -> Told:
    found: Told = {}
    for logged in receiver.LogReader(path).messages(receiver.Selection(**selection)):
        kind = logged.message.consumer.name.partition("@")[0]
        if kind == "print":
            assert logged.tap.described is not None
            kind = str(logged.tap.described.params["fmt"]).partition(" ")[0]
        found.setdefault(kind, []).append((int(logged.message.arrays[-1].reshape(-1)[0]), logged.step))
    return found


def right(*steps: int) -> list[tuple[int, int | None]]:
    return [(step, step) for step in steps]


def unknown(*steps: int) -> list[tuple[int, int | None]]:
    return [(step, None) for step in steps]


EVERY = right(*range(COUNT))


@pytest.mark.parametrize("program", [looped, scanned])
def test_prints_and_checks_have_the_step_of_their_iteration(tmp_path: Path, program: Any) -> None:
    found = told(recorded(tmp_path, program(before, check, metrics, after)))
    assert found == {"before": EVERY, "check": right(1, 4), "metrics": EVERY, "after": EVERY}


@pytest.mark.parametrize(
    "parts", [(before, metrics), (metrics, after), (before, before, metrics, after, after)]
)
@pytest.mark.parametrize("program", [looped, scanned])
def test_the_order_of_print_and_metrics_does_not_matter(tmp_path: Path, program: Any, parts: Any) -> None:
    found = told(recorded(tmp_path, program(*parts)))
    assert {message for messages in found.values() for message in messages} == set(EVERY)


def test_a_check_of_a_loop_has_no_step_if_its_place_in_the_iteration_is_not_known(tmp_path: Path) -> None:
    for number, parts in enumerate([(check, metrics), (metrics, check)]):
        found = told(recorded(tmp_path / str(number), scanned(*parts)))
        assert found["check"] == unknown(1, 4)


def test_a_failed_check_before_the_metrics_of_a_jitted_step_has_its_step(tmp_path: Path) -> None:
    found = told(recorded(tmp_path, looped(lambda i: hcb.check(i < 0, "fails {}", i), metrics)))
    assert found["check"] == EVERY


def test_a_check_that_fails_in_every_iteration_of_a_loop_precedes_its_metrics(tmp_path: Path) -> None:
    found = told(recorded(tmp_path, scanned(lambda i: hcb.check(i < 0, "fails {}", i), metrics)))
    assert found["check"] == EVERY


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("order", [1, -1])
def test_steps_that_are_not_sent_are_not_guessed(tmp_path: Path, at: int, order: int) -> None:
    found = told(recorded(tmp_path, scanned(*[before, seldom(metrics, 3, at)][::order]), 12))
    assert found["metrics"] == right(*range(at, 12, 3))
    assert found["before"] == unknown(*range(12))


def test_messages_of_a_program_without_steps_have_none(tmp_path: Path) -> None:
    def run(count: int) -> None:
        trains, tests = looped(metrics), looped(after)
        trains(count)
        tests(count)
        hcb.print("before {}", count)

    assert told(recorded(tmp_path, run)) == {
        "metrics": EVERY, "after": unknown(*range(COUNT)), "before": unknown(COUNT),
    }  # fmt: skip


def test_each_device_has_its_own_iterations(tmp_path: Path) -> None:
    @jax.jit
    def step(i: Any) -> Any:
        before(i)
        metrics(i)
        after(i)
        return i + 1

    def run(count: int) -> None:
        values = [jax.device_put(jnp.int32(100 * k), device) for k, device in enumerate(jax.devices()[:2])]
        for _ in range(count):
            values = [step(value) for value in values]

    found = told(recorded(tmp_path, run))
    for messages in found.values():
        assert sorted(messages) == right(*range(COUNT), *range(100, 100 + COUNT))


def test_a_step_under_vmap_is_that_of_all_elements(tmp_path: Path) -> None:
    def one(x: Any, i: Any) -> Any:
        hcb.print("before {} {}", x, i)
        hcb.metrics({"loss": x}, step=i)
        return x + 1

    def body(x: Any, i: Any) -> Any:
        return jax.vmap(one, in_axes=(0, None))(x, i), None

    run = jax.jit(lambda x: lax.scan(body, x, jnp.arange(COUNT))[0])
    found = told(recorded(tmp_path, lambda count: run(jnp.zeros(3))))
    assert found["before"][: 3 * COUNT : len(found["before"]) // COUNT] == EVERY


def test_a_selection_by_step_finds_what_the_whole_log_shows(tmp_path: Path) -> None:
    always = lambda i: hcb.check(i < 0, "fails {}", i)  # noqa: E731, each failure is written at once, as a chunk
    for name, program in (("loop", looped), ("scan", scanned)):
        path = recorded(tmp_path / name, program(always, metrics, after), 40)
        whole = told(path)
        for first, last in ((0, 0), (17, 19), (39, 39)):
            wanted = {
                kind: [item for item in messages if item[1] is not None and first <= item[1] <= last]
                for kind, messages in whole.items()
            }
            assert told(path, first_step=first, last_step=last) == wanted
            assert wanted["check"] == right(*range(first, last + 1))


def test_every_tool_tells_the_same_steps(tmp_path: Path) -> None:
    path = recorded(tmp_path / "log", looped(before, metrics, after))
    texts = [(f"{when} {i}", i) for i in range(COUNT) for when in ("before", "after")]
    found = [json.loads(line) for line in command(tmp_path, "cat", "--json", path).stdout.splitlines()]
    assert [(f"{'before' if i % 3 == 0 else 'after'} {found[i]['step']}", found[i]["step"])
            for i in range(len(found)) if i % 3 != 1] == texts  # fmt: skip
    shown = command(tmp_path, "cat", path).stdout
    assert re.findall(r"  (\d+)  print\S*  ((?:before|after) \d+)", shown) == [
        (str(i), text) for text, i in texts
    ]
    table = hcb.read(path)
    for name in (name for name in table if name.startswith("print")):
        assert list(table[name].to_numpy()["step"]) == list(range(COUNT))
    index = LogIndex([path])
    index.look()
    while index.read_some(1.0):
        pass
    assert [(line["text"], line["step"]) for line in lines(index, Wanted())["lines"]] == texts


def large(i: Any) -> None:
    """Emits a message that fills a chunk."""
    hcb.id_tap(lambda value: None, jnp.full(200_000, jnp.float32(i)), name="large")


def test_a_selection_by_step_finds_large_messages_before_their_step(tmp_path: Path) -> None:
    log = recorded(tmp_path, looped(large, large, metrics), 4)
    assert told(log)["large"] == right(0, 0, 1, 1, 2, 2, 3, 3)
    assert told(log, first_step=2, last_step=2)["large"] == right(2, 2)


@pytest.mark.slow
def test_the_time_to_read_large_messages_without_steps_grows_with_their_number(tmp_path: Path) -> None:
    def run(count: int) -> None:
        metrics(0)
        scanned(large)(count)

    took = []
    for count in (40, 160):
        log = recorded(tmp_path / str(count), run, count)
        began = time.process_time()
        assert told(log)["large"] == unknown(*range(count))
        took.append(time.process_time() - began)
    assert took[1] < 12 * took[0] + 0.2  # 4 times as many; if each looked into all that follow, 60 times


def test_an_exception_whose_text_has_a_lone_surrogate_is_in_the_log(tmp_path: Path) -> None:
    def fail(value: Any) -> None:
        raise ValueError(os.fsdecode(b"no file \xff"))

    log = recorded(tmp_path, looped(lambda i: hcb.id_tap(fail, i)), 3)
    assert sum(map(len, told(log).values())) == 3


def test_the_page_finds_the_steps_of_failed_checks(tmp_path: Path) -> None:
    path = recorded(tmp_path, looped(check, metrics))
    index = LogIndex([path])
    index.look()
    while index.read_some(1.0):
        pass
    assert [(line["text"], line["step"]) for line in lines(index, Wanted())["lines"]] == [
        ("check failed: fails 1", 1),
        ("check failed: fails 4", 4),
    ]


def test_a_collector_prints_no_wrong_step(tmp_path: Path) -> None:
    with CollectorProcess(tmp_path) as collector:
        with hcb.outfeed_receiver(forward=collector.address, spool=tmp_path / "spool"):
            looped(before, metrics, after)(COUNT)
            scanned(before, metrics, after)(COUNT)
        assert collector.stop() == 0
    printed = [re.match(r"\[p0 d0( step \d+)? \S+\] \w+ (\d+)", line) for line in collector.lines]
    assert len(printed) == 4 * COUNT
    for line in printed:
        assert line is not None
        assert line[1] in (None, f" step {line[2]}")
    assert sum(line[1] is not None for line in printed if line is not None) > 2 * COUNT
    stored = told(collector.log / own_run())
    assert stored["before"] == stored["after"] == EVERY * 2


def other_steps(i: Any) -> None:
    """Three taps with a leaf called `step` that is no step of a message."""
    hcb.id_tap(lambda value: None, {"step": i, "step_value": i, "train": {"step": 10 * i}}, name="nested")
    hcb.id_tap(lambda value: None, {"step": i / 2}, name="half")
    hcb.log("{state}", state={"step": 10 * i}, step=i, name="logged")


def test_a_leaf_called_step_that_is_not_the_messages_step_is_a_value_in_every_tool(tmp_path: Path) -> None:
    path = recorded(tmp_path / "log", looped(other_steps))
    steps, tens, halves = [*range(COUNT)], [10 * i for i in range(COUNT)], [i / 2 for i in range(COUNT)]
    table = hcb.read(path)
    found = {name: table[name].to_numpy() for name in table}
    assert {
        name: {key: found[name][key].tolist() for key in found[name] if key != "time"} for name in found
    } == {
        "nested": {"step": steps, "step_value": steps, "train/step": tens},
        "half": {"step": steps, "step_value": halves},
        "logged": {"step": steps, "state/step": tens},
    }
    with scalars_into(tmp_path / "scalars.csv") as scalars:
        receiver.replay(path, sinks=[scalars])
    names = "nested/train/step", "nested/step_value", "half/step", "logged/state/step"
    assert scalars.written == dict.fromkeys(names, COUNT)
    command(tmp_path, "convert", path, "--to", "trace", "-o", "trace.json")
    counters = [
        event
        for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        if event["ph"] == "C"
    ]
    assert {event["name"].split()[0] for event in counters} == {*scalars.written}
    index = LogIndex([path])
    index.look()
    while index.read_some(1.0):
        pass
    assert {(tap.name, tap.leaf) for tap in index.taps.rows if tap.kind == "scalar"} == {
        ("nested", "train/step"), ("nested", "step_value"), ("half", "step"),
    }  # fmt: skip


def scalars(i: Any) -> None:
    """Scalars before and after the step of their launch."""
    hcb.tap(lambda value: None, 10.0 * i, name="earlier")
    hcb.metrics({"loss": i * 0.5}, step=i)
    hcb.tap(lambda value: None, 20.0 * i, name="later")


def rows(file: Path) -> list[dict[str, str]]:
    """The rows of a CSV file."""
    with file.open(newline="") as read:
        return [*csv.DictReader(read)]


def test_scalars_are_in_the_rows_of_their_steps(tmp_path: Path) -> None:
    path = recorded(tmp_path / "log", looped(scalars))
    assert command(tmp_path, "replay", path, "--metrics", "scalars.csv").returncode == 0
    assert rows(tmp_path / "scalars.csv") == [
        {"step": f"{i}", "earlier": f"{10.0 * i}", "loss": f"{i * 0.5}", "later": f"{20.0 * i}"}
        for i in range(COUNT)
    ]
    # Again, and what is there is not kept without a word.
    said = command(tmp_path, "replay", path, "--metrics", "scalars.csv").stderr
    assert "scalars.csv had content and is replaced; another --metrics FILE keeps it" in said


@pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 devices")
def test_scalars_of_two_devices_share_no_row(tmp_path: Path) -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("d",))

    def each(x: Any, i: Any) -> Any:
        hcb.metrics({"loss": x[0] + i}, step=i, name="train")
        hcb.metrics({"other": -x[0] - i}, step=i, name="more")
        return x

    step = jax.jit(jax.shard_map(each, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d")))
    path = recorded(tmp_path / "log", lambda count: [step(jnp.array([1e3, 2e3]), i) for i in range(count)])
    assert command(tmp_path, "replay", path, "--metrics", "scalars.csv").returncode == 0
    names = [f"{device.platform}:{device.id}" for device in mesh.devices]
    assert rows(tmp_path / "scalars.csv") == [
        {"step": f"{i}", "device": names[d], "train/loss": f"{x + i}", "more/other": f"{-x - i}"}
        for i in range(COUNT)
        for d, x in enumerate((1e3, 2e3))
    ]
    assert command(tmp_path, "replay", path, "--metrics", "scalars.jsonl").returncode == 0
    for line in map(json.loads, (tmp_path / "scalars.jsonl").read_text().splitlines()):
        assert abs(next(reversed(line.values()))) == 1e3 * (1 + names.index(line["device"])) + line["step"]

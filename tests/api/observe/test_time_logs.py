"""The times of places in tap logs: the table of `hcb stats`, the text of `hcb cat`, and the spans of a trace."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hostcallback as hcb
from hcb_command import hcb as run_hcb
from hostcallback.receiver.sinks.time_rows import PROGRAM, Times, table
from hostcallback.receiver.sinks.times import TimeSink
from hostcallback.receiver.text import duration_text

CALLS, LENGTH = 3, 4


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("log") / "taps"

    def body(x: Any, _: Any) -> Any:
        with hcb.span("outer"):
            x = jnp.sin(x @ x)
            with hcb.span("inner"):
                x = jnp.cos(x @ x)
        return x, None

    program = jax.jit(lambda x: jax.lax.scan(body, x, None, length=LENGTH)[0])
    with (
        hcb.outfeed_receiver(record=folder),
        hcb.observe(what="time", name="parts", tap_func=lambda times: None),
    ):
        for _ in range(CALLS):
            program(jnp.eye(8)).block_until_ready()
    return folder


def test_stats_prints_the_table(log: Path) -> None:
    shown = run_hcb(log.parent, "stats", log).stdout
    lines = shown[shown.index("parts:\n") : shown.index("\n\nslowest ")].splitlines()[1:]
    assert lines[0].split() == ["place", "count", "mean", "p50", "p90", "p99", "max", "share"]
    counts = {line.split()[0]: int(line.split()[1]) for line in lines[1:]}
    assert counts == {"outer/inner": CALLS * LENGTH, "outer": CALLS * LENGTH, PROGRAM: CALLS}
    found = [json.loads(line) for line in run_hcb(log.parent, "stats", log, "--json").stdout.splitlines()]
    rows = {one["place"]: one for one in found if "times" in one}
    assert rows["outer"]["count"] == CALLS * LENGTH
    assert re.fullmatch(r"call [012], iteration [0123]", rows["outer"]["max_at"])
    assert re.fullmatch(r"call [012]", rows[PROGRAM]["max_at"])
    assert rows[PROGRAM]["max"] >= rows["outer"]["max"] > rows["outer"]["mean"]
    assert 0 < rows["outer/inner"]["share"] < rows["outer"]["share"] < rows[PROGRAM]["share"] == 1


def test_cat_shows_the_times_of_each_call(log: Path) -> None:
    lines = run_hcb(log.parent, "cat", log).stdout.splitlines()
    assert len(lines) == CALLS
    assert all(re.search(rf"  outer [\d.]+ \ws, outer/inner .*, {PROGRAM} ", line) for line in lines)


def test_a_trace_has_the_places_in_each_other(log: Path, tmp_path: Path) -> None:
    run_hcb(log.parent, "convert", log, "--to", "trace", "-o", tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    ends: dict[str, list[tuple[float, float]]] = {}
    for event in spans:
        ends.setdefault(event["name"], []).append((event["ts"], event["ts"] + event["dur"]))
    assert {name: len(each) for name, each in ends.items()} == {
        "outer": CALLS * LENGTH, "outer/inner": CALLS * LENGTH, PROGRAM: CALLS
    }  # fmt: skip
    for name, around in (("outer/inner", "outer"), ("outer", PROGRAM)):
        wide = ends[around]
        assert all(any(b - 0.01 <= begin and end <= e + 0.01 for b, e in wide) for begin, end in ends[name])
    iterations = [event["args"]["iterations"] for event in spans if event["name"] == "outer"]
    assert iterations == [[i] for i in range(LENGTH)] * CALLS
    [track] = {(event["pid"], event["tid"]) for event in spans}
    names = {(e["pid"], e.get("tid")): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names[track] == "cpu:0 time"


def test_messages_that_are_no_times_are_refused(log: Path) -> None:
    from hostcallback import receiver

    message = next(receiver.LogReader(log).messages())
    described = message.tap.described
    sink = TimeSink.of(described)
    arrays = list(message.message.arrays)
    assert set(sink.seconds(message.message._replace(arrays=arrays))) == {"outer/inner", "outer", PROGRAM}
    for number, other in (
        (0, np.zeros(3, np.float32)),
        (0, np.zeros(3, np.int8)),
        (1, np.zeros(1, np.float32)),
    ):
        wrong = [*arrays[:number], other, *arrays[number + 1 :]]
        with pytest.raises(ValueError, match="other arrays"):
            sink.seconds(message.message._replace(arrays=wrong))
    for axes in ({"outer": ["weeks"]}, [], {"outer": 3}):
        with pytest.raises(ValueError, match="the axes of times"):
            TimeSink.of(dataclasses.replace(described, params={"axes": axes}))
    with pytest.raises(ValueError, match="no times of 'missing'"):
        list(
            TimeSink.of(dataclasses.replace(described, params={"axes": {"missing": []}})).segments(
                message.message
            )
        )


def test_the_table_tells_percentiles_and_the_slowest_device() -> None:
    times = Times()
    slow = np.repeat([1e-3, 5e-3], [95, 5]).astype(np.float32)
    times.add({"a": {"[0]": slow, "[1]": 3 * slow}, PROGRAM: {"[0]": 10 * slow, "[1]": 10 * slow}})
    times.add({"b": {"[0]": np.zeros(0, np.float32)}})
    a, b, program = times.rows()
    assert (a.count, b.count, program.place) == (200, 0, PROGRAM)
    assert a.mean == pytest.approx(2 * slow.mean())
    assert (a.p50, a.p90, a.p99) == pytest.approx((3e-3, 3e-3, 15e-3), rel=0.006)
    assert (a.slowest, a.spread) == ("[1]", pytest.approx(0.5))
    assert a.share == pytest.approx(0.2)
    lines = table([a, b, program]).splitlines()
    assert lines[0].split()[-1] == "slowest"
    assert lines[1].endswith("20.0 %  [1] +50.0 %")
    assert lines[2].split() == ["b", "0", "-", "-", "-", "-", "-", "0.0", "%"]


@pytest.mark.parametrize("percent", [50, 90, 99])
def test_a_percentile_has_its_share_of_the_calls_below_it(percent: int) -> None:
    def told(short_calls: int) -> float:
        times = Times()
        seconds = np.repeat([1e-3, 5e-3], [short_calls, 1000 - short_calls])
        times.add({"a": {"[0]": seconds}})
        return float(getattr(times.rows()[0], f"p{percent}"))

    assert told(10 * percent + 5) == pytest.approx(1e-3, rel=0.006)
    assert told(10 * percent - 5) == pytest.approx(5e-3, rel=0.006)


@pytest.mark.parametrize("seconds", [0.043, 0.0435, 1.0e-5, 2.74e-3, 33.1])
def test_percentiles_are_times_that_were_measured(seconds: float) -> None:
    times = Times()
    for device in ("a", "b"):
        times.add({"one": {device: np.full(3, seconds)}})
    times.add({"several": {"a": seconds * np.linspace(1, 1.5, 99)}})
    one, several = times.rows()
    assert one.p50 == one.p90 == one.p99 == one.max == seconds
    assert seconds < several.p50 < several.p90 < several.p99 <= several.max == seconds * 1.5


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (1.5e-7, "0.15 us"),
        (2.345e-6, "2.35 us"),
        (0.0123, "12.3 ms"),
        (2, "2 s"),
        (86400, "86400 s"),
        (np.nan, "-"),
    ],
)
def test_durations_have_three_digits(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text

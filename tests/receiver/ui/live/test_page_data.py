"""The data of the page about running processes: their devices, taps, knobs, rules and failures, next to the logs'."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scripted_sources import Source, device, figures, process, tap

from hostcallback.receiver.control.protocol import ControlError
from hostcallback.receiver.errors import TapFailure
from hostcallback.receiver.failures.failure_report import FailureHistory
from hostcallback.receiver.ui.index.log_index import LogIndex
from hostcallback.receiver.ui.live.processes import LiveProcesses
from hostcallback.receiver.ui.server import page_data
from hostcallback.receiver.ui.server.page_data import MAX_KNOBS, TAPS, PageData, devices, take_taps
from hostcallback.receiver.ui.server.requests import (
    BadRequestError,
    NoControlError,
    RuleRequest,
    UnknownError,
)
from logged_frames import LOSS, block_of, frame, log_in, losses
from threads import wait_for

Page = Callable[..., PageData]


@pytest.fixture
def page() -> Iterator[Page]:
    """Makes the data of a page with some sources, which may control."""
    made: list[PageData] = []

    def make(*sources: Source, logs: Any = (), control: bool = True) -> PageData:
        live = LiveProcesses(sources)  # type: ignore[arg-type]
        made.append(PageData(LogIndex(logs), [*map(str, logs)], live=live, control=control))
        return made[-1]

    yield make
    for each in made:
        each.close()


def live_of(*told: Any) -> LiveProcesses:
    """Processes that were asked once."""
    live = LiveProcesses([Source(told)])  # type: ignore[list-item]
    live.refresh()
    return live


def test_the_knobs_of_all_processes_are_listed_by_name(page: Page) -> None:
    source = Source([])
    knob = {
        "name": "lr",
        "value": 0.5,
        "default": 0.1,
        "min": 0,
        "max": None,
        "dtype": "float32",
        "source_line": "a:1",
    }
    source.answer = [
        [
            knob,
            {"name": "\x1bz", "value": float("nan"), "default": [1, 2.5], "min": float("inf"), "max": True},
        ],
        [{**knob, "value": 0.25, "default": 7}, "no knob"],
        "no list",
    ]
    found = page(source).knobs()
    lr = {**knob, "values": [0.5, 0.25]}
    del lr["value"]
    none = {"dtype": None, "source_line": None}
    odd = {"name": "\\x1bz", "values": ["nan"], "default": "[1, 2.5]", "min": "inf", "max": True, **none}
    assert found == {"processes": 3, "knobs": [odd, lr]}
    assert source.told == [("knobs", "", {})]


def test_knobs_are_limited_in_number_and_length(page: Page) -> None:
    source = Source([], answer=[[{"name": f"{k:03}", "value": "v" * 1001} for k in range(MAX_KNOBS + 1)]])
    found = page(source).knobs()["knobs"]
    assert [knob["name"] for knob in found] == [f"{k:03}" for k in range(MAX_KNOBS)]
    assert found[0]["values"] == ["v" * 1000]


def test_processes_without_knobs_leave_the_list_empty(page: Page) -> None:
    assert page(Source([], answer=ControlError("unknown command"))).knobs() == {"processes": 0, "knobs": []}
    assert page().knobs() == {"processes": 0, "knobs": []}


def test_knobs_rules_and_stops_reach_the_processes(page: Page) -> None:
    source = Source([], answer=[{"names": ["b", "a\x1b"]}, None, {"names": ["c", "b"]}, {}])
    shown = page(source)
    rule = RuleRequest(pattern="*", run="one", settings={"enabled": False}, reset=True)
    assert shown.set_rules(rule) == {"applied": ["b", "a\\x1b", "c"]}
    assert shown.set_knob({"name": "lr", "value": None}) == {"processes": 4}
    assert shown.stop() == {"processes": 4}
    assert source.told == [
        ("rules", "one", {"pattern": "*", "settings": {"enabled": False}, "reset": True}),
        ("set", "", {"name": "lr", "value": None, "by": "hcb ui"}),
        ("stop", "", {"by": "hcb ui"}),
    ]


@pytest.mark.parametrize("wanted", [None, [], {"name": "lr"}, {"value": 1}, {"name": 5, "value": 1}], ids=str)
def test_a_knob_is_set_by_its_name_and_value(page: Page, wanted: Any) -> None:
    source = Source([])
    with pytest.raises(BadRequestError, match="expected the name and the value of a knob"):
        page(source).set_knob(wanted)
    assert source.told == []


def test_a_page_without_control_or_processes_changes_nothing(page: Page) -> None:
    source = Source([])
    with pytest.raises(NoControlError, match="start hcb ui with --control"):
        page(source, control=False).stop()
    with pytest.raises(NoControlError, match="no running process is shown"):
        page().stop()
    assert source.told == []


def test_the_device_of_a_process_has_its_counts_and_those_of_its_log(tmp_path: Path) -> None:
    with log_in(tmp_path) as log:
        log.append("cpu:0", losses(0, 3), at_once=True)
        log.lose("cpu:0", 1, 2, 5, "full disk")
    index = LogIndex([tmp_path])
    index.look()
    index.read_some(60.0)
    (logged,) = devices(index, LiveProcesses())
    assert (logged["live"], logged["messages"], logged["drops"], logged["backlog"]) == (False, 3, 5, None)
    assert logged["taps"] == [{"name": "loss", "messages": 3, "seconds": None}]
    (segment,) = index.files.segments
    writer = segment.writer
    told = figures(
        1.0,
        device("cpu:0", emitted=2, dropped=6, queued=4, queued_bytes=44, waiting=1),
        device("cpu:1", emitted=9),
    )
    here = process(told, writer.pid)._replace(host=writer.host)
    first, second = devices(index, live_of(here))
    assert first == logged | {
        "live": True, "rate": 0.0, "messages": 3, "queue_bytes": 44, "backlog": 4, "drops": 6, "stalls": 1,
        "seconds_in_taps": 0, "silent_sec": first["silent_sec"],
    }  # fmt: skip
    assert (second["device"], second["messages"], second["live"]) == ("cpu:1", 9, True)
    other = here._replace(host="elsewhere")
    assert [row["live"] for row in devices(index, live_of(other))] == [False, True, True]


def test_devices_without_logs_have_the_name_of_their_process_and_its_busiest_taps() -> None:
    taps = [tap(f"t\x1b{k}", messages=k, tap_sec=0.5) for k in range(TAPS + 1)]
    live = live_of(
        process(figures(1.0, device("cpu:0", emitted=8), device("cpu:1"), taps=taps), 7, "one"),
        process(figures(1.0, device("cpu:0")), 8, ""),
    )
    found = devices(LogIndex([]), live)
    assert [(row["run"], row["process"], row["device"]) for row in found] == [
        ("one", "host:7", "cpu:0"), ("one", "host:7", "cpu:1"), ("host:8", "host:8", "cpu:0"),
    ]  # fmt: skip
    assert [row["messages"] for row in found] == [8, 0, 0]
    assert found[0]["seconds_in_taps"] == (TAPS + 1) / 2
    assert [row["messages"] for row in found[0]["taps"]] == [*range(TAPS, 0, -1)]
    assert found[0]["taps"][0] == {"name": f"t\\x1b{TAPS}", "messages": TAPS, "seconds": 0.5}
    assert found[2]["taps"] == []


def test_a_tap_is_on_if_it_is_on_in_all_processes() -> None:
    live = live_of(
        process(figures(1.0, taps=[tap("a", enabled=True), tap("b", enabled=True), tap("c", messages=4)]), 7),
        process(
            figures(1.0, taps=[tap("a", enabled=False), tap("b"), tap("c", "other:2", enabled=0)]), 8, ""
        ),
        process(figures(1.0, taps=[tap("a", enabled=True), tap("k", check=True), tap("c", messages=2)]), 7),
    )
    index = LogIndex([])
    assert take_taps(index, live) == {
        ("a", "a.py:1"): False, ("b", "a.py:1"): True, ("c", "a.py:1"): True, ("c", "other:2"): False,
        ("k", "a.py:1"): True,
    }  # fmt: skip
    rows = [(row.run, row.name, row.kind, row.count) for row in index.taps.rows]
    assert ("one", "k", "check", 1) in rows
    assert ("one", "c", "array", 4) in rows
    assert ("host:8", "c", "array", 1) in rows
    assert len(rows) == 7


def told_of(*errors: Exception) -> list[dict[str, Any]]:
    """What a process tells of exceptions."""
    history = FailureHistory()
    for number, error in enumerate(errors):
        history.add_exception(TapFailure(error, "f", f"a.py:{number}", "cpu:0", number, time_ns=1, step=None))
    return history.as_dicts()


def test_failures_of_processes_are_taken_once_for_each_answer(page: Page) -> None:
    first = process(figures(1.0, failures=told_of(ValueError("one"))))
    both = process(figures(2.0, failures=told_of(ValueError("one"), KeyError("two"))))
    shown = page(Source([first], [both]))
    assert shown.changes([])["errors"] == [1, 1]
    shown.live.tell("stop")  # asks again at once
    assert shown.changes([])["errors"] == [2, 2]
    assert sorted(group["title"] for group in shown.errors()["groups"]) == [
        "KeyError: 'two'",
        "ValueError: one",
    ]


def test_the_counts_of_an_overview_are_told_every_three_seconds(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(page_data, "time", SimpleNamespace(monotonic=lambda: clock.now))
    shown = page(Source([process(figures(1.0))]))
    told = [shown.changes([])["overview"][4]]
    shown.index.version += 1
    for seconds in (2.5, 3.0):
        clock.now = 1000.0 + seconds
        told.append(shown.changes([])["overview"][4])
    assert told[0] == told[1] != told[2]


def test_a_page_has_the_logs_that_its_processes_name(
    page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_data, "INTERVAL_SEC", 0.01)
    with log_in(tmp_path, run="one") as log:
        log.append("cpu:0", losses(0, 3), at_once=True)
    shown = page(
        Source(
            [process(figures(1.0, taps=[tap("loss", LOSS.source_line, enabled=False)]))], folder=[tmp_path]
        )
    )
    (logged,) = wait_for(
        lambda: [
            row for row in shown.overview("LOSS", 10)["taps"] if row["count"] == 3 and row["field"] == "loss"
        ],
        "the messages of the log",
    )
    assert (logged["run"], logged["kind"], logged["enabled"], logged["last"]) == ("one", "scalar", False, 2.0)
    assert [run["id"] for run in shown.overview("", 10)["runs"]] == ["one"]
    last = shown.changes([logged["id"], 99])["taps"]
    assert last == [[logged["id"], 3, 2.0]]
    assert shown.taps([logged["id"]])[0].name == "loss"
    for number in (-1, len(shown.index.taps.rows)):
        with pytest.raises(UnknownError, match=f"no tap has the id {number}"):
            shown.taps([number])


def test_taps_are_found_by_a_part_of_their_name_or_a_pattern(page: Page) -> None:
    taps = [tap("train/Loss"), tap("train/norm"), tap("evaluation/loss")]
    shown = page(Source([process(figures(1.0, taps=taps))]))

    def names(pattern: str, limit: int = 10) -> list[str]:
        return [row["name"] for row in shown.overview(pattern, limit)["taps"]]

    assert names("LOSS") == ["train/Loss", "evaluation/loss"]
    assert names("train/*") == ["train/Loss", "train/norm"]
    assert names("*/[l]oss") == ["evaluation/loss"]
    assert names("train/nor?") == ["train/norm"]
    assert names("", 2) == ["train/Loss", "train/norm"]
    assert shown.overview("", 2)["taps_total"] == 3


def test_a_log_says_what_is_wrong_with_it(page: Page, tmp_path: Path) -> None:
    empty, damaged = tmp_path / "empty", tmp_path / "damaged"
    empty.mkdir()

    def message(shown: PageData) -> str:
        (source,) = shown.overview("", 10)["sources"]
        assert (source["kind"], source["state"]) == ("log", "ended")
        return str(source["message"])

    shown = page(logs=[empty])
    wait_for(lambda: message(shown) == "no messages so far", "an empty log")
    shown.index.files.note("one \x1b problem")
    assert message(shown) == "no messages so far; one \\x1b problem"
    shown.index.files.note("another")
    shown.index.files.note("a third")
    assert message(shown) == "no messages so far; one \\x1b problem (and 2 more)"
    shown.index.taps.left_out.add("tap")
    assert message(shown).endswith(" more); about 1 taps are left out: the page keeps the first 0")
    with log_in(damaged) as log:
        log.append("cpu:0", block_of(frame(LOSS, np.float32(1), np.int32(1), seq=1)), at_once=True)
    complete = page(logs=[damaged])
    wait_for(lambda: message(complete) == "", "the log that was read")


def test_parts_that_are_not_read_yet_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with log_in(tmp_path) as log:
        for first in range(3):
            log.append("cpu:0", losses(first, 1), at_once=True)
    index, pause = LogIndex([tmp_path]), threading.Event()
    index.look()
    monkeypatch.setattr(index, "read_some", lambda seconds: pause.wait(0.01))
    monkeypatch.setattr(index, "look", lambda seconds: None)
    with closing(PageData(index, ["a"])) as page:
        (source,) = page.overview("", 10)["sources"]
        assert source["message"] == "reading: 3 of 3 parts are left"
        index.is_looking = True
        (source,) = page.overview("", 10)["sources"]
        assert source["message"] == "reading: not all files have been looked at"

"""The groups of failures of logs and processes: counted apart, in order, within limits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_failure_steps import CHECK

from hostcallback.receiver.errors import TapFailure
from hostcallback.receiver.failures.failure_report import FailureHistory
from hostcallback.receiver.failures.told_failure import told_failures
from hostcallback.receiver.ui.index import failures
from hostcallback.receiver.ui.index.failures import Failures, Group, Occurrence, frame_of
from hostcallback.receiver.ui.index.log_index import LogIndex
from logged_frames import BEGIN_NS, block_of, frame, log_in

BEGIN = BEGIN_NS / 1e9


def told(*times: int, line: str = "a.py:1", name: str = "f", text: str = "bug") -> list[dict[str, Any]]:
    """What a process tells of exceptions at these seconds, and in these steps."""
    history = FailureHistory()
    for at in times:
        history.add_exception(TapFailure(ValueError(text), name, line, "cpu:0", at, time_ns=at, step=at))
    return [each | {"first": BEGIN + times[0], "last": BEGIN + times[-1]} for each in history.as_dicts()]


def take(found: Failures, process: tuple[str, int], answer: Any) -> None:
    for failure in told_failures(answer):
        found.take_live(process, failure)


def test_a_later_answer_of_a_process_replaces_an_earlier_one() -> None:
    found = Failures()
    take(found, ("host", 1), told(1, 2, text="early"))
    take(found, ("host", 2), told(5))
    take(found, ("host", 1), told(1, 2, 9, text="late"))
    take(found, ("host", 1), told(1, text="out of order"))
    (group,) = found.as_dicts()
    assert (found.count, found.kinds, group["count"]) == (4, 1, 4)
    assert (group["title"], group["values"]) == ("ValueError: late", "")
    assert group["per"] == [
        {"process": "host:1", "device": "cpu:0", "count": 3}, {"process": "host:2", "device": "cpu:0", "count": 1},
    ]  # fmt: skip
    assert (group["first"], group["last"]) == (
        {"time": BEGIN + 1, "step": 1}, {"time": BEGIN + 9, "step": 9},
    )  # fmt: skip


def test_groups_with_the_latest_failure_come_first() -> None:
    found = Failures()
    for line, at in (("a.py:1", 5), ("b.py:2", 7), ("c.py:3", 6)):
        take(found, ("host", 1), told(at, line=line))
    assert [group["place"] for group in found.as_dicts()] == ["b.py:2", "c.py:3", "a.py:1"]
    assert [group["id"] for group in found.as_dicts()] == ["1", "2", "0"]


def test_groups_processes_and_places_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "MAX_GROUPS", 2)
    monkeypatch.setattr(failures, "MAX_PLACES", 2)
    found = Failures()
    for number in range(3):
        take(found, ("host", number), told(number))
        take(found, ("host", 0), told(number, line=f"other.py:{number}"))
    take(found, ("host", 1), told(1, 2, 3))  # one of those that are known
    assert {group["place"]: group["count"] for group in found.as_dicts()} == {"a.py:1": 4, "other.py:0": 1}
    group = Group(0, "check", "", "")
    for number, count in enumerate((1, 2, 3)):
        group.add("process", f"cpu:{number}", count, Occurrence(1.0, None))
    group.add("process", "cpu:1", 5, Occurrence(1.0, None))
    shown = group.as_dict({})
    assert shown["count"] == 11
    assert [(row["device"], row["count"]) for row in shown["per"]] == [("cpu:1", 7), ("cpu:0", 1)]


def test_the_first_and_the_last_failure_are_by_time_in_any_order_of_reading() -> None:
    group = Group(0, "check", "", "")
    found = [group.add("p", "cpu:0", 1, Occurrence(float(at), at)) for at in (5, 3, 3, 9, 9, 4)]
    assert found == [True, True, False, False, False, False]
    shown = group.as_dict({})
    assert (shown["first"]["step"], shown["last"]["step"]) == (3, 9)


def test_the_steps_of_many_failures_are_the_smallest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "MAX_STEPS", 4)
    group = Group(0, "check", "", "")
    group.add("p", "cpu:0", 9, Occurrence(1.0, 1))
    group.add_steps(np.array([20, 21, 22, 23]))
    assert group.as_dict({})["steps"] == "at steps 20 to 23"
    group.add_steps(np.array([10, 11, 12, 13]))
    assert group.as_dict({})["steps"] == "at steps 10 to 13, and more"
    group.add_steps(np.array([1, 2]))
    assert group.as_dict({})["steps"] == "at steps 1 to 2, 10 to 11, and more"


@pytest.fixture
def index(tmp_path: Path) -> LogIndex:
    """A log of a check that failed at the seconds and steps 3, 4 and 5 on one device, and lost 7 messages."""
    with log_in(tmp_path) as log:
        log.describe(CHECK)
        frames = [frame(CHECK, np.bool_(False), np.int32(step), seq=step) for step in (3, 4, 5)]
        log.append("cpu:0", block_of(*frames), at_once=True)
        log.lose("cpu:1", 1, 7, 7, "full disk")
        log.note_exceptions(told(6, 8))
    found = LogIndex([tmp_path])
    found.look()
    found.read_some(60.0)
    return found


def test_a_log_has_checks_losses_and_exceptions(index: LogIndex) -> None:
    raised, check, loss = index.failures.as_dicts()
    assert (check["kind"], check["title"], check["count"]) == ("check", "bad", 3)
    assert check["steps"] == "at steps 3 to 5"
    assert (raised["kind"], raised["count"], raised["last"]["step"]) == ("tap exception", 2, 8)
    assert (loss["kind"], loss["count"], loss["title"]) == ("loss", 7, "messages lost: full disk")
    assert loss["per"][0]["device"] == "cpu:1"
    assert (index.failures.count, index.failures.kinds, index.failures.losses) == (5, 2, 7)
    assert check["per"][0]["process"] == raised["per"][0]["process"]
    assert index.texts == 3


def test_what_a_process_tells_beyond_its_log_is_added(index: LogIndex) -> None:
    writer = index.files.segments[0].writer
    (of_check,) = told(3, 4, 5, 9, line=CHECK.source_line, name=CHECK.name)
    of_check["kind"] = "check"
    take(index.failures, (writer.host, writer.pid), [of_check])
    (check,) = [group for group in index.failures.as_dicts() if group["kind"] == "check"]
    assert (check["count"], check["title"]) == (4, "bad")
    assert [row["count"] for row in check["per"]] == [4]
    assert (check["first"]["step"], check["last"]) == (3, {"time": BEGIN + 9, "step": 9})
    assert index.failures.count == 6


def test_a_log_that_is_a_second_behind_has_the_last_failure() -> None:
    for late, step in ((1.0, 7), (1.5, 1)):
        group = Group(0, "tap exception", "", "")
        (failure,) = told_failures(told(1))
        group.take_live(("host", 1), failure)
        group.add("host:1", "cpu:0", 1, Occurrence(BEGIN + 1 - late, 7))
        assert group.as_dict({})["last"]["step"] == step


def test_the_source_is_shown_around_the_line(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("".join(f"\tline {number}  \n" if number != 6 else "\n" for number in range(1, 21)))

    def source(line: int) -> Any:
        place = f"{file}:{line} (step)"
        return Group(0, "check", "", place, frame=frame_of(place)).as_dict({})["source"]

    empty = [[6, ""]]
    assert source(10) == empty + [[number, f"    line {number}  "] for number in range(7, 15)]
    assert [number for number, _ in source(2)] == [1, 2, 3, 4, 5, 6]
    assert source(0) is None
    assert source(99) is None


@pytest.mark.parametrize(
    ("place", "found"),
    [
        ("train.py:31 (step)", ("train.py", 31)), ("C:/a.py:7", ("C:/a.py", 7)), ("train.py", None), ("", None),
        ("train.py:1234567890 (f)", None), ("train.py:31x", None),
    ],
)  # fmt: skip
def test_the_line_of_a_place_is_read(place: str, found: Any) -> None:
    assert frame_of(place) == found

"""Tap logs of a program of several processes: commands show its sharded arrays whole, or shard by shard."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hostcallback.receiver.cli import main
from hostcallback.receiver.remote.collector.store import Store
from hostcallback.receiver.replayer.replay import Replay
from hostcallback.receiver.sinks.sharding import assembly
from hostcallback.receiver.taplog.format.layout import Damage
from hostcallback.receiver.taplog.reading.follow import Follower
from hostcallback.receiver.taplog.reading.logged_message import LoggedMessage
from hostcallback.receiver.taplog.reading.reader import LogReader
from hostcallback.receiver.taplog.reading.selection import Selection
from stored_shards import ALONE, OTHERS, PARTS, StoredProcess, Taken, whole_of

HOUR_NS = 3_600_000_000_000


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "log")
    yield store
    store.close()


def processes(store: Store, count: int = 2, *, skew_ns: int = 0, **options: Any) -> list[StoredProcess]:
    return [
        StoredProcess(store, number, processes=count, clock_ns=number * skew_ns, **options)
        for number in range(count)
    ]


def folder(store: Store) -> str:
    return str(store.folder("run"))


def cat(store: Store, capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert main(["cat", "--json", *arguments, folder(store)]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def numbers(rows: Sequence[dict[str, Any]], name: str = "parts") -> list[int]:
    """Of the whole values of a tap."""
    found = []
    for row in rows:
        if row["name"] == name and "index" not in row:
            found.append(int(row["value"][0] // 1000))
            np.testing.assert_array_equal(row["value"], whole_of(found[-1], len(row["value"])))
    return found


@pytest.mark.parametrize("skew_ns", [0, HOUR_NS, -HOUR_NS])
def test_cat_shows_values_once_whole_and_in_order(
    store: Store, capsys: pytest.CaptureFixture[str], skew_ns: int
) -> None:
    for process in processes(store, 3, skew_ns=skew_ns):
        process.store(range(50), [PARTS, OTHERS])
    rows = cat(store, capsys)
    assert [row["name"] for row in rows] == ["parts", "others"] * 50
    assert numbers(rows) == numbers(rows, "others") == list(range(50))
    assert {(row["process"], row["device"]) for row in rows} == {("process 0", "cpu:0")}


def test_cat_shows_shards_that_are_wanted(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    for process in processes(store):
        process.store(range(3))
    rows = cat(store, capsys, "--shards")
    assert sorted((row["process"], row["value"], row["index"]) for row in rows) == [
        (
            f"process {number}",
            [1000.0 * k + 2 * number, 1000.0 * k + 2 * number + 1],
            [[[2 * number, 2 * number + 2]]],
        )
        for number in range(2)
        for k in range(3)
    ]
    assert len(cat(store, capsys, "--device", "cpu:0")) == 6


def test_incomplete_values_are_shown_shard_by_shard(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = processes(store)
    first.store(range(5), [PARTS, ALONE])
    second.store(range(2))
    second.lose()
    second.store(range(3, 4))
    rows = cat(store, capsys)
    assert numbers(rows) == [0, 1, 3]
    assert [row["value"] for row in rows if "index" in row] == [[2000.0, 2001.0], [4000.0, 4001.0]]
    assert len([row for row in rows if row["name"] == "alone"]) == 5


@pytest.mark.parametrize("skew_ns", [HOUR_NS, -HOUR_NS])
def test_a_stream_far_ahead_by_the_clock_is_read_later(
    store: Store, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, skew_ns: int
) -> None:
    monkeypatch.setattr(assembly, "MAX_PENDING_VALUES", 20)
    for process in processes(store, skew_ns=skew_ns, devices=2):
        for start in range(0, 400, 40):
            for device in range(2):
                process.store(range(start, start + 40), [PARTS, OTHERS], device=device)
    rows = cat(store, capsys)
    assert not [row for row in rows if "index" in row]
    assert numbers(rows) == numbers(rows, "others") == list(range(400))


def test_a_process_that_ends_early_blocks_no_other(
    store: Store, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembly, "MAX_PENDING_VALUES", 20)
    first, second = processes(store)
    for start in range(0, 400, 40):
        first.store(range(start, start + 40), [PARTS, ALONE])
    second.store(range(10))
    rows = cat(store, capsys)
    assert numbers(rows) == list(range(10))
    shards = [row["value"][0] for row in rows if "index" in row]
    assert sorted(shards) == [1000.0 * k for k in range(10, 400)]
    assert len([row for row in rows if row["name"] == "alone"]) == 400


def test_replay_delivers_values_once_and_reports_the_number_of_incomplete_ones(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = processes(store, skew_ns=HOUR_NS)
    first.store(range(30))
    second.store(range(25))
    taken = Taken()
    replayed = Replay(LogReader(folder(store)), sinks=[taken]).run(Selection())
    assert taken.numbers() == list(range(25))
    assert replayed.incomplete.total() == 5
    shards = Taken()
    Replay(LogReader(folder(store)), sinks=[shards], shards=True).run(Selection())
    assert shards.parts == 55
    assert main(["replay", folder(store)]) == 0
    assert "5 value(s) of parts at /home/me/train.py:12" in capsys.readouterr().err


def test_following_shows_values_when_they_are_whole(store: Store) -> None:
    first, second = processes(store)
    first.store(range(20))
    second.store(range(15))
    follower = Follower([folder(store)], Selection(), wait=False)
    assert shown(follower.last(4)) == [11, 12, 13, 14]
    second.store(range(15, 21))
    first.store(range(20, 21))
    assert shown(list(follower.poll())) == list(range(15, 21))


def shown(found: Sequence[Any]) -> list[int]:
    rows = []
    for item in found:
        assert not isinstance(item, Damage)
        assert isinstance(item, LoggedMessage)
        assert item.message.shard_index is None
        rows.append(int(item.message.arrays[0][0] // 1000))
    return rows


def test_tail_shows_values_or_shards(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    for process in processes(store):
        process.store(range(5))
    assert main(["tail", "-n", "2", "--json", folder(store)]) == 0
    assert numbers([json.loads(line) for line in capsys.readouterr().out.splitlines()]) == [3, 4]
    assert main(["tail", "-n", "2", "--json", "--shards", folder(store)]) == 0
    assert all("index" in json.loads(line) for line in capsys.readouterr().out.splitlines())


def test_processes_that_number_their_launches_differently_are_shown_shard_by_shard(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(2):
        StoredProcess(store, number, base=number << 29).store(range(100))
    rows = cat(store, capsys)
    assert len(rows) == 200
    for number in range(2):
        found = [row["value"][0] for row in rows if row["process"] == f"process {number}"]
        assert found == [1000.0 * k + 2 * number for k in range(100)]

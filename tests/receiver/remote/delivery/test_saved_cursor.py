"""The file that says how far a collector has delivered: each change alone is saved, and none needs no file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hostcallback.receiver.remote.delivery.cursor import CURSOR_NAME, Cursor, Waiting
from hostcallback.receiver.remote.forwarding_protocol import StreamKey, StreamOffset

KEY, OTHER = StreamKey("run", 0, "a" * 16), StreamKey("run", 1, "b" * 16)
AT, LATER = StreamOffset(2, 300), StreamOffset(2, 900)
SHARDS = [(KEY, Waiting(StreamOffset(2, 100), "cpu:0", 7)), (KEY, Waiting(StreamOffset(1, 50), "cpu:1", 3))]


def told(cursor: Cursor) -> list[Any]:
    """All that it has."""
    return [
        cursor.metrics,
        *((cursor.position(key), cursor.done(key), cursor.waiting(key)) for key in (KEY, OTHER)),
    ]


CHANGES: dict[str, Callable[[Cursor], None]] = {
    "a position": lambda cursor: cursor.move(KEY, LATER),
    "messages after it": lambda cursor: cursor.move(KEY, AT, done=4),
    "another stream": lambda cursor: cursor.move(OTHER, AT),
    "shards that wait": lambda cursor: cursor.wait_for(SHARDS),
    "metrics": lambda cursor: cursor.note_metrics({"lines": 3, "file": "m\udcff.csv"}),
    "a stream that is passed over": lambda cursor: cursor.pass_over(KEY, LATER),
}


@pytest.mark.parametrize("name", CHANGES)
def test_each_change_is_saved(name: str, tmp_path: Path) -> None:
    cursor = Cursor(tmp_path)
    cursor.move(KEY, AT)
    cursor.save()
    before = told(cursor)
    CHANGES[name](cursor)
    assert told(Cursor(tmp_path)) == before
    cursor.save()
    assert told(cursor) != before
    assert told(Cursor(tmp_path)) == told(cursor)


def test_shards_wait_from_the_first_of_them_on_until_their_values_are_whole(tmp_path: Path) -> None:
    cursor = Cursor(tmp_path)
    cursor.move(KEY, AT)
    cursor.wait_for(SHARDS)
    cursor.save()
    found = Cursor(tmp_path).waiting(KEY)
    assert found is not None
    assert (found.since, found.seqs) == (StreamOffset(1, 50), {"cpu:0": [7], "cpu:1": [3]})
    cursor.wait_for([])
    cursor.save()
    assert Cursor(tmp_path).waiting(KEY) is None
    cursor.wait_for(SHARDS)
    cursor.pass_over(KEY, StreamOffset(1, 0))
    cursor.save()
    again = Cursor(tmp_path)
    assert (again.waiting(KEY), again.position(KEY)) == (None, AT)


def test_without_a_change_nothing_is_written(tmp_path: Path) -> None:
    cursor = Cursor(tmp_path)
    cursor.save()
    assert not (tmp_path / CURSOR_NAME).exists()
    cursor.move(KEY, AT)
    cursor.save()
    (tmp_path / CURSOR_NAME).unlink()
    for change in (
        lambda: cursor.move(KEY, AT),
        lambda: cursor.wait_for([]),
        lambda: cursor.note_metrics(None),
    ):
        change()
        cursor.save()
    assert not (tmp_path / CURSOR_NAME).exists()

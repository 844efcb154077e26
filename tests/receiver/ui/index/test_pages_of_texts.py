"""Pages of texts: each line comes on one of them, in order, whichever way a reader goes through them."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hostcallback.receiver.ui import texts
from hostcallback.receiver.ui.index.log_index import LogIndex
from hostcallback.receiver.ui.texts import Cursor, Wanted, lines
from logged_frames import LOSS, block_of, frame, log_in

TOLD = replace(
    LOSS, name="told", consumer_id=501, kind="format", kwargs={}, transforms=(),
    tree=["tuple", [["tuple", [["array"]]], ["dict", [], []]]],
    params={"fmt": "at {}", "has_placeholders": True, "printoptions": np.get_printoptions()},
)  # fmt: skip
COUNT, CHUNK = 24, 4


def told(folder: Path, count: int = COUNT, chunk: int = CHUNK) -> LogIndex:
    """The index of a log of texts, from "at 0" on, in chunks of two devices whose times overlap."""
    with log_in(folder) as log:
        log.describe(TOLD)
        for first in range(0, count, 2 * chunk):
            for device in (0, 1):
                numbers = range(first + device, min(first + 2 * chunk, count), 2)
                frames = [frame(TOLD, np.int32(k), seq=k // 2, time_ns=1000 + k) for k in numbers]
                log.append(f"cpu:{device}", block_of(*frames), at_once=True)
    return indexed(folder)


def indexed(folder: Path) -> LogIndex:
    index = LogIndex([folder])
    index.look()
    assert not index.read_some(60.0)
    return index


def numbers(page: dict[str, Any]) -> list[int]:
    return [int(line["text"].removeprefix("at ")) for line in page["lines"]]


@pytest.mark.parametrize("limit", [1, 5, 8, 23])
def test_pages_backwards_have_each_line_once(tmp_path: Path, limit: int) -> None:
    index = told(tmp_path)
    found: list[int] = []
    before = None
    for _ in range(0, COUNT, limit):
        page = lines(index, Wanted(before=before, limit=limit))
        assert len(page["lines"]) == min(limit, COUNT - len(found))
        found = numbers(page) + found
        before = Cursor.parse(page["next"]) if page["more"] else None
    assert found == [*range(COUNT)]
    assert page["total"] == COUNT


@pytest.mark.parametrize("limit", [1, 5, 8, 23])
def test_pages_forwards_have_each_line_after_the_first_once(tmp_path: Path, limit: int) -> None:
    index = told(tmp_path)
    after = Cursor.parse(lines(index, Wanted(limit=COUNT))["lines"][0]["cursor"])
    found: list[int] = []
    for _ in range(COUNT):
        page = lines(index, Wanted(after=after, limit=limit))
        found += numbers(page)
        if not page["more"] or not page["lines"]:
            break
        assert len(page["lines"]) == limit
        after = Cursor.parse(page["next"])
    assert found == [*range(1, COUNT)]


def test_a_page_has_200_lines_and_says_whether_there_are_more(tmp_path: Path) -> None:
    index = told(tmp_path, 201, 50)
    page = lines(index, Wanted())
    assert (numbers(page), page["more"]) == ([*range(1, 201)], True)
    rest = lines(index, Wanted(before=Cursor.parse(page["next"])))
    assert (numbers(rest), rest["more"], rest["next"]) == ([0], False, None)


@pytest.mark.parametrize(("limit", "more"), [(COUNT - 1, True), (COUNT, False), (COUNT + 1, False)])
def test_a_page_with_all_lines_has_no_next_one(tmp_path: Path, limit: int, more: bool) -> None:
    page = lines(told(tmp_path), Wanted(limit=limit))
    assert (len(page["lines"]), page["more"]) == (min(limit, COUNT), more)
    assert (page["next"] is not None) == more


@pytest.mark.parametrize("times", [[[5], [7], [6, 7]], [[7, 8], [9], [7]]], ids=str)
def test_lines_of_one_time_are_on_pages_by_their_chunks(tmp_path: Path, times: list[list[int]]) -> None:
    with log_in(tmp_path) as log:
        log.describe(TOLD)
        for chunk, of_chunk in enumerate(times):
            frames = [frame(TOLD, np.int32(t), seq=k, time_ns=t) for k, t in enumerate(of_chunk)]
            log.append(f"cpu:{chunk}", block_of(*frames), at_once=True)
    index = indexed(tmp_path)
    everything = lines(index, Wanted())["lines"]
    assert len(everything) == 4
    first = lines(index, Wanted(after=Cursor(0, 0, 0), limit=3))
    rest = lines(index, Wanted(after=Cursor.parse(first["next"])))
    assert first["lines"] + rest["lines"] == everything
    last = lines(index, Wanted(limit=3))
    before = lines(index, Wanted(before=Cursor.parse(last["next"])))
    assert before["lines"] + last["lines"] == everything


class Clock:
    """A clock that goes on by 0.4 s whenever it is read."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 0.4
        return self.now


@pytest.mark.parametrize("forward", [False, True])
def test_a_search_that_takes_long_is_continued_where_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forward: bool
) -> None:
    index = told(tmp_path)
    monkeypatch.setattr(texts, "time", Clock())
    found: list[list[int]] = []
    at = Cursor(0, 0, 0) if forward else None
    while at is not None or not found:
        assert len(found) < COUNT, "a page goes on where it began"
        page = lines(index, Wanted(after=at) if forward else Wanted(before=at))
        assert page["more"] == (page["next"] is not None)
        found.append(numbers(page))
        at = Cursor.parse(page["next"]) if page["more"] else None
    if forward:
        assert [*itertools.chain(*found)] == [*range(COUNT)]
    else:
        assert [*itertools.chain(*found[::-1])] == [*range(COUNT)]
    # Of two chunks; only up to the time from which on others have lines, too.
    assert [len(page) for page in found] == ([7, 1, 7, 1, 8] if forward else [8, 1, 7, 1, 7])

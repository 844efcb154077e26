"""Pairing of messages, in logs with gaps, folded failures and other orders."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hostcallback.receiver.cli import main
from hostcallback.receiver.sinks.call import WHOLE_ID
from hostcallback.receiver.taplog.diff import pairing
from hostcallback.receiver.taplog.format.block import FrameBlock
from hostcallback.receiver.taplog.format.layout import Lost
from hostcallback.receiver.taplog.writing.segment_writer import SegmentWriter
from hostcallback.receiver.wire.frame import Flags, encode_frame
from hostcallback.receiver.wire.tap_descriptor import TapDescriptor

X = TapDescriptor(
    name="x", source_line="run.py:1 (f)", consumer_id=1, kind="tap", params={}, kwargs={}, transforms=(),
    tree=["array"], shards=None, sharding="global",
)  # fmt: skip
Y = replace(X, name="y", source_line="run.py:2 (f)", consumer_id=2)
CHECK = replace(X, name="check", consumer_id=3)
TAPS = {"x": X, "y": Y, "c": CHECK}

Sent = tuple[str, float]


def write(
    path: Path,
    sent: Sequence[Sent],
    *,
    without: Sequence[int] = (),
    note: bool = True,
    folded: dict[int, int] | None = None,
    first_seq: int = 0,
) -> Path:
    """A log of messages by tap and value, without some of them, by number; `note`: the log says so."""
    frames = [
        encode_frame(
            [np.float64(value)],
            consumer_id=TAPS[tap].consumer_id,
            flags=Flags.ORDERED,
            seq=first_seq + number,
            time_ns=10**18 + number,
            run_id=1,
        )
        for number, (tap, value) in enumerate(sent)
        if number not in without
    ]
    writer = SegmentWriter(path)
    if without and note:
        first, last = first_seq + min(without), first_seq + max(without)
        writer.lost(Lost("cpu:0", first, last, len(without), 0, 10**18, "dropped"))
    offsets = np.cumsum([0, *map(len, frames[:-1])])
    block = FrameBlock(np.frombuffer(bytearray(b"".join(frames)), np.uint8), offsets)
    writer.frames(
        "cpu:0", block, {tap.consumer_id: tap for tap in TAPS.values()}, folded=list((folded or {}).items())
    )
    writer.close()
    return path


def diff(
    a: Path, b: Path, capsys: pytest.CaptureFixture[str], *options: str
) -> tuple[int, list[dict[str, Any]], str]:
    """Status, differences with the counts behind them, standard error."""
    status = main(["diff", "--json", *options, str(a), str(b)])
    out, err = capsys.readouterr()
    return status, [json.loads(line) for line in out.splitlines()], err


SENT = [(tap, 10.0 * i + j) for i in range(20) for j, tap in enumerate("xyy")]


@pytest.mark.parametrize("without", [[0], [7], [30, 31, 32, 33], [5, 6, 20, 21, 22], [58, 59], range(60)])
def test_gaps_are_passed_over(
    without: Sequence[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if len(without) == 60:
        without = range(1, 60)
    whole = write(tmp_path / "whole", SENT)
    part = write(tmp_path / "part", SENT, without=without)
    for pair in ((whole, part), (part, whole)):
        status, (*found, counts), err = diff(*pair, capsys)
        assert found == []
        assert (status, err) == (0, "")
        assert counts["compared"] == 60 - len(without)
        assert counts["passed_over"] == len(without)


@pytest.mark.parametrize(
    ("first", "stop", "missing"),
    [(10, 20, 10), (0, 30, 10), (15, 25, 5), (5, 12, 2), (19, 21, 1), (20, 30, 0), (0, 10, 0)],
)
def test_of_a_gap_only_what_a_log_notes_as_lost_is_missing(first: int, stop: int, missing: int) -> None:
    lost = Lost("cpu:0", 10, 19, 10, 0, 10**18, "dropped")
    assert pairing._missing([lost], first, stop) == missing
    # Notes that overlap count no number twice, as far as the gap has them.
    assert pairing._missing([lost, lost], 10, 20) == 10


def test_gaps_in_both_logs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write(tmp_path / "a", SENT, without=range(10, 20))
    b = write(tmp_path / "b", SENT, without=range(15, 30))
    for pair in ((a, b), (b, a)):
        status, (*found, counts), err = diff(*pair, capsys)
        assert found == []
        assert (status, err, counts["compared"]) == (0, "", 40)


def test_a_difference_behind_a_gap(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = [*SENT[:45], ("x", -1.0), *SENT[46:]]
    a = write(tmp_path / "a", SENT, without=range(10, 20))
    status, (found, _), _ = diff(a, write(tmp_path / "b", other), capsys)
    assert (status, found["a"]["seq"], found["leaves"][0]["b"]) == (1, 45, -1.0)


def test_numbers_that_were_not_messages_are_not_a_gap(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Such as the ends of receivers' scopes; or a run whose first messages were not recorded.
    a = write(tmp_path / "a", SENT, first_seq=100)
    b = write(tmp_path / "b", SENT)
    status, (counts,), _ = diff(a, b, capsys)
    assert (status, counts["compared"], counts["passed_over"]) == (0, 60, 0)
    missing = write(tmp_path / "c", SENT, without=[30], note=False)
    assert diff(b, missing, capsys)[0] == 1


def test_no_difference_is_reported_behind_a_gap_of_unknown_messages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The log says that fewer are missing than there are in the other run, which sent more.
    a = write(tmp_path / "a", SENT, without=range(10, 20))
    b = write(tmp_path / "b", [*SENT[:12], ("x", 1.0), *SENT[12:]])
    status, (counts,), err = diff(a, b, capsys)
    assert (status, counts["unaligned"], counts["compared"]) == (2, 1, 10)
    assert "not compared from message 20 in A and 20 in B on" in err


def test_the_order_of_taps_does_not_matter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write(tmp_path / "a", SENT)
    by_tap = sorted(SENT, key=lambda sent: sent[0])
    status, (counts,), _ = diff(a, write(tmp_path / "b", by_tap), capsys)
    assert (status, counts["compared"]) == (0, 60)
    # The first in the order of A, though in B another difference comes earlier.
    later = [(tap, -value) if value in (100.0, 41.0) else (tap, value) for tap, value in by_tap]
    _, (found, _), _ = diff(a, write(tmp_path / "c", later), capsys)
    assert found["leaves"][0]["a"] == 41.0
    # The two are found one after the other, the later one first.
    a = write(tmp_path / "d", [("x", 1.0), ("y", 2.0), ("x", 3.0)])
    b = write(tmp_path / "e", [("y", -2.0), ("x", -1.0), ("x", 3.0)])
    _, (found, _), _ = diff(a, b, capsys)
    assert (found["leaves"][0]["a"], found["a"]["seq"]) == (1.0, 0)


def test_the_first_difference_may_be_a_missing_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = write(tmp_path / "a", SENT)
    shorter = [sent for number, sent in enumerate(SENT) if number != 59]
    _, (found, _), _ = diff(a, write(tmp_path / "b", [*shorter[:-1], ("y", -1.0)]), capsys)
    assert (found["what"], found["a"]["seq"]) == ("value", 58)
    _, (found, _), _ = diff(a, write(tmp_path / "c", shorter), capsys)
    assert (found["what"], found["a"]["seq"], found["b"]) == ("missing", 59, None)
    assert "has 39 message(s) of this tap" in found["text"]


def test_the_number_of_waiting_messages_is_bounded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    a = write(tmp_path / "a", SENT)
    b = write(tmp_path / "b", sorted(SENT, key=lambda sent: sent[0]))
    monkeypatch.setattr(pairing, "PENDING_BYTES", 10_000)
    status, (found, _), _ = diff(a, b, capsys)
    assert (status, found["what"]) == (1, "missing")
    assert "within" in found["text"]


def test_folded_failures_are_passed_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sent = [("c", float(i)) for i in range(10)]
    a = write(tmp_path / "a", sent)
    b = write(tmp_path / "b", sent, without=range(2, 8), note=False, folded={8: 6})
    for pair in ((a, b), (b, a)):
        status, (counts,), _ = diff(*pair, capsys)
        assert (status, counts["compared"], counts["passed_over"]) == (0, 4, 6)


def test_lines_may_be_ignored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    a = write(tmp_path / "a", SENT)
    monkeypatch.setitem(TAPS, "x", replace(X, source_line="run.py:9 (f)"))
    b = write(tmp_path / "b", SENT)
    status, (found, _), _ = diff(a, b, capsys)
    assert (status, found["what"]) == (1, "missing")
    assert diff(a, b, capsys, "--ignore-lines")[0] == 0


def test_taps_of_exported_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def record(name: str, values: Sequence[float]) -> Path:
        frames = [
            encode_frame(
                [tap.pack(), np.float64(value)],
                consumer_id=WHOLE_ID,
                flags=Flags.ORDERED,
                seq=seq,
                time_ns=seq,
                run_id=1,
            )
            for seq, (tap, value) in enumerate(zip([X, Y] * 5, values, strict=True))
        ]
        writer = SegmentWriter(tmp_path / name)
        offsets = np.cumsum([0, *map(len, frames[:-1])])
        writer.frames("cpu:0", FrameBlock(np.frombuffer(bytearray(b"".join(frames)), np.uint8), offsets), {})
        writer.close()
        return writer.path

    a = record("a", range(10))
    status, (found, _), _ = diff(a, record("b", [0, 1, 2, 3, 4, 50, 6, 7, 8, 9]), capsys)
    assert (status, found["name"], found["a"]["seq"]) == (1, "y", 5)
    # A log of the same taps as this process traced them.
    assert diff(a, write(tmp_path / "c", [("xy"[i % 2], float(i)) for i in range(10)]), capsys)[0] == 0

"""One segment of a log: when it has as many taps as one should have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from hostcallback.receiver import limits
from hostcallback.receiver.taplog.format.layout import Kind
from hostcallback.receiver.taplog.reading.segment_reader import Chunk, SegmentReader
from hostcallback.receiver.taplog.writing.segment_writer import SegmentWriter
from logged_frames import LOSS, NORM


@contextmanager
def segment(tmp_path: Path) -> Iterator[SegmentWriter]:
    """A segment in which two taps are described, one after the other."""
    writer = SegmentWriter(tmp_path / "000001.hcblog")
    try:
        writer.describe(LOSS)
        writer.describe(NORM, LOSS)
        yield writer
    finally:
        writer.abandon()


def described_bytes(path: Path) -> int:
    """The bytes of the descriptions in a segment."""
    with closing(SegmentReader(path)) as reader:
        chunks = [each for each in reader.headers() if isinstance(each, Chunk)]
    return sum(chunk.raw_bytes for chunk in chunks if chunk.kind is Kind.DESCRIPTIONS)


@pytest.mark.parametrize(("most", "has_many"), [(4, True), (5, True), (6, False)])
def test_half_of_the_taps_that_readers_take_are_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, has_many: bool
) -> None:
    monkeypatch.setattr(limits, "DESCRIPTIONS", most)
    with segment(tmp_path) as writer:
        assert writer.has_many_taps == has_many


def test_half_of_the_bytes_of_taps_that_readers_take_are_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with segment(tmp_path) as writer:
        count = described_bytes(writer.path)
        assert count > 200
        for most, has_many in ((2 * count, True), (2 * count + 1, True), (2 * count + 2, False)):
            monkeypatch.setattr(limits, "DESCRIPTIONS_BYTES", most)
            assert writer.has_many_taps == has_many
        writer.describe(replace(LOSS, consumer_id=1))
        assert writer.has_many_taps

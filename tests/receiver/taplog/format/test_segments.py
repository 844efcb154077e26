"""A reader gets from a segment the messages written into it, however the file's bytes are damaged."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from hostcallback.receiver.errors import (
    CutOffLogError,
    DamagedLogError,
    NotATapLogError,
    UnsupportedVersionError,
)
from hostcallback.receiver.taplog.format import layout
from hostcallback.receiver.taplog.format.compression import Compressor
from hostcallback.receiver.taplog.format.layout import CHUNK_HEADER_BYTES, PAGE_BYTES, Damage, Kind, Lost
from hostcallback.receiver.taplog.format.step_finder import StepFinder
from hostcallback.receiver.taplog.reading.chunk_reader import Chunk
from hostcallback.receiver.taplog.reading.reader import LogReader
from hostcallback.receiver.taplog.reading.segment_reader import SegmentReader
from hostcallback.receiver.taplog.writing.segment_writer import SegmentWriter
from logged_frames import BEGIN_NS, DESCRIBED, LOSS, NORM, SECOND, block_of, frame, losses, read, seqs

COMPRESSED = [pytest.param(False, id="plain"), pytest.param(True, id="zstd")]


def write_small(path: Path, *, close: bool, compress: bool = False, count: int = 20) -> Path:
    """Three chunks of messages of two devices, a note of lost ones, folded failures."""
    writer = SegmentWriter(path, info={"process_index": 3}, compressor=Compressor() if compress else None)
    steps = StepFinder(DESCRIBED)
    first = losses(0, 3)
    writer.frames("cpu:0", first, DESCRIBED, steps=steps.in_force(first, layout.NO_STEP))
    other = block_of(frame(NORM, np.arange(40.0), seq=7, time_ns=BEGIN_NS + SECOND // 2))
    writer.frames("cpu:1", other, DESCRIBED)
    writer.lost(Lost("cpu:0", 3, 4, 2, 100, BEGIN_NS + 3 * SECOND, "no room"))
    last = losses(5, count)
    writer.frames("cpu:0", last, DESCRIBED, step_before=2, steps=steps.in_force(last, 2), folded=[(6, 11)])
    if close:
        writer.close()
    writer.abandon()
    return path


@pytest.mark.parametrize("close", [True, False], ids=["closed", "open"])
@pytest.mark.parametrize("compress", COMPRESSED)
def test_written_messages_come_back_in_order_of_time(tmp_path: Path, close: bool, compress: bool) -> None:
    path = write_small(tmp_path / "a.hcblog", close=close, compress=compress)
    messages, lost, damaged = read(path)
    assert damaged == []
    assert seqs(messages) == [0, 7, 1, 2, *range(5, 25)]
    assert [m.message.device for m in messages[:3]] == ["cpu:0", "cpu:1", "cpu:0"]
    assert [m.step for m in messages] == [0, None, 1, 2, *range(5, 25)]
    assert messages[0].value == {"loss": 0.0, "step": 0}
    np.testing.assert_array_equal(messages[1].value, np.arange(40.0))
    assert [(m.message.seq, m.folded) for m in messages if m.folded] == [(6, 11)]
    ((_, note),) = lost
    assert note == Lost("cpu:0", 3, 4, 2, 100, BEGIN_NS + 3 * SECOND, "no room")
    consumer = messages[0].message.consumer
    assert (consumer.name, consumer.source_line) == ("loss", "train.py:12 (step)")
    assert consumer.kwargs == {"run": 7}
    assert consumer.describe is not None
    assert consumer.describe() == LOSS
    writer = messages[0].writer
    assert (writer.pid, writer.process_index) == (os.getpid(), 3)
    assert SegmentReader(path).is_closed() is close


def test_the_index_and_the_headers_agree(tmp_path: Path) -> None:
    closed = write_small(tmp_path / "a.hcblog", close=True)
    still_open = write_small(tmp_path / "b.hcblog", close=False)
    by_index, by_headers = (
        [chunk for chunk in SegmentReader(path).chunks() if isinstance(chunk, Chunk)]
        for path in (closed, still_open)
    )
    shift = by_index[0].offset - by_headers[0].offset
    assert shift == 0
    assert by_index == by_headers
    assert [chunk.kind for chunk in by_index] == [
        Kind.FRAMES, Kind.FRAMES, Kind.LOST, Kind.FOLDED, Kind.FRAMES,
    ]  # fmt: skip
    frames = by_index[-1]
    assert (frames.first_seq, frames.last_seq, frames.messages) == (5, 24, 20)
    assert (frames.step_before, frames.min_step, frames.max_step) == (2, 5, 24)
    assert (frames.min_time_ns, frames.max_time_ns) == (BEGIN_NS + 5 * SECOND, BEGIN_NS + 24 * SECOND)
    assert frames.consumers == 1


def test_a_description_is_written_once_and_before_its_frames(tmp_path: Path) -> None:
    path = tmp_path / "a.hcblog"
    writer = SegmentWriter(path)
    writer.describe(LOSS, NORM)
    before = writer.nbytes
    writer.describe(LOSS)
    writer.describe(replace(LOSS, name="other"))  # by the same id: the first one stays
    assert writer.nbytes == before
    writer.close()
    reader = SegmentReader(path)
    assert list(reader.chunks()) == []
    assert reader.consumers == {LOSS.consumer_id: (0, LOSS), NORM.consumer_id: (1, NORM)}


def test_a_file_that_exists_is_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "a.hcblog"
    path.write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        SegmentWriter(path)
    assert path.read_bytes() == b"mine"


# Files that end anywhere


@pytest.mark.slow
@pytest.mark.parametrize("close", [True, False], ids=["closed", "open"])
@pytest.mark.parametrize("compress", COMPRESSED)
def test_a_file_cut_at_any_byte_gives_everything_before_the_cut(
    tmp_path: Path, close: bool, compress: bool
) -> None:
    path = write_small(tmp_path / "whole.hcblog", close=close, compress=compress, count=3)
    data = path.read_bytes()
    whole_chunks = [c for c in SegmentReader(path).chunks() if isinstance(c, Chunk)]
    everything = [(m.message.device, m.message.seq, str(m.value)) for m in read(path)[0]]
    ends = {  # by where a frame that is stored as it is ends in the file
        (device, seq): end for device, seq, end in frame_ends(path, whole_chunks)
    }
    cut = tmp_path / "cut.hcblog"
    for size in range(0, len(data), 1 if not close and not compress else 5):
        cut.write_bytes(data[:size])
        try:
            messages, _, damaged = read(cut)
        except CutOffLogError:
            assert size < whole_chunks[0].offset
            continue
        found = [(m.message.device, m.message.seq, str(m.value)) for m in messages]
        assert set(found) <= set(everything)
        due = {
            (device, seq)
            for device, seq, _ in everything
            if size >= (ends[device, seq] if not compress else chunk_end(whole_chunks, device, seq))
        }
        assert due <= {(device, seq) for device, seq, _ in found}, size
        assert all(damage.torn for damage in damaged), (size, damaged)


def frame_ends(path: Path, chunks: list[Chunk]) -> list[tuple[str, int, int]]:
    """End in the file of each message's bytes, without padding."""
    found = []
    reader = SegmentReader(path)
    list(reader.chunks())
    for chunk in chunks:
        if chunk.kind is not Kind.FRAMES:
            continue
        sizes = {0: 192, 1: 64 + 64 + 320}
        start = chunk.end - layout.align(chunk.stored_bytes)
        for k in range(chunk.messages):
            end = start + sizes[chunk.stream] * (k + 1)
            found.append((reader.devices[chunk.stream], chunk.first_seq + k, end))
    return found


def chunk_end(chunks: list[Chunk], device: str, seq: int) -> int:
    stream = int(device[-1])
    (end,) = [
        c.end
        for c in chunks
        if c.kind is Kind.FRAMES and c.stream == stream and c.first_seq <= seq <= c.last_seq
    ]
    return end


def test_a_torn_compressed_chunk_gives_its_decompressible_part(tmp_path: Path) -> None:
    noise = np.random.default_rng(0)
    block = block_of(*(frame(NORM, noise.random(500), seq=k) for k in range(100)))
    path = tmp_path / "whole.hcblog"
    writer = SegmentWriter(path, compressor=Compressor())
    writer.frames("cpu:0", block, DESCRIBED)
    writer.abandon()
    data = path.read_bytes()
    found = []
    for part in (0.4, 0.7):
        path.write_bytes(data[: int(len(data) * part)])
        messages, _, (torn,) = read(path)
        assert torn.torn
        assert seqs(messages) == list(range(len(messages)))
        assert torn.messages == 100 - len(messages)
        found.append(len(messages))
    # zstd compresses 128 KiB at a time: data cut off before the end of a block is lost.
    assert 30 <= found[0] < found[1] < 100


def test_a_segment_grows_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.hcblog"
    writer = SegmentWriter(path)
    reader = SegmentReader(path)
    assert list(reader.chunks()) == []
    at = writer.nbytes
    for first in (0, 3):
        writer.frames("cpu:0", losses(first, 3), DESCRIBED)
        *_, chunk = reader.chunks(at)
        assert isinstance(chunk, Chunk)
        assert (chunk.first_seq, chunk.is_torn) == (first, False)
        at = chunk.end
    assert list(reader.chunks(at)) == []
    writer.close()
    assert list(reader.chunks(at)) == []
    assert reader.is_closed()


# Damage in the middle


def test_a_bad_page_costs_its_own_messages_only(tmp_path: Path) -> None:
    path = tmp_path / "a.hcblog"
    writer = SegmentWriter(path)
    writer.frames("cpu:0", losses(0, 200), DESCRIBED)
    writer.frames("cpu:0", losses(200, 5), DESCRIBED)
    writer.close()
    chunk = next(c for c in SegmentReader(path).chunks() if isinstance(c, Chunk))
    payload = chunk.end - layout.align(chunk.stored_bytes)
    flip(path, payload + 2 * PAGE_BYTES + 700)
    messages, _, (damage,) = read(path)
    missing = sorted(set(range(205)) - set(seqs(messages)))
    # The page's 4096 bytes hold, in part or as a whole, these messages of 192.
    assert missing == list(range(2 * 4096 // 192, (3 * 4096 - 1) // 192 + 1))
    assert damage.messages == len(missing)
    assert "checksums do not match" in damage.reason
    assert not damage.torn
    with pytest.raises(DamagedLogError, match=r"a\.hcblog: checksums do not match"):
        list(LogReader(path).messages())


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


@pytest.mark.parametrize("close", [True, False], ids=["closed", "open"])
def test_a_damaged_header_costs_its_chunk_only(tmp_path: Path, close: bool) -> None:
    path = write_small(tmp_path / "a.hcblog", close=close)
    second = [c for c in SegmentReader(path).chunks() if isinstance(c, Chunk) and c.kind is Kind.FRAMES][1]
    for offset in range(second.offset, second.offset + CHUNK_HEADER_BYTES, 9):
        copy = Path(shutil.copy(path, tmp_path / "copy.hcblog"))
        flip(copy, offset)
        messages, lost, damaged = read(copy)
        assert len(lost) == 1
        if close:  # the index has the header
            assert damaged == []
            assert len(messages) == 24
        else:
            assert seqs(messages) == [0, 1, 2, *range(5, 25)]
            (damage,) = damaged
            assert damage.offset == second.offset
            assert damage.nbytes == second.end - second.offset


def test_a_damaged_index_is_not_needed(tmp_path: Path) -> None:
    path = write_small(tmp_path / "a.hcblog", close=True)
    whole = [m.message.seq for m in read(path)[0]]
    size = path.stat().st_size
    for offset in (size - 1, size - 60, size - 100):
        copy = Path(shutil.copy(path, tmp_path / "copy.hcblog"))
        flip(copy, offset)
        messages, _, _ = read(copy)
        assert seqs(messages) == whole


def test_bytes_that_are_not_a_chunk_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "a.hcblog"
    writer = SegmentWriter(path)
    writer.frames("cpu:0", losses(0, 2), DESCRIBED)
    hole = writer.nbytes
    # A copy of an earlier chunk in the wrong place: whole, but it names another offset.
    copied = path.read_bytes()[128:]
    with path.open("ab") as file:
        file.write(copied + bytes(-len(copied) % 64) + bytes(3 << 20))
    writer.nbytes = path.stat().st_size
    writer.frames("cpu:0", losses(2, 2), DESCRIBED)
    writer.abandon()
    messages, _, (damage,) = read(path)
    assert seqs(messages) == [0, 1, 2, 3]
    assert damage.offset == hole
    assert damage.nbytes > 3 << 20


@pytest.mark.slow
@settings(max_examples=150)
@given(
    flips=st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 255)), min_size=1, max_size=4),
    close=st.booleans(),
    compress=st.booleans(),
)
def test_flipped_bits_give_no_wrong_message(
    flips: list[tuple[int, int]], close: bool, compress: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("flips")
    path = write_small(folder / "a.hcblog", close=close, compress=compress)
    right = {
        (m.message.device, m.message.seq, m.message.time_ns, str(m.value), m.folded) for m in read(path)[0]
    }
    right |= {(*key, 0) for *key, _ in right}  # the number of folded failures is noted separately
    data = bytearray(path.read_bytes())
    for place, bits in flips:
        data[place % len(data)] ^= bits
    path.write_bytes(data)
    try:
        messages, _, _ = read(path)
    except (NotATapLogError, UnsupportedVersionError):
        return
    for m in messages:
        if m.tap.described is not None:
            assert (m.message.device, m.message.seq, m.message.time_ns, str(m.value), m.folded) in right


# Files that are something else


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda data: b"", "empty or cut off"),
        (lambda data: data[:40], "empty or cut off"),
        (lambda data: data[:70], "ends before its header does"),
        (lambda data: b"PK\x03\x04" + data[4:], r"is not a tap log: it starts with b'PK"),
        (lambda data: data.replace(b"\r\n", b"\n"), "was copied as text, which changed it"),
        (lambda data: data[:30] + b"\1" + data[31:], "its checksum does not match"),
        (
            lambda data: data[:70] + b"\xff" + data[71:],
            "the info after the header of this tap log is damaged",
        ),
    ],
    ids=["empty", "short", "no info", "foreign", "text", "header", "info"],
)
def test_a_file_that_is_not_a_segment_is_refused(
    tmp_path: Path, change: Callable[[bytes], bytes], text: str
) -> None:
    path = write_small(tmp_path / "a.hcblog", close=True)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(NotATapLogError, match=text):
        LogReader(path)


def test_newer_versions_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(layout, "VERSION", 2)
        newer = write_small(tmp_path / "a.hcblog", close=True)
    with pytest.raises(UnsupportedVersionError, match="of version 2, this package reads up to 1"):
        LogReader(newer)
    with monkeypatch.context() as patch:
        patch.setattr(layout.frame, "VERSION", 2)
        newer = write_small(tmp_path / "b.hcblog", close=True)
    with pytest.raises(UnsupportedVersionError, match="wire format 2, this package reads up to 1"):
        LogReader(newer)


def test_a_folder_without_segments_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotATapLogError, match="this folder has no tap log"):
        LogReader(tmp_path)
    (tmp_path / "run1").mkdir()
    write_small(tmp_path / "run1" / "a.hcblog", close=True)
    with pytest.raises(NotATapLogError, match=r"expected files \*.hcblog; its subfolders run1 have one"):
        LogReader(tmp_path)
    with pytest.raises(FileNotFoundError):
        LogReader(tmp_path / "missing")


def test_a_damaged_segment_among_others_is_reported(tmp_path: Path) -> None:
    write_small(tmp_path / "a.hcblog", close=True)
    (tmp_path / "b.hcblog").write_bytes(b"")
    messages, _, (damage,) = read(tmp_path)
    assert len(messages) == 24
    assert isinstance(damage, Damage)
    assert damage.torn
    assert damage.path.name == "b.hcblog"

"""What a dead process left in its spool: found once, sent in pieces, removed when all is stored, else left free."""

from __future__ import annotations

from pathlib import Path

import pytest

from hostcallback.receiver.remote.forwarding_protocol import (
    PIECE_BYTES,
    SegmentSlice,
    StreamKey,
    StreamOffset,
)
from hostcallback.receiver.remote.spool.spool_folders import (
    OrphanSpool,
    StreamFolder,
    find_orphans,
    left_by_other_runs,
)

KEY = StreamKey("run", 0, "0123456789abcdef")
LONG = bytes(range(256)) * (PIECE_BYTES // 256) + b"the rest"


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    """A spool in which a process has left three segments, one of them empty."""
    folder = StreamFolder.make(tmp_path, KEY)
    for number, data in (1, LONG), (2, b""), (4, b"last"):
        folder.segment(number).write_bytes(data)
    folder.release()
    return tmp_path


def orphan(spool: Path) -> OrphanSpool:
    """The only orphan of the run, locked."""
    (folder,) = find_orphans(spool, "run")
    return OrphanSpool(folder)


def test_all_of_it_is_read_in_order_in_pieces(spool: Path) -> None:
    left = orphan(spool)
    assert (left.key, left.sent_before) == (KEY, StreamOffset(4, 4))
    at, pieces = StreamOffset(1, 0), []
    while piece := left.read(at, 0):
        pieces.append(piece)
        at = piece.end
    assert pieces == [
        SegmentSlice(StreamOffset(1, 0), LONG[:PIECE_BYTES]),
        SegmentSlice(StreamOffset(1, PIECE_BYTES), b"the rest"),
        SegmentSlice(StreamOffset(4, 0), b"last"),
    ]


def test_what_is_stored_is_removed_and_the_rest_left_free(spool: Path) -> None:
    left = orphan(spool)
    assert find_orphans(spool, "run") == []  # locked
    left.acked(StreamOffset(1, len(LONG) - 1))
    assert (spool / KEY.folder / "000001.hcblog").exists()
    left.acked(StreamOffset(1, len(LONG)))
    assert not (spool / KEY.folder / "000001.hcblog").exists()
    assert not left.is_sent()
    left.end()
    assert left_by_other_runs(spool, "another") == {"run": 4}
    again = orphan(spool)
    again.acked(StreamOffset(4, 4))
    assert again.is_sent()
    again.end()
    assert [*spool.iterdir()] == []


def test_a_folder_that_a_living_process_has_is_no_orphan(tmp_path: Path) -> None:
    living = StreamFolder.make(tmp_path, KEY)
    assert find_orphans(tmp_path, "run") == []
    assert left_by_other_runs(tmp_path, "another") == {}
    living.remove()
    assert [*tmp_path.iterdir()] == []

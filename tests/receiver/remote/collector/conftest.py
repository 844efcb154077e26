"""What tests of stored streams share."""

from __future__ import annotations

from pathlib import Path

import pytest

from hostcallback.receiver.taplog.writing.segment_writer import SegmentWriter
from logged_frames import DESCRIBED, losses


@pytest.fixture
def segment(tmp_path: Path) -> bytes:
    """The first segment of the stream `run`, process 0, epoch `a` * 16: ten messages."""
    info = {"run": "run", "stream_process": 0, "process": "a" * 16, "segment": 1, "process_index": 0}
    writer = SegmentWriter(tmp_path / "a.hcblog", info=info)
    writer.frames("cpu:0", losses(0, 10), DESCRIBED)
    writer.close()
    return (tmp_path / "a.hcblog").read_bytes()

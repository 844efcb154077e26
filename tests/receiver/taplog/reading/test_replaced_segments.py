"""Segments that change between the first look at a log and its reading."""

from __future__ import annotations

from pathlib import Path

import pytest

from hostcallback.receiver.taplog.format.layout import Damage
from hostcallback.receiver.taplog.reading.logged_message import LoggedMessage
from hostcallback.receiver.taplog.reading.reader import LogReader
from logged_frames import log_in, losses


@pytest.mark.parametrize(
    ("content", "nbytes", "messages", "torn"),
    [
        (b"no log" * 100, 600, -1, False),
        ("cut", 20, 0, True),
        ("a link to itself", 0, -1, False),
        ("deleted", None, None, None),
    ],
)
def test_a_segment_that_was_damaged_since_is_reported_and_the_others_are_read(
    tmp_path: Path, content: bytes | str, nbytes: int | None, messages: int | None, torn: bool | None
) -> None:
    for first in (0, 4):
        with log_in(tmp_path) as log:
            log.append("cpu:0", losses(first, 2))
    reader = LogReader(tmp_path)
    segment = min(tmp_path.iterdir())
    data = segment.read_bytes()
    segment.unlink()
    if content == "a link to itself":
        segment.symlink_to(segment.name)
    elif content != "deleted":
        segment.write_bytes(data[:20] if content == "cut" else bytes(content))  # type: ignore[arg-type]
    found = list(reader.records())
    assert [item.message.seq for item in found if isinstance(item, LoggedMessage)] == [4, 5]
    damaged = [item for item in found if isinstance(item, Damage)]
    if content == "deleted":  # its writer deletes old segments
        assert not damaged
        return
    (damage,) = damaged
    assert (damage.path, damage.offset, damage.nbytes, damage.messages, damage.torn) == (
        segment, 0, nbytes, messages, torn,
    )  # fmt: skip
    assert segment.name in damage.reason

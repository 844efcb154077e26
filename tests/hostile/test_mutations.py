"""Mutated logs with correct checksums: whatever they hold, readers end, and raise only what is documented.

`HOSTILE_EXAMPLES` sets how many mutations are tried; `make fuzz` sets many.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from hostcallback.receiver.errors import BadStreamError, HostCallbackError
from hostcallback.receiver.remote.collector.segment_validator import SegmentValidator
from hostcallback.receiver.remote.forwarding_protocol import StreamKey
from hostcallback.receiver.sinks.factory import own_sink
from hostcallback.receiver.taplog.format import layout
from hostcallback.receiver.taplog.format.layout import (
    CHUNK_HEADER_BYTES,
    HEADER_BYTES,
    ChunkHeader,
    page_checksums,
)
from hostcallback.receiver.taplog.reading.logged_message import LoggedMessage
from hostcallback.receiver.taplog.reading.reader import LogReader
from hostcallback.receiver.taplog.reading.selection import Selection
from hostcallback.receiver.taplog.render import as_dict, message_text, short_text
from hostcallback.receiver.taplog.tap_stats import gather
from hostcallback.receiver.taplog.writing.segment_writer import SegmentWriter
from hostcallback.receiver.wire.tap_descriptor import TapDescriptor
from hostile_log import write_hostile_log
from logged_frames import DESCRIBED, losses
from mutations import EXAMPLES, mutated_bytes, mutated_value, packed

HEADER_FIELDS = ("kind", "codec", "raw_bytes", "messages", "consumers", "stream", "first_seq", "step_before")


class Part:
    """One chunk of a log: its header and its content."""

    def __init__(self, header: ChunkHeader, data: bytes) -> None:
        self.header, self.data = header, data


def taken_apart(path: Path) -> tuple[dict[str, Any], list[Part]]:
    """The info and the chunks of a log."""
    data = path.read_bytes()
    info_bytes, _ = layout.decode_file_header(data[:HEADER_BYTES], "log")
    info = msgpack.unpackb(data[HEADER_BYTES : HEADER_BYTES + info_bytes])
    at = HEADER_BYTES + layout.align(info_bytes)
    parts = []
    while (header := layout.decode_chunk_header(data[at : at + CHUNK_HEADER_BYTES], at)) is not None:
        start = at + CHUNK_HEADER_BYTES + layout.table_bytes(header.stored_bytes)
        parts.append(Part(header, data[start : start + header.stored_bytes]))
        at += layout.chunk_bytes(header.stored_bytes)
    return info, parts


def put_together(info: dict[str, Any], parts: list[Part]) -> bytes:
    """A log with correct checksums and offsets."""
    pieces = [layout.encode_file_header(info)]
    for part in parts:
        table = page_checksums(part.data).tobytes()
        header = part.header._replace(offset=sum(map(len, pieces)), stored_bytes=len(part.data))
        pieces += [layout.encode_chunk_header(header), table, layout.padding(len(table)), part.data]
        pieces.append(layout.padding(len(part.data)))
    return b"".join(pieces)


def mutate(info: dict[str, Any], parts: list[Part], choose: random.Random) -> bytes:
    """One mutation of a log."""
    parts = [Part(part.header, part.data) for part in parts]
    part = choose.choice(parts)
    kind = choose.randrange(6)
    if kind == 0:
        info = mutated_value(info, choose)
        info = info if isinstance(info, dict) else {}
    elif kind == 1:
        part.data = mutated_bytes(part.data, choose)
    elif kind == 2:
        field = choose.choice(HEADER_FIELDS)
        most = {"kind": 8, "codec": 3, "stream": 2**31 - 1, "step_before": 2**63 - 1}.get(field, 2**64 - 1)
        part.header = part.header._replace(**{field: choose.choice([0, 1, most, choose.randint(0, most)])})
    elif kind == 3:
        parts.insert(choose.randrange(len(parts)), part)
    elif kind == 4:
        parts.remove(part)
    else:
        described = [part for part in parts if part.header.kind == layout.Kind.DESCRIPTIONS]
        part = choose.choice(described)
        items = _items(part.data)
        at = choose.randrange(len(items))
        if "consumer" in items[at] and choose.random() < 0.9:
            fields = mutated_value(msgpack.unpackb(items[at]["consumer"]), choose)
            items[at] = {**items[at], "consumer": packed(fields)}
        else:
            items[at] = mutated_value(items[at], choose)
        part.data = b"".join(map(packed, items))
        part.header = part.header._replace(raw_bytes=len(part.data))
    return put_together(info, parts)


def _items(data: bytes) -> list[Any]:
    unpacker = msgpack.Unpacker()
    unpacker.feed(data)
    return list(unpacker)


def originals(folder: Path) -> Iterator[tuple[dict[str, Any], list[Part]]]:
    """Logs to mutate."""
    (path,) = write_hostile_log(folder / "hostile").iterdir()
    yield taken_apart(path)
    path = folder / "a.hcblog"
    writer = SegmentWriter(path)
    writer.frames("cpu:0", losses(0, 20), DESCRIBED, steps=np.arange(20), folded=[(3, 4)])
    writer.close()
    yield taken_apart(path)


def read_all(path: Path) -> int:
    """Reads and shows a log in every way; returns how many messages it has."""
    reader = LogReader(path)
    count = 0
    for record in reader.values():
        if not isinstance(record, LoggedMessage):
            str(record)
            continue
        count += 1
        try:
            as_dict(record)
            if message_text(record) is None:
                short_text(record.value, 160)
        except Exception as error:  # a message that is not as it is described
            assert not isinstance(error, MemoryError | RecursionError | SystemError), error
    gather(reader.message_runs(), Selection())
    return count


@pytest.mark.parametrize("seed", range(4))
def test_logs(seed: int, tmp_path: Path) -> None:
    choose = random.Random(seed)
    logs = list(originals(tmp_path))
    path = tmp_path / "m.hcblog"
    read = 0
    for number in range(EXAMPLES // 4):
        path.write_bytes(mutate(*choose.choice(logs), choose))
        try:
            read += read_all(path)
        except HostCallbackError:
            pass
        except Exception as error:
            raise AssertionError(f"seed {seed}, mutation {number}: {error!r}") from error
        validator = SegmentValidator(StreamKey("run", 0, "a" * 16), 1)
        with contextlib.suppress(BadStreamError):
            validator.take(path.read_bytes())
    assert read


@pytest.mark.parametrize("seed", range(2))
def test_descriptions(seed: int) -> None:
    choose = random.Random(seed)
    taps = [msgpack.unpackb(tap.pack()) for tap in DESCRIBED.values()]
    for _ in range(EXAMPLES):
        data = packed(mutated_value(mutated_value(choose.choice(taps), choose), choose))
        if choose.random() < 0.2:
            data = mutated_bytes(data, choose)
        try:
            described = TapDescriptor.unpack(data)
        except ValueError:
            continue
        with contextlib.suppress(LookupError, TypeError, ValueError, ArithmeticError, AttributeError):
            own_sink(described)

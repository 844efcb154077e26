"""Mutated rule files, flight recordings, spool folders and files of a collector: one documented error each, no more."""

from __future__ import annotations

import contextlib
import json
import os
import random
import struct
from pathlib import Path

import msgpack
import numpy as np
import pytest

from collecting import Emitter, forwarder
from hostcallback.receiver.cli import main
from hostcallback.receiver.control.protocol import RuleFileError
from hostcallback.receiver.control.rule_file import read_rules
from hostcallback.receiver.remote.delivery.cursor import CURSOR_NAME as NAME, Cursor, InProgress
from hostcallback.receiver.remote.forwarding_protocol import StreamKey, StreamOffset
from hostcallback.receiver.remote.spool.spool_folders import OrphanSpool, find_orphans
from hostcallback.receiver.taplog.flight.recorder import _CONTROL, MAGIC, RingFileError, read_ring
from hostcallback.receiver.wire.frame import encode_frame
from mutations import examples, mutated_bytes, mutated_value

RULES = """
["loss*"]
every = 10
rate = 2.5
when = "value > 3"
["grad.**"]
enabled = false
truncate = 100
first = 3
"""
PIECES = [
    "=",
    "[",
    "]",
    '"',
    "\n",
    "[[",
    "{a=",
    "nan",
    "inf",
    "-1",
    "1e999",
    "9" * 400,
    "x.y",
    "\x00",
    "\x1b[2J",
    "ü",
    "#",
    "true",
]


def test_rule_files(tmp_path: Path) -> None:
    choose = random.Random(1)
    path = tmp_path / "rules.toml"
    for _ in range(examples(8)):
        text = RULES
        for _ in range(choose.randrange(1, 5)):
            at = choose.randrange(len(text))
            text = (
                text[:at]
                + choose.choice(PIECES) * choose.choice([1, 1, 1, 3, 300])
                + text[at + choose.randrange(8) :]
            )
        data = text.encode()
        path.write_bytes(mutated_bytes(data, choose) if choose.random() < 0.3 else data)
        with contextlib.suppress(RuleFileError):
            read_rules(path)


def ring_file() -> bytes:
    """A ring with frames and a payload block, as a killed process leaves it."""
    capacity, page = 1 << 13, 4096
    frames = bytearray()
    kinds = [[np.float32(1)], [np.zeros((3, 5), np.int32), np.int8(2)], [np.zeros(40)]]
    while len(frames) < capacity - 1024:
        arrays = kinds[len(frames) % 3]
        frame = bytearray(encode_frame(arrays, consumer_id=1, seq=len(frames), time_ns=1, run_id=1))
        struct.pack_into("<Q", frame, 56, len(frames))
        frames += frame
    control = _CONTROL.pack(MAGIC, 1, page, capacity, 0, 0, 1, 1, page + capacity, 4096, b"cpu:0")
    first = bytearray(control.ljust(page, b"\0"))
    for at, value in ((128, len(frames)), (192, 0), (200, 0)):
        struct.pack_into("<Q", first, at, value)
    return bytes(first) + bytes(frames).ljust(capacity, b"\0") + bytes(4096)


def test_rings_of_a_flight_recorder(tmp_path: Path) -> None:
    choose = random.Random(2)
    path = tmp_path / "cpu0.hcbring"
    whole = ring_file()
    path.write_bytes(whole)
    assert len(read_ring(path).frames) > 10
    for _ in range(examples(8)):
        data = bytearray(whole)
        for _ in range(choose.randrange(1, 6)):
            at = choose.choice(
                [
                    *range(8, 64, 4),
                    128,
                    192,
                    200,
                    4096 + 64 * choose.randrange(128) + 4 * choose.randrange(16),
                ]
            )
            value = choose.choice(
                [0, 1, 63, 64, 4096, 2**31, 2**32 - 1, 2**63, 2**64 - 1, choose.getrandbits(64)]
            )
            struct.pack_into("<Q", data, at, value)
        path.write_bytes(data if choose.random() < 0.9 else data[: choose.randrange(len(data))])
        with contextlib.suppress(RingFileError):
            read_ring(path)


def test_recovered_flights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    choose = random.Random(3)
    process = {"host": "h", "pid": 1, "started_ns": 1, "command": ["python", "x.py"], "process_index": 0}
    flight = tmp_path / "flight"
    flight.mkdir()
    for number in range(examples(32)):
        (flight / "process.json").write_text(json.dumps(mutated_value(process, choose), default=repr))
        (flight / "taps.hcbdesc").write_bytes(mutated_bytes(msgpack.packb({"name": "x"}) * 9, choose))
        (flight / "cpu0.hcbring").write_bytes(mutated_bytes(ring_file(), choose))
        out = tmp_path / f"out{number}"
        assert main(["recover", str(flight), "--to", str(out)]) in (0, 1)
        assert "Traceback" not in capsys.readouterr().err


NAMES = [
    "run~0~",
    "run~9999999999~",
    "run~-1~",
    "run~~",
    "~",
    "run~0~zz",
    "run~0",
    ".new-run~0~",
    "run~1~",
    "r\nun~0~",
]
FILES = ["lock", "000001.hcblog", "000000.hcblog", "-1.hcblog", "9" * 30 + ".hcblog", "x"]


def test_spool_folders(tmp_path: Path) -> None:
    choose = random.Random(4)
    made = forwarder("localhost:1", tmp_path / "made", drain_sec=0.0)
    Emitter(made).losses(100)
    made.close()
    (stream,) = (tmp_path / "made").iterdir()
    segment = next(stream.glob("*.hcblog")).read_bytes()
    for number in range(examples(8)):
        spool = tmp_path / f"spool{number}"
        for _ in range(choose.randrange(1, 4)):
            folder = spool / (choose.choice(NAMES) + choose.choice(["a" * 16, "A" * 16, "0" * 15, ""]))
            folder.mkdir(parents=True, exist_ok=True)
            for name in choose.sample(
                ["lock", "000001.hcblog", "000000.hcblog", "-1.hcblog", "9" * 30 + ".hcblog", "x"], 3
            ):
                target = folder / name
                if target.exists() or target.is_symlink():
                    continue
                kind = choose.randrange(5)
                if kind == 0:
                    target.mkdir()
                elif kind == 1:
                    target.symlink_to(tmp_path / "nothing")
                else:
                    target.write_bytes(mutated_bytes(segment, choose) if kind > 2 else b"")
        for orphan in find_orphans(spool, "run"):
            # The sender logs whatever a folder raises, and leaves it: it must only end.
            with contextlib.suppress(OSError, ValueError):
                source = OrphanSpool(orphan)
                position, count = StreamOffset(0, 0), 0
                while (piece := source.read(position, 0.0)) is not None and count < 100:
                    position, count = piece.end, count + 1
                assert count < 100
            orphan.release()


def test_what_a_collector_has_delivered(tmp_path: Path) -> None:
    choose = random.Random(5)
    key = StreamKey("run", 0, "a" * 16)
    entries = [[key.folder, [1, 64], [1, 0], {"cpu:0": [1, 2]}, 7], [key.folder, [2, 0], None, None, 0]]
    for _ in range(examples(4)):
        data = msgpack.packb(mutated_value(entries, choose))
        (tmp_path / NAME).write_bytes(mutated_bytes(data, choose) if choose.random() < 0.3 else data)
        cursor = Cursor(tmp_path)
        assert cursor.position(key) >= StreamOffset(0, 0)
        assert cursor.done(key) >= 0
        cursor.save()


def test_what_a_collector_was_delivering(tmp_path: Path) -> None:
    choose = random.Random(6)
    key = StreamKey("run", 0, "a" * 16)
    for _ in range(examples(4)):
        InProgress(tmp_path).enter(key, StreamOffset(1, 64))
        path = tmp_path / ".delivering"
        path.write_bytes(mutated_bytes(path.read_bytes()[:64], choose))
        found = InProgress(tmp_path).interrupted
        assert found is None or found.deaths > 0
        os.unlink(path)

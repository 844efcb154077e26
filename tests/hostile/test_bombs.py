"""Bombs: small logs that claim much. A process of limited memory reads each, and ends soon."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkout import python_path
from hostcallback.receiver import limits
from hostcallback.receiver.remote.forwarding_protocol import StreamKey
from hostcallback.receiver.taplog.format import layout
from hostcallback.receiver.taplog.format.compression import decompress
from hostcallback.receiver.taplog.format.layout import ChunkHeader, Codec, Kind, page_checksums
from hostcallback.receiver.taplog.writing.segment_writer import SegmentWriter, segment_info
from hostcallback.receiver.wire.tap_descriptor import TapDescriptor
from logged_frames import block_of, frame
from python_process import run_python

MEMORY_BYTES = 2 << 30
TAP = TapDescriptor("x", "a.py:1 (f)", 1, "tap", {}, {}, (), ["array"], None, "global")
FORMAT = replace(
    TAP,
    kind="format",
    tree=["tuple", [["tuple", [["array"]]], ["dict", [], []]]],
    params={"fmt": "{}", "has_placeholders": True, "printoptions": {}},
)
KEY = StreamKey("run", 0, "a" * 16)
INFO = {"run": KEY.run, "stream_process": 0, "process": KEY.epoch}


def written(path: Path, tap: TapDescriptor, *arrays: Any, count: int = 1) -> None:
    """A log with messages of one tap."""
    writer = SegmentWriter(path, info=INFO)
    writer.frames("cpu:0", block_of(*(frame(tap, *arrays, seq=k) for k in range(count))), {1: tap})
    writer.close()


def template(fmt: str, value: Any = 1.5, **params: Any) -> Callable[[Path], None]:
    """A log with one message of a described print."""
    tap = replace(FORMAT, params={**FORMAT.params, "fmt": fmt, **params})
    return lambda path: written(path, tap, np.asarray(value, np.float32))


def batch(shape: tuple[int, ...], dtype: Any, fmt: str = "{}") -> Callable[[Path], None]:
    """A log with one message of a described print under vmap."""
    tap = replace(FORMAT, transforms=(("batch", {"batch_dims": (0,)}),), params={**FORMAT.params, "fmt": fmt})
    return lambda path: written(path, tap, np.zeros(shape, dtype))


def chunk(kind: Kind, data: bytes, raw_bytes: int, **fields: int) -> Callable[[Path], None]:
    """A log with one compressed chunk, whatever it holds, with correct checksums."""

    def write(path: Path) -> None:
        start = layout.encode_file_header({**segment_info(1), **INFO})
        table = page_checksums(data).tobytes()
        header = ChunkHeader(kind, Codec.ZSTD, 0, len(start), len(data), raw_bytes, **fields)
        parts = [start, layout.encode_chunk_header(header), table, layout.padding(len(table)), data]
        path.write_bytes(b"".join([*parts, layout.padding(len(data))]))

    return write


def zeros(nbytes: int) -> bytes:
    """A zstd frame of zeros: a header that states no length, and blocks of 128 KiB that repeat one byte."""
    block = (1 << 17) << 3 | 1 << 1
    count = nbytes >> 17
    blocks = (block.to_bytes(3, "little") + b"\0") * (count - 1) + (block | 1).to_bytes(3, "little") + b"\0"
    return b"\x28\xb5\x2f\xfd" + b"\x00" + bytes([(20 - 10) << 3]) + blocks


BOMBS: dict[str, Callable[[Path], None]] = {
    "width": template("{:>4000000000}"),
    "precision": template("{:.2000000000f}"),
    "nested width": template("{:{w}}"),
    "repeated": template("{0:>1000}" * 1000),
    "attributes": template("{0.ctypes.__class__.__init__.__globals__[sys].modules[os].environ}"),
    "print options": template("{}", np.ones(9), printoptions={"precision": 10**9}),
    "threshold": template("{}", np.ones(1000), printoptions={"threshold": 2**62, "linewidth": 2**62}),
    "batch without bytes": batch((10**9, 0), np.float32),
    "batch of text": batch((200_000,), np.int8, "x" * 60_000 + "{}"),
    "rows without bytes": lambda path: written(path, TAP, np.zeros((10**9, 0), np.float32)),
    "float0": lambda path: written(path, replace(TAP, tree=["float0", [3 * 10**9]]), np.zeros(0, np.uint8)),
    "float0 of ranks": lambda path: written(
        path, replace(TAP, tree=["float0", [7] * 20]), np.zeros(0, np.uint8)
    ),
    "zstd": chunk(Kind.FRAMES, zeros(24 << 30), 24 << 30, messages=1),
    "zstd that lies": chunk(Kind.FRAMES, zeros(24 << 30), 1 << 20, messages=1),
    "zstd of descriptions": chunk(Kind.DESCRIPTIONS, zeros(1 << 30), 1 << 30),
    "zstd of notes": chunk(Kind.LOST, zeros(1 << 30), 1 << 30, messages=1),
    "zstd of folded": chunk(Kind.FOLDED, zeros(1 << 30), 1 << 30, messages=1),
    "zstd of an index": chunk(Kind.INDEX, zeros(1 << 30), 1 << 30),
}


def test_the_bombs_are_valid_zstd() -> None:
    assert decompress(zeros(1 << 20), 1 << 20) == bytes(1 << 20)


SLOW = {"batch of text"}
COMMANDS = [
    ["cat"],
    ["cat", "--full"],
    ["cat", "--json"],
    ["tail", "-n", "3"],
    ["stats"],
    ["errors"],
    ["replay"],
]


def limited(*arguments: str | Path, program: str = "") -> subprocess.CompletedProcess[str]:
    """Runs a command in a process of limited memory."""

    # The process limits itself: JAX, which this one has loaded, warns of a fork with code before the new program.
    limit = f"import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_AS, ({MEMORY_BYTES}, {MEMORY_BYTES}))\n"
    run_commands = "runpy.run_module('hostcallback.receiver.cli', run_name='__main__', alter_sys=True)"
    command = ["-c", limit + (program or run_commands)]
    return run_python(
        *command, *arguments, PYTHONPATH=python_path(), OPENBLAS_NUM_THREADS="1", HCB_SECRET="kept"
    )


COLLECT = """
import sys
from pathlib import Path
from hostcallback.receiver.remote.collector.store import Store
from hostcallback.receiver.remote.delivery.delivery import Delivery
store = Store(sys.argv[1])
delivery = Delivery(store, everything=True)
assert delivery.wait_idle(90)
delivery.close()
print("delivered", sum(delivery.set_aside.values()))
"""

EVERY_COMMAND = """
import sys
from hostcallback.receiver.cli import main
for words in sys.argv[2:]:
    status = main([*words.split(), sys.argv[1]])
    assert status in (0, 1), (words, status)
"""


@pytest.mark.slow_variants(every=4)
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in BOMBS])
def test_a_reader_of_limited_memory(name: str, tmp_path: Path) -> None:
    log = tmp_path / "20260101T000000.000000000Z-1-000001.hcblog"
    BOMBS[name](log)
    assert log.stat().st_size < 1 << 20
    done = limited(log, *(" ".join(command) for command in COMMANDS), program=EVERY_COMMAND)
    assert "Traceback" not in done.stderr, done.stderr[-2000:]
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout) < 8 * limits.MESSAGE_CHARS
    assert "HCB_SECRET" not in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", BOMBS)
def test_a_collector_of_limited_memory(name: str, tmp_path: Path) -> None:
    folder = tmp_path / KEY.run
    folder.mkdir()
    BOMBS[name](folder / KEY.segment_name(1))
    good = StreamKey("run", 1, "b" * 16)
    template("still here {}")(folder / good.segment_name(1))
    done = limited(tmp_path, program=COLLECT)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "still here 1.5" in done.stdout
    assert "delivered" in done.stdout
    assert "HCB_SECRET" not in done.stdout

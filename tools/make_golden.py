"""Writes the golden frames that every encoder must reproduce: `python tools/make_golden.py [--check]`.

Run it when a case is added. A golden file that changes is a change of the wire format: see
docs/wire-format.md, "Versions".
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from hostcallback.receiver.wire.array_types import WIRE_TYPES, WireType, dtype_of  # noqa: E402
from hostcallback.receiver.wire.frame import Flags, encode_frame  # noqa: E402

FOLDER = ROOT / "tests" / "receiver" / "wire" / "golden"


class Case(NamedTuple):
    """Contents of one golden file."""

    arrays: list[np.ndarray[Any, Any]]
    header: dict[str, int]

    def encode(self) -> bytes:
        """The frame, by the reference encoder."""
        return encode_frame(self.arrays, **self.header)


HEADER = {
    "consumer_id": 0x0123456789ABCDEF,
    "flags": int(Flags.ORDERED),
    "seq": 5,
    "time_ns": 1_700_000_000_123_456_789,
    "run_id": 77,
    "device": 2,
    "position": 4096,
}


def sample(wire_type: WireType) -> np.ndarray[Any, Any]:
    """An array of the dtype with an odd number of different elements."""
    dtype = dtype_of(wire_type.code)
    if wire_type.name == "bool":
        return np.array([True, False, True])
    if wire_type.bits < 8:
        codes = (np.arange(3 * 8 // wire_type.bits - 1) * 5 + 1) % (1 << wire_type.bits)
        if wire_type.name.startswith("int"):
            return np.where(codes >= 1 << (wire_type.bits - 1), codes - (1 << wire_type.bits), codes).astype(
                dtype
            )
        return codes.astype(np.uint8).view(dtype)
    # Distinct bytes show every swap. The values are as they come, NaNs included.
    return (np.arange(3 * dtype.itemsize) * 37 + 1).astype(np.uint8).view(dtype)


def cases() -> dict[str, Case]:
    """The golden files by their names without `.bin`."""
    found = {f"dtype-{t.code:02}-{t.name}": Case([sample(t)], HEADER) for t in WIRE_TYPES}
    int4 = next(t for t in WIRE_TYPES if t.name == "int4")
    found["scalar"] = Case([np.array(1.5, np.float32)], HEADER)
    found["several-arrays"] = Case(
        [
            np.array(True),
            np.arange(5, dtype=np.int16),  # 10 bytes: the next one starts after a gap
            np.arange(24, dtype=np.float32).reshape(2, 3, 4),  # at least 64 bytes: aligned to 64
            np.array(-1, np.int64),
            sample(int4),
            np.arange(16, dtype=np.uint32),  # exactly 64 bytes
        ],
        HEADER,
    )
    found["zero-size"] = Case(
        [
            np.zeros((0,), np.float32),
            np.zeros((3, 0, 2), np.int8),
            np.array(7, np.int32),
            np.zeros(0, np.int64),
        ],
        HEADER,
    )
    found["only-zero-size"] = Case([np.zeros((0, 5), np.float64)], HEADER)
    found["no-arrays"] = Case([], HEADER)
    found["end-of-stream"] = Case([], {**HEADER, "flags": int(Flags.END_OF_STREAM), "consumer_id": 9})
    found["truncated"] = Case(
        [
            np.array([2, 128, 64, 0, 1, 9], np.int64),  # the shapes: (128, 64), (), (9,)
            np.arange(8, dtype=np.float32),
            np.array(3, np.int32),
            sample(int4)[:3],
        ],
        {**HEADER, "flags": int(Flags.ORDERED | Flags.TRUNCATED)},
    )
    found["long-metadata"] = Case([np.full((1, 1, 1, 2), i, np.int16) for i in range(100)], HEADER)
    found["long-dimensions"] = Case([np.zeros((0, 127, 128, 255, 256, 65535, 65536), np.uint8)], HEADER)
    found["extreme-header"] = Case(
        [np.array(0, np.uint8)],
        {
            "consumer_id": 2**64 - 1,
            "flags": 0,
            "seq": 2**64 - 1,
            "time_ns": -(2**63),
            "run_id": -(2**63),
            "device": -(2**31),
            "position": 2**64 - 64,
        },
    )
    return found


def main(arguments: list[str]) -> int:
    """Writes or checks the files; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file differs")
    check = parser.parse_args(arguments).check
    frames = {f"{name}.bin": case.encode() for name, case in cases().items()}
    present = {path.name: path.read_bytes() for path in FOLDER.glob("*.bin")}
    different = sorted(
        name for name in frames.keys() | present.keys() if frames.get(name) != present.get(name)
    )
    if not check:
        FOLDER.mkdir(parents=True, exist_ok=True)
        for name in different:
            if name in frames:
                (FOLDER / name).write_bytes(frames[name])
            else:
                (FOLDER / name).unlink()
    for name in different:
        print(f"{name}: {'differs' if check else 'written' if name in frames else 'removed'}")
    print(f"make_golden: {len(frames)} frames, {len(different)} {'differ' if check else 'changed'}")
    return 1 if check and different else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

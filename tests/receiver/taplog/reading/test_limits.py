"""Sizes that a log states are compared with limits before anything is allocated."""

from __future__ import annotations

from dataclasses import replace

import msgpack
import numpy as np
import pytest

from hostcallback.receiver import limits
from hostcallback.receiver.messages import Message
from hostcallback.receiver.sinks.batches import for_each_element
from hostcallback.receiver.taplog.format.compression import Compressor, decompress
from hostcallback.receiver.taplog.render import plain_value, short_text
from hostcallback.receiver.wire.pytree import FLOAT0, check_nesting, unpack_plain
from hostcallback.receiver.wire.tap_descriptor import TapDescriptor

TAP = TapDescriptor("x", "a.py:1", 1, "tap", {}, {}, (), ["array"], None, "global")


def test_a_bomb_is_decompressed_up_to_its_stated_size_only() -> None:
    bomb = Compressor()(bytes(1 << 28))
    assert len(bomb) < 1 << 16
    assert len(decompress(bomb, 1000)) == 1000
    assert decompress(bomb, limits.COMPRESSED_RAW_BYTES + 1) == b""


@pytest.mark.parametrize("cut", [0, 1, 100, 5000, -1])
def test_chunks_before_the_damage_are_decompressed(cut: int) -> None:
    raw = np.random.default_rng(0).integers(0, 9, 400_000, np.uint8).tobytes()
    stored = bytearray(Compressor()(raw))
    assert decompress(stored, len(raw)) == raw
    assert raw.startswith(decompress(stored[:cut], len(raw)))
    stored[len(stored) // 2] ^= 0xFF
    assert len(decompress(stored, len(raw))) <= len(raw)


def test_nested_data_is_refused_whatever_its_depth() -> None:
    for depth in (limits.NESTING + 2, 900, 100_000):
        with pytest.raises(ValueError, match=r"nested|plain data"):
            unpack_plain(b"\x91" * depth + b"\xc0")
    check_nesting([[[]]], 3)
    with pytest.raises(ValueError, match="nested"):
        check_nesting([[[[]]]], 2)


def test_a_list_that_states_a_length_is_not_allocated() -> None:
    with pytest.raises(ValueError, match="plain data"):
        unpack_plain(b"\xdd\xff\xff\xff\xff")


@pytest.mark.parametrize(
    "change",
    [
        {"name": "n" * (limits.NAME_CHARS + 1)},
        {"kwargs": {"x": msgpack.unpackb(b"\x91" * 300 + b"\xc0")}},
        {"kwargs": {"x": "y" * limits.DESCRIPTION_BYTES}},
        {"tree": ["value", msgpack.unpackb(b"\x91" * 300 + b"\xc0")]},
    ],
)
def test_a_description_is_bounded(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"no description|cannot be exported|described"):
        replace(TAP, **change).pack()


@pytest.mark.parametrize("shape", [(10**9, 0), (10**9,), (3, 10**6, 10**6)])
def test_an_array_without_bytes_is_shown_by_its_head(shape: tuple[int, ...]) -> None:
    array = np.zeros(shape, FLOAT0) if 0 not in shape else np.zeros(shape, np.float32)
    assert plain_value(array)["shape"] == list(shape)
    assert len(short_text(array, 160)) <= 160
    assert len(short_text(array)) < 1000


def test_a_batch_without_bytes_is_refused() -> None:
    message = Message(None, [np.zeros((10**9, 0), np.float32)], 0, 0, 0, "cpu:0", None)
    with pytest.raises(ValueError, match="1,000,000,000 elements"):
        for_each_element(message, [(0,)], lambda arrays: None, most=limits.BATCH_ELEMENTS)  # type: ignore[arg-type]

"""Mutations of bytes and of plain data, for the tests of decoders."""

from __future__ import annotations

import os
import random
from typing import Any

import msgpack

EXAMPLES = int(os.environ.get("HOSTILE_EXAMPLES", "400"))
"""How many mutations a test tries whose mutations cost little; see `examples`."""


def examples(cost: int) -> int:
    """How many mutations a test tries whose mutations cost this many times more."""
    return max(10, EXAMPLES // cost)


ODD: tuple[Any, ...] = (
    None, True, 0, -1, 1, 63, 64, 2**31, 2**63 - 1, 2**64 - 1, -(2**63), 0.5, float("inf"), float("nan"), "", "x",
    "{0.a}", "\x1b[2J\n", b"", b"\0" * 9, [], [[]], ["array"], {}, {"a": 1}, "batch", "format", "check", ["tuple", []],
)  # fmt: skip


def packed(value: Any) -> bytes:
    """The msgpack of a value, or of something nested too deep if it is."""
    try:
        data: bytes = msgpack.packb(value)
    except (ValueError, OverflowError):
        return b"\x91" * 5000 + b"\xc0"
    return data


def mutated_bytes(data: bytes, choose: random.Random) -> bytes:
    """Some bytes changed, or a number put in, or a piece cut or doubled."""
    if not data:
        return data
    changed = bytearray(data)
    for _ in range(choose.randint(1, 4)):
        at = choose.randrange(len(changed))
        kind = choose.randrange(5)
        if kind == 0:
            changed[at] ^= 1 << choose.randrange(8)
        elif kind == 1:
            number = choose.choice([0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1, choose.getrandbits(64)])
            at &= -8
            changed[at : at + 8] = number.to_bytes(8, "little")[: len(changed) - at]
        elif kind == 2:
            changed[at] = choose.randrange(256)
        elif kind == 3 and len(changed) > 64:
            del changed[at : at + choose.randint(1, 64)]
        else:
            changed[at:at] = changed[at : at + choose.randint(1, 64)]
    return bytes(changed)


def mutated_value(value: Any, choose: random.Random) -> Any:
    """Plain data with one part replaced, removed or wrapped."""
    if isinstance(value, dict) and value and choose.random() < 0.8:
        key = choose.choice([*value])
        if choose.random() < 0.1:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: mutated_value(value[key], choose)}
    if isinstance(value, list) and value and choose.random() < 0.8:
        at = choose.randrange(len(value))
        return [*value[:at], mutated_value(value[at], choose), *value[at + choose.randint(0, 1) :]]
    if choose.random() < 0.1:
        for _ in range(choose.choice([1, 5, 150, 900])):
            value = [value]
        return value
    return choose.choice(ODD)

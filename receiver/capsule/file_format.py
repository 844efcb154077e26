"""What a capsule's file has: a zip archive of uncompressed members, with a manifest in JSON."""

from __future__ import annotations

import reprlib
from dataclasses import dataclass
from typing import Any

from hostcallback.receiver.errors import HostCallbackError

FORMAT = 1
"""Version of the format. Readers refuse later ones."""

SUFFIX = ".hcb"

MANIFEST, PROGRAM, REPORT, MESSAGES = "manifest.json", "program.jaxexport", "report.txt", "messages.jsonl"
"""Members: what the capsule is, the step, the report of the failure, the last messages before it."""

WATCHED, PROMOTED = "operations.jaxexport", "operations64.jaxexport"
"""Members: the step with a digest of each operation's result, and the same in 64 bits."""

INPUT = "inputs/{}.bin"
"""The elements of an input or of one shard of it, in C order, little-endian."""


class CapsuleError(HostCallbackError):
    """A file is no capsule that can be read: damaged, cut off, of a later version, or larger than its limits.

    Example:
        pathlib.Path("step-17.hcb").write_text("something else")
        try:
            receiver.Capsule("step-17.hcb")
        except receiver.CapsuleError as error:
            print(error)
    """


@dataclass(frozen=True)
class Shard:
    """The part of an input that one device had.

    Attributes:
        member: name of the member with the elements; empty if it was left out.
        device: number of the device among the program's.
        start: first index in each dimension.
        shape: number of elements in each dimension.
    """

    member: str
    device: int
    start: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Input:
    """One array that the step got.

    Attributes:
        path: where it is in the arguments, such as `args[0]['w']`.
        dtype: name of its dtype, such as `bfloat16`.
        shape: number of elements in each dimension.
        shards: its parts; one with all elements if it was on one device.
        mesh: names and sizes of the axes of its mesh, if it was on several devices.
        spec: for each dimension, the names of the mesh axes over which it is partitioned.
        left_out: why elements are missing; empty if they are there.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    shards: tuple[Shard, ...]
    mesh: tuple[tuple[str, int], ...] = ()
    spec: tuple[tuple[str, ...], ...] = ()
    left_out: str = ""


@dataclass(frozen=True)
class Failure:
    """What failed.

    Attributes:
        kind: "check", "nonfinite", or "tap exception".
        name: name of the check or the tap.
        source_line: `file:line (function)` of the check or the tap.
        text: the check's message with its values; the exception's type and text.
        device: of the first failure, such as `cpu:0`.
    """

    kind: str
    name: str
    source_line: str
    text: str
    device: str


def shown(value: Any) -> str:
    """Returns a value of a manifest, which may be deep or large, as a short text."""
    return _SHOWN.repr(value)


_SHOWN = reprlib.Repr()
_SHOWN.maxstring = 80

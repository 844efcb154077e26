"""The format of a capsule's file: a manifest and uncompressed members in a zip archive, checked before any is read.

A capsule is written atomically: the file appears complete or not at all, even if the process dies.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import json
import math
import os
import reprlib
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from hostcallback.receiver import errors, limits
from hostcallback.receiver.files import PRIVATE
from hostcallback.receiver.wire.array_types import BY_NAME

FORMAT = 1
"""Version of the format. Readers refuse later ones."""

SUFFIX = ".hcb"

MANIFEST, PROGRAM, REPORT, MESSAGES = "manifest.json", "program.jaxexport", "report.txt", "messages.jsonl"
"""Members: what the capsule is, the step, the report of the failure, the last messages before it."""

WATCHED, PROMOTED = "operations.jaxexport", "operations64.jaxexport"
"""Members: the step with a digest of each operation's result, and the same in 64 bits."""

INPUT = "inputs/{}.bin"
"""The elements of an input or of one shard of it, in C order, little-endian."""


class CapsuleError(errors.HostCallbackError):
    """A file is no capsule that can be read: damaged, cut off, of a later version, or larger than its limits.

    Example:
        pathlib.Path("step-17.hcb").write_text("something else")
        try:
            receiver.Capsule("step-17.hcb")
        except receiver.CapsuleError as error:
            print(error)
    """


@dataclasses.dataclass(frozen=True)
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


@dataclasses.dataclass(frozen=True)
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


@dataclasses.dataclass(frozen=True)
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


_LOCAL_HEADER = struct.Struct("<4s5H3L2H")
_ENTRY_BYTES = 128
"""More than an entry of the list of members has; the names of a capsule's members are short."""

_ENCRYPTED = 0x2061
"""Flags of members that are encrypted or patched, by any of the ways of the zip format."""

CHECK_BYTES = 16 << 20


class _Bounded(io.BufferedReader):
    """A file of which the list of members is read only if it is not too large."""

    def read(self, size: int | None = -1, /) -> bytes:
        most = limits.CAPSULE_MEMBERS * _ENTRY_BYTES
        if size is not None and size > most:
            raise ValueError(f"its list of members has {size:,} bytes, expected at most {most:,}")
        return super().read(size)


class Archive:
    """A zip archive of uncompressed members that do not overlap. Any thread."""

    def __init__(self, path: Path) -> None:
        """Reads the list of members.

        Raises:
            CapsuleError: the file is no such archive.
            OSError: the file cannot be read.
        """
        self._path = path
        expected = f"expected a capsule (*{SUFFIX}), which hcb.capsule or on_failure='capsule' writes"
        try:
            found = path.stat()
        except FileNotFoundError as error:
            raise FileNotFoundError(error.errno, f"no such file: {expected}", str(path)) from None
        if not stat.S_ISREG(found.st_mode):
            files = sorted(file.name for file in path.glob(f"*{SUFFIX}"))[-5:] if path.is_dir() else []
            there = f"; the folder has {', '.join(files)}" if files else ""
            raise CapsuleError(f"{path}: not a file{there or f', {expected}'}")
        self._nbytes = found.st_size
        try:
            with _Bounded(io.FileIO(path)) as file, zipfile.ZipFile(file) as archive:
                self._members = {info.filename: info for info in self._checked(archive.infolist())}
        except (
            zipfile.BadZipFile,
            EOFError,
            struct.error,
            ValueError,
            ArithmeticError,
            RuntimeError,
        ) as error:
            raise CapsuleError(f"{path}: not a capsule, or cut off ({error}): {expected}") from None

    def _checked(self, members: list[zipfile.ZipInfo]) -> list[zipfile.ZipInfo]:
        if len(members) > limits.CAPSULE_MEMBERS:
            raise ValueError(f"{len(members)} members, expected at most {limits.CAPSULE_MEMBERS}")
        if len({info.filename for info in members}) < len(members):
            raise ValueError("two of its members have the same name")
        end = 0
        for info in sorted(members, key=lambda info: info.header_offset):
            if info.flag_bits & _ENCRYPTED:
                raise ValueError(f"the member {shown(info.filename)} is encrypted")
            if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
                raise ValueError(f"the member {shown(info.filename)} is compressed")
            if info.header_offset < end:
                raise ValueError("its members overlap")
            end = info.header_offset + _LOCAL_HEADER.size + info.file_size
            if end > self._nbytes:
                raise ValueError(f"the member {shown(info.filename)} ends after the file")
        return members

    def __contains__(self, name: str) -> bool:
        """Whether there is a member of this name."""
        return name in self._members

    def nbytes(self, name: str) -> int:
        """The size of a member; -1 if there is none of this name."""
        return self._members[name].file_size if name in self._members else -1

    def read(self, name: str, most: int) -> bytes:
        """Returns a member.

        Raises:
            CapsuleError: it is missing, larger than `most` bytes, or damaged.
            OSError: the file cannot be read.
        """
        nbytes = self.nbytes(name)
        if nbytes < 0:
            raise CapsuleError(f"{self._path}: the capsule has no {name}")
        if nbytes > most:
            raise CapsuleError(f"{self._path}: {name} has {nbytes:,} bytes, expected at most {most:,}")
        return self.mapped(name, name).tobytes()

    def mapped(self, name: str, title: str) -> np.ndarray[Any, Any]:
        """Maps the bytes of a member into memory; read-only.

        Args:
            name: of a member that is there.
            title: what it is, for errors.

        Raises:
            CapsuleError: it is damaged.
            OSError: the file cannot be read, or not be mapped.
        """
        info = self._members[name]
        with self._path.open("rb") as file:
            file.seek(info.header_offset)
            header = file.read(_LOCAL_HEADER.size)
        if len(header) < _LOCAL_HEADER.size or header[:4] != b"PK\x03\x04":
            raise CapsuleError(f"{self._path}: {title} is damaged")
        *_, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
        offset = info.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes
        if offset + info.file_size > self._nbytes:
            raise CapsuleError(f"{self._path}: {title} is cut off")
        if not info.file_size:
            return np.zeros(0, np.uint8)
        data = np.memmap(self._path, np.uint8, "r", offset, info.file_size)
        checksum = 0
        for begin in range(0, info.file_size, CHECK_BYTES):
            checksum = zlib.crc32(data[begin : begin + CHECK_BYTES].data, checksum)
        if checksum != info.CRC:
            raise CapsuleError(f"{self._path}: {title} is damaged: its checksum is wrong")
        return data


WRITE_BYTES = 4 << 20


class CapsuleWriter:
    """Writes one capsule; a context manager. The file has its name once the block has ended without an exception.

    Attributes:
        path: of the file.
        left_out: what is not in the capsule, and why, for its manifest.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Creates a file in the folder of `path`, which only this user can read.

        Args:
            path: of the capsule; a file that exists is replaced.
            max_bytes: largest number of bytes of inputs; those beyond it are left out, the largest first.

        Raises:
            OSError: the file cannot be created.
        """
        self.path = path
        self.left_out: list[str] = []
        self._max_bytes = max_bytes
        self._inputs: list[Input] = []
        PRIVATE.make_folder(path.parent)
        self._partial = path.with_name(f".{path.name}.{os.getpid()}")
        self._partial.unlink(missing_ok=True)
        self._file = os.fdopen(PRIVATE.create(self._partial, os.O_RDWR), "w+b")
        self._zip = zipfile.ZipFile(self._file, "w", zipfile.ZIP_STORED)

    def add(self, name: str, data: bytes) -> None:
        """Adds a member.

        Raises:
            OSError: it cannot be written.
        """
        self._zip.writestr(_info(name), data)

    def add_inputs(self, inputs: Iterable[tuple[Input, Sequence[ArrayLike]]]) -> None:
        """Adds the inputs, each with the elements of its shards; without any, it was too large to be had.

        They become NumPy arrays when they are written, one shard at a time. What has a reason to be left out is.

        Raises:
            OSError: they cannot be written.
        """
        given = list(inputs)
        sizes = [_nbytes(entry) if arrays else 0 for entry, arrays in given]
        # The smallest first, so that as many inputs as possible are there.
        order = sorted(range(len(sizes)), key=sizes.__getitem__)
        totals = itertools.accumulate(sizes[number] for number in order)
        fits = {n for n, total in zip(order, totals, strict=True) if total <= self._max_bytes}
        members = map(INPUT.format, itertools.count())
        for number, (entry, arrays) in enumerate(given):
            reason = entry.left_out
            if not reason and (number not in fits or not arrays):
                reason = f"the inputs kept are limited to {self._max_bytes:,} bytes (max_bytes=)"
                self.left_out.append(f"{entry.path} ({_nbytes(entry):,} bytes): {reason}")
            names = [next(members) for _ in entry.shards]
            if reason:
                names = [""] * len(names)
            else:
                for member, array in zip(names, arrays, strict=True):
                    self._add_array(member, np.asarray(array))
            shards = [dataclasses.replace(s, member=m) for s, m in zip(entry.shards, names, strict=True)]
            self._inputs.append(dataclasses.replace(entry, shards=tuple(shards), left_out=reason))

    def _add_array(self, member: str, array: np.ndarray[Any, Any]) -> None:
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        with self._zip.open(_info(member), "w", force_zip64=True) as file:
            for begin in range(0, len(flat), WRITE_BYTES):
                file.write(flat[begin : begin + WRITE_BYTES].data)

    def finish(self, about: dict[str, Any], failure: Failure) -> None:
        """Adds the manifest, and gives the file its name once it is on the disk.

        Args:
            about: plain data for the manifest: names, versions, devices.
            failure: what failed.

        Raises:
            OSError: it cannot be written.
        """
        manifest = {
            "format": FORMAT,
            **about,
            "failure": dataclasses.asdict(failure),
            "inputs": [dataclasses.asdict(entry) for entry in self._inputs],
            "left_out": self.left_out,
        }
        self.add(MANIFEST, json.dumps(manifest, indent=1).encode())
        self._zip.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._partial.rename(self.path)
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the name too
        finally:
            os.close(folder)

    def discard(self) -> None:
        """Removes the unfinished file. Does nothing after `finish`."""
        with contextlib.suppress(OSError, ValueError):  # a full disk; a member that is not finished
            self._zip.close()
        with contextlib.suppress(OSError):  # of a full disk too; it is closed all the same
            self._file.close()
        self._partial.unlink(missing_ok=True)


def _info(name: str) -> zipfile.ZipInfo:
    return zipfile.ZipInfo(name)  # of the year 1980: equal capsules are equal files


def _nbytes(entry: Input) -> int:
    return sum(math.prod(shard.shape) for shard in entry.shards) * BY_NAME[entry.dtype].itemsize

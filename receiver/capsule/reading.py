"""Reads capsules, which may come from anybody: nothing is unpickled, and every size is checked before it is used."""

from __future__ import annotations

import json
import math
import os
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from hostcallback.receiver import limits
from hostcallback.receiver.capsule.file_format import (
    FORMAT,
    MANIFEST,
    MESSAGES,
    REPORT,
    CapsuleError,
    Failure,
    Input,
    Shard,
)
from hostcallback.receiver.wire.dtypes import BY_NAME, dtype_of

_LOCAL_HEADER = struct.Struct("<4s5H3L2H")
CHECK_BYTES = 16 << 20


class Capsule:
    """A capsule that `hcb.capsule` wrote. Only the arrays that are asked for are read. Any thread.

    Attributes:
        path: of the file.
        name: of the step.
        call: number of the call that failed, from 0.
        failure: what failed.
        inputs: the arrays of the call, in the order of the program's arguments.
        left_out: what is not in the capsule, and why.
        about: the rest of the manifest: versions, devices, environment, time.

    Example:
        capsule = receiver.Capsule("capsules/train_step-17.hcb")
        print(capsule.failure.text, capsule.inputs[0].path)
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Reads the manifest.

        Raises:
            CapsuleError: the file is no capsule that can be read.
            OSError: the file cannot be read.
        """
        self.path = Path(path)
        self._nbytes = self.path.stat().st_size
        try:
            with zipfile.ZipFile(self.path) as file:
                self._members = {info.filename: info for info in self._checked(file.infolist())}
        except (zipfile.BadZipFile, EOFError, struct.error, ValueError, NotImplementedError) as error:
            raise CapsuleError(f"{self.path}: not a capsule, or cut off: {error}") from None
        manifest = self._manifest()
        try:
            self.name = _text(manifest, "name")
            self.call = _number(manifest, "call")
            self.failure = Failure(
                *(
                    _text(manifest["failure"], key)
                    for key in ("kind", "name", "source_line", "text", "device")
                )
            )
            entries = manifest["inputs"]
            if not isinstance(entries, list) or len(entries) > limits.CAPSULE_MEMBERS:
                raise ValueError("the list of inputs")
            self.inputs = [self._input(entry) for entry in entries]
            self.left_out = [str(text) for text in manifest["left_out"]]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CapsuleError(f"{self.path}: the manifest is damaged: {error}") from None
        known = ("format", "name", "call", "failure", "inputs", "left_out")
        self.about: dict[str, Any] = {key: value for key, value in manifest.items() if key not in known}

    def _checked(self, members: list[zipfile.ZipInfo]) -> list[zipfile.ZipInfo]:
        if len(members) > limits.CAPSULE_MEMBERS:
            raise ValueError(f"{len(members)} members, expected at most {limits.CAPSULE_MEMBERS}")
        total = 0
        for info in members:
            if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
                raise ValueError(f"the member {info.filename[:80]!r} is compressed")
            total += info.file_size
        if total > self._nbytes or len({info.filename for info in members}) < len(members):
            raise ValueError("its members overlap")
        return members

    def _manifest(self) -> dict[str, Any]:
        data = self.member(MANIFEST, limits.CAPSULE_MANIFEST_BYTES)
        try:
            manifest = json.loads(data)
        except (ValueError, RecursionError):
            raise CapsuleError(f"{self.path}: the manifest is no JSON") from None
        if not isinstance(manifest, dict) or not isinstance(manifest.get("format"), int):
            raise CapsuleError(f"{self.path}: the manifest has no format number")
        if manifest["format"] > FORMAT:
            raise CapsuleError(
                f"{self.path}: the capsule has format {manifest['format']}, and this version of hostcallback reads "
                f"formats up to {FORMAT}: upgrade hostcallback (pip install --upgrade hostcallback)"
            )
        return manifest

    def _input(self, entry: dict[str, Any]) -> Input:
        shape = _dimensions(entry["shape"])
        dtype = _text(entry, "dtype")
        if dtype not in BY_NAME:
            raise ValueError(f"the dtype {dtype[:80]!r}")
        if not isinstance(entry["shards"], list) or len(entry["shards"]) > limits.CAPSULE_MEMBERS:
            raise ValueError("the list of shards")
        shards = tuple(
            Shard(_text(s, "member"), _number(s, "device"), _dimensions(s["start"]), _dimensions(s["shape"]))
            for s in entry["shards"]
        )
        for shard in shards:
            self._check_shard(shard, shape, BY_NAME[dtype].itemsize)
        mesh = tuple((str(name), _size(size)) for name, size in entry["mesh"])
        spec = tuple(tuple(str(name) for name in names) for names in entry["spec"])
        return Input(_text(entry, "path"), dtype, shape, shards, mesh, spec, _text(entry, "left_out"))

    def _check_shard(self, shard: Shard, shape: tuple[int, ...], itemsize: int) -> None:
        ends = [begin + size for begin, size in zip(shard.start, shard.shape, strict=True)]
        if len(ends) != len(shape) or any(end > size for end, size in zip(ends, shape, strict=True)):
            raise ValueError("a shard is outside of its array")
        if not shard.member:
            return
        info = self._members.get(shard.member)
        if info is None or info.file_size != math.prod(shard.shape) * itemsize:
            raise ValueError(f"the member {shard.member[:80]!r} does not have its array's size")

    def has(self, member: str) -> bool:
        """Whether the capsule has a member."""
        return member in self._members

    def member(self, name: str, most: int = limits.CAPSULE_MEMBER_BYTES) -> bytes:
        """Returns a member.

        Raises:
            CapsuleError: it is missing, larger than `most` bytes, or damaged.
            OSError: the file cannot be read.
        """
        info = self._members.get(name)
        if info is None:
            raise CapsuleError(f"{self.path}: the capsule has no {name}")
        if info.file_size > most:
            raise CapsuleError(f"{self.path}: {name} has {info.file_size:,} bytes, expected at most {most:,}")
        try:
            with zipfile.ZipFile(self.path) as file:
                return file.read(info)
        except (zipfile.BadZipFile, EOFError, struct.error) as error:
            raise CapsuleError(f"{self.path}: {name} is damaged: {error}") from None

    def array(self, entry: Input, shard: Shard | None = None) -> np.ndarray[Any, Any]:
        """Maps the elements of an input, or of one shard of it, into memory; read-only.

        Args:
            entry: one of `inputs`.
            shard: one of its shards; None for the only one.

        Raises:
            CapsuleError: they were left out, or are damaged, or the input has several shards and none is given.
            OSError: the file cannot be read.
        """
        if shard is None:
            if len(entry.shards) != 1:
                raise CapsuleError(
                    f"{entry.path} has {len(entry.shards)} shards: array(entry, entry.shards[0])"
                )
            shard = entry.shards[0]
        if not shard.member:
            raise CapsuleError(f"{self.path}: {entry.path} is not in the capsule: {entry.left_out}")
        info = self._members[shard.member]
        with self.path.open("rb") as file:
            file.seek(info.header_offset)
            header = file.read(_LOCAL_HEADER.size)
        if len(header) < _LOCAL_HEADER.size or header[:4] != b"PK\x03\x04":
            raise CapsuleError(f"{self.path}: {shard.member} is damaged")
        *_, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
        offset = info.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes
        if offset + info.file_size > self._nbytes:
            raise CapsuleError(f"{self.path}: {shard.member} is cut off")
        dtype = dtype_of(BY_NAME[entry.dtype].code)
        if not info.file_size:
            return np.zeros(shard.shape, dtype)
        data = np.memmap(self.path, np.uint8, "r", offset, info.file_size)
        checksum = 0
        for begin in range(0, info.file_size, CHECK_BYTES):
            checksum = zlib.crc32(data[begin : begin + CHECK_BYTES].data, checksum)
        if checksum != info.CRC:
            raise CapsuleError(f"{self.path}: {entry.path} is damaged: its checksum is wrong")
        return data.view(dtype).reshape(shard.shape)

    @property
    def report(self) -> str:
        """The report of the failure, as the program's user got it; empty if it was left out."""
        return self._optional(REPORT)

    @property
    def messages(self) -> list[str]:
        """The last messages before the failure, if the receiver recorded: one JSON object each, as from `hcb cat`."""
        return self._optional(MESSAGES).splitlines()

    def _optional(self, name: str) -> str:
        return self.member(name, limits.CAPSULE_TEXT_BYTES).decode(errors="replace") if self.has(name) else ""


def _text(entry: dict[str, Any], key: str) -> str:
    if not isinstance(entry[key], str):
        raise ValueError(f"{key} is {str(entry[key])[:80]}, expected a text")
    return str(entry[key])


def _number(entry: dict[str, Any], key: str) -> int:
    return _size(entry[key])


def _size(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{str(value)[:80]}, expected a whole number")
    return value


def _dimensions(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or len(values) > limits.CAPSULE_DIMENSIONS:
        raise ValueError(f"the shape {str(values)[:80]}")
    return tuple(_size(value) for value in values)

"""Reads capsules, which may come from anybody: nothing is unpickled, and every size is checked before it is used."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np

from hostcallback.receiver import limits
from hostcallback.receiver.capsule import file_format
from hostcallback.receiver.capsule.file_format import Input, Shard
from hostcallback.receiver.public_names import hide_frames
from hostcallback.receiver.wire.array_types import BY_NAME, dtype_of


class Capsule:
    """A capsule that `hcb.capsule` wrote. Only the arrays that are asked for are read. Any thread.

    Attributes:
        path: of the file.
        name: of the step.
        failure: what failed.
        inputs: the arrays of the call, in the order of the program's arguments.
        left_out: what is not in the capsule, and why.
        about: the rest of the manifest: versions, devices, environment, time.

    Example:
        for path in pathlib.Path("capsules").glob("*.hcb"):
            capsule = receiver.Capsule(path)
            print(capsule.failure.text, [entry.path for entry in capsule.inputs])
    """

    @hide_frames
    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Reads the manifest.

        Raises:
            CapsuleError: the file is no capsule that can be read.
            OSError: the file cannot be read.
        """
        self.path = Path(path)
        self._archive = file_format.Archive(self.path)
        manifest = self._manifest()
        try:
            self.name = _text(manifest, "name")
            self.failure = file_format.Failure(
                *(
                    _text(manifest["failure"], key)
                    for key in ("kind", "name", "source_line", "text", "device")
                )
            )
            entries = manifest["inputs"]
            if not isinstance(entries, list) or len(entries) > limits.CAPSULE_MEMBERS:
                raise ValueError("the list of inputs")
            self.inputs = [self._input(entry) for entry in entries]
            self.left_out = list(_texts(manifest["left_out"]))
        except KeyError as error:
            raise file_format.CapsuleError(
                f"{self.path}: the manifest is damaged: it has no {error}"
            ) from None
        except (TypeError, ValueError, AttributeError) as error:
            raise file_format.CapsuleError(f"{self.path}: the manifest is damaged: {error}") from None
        known = ("format", "name", "failure", "inputs", "left_out")
        self.about: dict[str, Any] = {key: value for key, value in manifest.items() if key not in known}

    def _manifest(self) -> dict[str, Any]:
        data = self.member(file_format.MANIFEST, limits.CAPSULE_MANIFEST_BYTES)
        try:
            manifest = json.loads(data)
        except (ValueError, RecursionError):
            raise file_format.CapsuleError(f"{self.path}: the manifest is no JSON") from None
        if not isinstance(manifest, dict) or type(manifest.get("format")) is not int:
            raise file_format.CapsuleError(f"{self.path}: the manifest has no format number")
        if manifest["format"] < 1:
            raise file_format.CapsuleError(
                f"{self.path}: the manifest is damaged: format {manifest['format']}"
            )
        if manifest["format"] > file_format.FORMAT:
            raise file_format.CapsuleError(
                f"{self.path}: the capsule has format {manifest['format']}, and this version of hostcallback reads "
                f"formats up to {file_format.FORMAT}: upgrade hostcallback (pip install --upgrade hostcallback)"
            )
        return manifest

    def _input(self, entry: dict[str, Any]) -> Input:
        shape = _dimensions(entry["shape"])
        dtype = _text(entry, "dtype")
        if dtype not in BY_NAME:
            raise ValueError(f"the dtype {file_format.shown(dtype)}")
        if not isinstance(entry["shards"], list) or len(entry["shards"]) > limits.CAPSULE_MEMBERS:
            raise ValueError("the list of shards")
        shards = tuple(
            Shard(_text(s, "member"), _size(s["device"]), _dimensions(s["start"]), _dimensions(s["shape"]))
            for s in entry["shards"]
        )
        for shard in shards:
            self._check_shard(shard, shape, BY_NAME[dtype].itemsize)
        if sum(math.prod(shard.shape) for shard in shards) > math.prod(shape):
            raise ValueError("the shards of an input overlap")
        mesh = tuple((_texts([name])[0], _size(size)) for name, size in entry["mesh"])
        spec = tuple(_texts(names) for names in entry["spec"])
        return Input(_text(entry, "path"), dtype, shape, shards, mesh, spec, _text(entry, "left_out"))

    def _check_shard(self, shard: Shard, shape: tuple[int, ...], itemsize: int) -> None:
        ends = [begin + size for begin, size in zip(shard.start, shard.shape, strict=True)]
        if len(ends) != len(shape) or any(end > size for end, size in zip(ends, shape, strict=True)):
            raise ValueError("a shard is outside of its array")
        if not shard.member:
            return
        if self._archive.nbytes(shard.member) != math.prod(shard.shape) * itemsize:
            raise ValueError(f"the member {file_format.shown(shard.member)} does not have its array's size")

    def has(self, member: str) -> bool:
        """Whether the capsule has a member."""
        return member in self._archive

    def member(self, name: str, most: int = limits.CAPSULE_MEMBER_BYTES) -> bytes:
        """Returns a member.

        Raises:
            CapsuleError: it is missing, larger than `most` bytes, or damaged.
            OSError: the file cannot be read.
        """
        return self._archive.read(name, most)

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
                raise file_format.CapsuleError(
                    f"{entry.path} has {len(entry.shards)} shards: array(entry, entry.shards[0])"
                )
            shard = entry.shards[0]
        if not shard.member:
            raise file_format.CapsuleError(
                f"{self.path}: {entry.path} is not in the capsule: {entry.left_out}"
            )
        data = self._archive.mapped(shard.member, entry.path)
        if (
            entry.dtype == "bool" and data.size and data.max() > 1
        ):  # such a byte is undefined for NumPy and XLA
            raise file_format.CapsuleError(
                f"{self.path}: {entry.path} is damaged: a bool has the byte {data.max()}, expected 0 or 1"
            )
        try:
            return data.view(dtype_of(BY_NAME[entry.dtype].code)).reshape(shard.shape)
        except (ValueError, ImportError) as error:  # NumPy has a largest number of dimensions and of elements
            raise file_format.CapsuleError(f"{self.path}: {entry.path} cannot be an array: {error}") from None

    @property
    def report(self) -> str:
        """The report of the failure, as the program's user got it; empty if it was left out."""
        return self._optional(file_format.REPORT)

    @property
    def messages(self) -> list[str]:
        """The last messages of the log, if the receiver recorded: one JSON object each, as from `hcb cat`."""
        return self._optional(file_format.MESSAGES).splitlines()

    def _optional(self, name: str) -> str:
        return self.member(name, limits.CAPSULE_TEXT_BYTES).decode(errors="replace") if self.has(name) else ""


def _text(entry: dict[str, Any], key: str) -> str:
    return _texts([entry[key]])[0]


def _texts(values: Any) -> tuple[str, ...]:
    if not isinstance(values, list):
        raise ValueError(f"{file_format.shown(values)}, expected a list of texts")
    for value in values:
        if not isinstance(value, str):
            raise ValueError(f"{file_format.shown(value)}, expected a text")
    return tuple(values)


def _size(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{file_format.shown(value)}, expected a whole number")
    return value


def _dimensions(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or len(values) > limits.CAPSULE_DIMENSIONS:
        raise ValueError(f"the shape {file_format.shown(values)}")
    return tuple(_size(value) for value in values)


MAX_DEVICES = 4096
"""A capsule from elsewhere may ask for any number of devices. Each takes memory."""


def prepare_devices(capsule: Capsule, at_least: int = 1) -> None:
    """Sets the variables with which JAX has as many CPU devices as the program had, and its 64-bit types.

    Call it before JAX is imported.

    Args:
        capsule: the capsule.
        at_least: number of devices that are needed besides.

    Raises:
        CapsuleError: the program ran in several processes.
    """
    process = capsule.about.get("process")
    if isinstance(process, dict) and process.get("count", 1) != 1:
        processes, index = file_format.shown(process["count"]), file_format.shown(process.get("index"))
        raise file_format.CapsuleError(
            f"{capsule.path}: the program ran in {processes} processes, and the capsule has the shards of process "
            f"{index}: its inputs can be read (receiver.Capsule), and it cannot be run here"
        )
    devices = capsule.about.get("devices")
    count = max(at_least, min(len(devices), MAX_DEVICES) if isinstance(devices, list) else 1)
    flags = os.environ.get("XLA_FLAGS", "")
    if count > 1 and "xla_force_host_platform_device_count" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={count}".strip()
    if capsule.about.get("x64") is True:
        os.environ.setdefault("JAX_ENABLE_X64", "1")

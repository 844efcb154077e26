"""Writes a capsule atomically: the file appears complete or not at all, even if the process dies."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import os
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from hostcallback.receiver.capsule.file_format import FORMAT, INPUT, MANIFEST, Failure, Input
from hostcallback.receiver.files import PRIVATE
from hostcallback.receiver.wire.array_types import BY_NAME

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
        self._file.close()
        self._partial.unlink(missing_ok=True)


def _info(name: str) -> zipfile.ZipInfo:
    return zipfile.ZipInfo(name)  # of the year 1980: equal capsules are equal files


def _nbytes(entry: Input) -> int:
    return sum(math.prod(shard.shape) for shard in entry.shards) * BY_NAME[entry.dtype].itemsize

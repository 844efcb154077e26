"""Permissions of files and folders that are created for messages, and the base class of what `with` closes."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from hostcallback.receiver.public_names import hide_frames

_OWNER = 0o600
_OTHERS = 0o066


def paths_of(given: Any, expected: str) -> list[str | os.PathLike[str]]:
    """Returns a path, or several, as a list.

    Raises:
        TypeError: it is something else than `expected`.
        ValueError: a path is empty, as a variable that is not set leaves it.
    """
    found = [given] if isinstance(given, str | os.PathLike) or not isinstance(given, Iterable) else [*given]
    for path in found:
        if not isinstance(path, str | os.PathLike):
            raise TypeError(f"got {type(path).__name__} {path!r:.80}, expected {expected}")
        if not os.fspath(path):
            raise ValueError(f"got an empty path, expected {expected}")
    return found


def refuse_unwritable(path: Path, what: str, where: str = "") -> None:
    """Refuses a path below which nothing can be made. Leaves nothing behind.

    Args:
        path: a file or folder, which need not exist.
        what: what would write it; begins the text.
        where: ends the text, such as the user's line.

    Raises:
        OSError: the nearest path that exists is a file, or no file can be made in it; the file may not be written.
    """
    nearest = path.absolute()
    while not nearest.exists():
        nearest = nearest.parent
    try:
        if nearest.is_dir():
            tempfile.TemporaryFile(dir=nearest).close()  # without a name; only trying tells, as in /proc
        elif nearest != path.absolute():
            raise NotADirectoryError(errno.ENOTDIR, f"{nearest} is a file, expected a folder")
        elif not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        text = f"{what} cannot write this: {error.strerror}: give a path that you may write to{where}"
        raise type(error)(error.errno, text, str(path)) from None


@dataclass(frozen=True, slots=True)
class Permissions:
    """Permissions of newly created files and folders. Existing ones keep theirs.

    Attributes:
        mode: of files. Folders have it with the right to enter for everyone who may read.
        group: id of the group that they belong to; None for the system's choice.
    """

    mode: int = _OWNER
    group: int | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for a mode that a log cannot have."""
        if (
            not isinstance(self.mode, int)
            or self.mode & _OWNER != _OWNER
            or self.mode & ~(_OWNER | _OTHERS)
            or self.mode & 0o022 & ~(self.mode >> 1)
        ):
            shown = f"0o{self.mode:o}" if isinstance(self.mode, int) and self.mode >= 0 else repr(self.mode)
            raise ValueError(
                f"mode is {shown}, expected permissions of files that their owner may read and write, such as 0o600 or "
                "0o640"
            )

    @property
    def folder_mode(self) -> int:
        """Mode of folders: 0o750 for files of 0o640."""
        return self.mode | (self.mode & 0o444) >> 2

    def make_folder(self, path: Path) -> None:
        """Creates a folder and those above it, if they do not exist.

        Raises:
            OSError: one cannot be created.
        """
        try:
            path.mkdir(mode=0o700)
        except FileNotFoundError:
            if path.parent.is_dir():  # a file system in which no folders can be created, such as /proc
                raise
            self.make_folder(path.parent)
            self.make_folder(path)
            return
        except OSError:
            if not path.is_dir():
                raise
            return
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            self._apply(descriptor, self.folder_mode)
        finally:
            os.close(descriptor)

    def create(self, path: Path, flags: int) -> int:
        """Creates a file, which must not exist, and opens it with `flags`. Returns the descriptor.

        Raises:
            OSError: it cannot be created.
        """
        descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _OWNER)
        try:
            self._apply(descriptor, self.mode)
        except OSError:
            os.close(descriptor)
            with contextlib.suppress(OSError):
                path.unlink()
            raise
        return descriptor

    def open(self, path: Path, flags: int) -> int:
        """Opens a file with `flags`, and creates it if it does not exist. Returns the descriptor.

        Raises:
            OSError: it cannot be opened or created.
        """
        with contextlib.suppress(FileExistsError):
            return self.create(path, flags)
        return os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, _OWNER)

    def _apply(self, descriptor: int, mode: int) -> None:
        # Not with the mode of `open` and `mkdir`: the process's umask would take permissions away that were asked for.
        if self.group is not None:
            os.fchown(descriptor, -1, self.group)
        if mode & 0o077:
            os.fchmod(descriptor, mode)


PRIVATE = Permissions()
"""Only the user may read and write."""


def write_private(path: Path, data: bytes, *, sync: bool = False) -> None:
    """Writes a file that only its user can read, in place of one that exists.

    Raises:
        OSError: it cannot be written.
    """
    path.unlink(missing_ok=True)
    with os.fdopen(PRIVATE.create(path, os.O_WRONLY), "wb") as file:
        file.write(data)
        if sync:
            file.flush()
            os.fsync(file.fileno())


class Closing:
    """A context manager that calls `close` at the end of its block, also after an error."""

    __slots__ = ()

    def close(self) -> None:
        """Releases the resources."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        """Returns the object."""
        return self

    @hide_frames
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        """Calls `close`."""
        self.close()

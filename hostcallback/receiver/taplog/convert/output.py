"""Shared by all conversions: atomic output files, and errors."""

from __future__ import annotations

import gzip
import io
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from hostcallback.receiver.errors import HostCallbackError


class ConvertError(HostCallbackError):
    """A log cannot be converted as the user asked; the text tells why."""


STDOUT = "-"


@contextmanager
def new_file(path: Path, *, force: bool) -> Iterator[Path]:
    """Yields a temporary path, whose file replaces `path` if the block succeeds, and is removed if not.

    Args:
        path: of the result.
        force: whether to replace an existing file.

    Raises:
        ConvertError: `path` exists.
        OSError: it cannot be written.
    """
    if path.is_dir() or (path.exists() and not force):
        cure = "name a file in it" if path.is_dir() else "give another name, or --force to replace it"
        raise ConvertError(f"{path} is {'a folder' if path.is_dir() else 'an existing file'}: {cure}")
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=_folder_of(path)) as folder:
        written = Path(folder, path.name)
        yield written
        os.replace(written, path)


@contextmanager
def new_folder(path: Path, pattern: str, *, force: bool) -> Iterator[Path]:
    """Yields a temporary folder, whose files move to `path` if the block succeeds.

    Args:
        path: the folder, created if it does not exist.
        pattern: of the names of written files.
        force: whether to remove such files of an earlier conversion; other files stay in any case.

    Raises:
        ConvertError: such files exist, or `path` is not a folder.
        OSError: it cannot be written.
    """
    if path.exists() and not path.is_dir():
        raise ConvertError(f"{path} is a file: name a folder")
    earlier = sorted(path.rglob(pattern)) if path.exists() else []
    if earlier and not force:
        raise ConvertError(
            f"{path} has {earlier[0].name} already: give another name, or --force to replace it"
        )
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=_folder_of(path)) as folder:
        yield Path(folder)
        for file in earlier:
            file.unlink()
        for file in sorted(Path(folder).rglob(pattern)):
            place = path / file.relative_to(folder)
            place.parent.mkdir(parents=True, exist_ok=True)
            os.replace(file, place)


def _folder_of(path: Path) -> Path:
    folder = path.absolute().parent
    folder.stat()  # its error names this folder; tempfile's would name a temporary file
    return folder


@contextmanager
def new_text(target: str, *, force: bool) -> Iterator[TextIO]:
    """Opens an output for text: gzip if the name ends in .gz; `-` is the standard output. See `new_file`."""
    if target == STDOUT:
        yield sys.stdout
        return
    with new_file(Path(target), force=force) as path:
        if path.suffix == ".gz":
            with gzip.open(path, "wb", compresslevel=6) as packed, io.TextIOWrapper(packed, "utf-8") as text:
                yield text
        else:
            with path.open("w", encoding="utf-8") as text:
                yield text

"""Where conversions write to: a file that is there as a whole or not at all, or the standard output."""

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

from receiver.taplog.convert.errors import ConvertError

STDOUT = "-"


@contextmanager
def new_file(path: Path, *, force: bool) -> Iterator[Path]:
    """Gives a file to write beside `path`, which becomes `path` if the block ends well, and is removed if not.

    Args:
        path: of the result.
        force: whether it may replace a file.

    Raises:
        ConvertError: there is something by that name.
        OSError: it cannot be written.
    """
    if path.is_dir() or (path.exists() and not force):
        cure = "name a file in it" if path.is_dir() else "give another name, or --force to replace it"
        raise ConvertError(f"{path} is {'a folder' if path.is_dir() else 'there already'}: {cure}")
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=_folder_of(path)) as folder:
        written = Path(folder, path.name)
        yield written
        os.replace(written, path)


@contextmanager
def new_folder(path: Path, pattern: str, *, force: bool) -> Iterator[Path]:
    """Gives a folder to write files to, which are in `path` if the block ends well.

    Args:
        path: a folder, which is made if it is not there.
        pattern: of the names of files that are written.
        force: whether to remove such files, of an earlier conversion; others stay in any case.

    Raises:
        ConvertError: there are such files, or `path` is no folder.
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
    folder.stat()  # says what is missing; what tempfile says names a file that nobody asked for
    return folder


@contextmanager
def new_text(target: str, *, force: bool) -> Iterator[TextIO]:
    """As `new_file`, opened for text: gzip where the name ends in .gz; `-` is the standard output."""
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

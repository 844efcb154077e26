"""Refuses a second copy of the package in one process.

Two copies would read the same rings, and each would wait for messages that the other has taken. A second copy is
made if the package's modules are removed from `sys.modules` and imported again, from the same path or another one.
"""

from __future__ import annotations

import sys
from typing import Any

_HERE: Any = globals().get("_HERE") or object()  # survives `importlib.reload`, which is allowed

_MARK = "_hostcallback_copy"


def refuse_second_copy(file: str) -> None:
    """Marks this process: the package was imported from `file`.

    Raises:
        ImportError: another copy marked it before.
    """
    # The mark is in `sys`, because a purge of `sys.modules` leaves `sys` in place.
    copy, first = sys.__dict__.setdefault(_MARK, (_HERE, file))
    if copy is not _HERE:
        where = f"from {first} and again" if first == file else f"from {first} and now"
        raise ImportError(
            f"hostcallback is imported twice in this process, {where} from {file}: two copies would take each other's "
            "messages. Something removed the package from sys.modules, or changed sys.path. Restart the process (in a "
            "notebook, the kernel) to load changed code",
            name="hostcallback",
            path=file,
        )

"""Refuses a second copy of the package in one process.

Two copies would read the same rings, and each would wait for messages that the other has taken. A copy comes about when
the package's modules are removed from `sys.modules` and imported again, from the same place or from another one.
"""

from __future__ import annotations

import sys
from typing import Any

_HERE: Any = globals().get("_HERE") or object()  # the same one after `importlib.reload`

_MARK = "_hostcallback_copy"


def refuse_second_copy(file: str) -> None:
    """Marks this process as one that has imported the package from `file`.

    Raises:
        ImportError: another copy has done so.
    """
    # In `sys`, which outlives a purge of `sys.modules`.
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

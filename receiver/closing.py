"""Base class of objects that a `with` block closes at its end."""

from __future__ import annotations

from types import TracebackType
from typing import Self


class Closing:
    """A context manager that calls `close` at the end of its block, also after an error."""

    __slots__ = ()

    def close(self) -> None:
        """Releases the resources."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        """Returns the object."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        """Calls `close`."""
        self.close()

"""What is closed at the end of a `with` block."""

from __future__ import annotations

from types import TracebackType
from typing import Self


class Closing:
    """A context manager that is closed where its block ends, however it ends."""

    __slots__ = ()

    def close(self) -> None:
        """Ends it."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        """Closes it."""
        self.close()

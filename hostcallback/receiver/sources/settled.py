"""Tells cheaply whether anything was emitted since everything was last found delivered. For threads that poll.

Rings count emissions in the native library; queues note theirs here. A look takes 0.2 us.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

from hostcallback.receiver.native import bindings as native_library


class Settled(NamedTuple):
    """The functions of this process, native ones where the library is there. None of them waits.

    Attributes:
        emissions: returns a number that changes with each emission.
        settle: notes that all is delivered that was emitted when `emissions` returned its argument.
        is_settled: returns whether nothing was emitted since.
        note_emission: notes that a queue has a further message, for `emissions`.
    """

    emissions: Callable[[], int]
    settle: Callable[[int], None]
    is_settled: Callable[[], int]
    note_emission: Callable[[], None]


@functools.cache
def settled() -> Settled:
    """Returns the functions. Any thread."""
    if not native_library.available():
        return _InPython().functions()
    library = native_library.load_holding_lock()
    return Settled(
        library.hcb_emissions, library.hcb_settle, library.hcb_is_settled, library.hcb_note_emission
    )


class _InPython:
    # Without a lock: two threads that note at a time may leave the lower number, which differs from the settled one.

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._emissions = self._settled = 0

    def functions(self) -> Settled:
        return Settled(lambda: self._emissions, self._settle, self._is_settled, self._note)

    def _settle(self, emissions: int) -> None:
        self._settled = emissions

    def _is_settled(self) -> bool:
        return self._emissions == self._settled

    def _note(self) -> None:
        self._emissions = next(self._numbers)

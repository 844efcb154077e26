"""The messages of all taps during a test, by name: the fixture `taps`."""

from __future__ import annotations

import difflib
import threading
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Self

import numpy as np

from hostcallback.api.barrier import barrier_wait, wait_for_taps
from hostcallback.receiver import tap_name
from hostcallback.receiver.messages.message import Message
from hostcallback.receiver.runtime.dispatch.scope_sinks import ScopeSinks
from hostcallback.receiver.runtime.runtime import runtime
from hostcallback.receiver.taplog.columns.log_data import UnknownTapError


class CapturedTaps(Mapping[str, list[Any]]):
    """A mapping of taps' names to the values that they sent, in order of delivery (of a device, in order of emission).

    A value is the tapped pytree, of numpy arrays; of shape () they are numpy scalars. Reading waits for the taps of
    all programs so far and raises their failures, as `hcb.barrier_wait()` does. Tap functions, prints and receivers
    work as without it. Failed checks are no messages. The messages of a receiver with `process=True` are not here.

    Example:
        def test_loss(taps):
            train()
            assert taps["loss"] == [3.0, 2.0, 1.0]
    """

    def __init__(self) -> None:
        """Captures nothing until it is entered."""
        self._lock = threading.Lock()  # protects `_values`
        self._values: dict[str, list[Any]] = {}
        self._observer = ScopeSinks([self._take])

    def __enter__(self) -> Self:
        """Begins to capture. Waits for earlier taps."""
        barrier_wait()
        runtime.observe(self._observer, True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        """Ends capturing. What was captured can still be read."""
        wait_for_taps()
        runtime.observe(self._observer, False)

    def _take(self, message: Message) -> None:
        consumer = message.consumer
        if consumer.is_check:
            return
        # Copies, because a tap function may change its arrays.
        arrays = [np.array(array) for array in message.arrays]
        rows = [[array[row] for array in arrays] for row in range(message.stacked)] or [arrays]
        values = [consumer.unflatten([array[()] for array in row]) for row in rows]
        with self._lock:
            self._values.setdefault(consumer.name, []).extend(values)

    def __getitem__(self, name: str) -> list[Any]:
        """The values of the tap of that name; that of an unnamed tap may be given without its line.

        Raises:
            UnknownTapError: no tap of that name sent anything; the text lists those that did.
            TapFunctionException: taps failed.
        """
        __tracebackhide__ = True
        values: list[Any] = self.values(name)
        return values

    def values(self, name: str | None = None) -> Any:
        """The values of one tap, as `taps[name]`; without a name, the lists of all taps, as a mapping's."""
        __tracebackhide__ = True
        barrier_wait()
        with self._lock:
            if name is None:
                return [list(values) for values in self._values.values()]
            there = [*self._values]
            if name in self._values:
                return list(self._values[name])
            near = [known for known in there if tap_name.matches(known, name)]
            if len(near) == 1:
                return list(self._values[near[0]])
        if near:
            raise UnknownTapError(f"{name!r} may be one of {', '.join(map(repr, near))}: give the whole name")
        similar = difflib.get_close_matches(str(name), there, n=1)
        meant = f" Did you mean {similar[0]!r}?" if similar else ""
        listed = ", ".join(map(repr, there)) or "none"
        raise UnknownTapError(f"no tap {name!r} sent a message; those that did are {listed}.{meant}")

    @property
    def names(self) -> list[str]:
        """The names of the taps that sent messages, in order of their first one."""
        barrier_wait()
        with self._lock:
            return [*self._values]

    def clear(self) -> None:
        """Forgets what was captured so far. Waits for it first."""
        barrier_wait()
        with self._lock:
            self._values.clear()

    def assert_close(self, name: str, expected: Any, *, rtol: float = 1e-6, atol: float = 0.0) -> None:
        """Asserts that the values of a tap are close to `expected`, stacked along a new first axis.

        Args:
            name: of the tap.
            expected: array-like of shape (messages, *shape of a value).
            rtol: relative tolerance, of `expected`.
            atol: absolute tolerance.

        Raises:
            AssertionError: they differ in shape or value; the text shows where.
            UnknownTapError: no tap of that name sent anything.
        """
        __tracebackhide__ = True
        found = np.asarray(self.values(name))
        wanted = np.asarray(expected)
        if found.shape != wanted.shape:
            raise AssertionError(
                f"tap {name!r} sent values of shape {found.shape} (messages first), expected {wanted.shape}:\n"
                f"{found}"
            )
        np.testing.assert_allclose(found, wanted, rtol=rtol, atol=atol, err_msg=f"the values of tap {name!r}")

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        """The names, with the number of values of each."""
        with self._lock:
            counted = ", ".join(f"{name!r}: {len(values)} values" for name, values in self._values.items())
        return f"taps({counted})"

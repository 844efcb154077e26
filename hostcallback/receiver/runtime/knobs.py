"""Knobs: the named values of this process that its programs read and its user changes, with their types and bounds."""

from __future__ import annotations

import difflib
import threading
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hostcallback.receiver import processes
from hostcallback.receiver.errors import HostCallbackError
from hostcallback.receiver.runtime.cells import Cell, CellSpec, cell_of

PREFIX = "knob "
"""Begins the name of a knob's cell."""


class UnknownKnobError(HostCallbackError, KeyError):
    """No knob has that name; the text has the nearest ones."""

    def __str__(self) -> str:
        """The text, without the quotes of a KeyError."""
        return str(self.args[0])


@dataclass(frozen=True)
class Knob:
    """A knob as `hostcallback.knob` declared it.

    Attributes:
        name: its name.
        cell: has its value.
        min: the smallest value allowed; None for no bound.
        max: the largest one.
        source_line: where it was declared first.
    """

    name: str
    cell: Cell
    min: float | None
    max: float | None
    source_line: str

    def checked(self, value: Any) -> np.ndarray[Any, Any]:
        """Returns a value as an array of the knob's dtype and shape.

        Raises:
            TypeError: it is of another kind, such as a text, or a fraction for an integer.
            ValueError: it has another shape, is NaN, does not fit the dtype, or is out of bounds.
        """
        spec, given = self.cell.spec, np.asarray(value)
        dtype = self.cell.value.dtype
        what = f"the knob {self.name!r}, declared at {self.source_line},"
        if given.dtype.kind not in "biufcV" or not _is_of_kind(given, dtype):
            raise TypeError(f"{what} is {spec.dtype}, got {value!r:.80}: set it to a number of that kind")
        if given.shape != spec.shape:
            raise ValueError(
                f"{what} has the shape {spec.shape}, got {given.shape}: set all of it at once, as an array of its shape"
            )
        with np.errstate(over="ignore", invalid="ignore"):
            made = given.astype(dtype)
        wide = _wide(made)
        if wide.dtype.kind in "fc" and np.isnan(wide).any():
            raise ValueError(f"{what} cannot be NaN, got {value!r:.80}")
        if wide.dtype.kind in "iuf" and not _is_same(_wide(given), wide):
            raise ValueError(f"{what} is {spec.dtype}, into which {value!r:.80} does not fit")
        low, high = (_rounded(bound, dtype) for bound in (self.min, self.max))
        if (low is not None and (wide < low).any()) or (high is not None and (wide > high).any()):
            raise ValueError(f"{what} is {_bounds(self.min, self.max)}, got {value!r:.80}")
        return made


def _is_of_kind(given: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> bool:
    kinds = {"b": "b", "i": "iu", "u": "iu", "c": "iufcV"}.get(dtype.kind, "iufV")
    if given.dtype.kind in kinds:
        return True
    # A number without a fraction, such as 1e3, is an integer too.
    return dtype.kind in "iu" and given.dtype.kind == "f" and bool((given == np.floor(given)).all())


def _rounded(bound: float | None, dtype: np.dtype[Any]) -> Any:
    # As values are, so that a value at the bound is within it.
    return bound if bound is None or dtype.kind in "biu" else _wide(np.asarray(bound).astype(dtype))


def _wide(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    # Small floating-point types: those of ml_dtypes are of kind V, and compare with Python's numbers in no version.
    is_small = array.dtype.kind == "V" or (array.dtype.kind == "f" and array.dtype.itemsize < 4)
    return array.astype(np.float32) if is_small else array


def _is_same(given: np.ndarray[Any, Any], made: np.ndarray[Any, Any]) -> bool:
    # Integers are equal; floating-point numbers may be rounded, but a finite one stays finite.
    if made.dtype.kind == "f":
        return bool((np.isfinite(made) == np.isfinite(given)).all())
    return bool((given == made).all())


def _bounds(low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return f"at most {high}" if low is None else f"at least {low}"
    return f"from {low} to {high}"


class Knobs(MutableMapping[str, Any]):
    """The knobs of this process by name: reads and changes their values. `hostcallback.knobs` is the one there is.

    A value is a number of numpy, or an array that cannot be written to. A change applies to the next read of each
    program, also of those that run. Any thread.

    Example:
        hcb.knobs["lr"] = 3e-4
        print(dict(hcb.knobs))
    """

    def __init__(self) -> None:
        """Has no knob."""
        self._lock = threading.RLock()  # protects the table, and puts changes in an order
        self._knobs: dict[str, Knob] = {}

    def declare(
        self, name: str, default: np.ndarray[Any, Any], low: float | None, high: float | None, line: str
    ) -> Knob:
        """Returns the knob of that name, which it makes if there is none.

        Raises:
            TypeError: it exists with another dtype or shape.
            ValueError: it exists with another default or other bounds, or the default is not allowed.
        """
        spec = CellSpec.of(PREFIX + name, default)
        with self._lock:
            known = self._knobs.get(name)
            if known is None:
                knob = Knob(name, cell_of(spec), low, high, line)
                knob.checked(default)
                if knob.cell.spec != spec:  # of a knob that was deleted
                    knob.cell.set(default)
                self._knobs[name] = knob
                return knob
        cell = known.cell
        if (cell.spec.dtype, cell.spec.shape) != (spec.dtype, spec.shape):
            raise TypeError(
                f"the knob {name!r} is {cell.spec.dtype}{list(cell.spec.shape)} at {known.source_line}, and "
                f"{spec.dtype}{list(spec.shape)} at {line}: a knob has one type, so give one of them another name"
            )
        if cell.spec.default != spec.default or (known.min, known.max) != (low, high):
            raise ValueError(
                f"the knob {name!r} has the default {cell.spec.array(cell.spec.default)} and the bounds "
                f"[{known.min}, {known.max}] at {known.source_line}, and {default} and [{low}, {high}] at {line}: its "
                f"value would depend on which program is traced first. Write them alike, set hcb.knobs[{name!r}], or "
                f"forget the first with del hcb.knobs[{name!r}]"
            )
        return known

    def knob(self, name: str) -> Knob:
        """Returns a knob.

        Raises:
            UnknownKnobError: there is none of that name.
        """
        with self._lock:
            found, names = self._knobs.get(name), sorted(self._knobs)
        if found is not None:
            return found
        if not names:
            raise UnknownKnobError(
                f"no knob is called {name!r}: no program with hcb.knob was traced yet, and hcb.knob({name!r}, default) "
                "declares it before that"
            )
        near = difflib.get_close_matches(name, names, n=8, cutoff=0.3) or names
        raise UnknownKnobError(f"no knob is called {name!r}: there are {', '.join(map(repr, near[:8]))}")

    def change(self, name: str, value: Any, who: str = "code") -> np.ndarray[Any, Any]:
        """Changes a value for `who`; returns the one before. Raises as `Knob.checked` and `knob` do."""
        knob = self.knob(name)
        with self._lock:
            return knob.cell.set(knob.checked(value))

    def __getitem__(self, name: str) -> Any:
        """The current value of a knob.

        Raises:
            UnknownKnobError: there is none of that name.
        """
        return self.knob(name).cell.value[()]

    def __setitem__(self, name: str, value: Any) -> None:
        """Changes a value.

        Raises:
            UnknownKnobError: no knob has that name.
            TypeError: the value is of another kind than the knob's.
            ValueError: it has another shape, is NaN, does not fit the dtype, or is out of bounds.
        """
        self.change(name, value)

    def __delitem__(self, name: str) -> None:
        """Forgets the default and the bounds of a knob, so that it can be declared otherwise.

        Programs that read it go on reading it.

        Raises:
            UnknownKnobError: no knob has that name.
        """
        self.knob(name)
        with self._lock:
            self._knobs.pop(name, None)

    def __iter__(self) -> Iterator[str]:
        """The names, sorted."""
        with self._lock:
            return iter(sorted(self._knobs))

    def __len__(self) -> int:
        """Number of knobs."""
        return len(self._knobs)

    def __repr__(self) -> str:
        """The names and their values."""
        return f"<knobs: {', '.join(f'{name}={value}' for name, value in self.items()) or 'none yet'}>"

    def after_fork_in_child(self) -> None:
        """Renews the lock, which a thread may hold that does not exist in the child."""
        self._lock = threading.RLock()


knobs = Knobs()
processes.in_child(processes.Stage.RUNTIME, knobs.after_fork_in_child)

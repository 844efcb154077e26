"""Knobs: the named values of this process that its programs read and its user changes, with their types and bounds."""

from __future__ import annotations

import difflib
import threading
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hostcallback.receiver import processes
from hostcallback.receiver.errors import HostCallbackError
from hostcallback.receiver.log import logger
from hostcallback.receiver.public_names import hide_frames
from hostcallback.receiver.runtime import host_messages
from hostcallback.receiver.runtime.cells import KNOB_PREFIX, Cell, CellSpec, cell_of
from hostcallback.receiver.runtime.runtime import runtime
from hostcallback.receiver.sinks.knob import CHANGES, START, KnobChange, describe_change, knob_of

if TYPE_CHECKING:
    from hostcallback.receiver.runtime.device_receiver import DeviceReceiver
    from hostcallback.receiver.taplog.reading.reader import Paths

CODE = "code"
"""Stands for a change in Python; the line follows."""

REPLAY = "replay"
"""Stands for who makes the changes of a log again."""


class UnknownKnobError(HostCallbackError, KeyError):
    """No knob has that name; the text has the nearest ones.

    Example:
        try:
            hcb.knobs["learning_rate"] = 3e-4
        except hcb.UnknownKnobError as error:
            print(error)
    """

    def __str__(self) -> str:
        """The text, without the quotes of a KeyError."""
        return str(self.args[0])


@dataclass(frozen=True)
class Knob:
    """A knob as `hostcallback.knob` declared it.

    Attributes:
        name: its name.
        spec: its type and its default.
        cell: has its value.
        min: the smallest value allowed; None for no bound.
        max: the largest one.
        source_line: where it was declared first.
    """

    name: str
    spec: CellSpec
    cell: Cell
    min: float | None
    max: float | None
    source_line: str

    @property
    def default(self) -> np.ndarray[Any, Any]:
        """The value until it is set."""
        return self.spec.array(self.spec.default)

    def checked(self, value: Any) -> np.ndarray[Any, Any]:
        """Returns a value as an array of the knob's dtype and shape.

        Raises:
            TypeError: it is of another kind, such as a text, or a fraction for an integer.
            ValueError: it has another shape, is NaN, does not fit the dtype, or is out of bounds.
        """
        spec, given = self.spec, np.asarray(value)
        dtype = self.default.dtype
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
        if not fits(given, made):
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


def fits(given: np.ndarray[Any, Any], made: np.ndarray[Any, Any]) -> bool:
    """Whether an array that was converted to another dtype has its values, up to rounding."""
    wide = _wide(made)
    return wide.dtype.kind not in "iuf" or _is_same(_wide(given), wide)


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

    Attributes:
        user_line: returns the line of the user's code that runs on the calling thread.

    Example:
        hcb.knob("temperature", 1.0)
        hcb.knobs["temperature"] = 0.7
        print(dict(hcb.knobs))
    """

    __slots__ = ("_knobs", "_lock", "_planned", "_replayed", "_waiting", "user_line")

    def __init__(self) -> None:
        """Has no knob."""
        self._lock = threading.RLock()  # protects all of the following, and puts changes in an order
        self._knobs: dict[str, Knob] = {}
        self._waiting: dict[str, list[tuple[Any, str, int | None]]] = {}  # changes of knobs not declared yet
        self._planned: dict[str, np.ndarray[Any, Any]] = {}  # the last value of a replay
        self._replayed: dict[str, int] = {}  # the number of the read before which its last change is made
        self.user_line: Callable[[], str] = str

    def __getattr__(self, name: str) -> Any:
        """Refuses a name that is no attribute."""
        raise AttributeError(
            f"hcb.knobs has no attribute {name!r}: hcb.knobs[{name!r}] is the knob of that name"
        )

    @hide_frames
    def __setattr__(self, name: str, value: Any) -> None:
        """Refuses a name that is no attribute.

        Raises:
            AttributeError: it is none.
        """
        if name not in self.__slots__:
            raise AttributeError(
                f"hcb.knobs has no attribute {name!r}: hcb.knobs[{name!r}] = {value!r:.80} sets the knob of that name, "
                f"at {self.user_line()}"
            )
        super().__setattr__(name, value)

    def declare(
        self, name: str, default: np.ndarray[Any, Any], low: float | None, high: float | None, line: str
    ) -> Knob:
        """Returns the knob of that name, which it makes if there is none.

        Raises:
            TypeError: it exists with another dtype or shape.
            ValueError: it exists with another default or other bounds, or the default is not allowed.
        """
        spec = CellSpec.of(KNOB_PREFIX + name, default)
        with self._lock:
            known = self._knobs.get(name)
            if known is None:
                knob = Knob(name, spec, cell_of(spec), low, high, line)
                knob.cell.set(knob.checked(default))  # the cell may be that of a deleted knob
                self._knobs[name] = knob
        if known is None:
            with self._lock:
                self._note(knob)
            self._settle(name)
            return knob
        if (known.spec.dtype, known.spec.shape) != (spec.dtype, spec.shape):
            raise TypeError(
                f"the knob {name!r} is {known.spec.dtype}{list(known.spec.shape)} at {known.source_line}, and "
                f"{spec.dtype}{list(spec.shape)} at {line}: a knob has one type, so give one of them another name"
            )
        if known.spec != spec or (known.min, known.max) != (low, high):
            raise ValueError(
                f"the knob {name!r} has the default {known.default!s} and the bounds "
                f"[{known.min}, {known.max}] at {known.source_line}, and {default!s} and [{low}, {high}] at {line}: "
                f"its value would depend on which program is traced first. Write them alike, set hcb.knobs[{name!r}], "
                f"or forget the first with del hcb.knobs[{name!r}]"
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

    def change(self, name: str, value: Any, who: str = CODE, *, at: int | None = None) -> None:
        """Changes a value, and sends the change to the logs. One that is set already is no change.

        Args:
            name: of the knob.
            value: the new one.
            who: changes it: `CODE`, or who controls this process.
            at: the number of the read, from 0, before which the change applies; None for now.

        Raises:
            UnknownKnobError: there is none of that name.
            TypeError: see `Knob.checked`.
            ValueError: see `Knob.checked`.
        """
        knob = self.knob(name)
        made = knob.checked(value)
        if who == CODE:
            who = f"{CODE}, {self.user_line()}"
        with self._lock:  # so that the logs have the changes in their order
            before = knob.cell.value
            if at is None:
                self._planned.pop(name, None)
            if at is None and before.tobytes() == made.tobytes():
                return
            reads = knob.cell.set(made, at)
            if at is not None:
                before = self._planned.get(name, before)
                self._planned[name] = made
            self._send(knob, who, KnobChange.of(before, made, reads if at is None else at))
        if not who.startswith(CODE):
            logger.info("%s sets the knob %r to %s", who, name, made)

    def change_later(self, name: str, value: Any, who: str, *, at: int | None = None) -> None:
        """As `change`, once the knob is declared, if it is not yet. Problems are logged then.

        Raises as `change` does if it is declared.
        """
        with self._lock:
            if name not in self._knobs:
                earlier = self._waiting.get(name, [])
                if at is None:  # it takes the place of what the same one wanted before
                    earlier = [wanted for wanted in earlier if wanted[1:] != (who, None)]
                self._waiting[name] = [*earlier, (value, who, at)]
                return
        self.change(name, value, who, at=at)

    def _settle(self, name: str) -> None:
        with self._lock:
            waiting = self._waiting.pop(name, [])
        for value, who, at in waiting:
            try:
                self.change(name, value, who, at=at)
            except (TypeError, ValueError) as error:
                logger.error("%s cannot set a knob: %s", who, error)

    def described(self) -> list[dict[str, Any]]:
        """Describes each knob for those who control this process: plain data."""
        with self._lock:
            known = [self._knobs[name] for name in sorted(self._knobs)]
        return [
            {
                "name": knob.name, "value": _plain(knob.cell.value), "dtype": knob.spec.dtype,
                "default": _plain(knob.default),
                "min": knob.min, "max": knob.max, "source_line": knob.source_line,
            }
            for knob in known
        ]  # fmt: skip

    def note_values(self) -> None:
        """Sends the current value of each knob, for logs that begin."""
        with self._lock:
            for knob in self._knobs.values():
                self._note(knob)

    def _note(self, knob: Knob) -> None:
        # The value that it has now, in logs; other receivers would only count the message.
        value, reads = knob.cell.state()
        recorded = [each for each in runtime.receivers() if runtime.scope_of(each.name).batch_sinks]
        self._send(knob, START, KnobChange.of(knob.default, value, reads), recorded)

    def _send(
        self, knob: Knob, who: str, change: KnobChange, receivers: Iterable[DeviceReceiver] | None = None
    ) -> None:
        # By one device for each log; a receiver may still deliver to the scope that it had before.
        receivers = runtime.receivers() if receivers is None else receivers
        devices = {id(runtime.scope_of(each.name)): each for each in receivers}.values()
        host_messages.send(describe_change(knob.name, knob.source_line, who), change, devices)

    @hide_frames
    def replay(self, log: Paths) -> dict[str, int]:
        """Sets the values that a log has at the steps at which they were set: a steered run is repeated exactly.

        Call it before the first program that reads the knobs; they may be declared later. A change applies before the
        read that it applied to then: reads are counted from the beginning of the log, and from this call on.

        Args:
            log: the folder of a tap log, or several; of one process.

        Returns:
            How many changes will be made, by the name of the knob; 0 for one that was never changed.

        Raises:
            ValueError: the log is that of several processes, or has no knob; or changes that an
                earlier replay has planned were not made yet.
            TypeError: a value of the log is not of the knob's type.
        """
        counts: dict[str, int] = {}
        found = _logged(log)
        for name in found:
            waits = any(who == REPLAY for _, who, _ in self._waiting.get(name, ()))
            if waits or self._reads(name) < self._replayed.get(name, 0):
                raise ValueError(
                    f"changes of the knob {name!r} wait that an earlier replay has planned: replay one log at a time, "
                    "and the next one when the program has read the knob as often as the earlier run had"
                )
        for name, changes in found.items():
            reads = self._reads(name)
            who, first = changes[0]
            begin = int(first.step) if who == START else 0
            self.change_later(name, first.new if who == START else first.old, REPLAY)
            made = [change for who, change in changes if who != START]
            for change in made:
                self._replayed[name] = reads + int(change.step) - begin
                self.change_later(name, change.new, REPLAY, at=self._replayed[name])
            counts[name] = len(made)
        return counts

    def _reads(self, name: str) -> int:
        return self._knobs[name].cell.state()[1] if name in self._knobs else 0

    @hide_frames
    def __getitem__(self, name: str) -> Any:
        """The current value of a knob.

        Raises:
            UnknownKnobError: there is none of that name.
        """
        return self.knob(name).cell.value[()]

    @hide_frames
    def __setitem__(self, name: str, value: Any) -> None:
        """Changes a value.

        Raises:
            UnknownKnobError: no knob has that name.
            TypeError: the value is of another kind than the knob's.
            ValueError: it has another shape, is NaN, does not fit the dtype, or is out of bounds.
        """
        self.change(name, value)

    @hide_frames
    def __delitem__(self, name: str) -> None:
        """Forgets the default and the bounds of a knob, so that it can be declared otherwise.

        Programs that read it go on reading it.

        Raises:
            UnknownKnobError: no knob has that name.
        """
        self.knob(name)
        with self._lock:
            self._knobs.pop(name, None)
            self._replayed.pop(name, None)

    def __iter__(self) -> Iterator[str]:
        """The names, sorted."""
        with self._lock:
            return iter(sorted(self._knobs))

    def __len__(self) -> int:
        """Number of knobs."""
        return len(self._knobs)

    def __repr__(self) -> str:
        """The names and their values."""
        return f"<knobs: {', '.join(f'{name}={value!s}' for name, value in self.items()) or 'none yet'}>"

    def after_fork_in_child(self) -> None:
        """Renews the lock, which a thread may hold that does not exist in the child."""
        self._lock = threading.RLock()


def _plain(value: np.ndarray[Any, Any]) -> Any:
    # Numbers of JSON, as short as their dtype allows: 0.0003, not the float64 that is nearest to the float32. A complex
    # number as its text.
    if value.dtype.kind in "biu":
        return value.tolist()
    texts = [str(number) for number in value.reshape(-1)]
    shown = np.array(texts if value.dtype.kind == "c" else [*map(float, texts)], dtype=object)
    return shown.reshape(value.shape).tolist()


def _logged(log: Paths) -> dict[str, list[tuple[str, KnobChange]]]:
    # Who changed each knob in a log, and to what, in order.
    from hostcallback.receiver.taplog.reading.reader import LogReader  # here, because few programs read logs
    from hostcallback.receiver.taplog.reading.selection import Selection

    reader = LogReader(log)
    if len(reader.writers) > 1:
        raise ValueError(
            f"{log} is a log of {len(reader.writers)} processes, which have knobs of their own: give the files of one "
            "process"
        )
    found: dict[str, list[tuple[str, KnobChange]]] = {}
    for logged in reader.messages(Selection(names=(CHANGES,))):
        described = logged.tap.described
        name = None if described is None else knob_of(described)
        if described is not None and name is not None:
            who = str(described.params.get("who"))
            found.setdefault(name, []).append((who, KnobChange(**logged.value)))
    if not found:
        raise ValueError(
            f"{log} has no knob, neither a value nor a change: it was recorded without a program that reads one"
        )
    return found


knobs = Knobs()
processes.in_child(processes.Stage.RUNTIME, knobs.after_fork_in_child)

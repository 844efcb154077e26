"""Cells: values of this process that compiled programs read where they stand, and that any thread changes meanwhile.

A cell has a name, a dtype and a shape. On the native transport programs read a copy of it that `handlers/cell.cc`
keeps; on the callback transport they read it here. All devices of a launch read one value at one point: the first
device that reaches a read decides.
"""

from __future__ import annotations

import ctypes
import hashlib
import threading
from collections import deque
from typing import Any, NamedTuple

import numpy as np

from hostcallback.receiver import environment, processes
from hostcallback.receiver.native import bindings as native
from hostcallback.receiver.wire.array_types import BY_NAME, dtype_of

KNOB_PREFIX = "knob "
"""Begins the name of a knob's cell."""


class CellSpec(NamedTuple):
    """What a program says of a cell that it reads. Equal in all processes.

    Attributes:
        name: of the cell.
        dtype: the name of its dtype.
        shape: its shape.
        default: the bytes of its first value, row-major.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    default: bytes

    @classmethod
    def of(cls, name: str, default: np.ndarray[Any, Any]) -> CellSpec:
        """Returns the spec of a cell with that name and first value."""
        return cls(name, default.dtype.name, default.shape, default.tobytes())

    def array(self, data: bytes) -> np.ndarray[Any, Any]:
        """The array of some bytes; it cannot be written to."""
        return np.frombuffer(data, dtype_of(BY_NAME[self.dtype].code)).reshape(self.shape)

    @property
    def cell_id(self) -> int:
        """The cell's key in the native library."""
        return _hash("cell", self.name)

    @property
    def type_id(self) -> int:
        """A number that is equal for cells of one dtype and shape."""
        return _hash(self.dtype, str(self.shape))


def site_id(site: str) -> int:
    """The number of a site, which is a text that says where a program reads."""
    return _hash("site", site)


def _hash(*texts: str) -> int:
    digest = hashlib.blake2b("\0".join(texts).encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


class Cell:
    """One value. Any thread.

    Attributes:
        spec: its name and type, and its first value.
    """

    def __init__(self, spec: CellSpec) -> None:
        """Has its default.

        Raises:
            TypeError: an exported program has read a cell of that name with another dtype or shape.
            MemoryError: the native library has no room for a further cell.
        """
        self.spec = spec
        self.lock = threading.RLock()  # protects everything below
        is_native = environment.TRANSPORT.read() != "callback" and native.available()
        self._library = native.load_holding_lock() if is_native else None
        # Without the native library: the value, how often programs have read it, and values for later reads by number.
        self._value = spec.array(spec.default)
        self._reads = 0
        self._later: deque[tuple[int, np.ndarray[Any, Any]]] = deque()
        self.set(self._value)

    @property
    def value(self) -> np.ndarray[Any, Any]:
        """The current value, which cannot be written to."""
        return self.state()[0]

    def state(self, *, counts: bool = False) -> tuple[np.ndarray[Any, Any], int]:
        """The current value, and how often programs have read the cell; the devices of a launch read together.

        `counts`: whether this is a read of a program, which is counted for the next.
        """
        with self.lock:
            if self._library is not None:
                data = ctypes.create_string_buffer(len(self.spec.default))
                reads = self._library.hcb_cell_get(self.spec.cell_id, data, counts)
                return self.spec.array(data.raw), reads
            while self._later and self._later[0][0] <= self._reads:
                self._value = self._later.popleft()[1]
            self._reads += counts
            return self._value, self._reads - counts

    def set(self, value: np.ndarray[Any, Any], at: int | None = None) -> int:
        """Changes the value, which has the cell's dtype and shape.

        Args:
            value: the new one.
            at: the number of the read, from 0, before which the change is made; None for now. Later changes come in
                the order of their numbers.

        Returns:
            How often programs have read the cell so far.
        """
        data = np.ascontiguousarray(value).tobytes()
        with self.lock:
            if self._library is not None:
                return self._tell(self._library, data, -1 if at is None else at)
            _, reads = self.state()
            if at is None:
                self._value = self.spec.array(data)
            else:
                self._later.append((at, self.spec.array(data)))
            return reads

    def forget_launches(self, site: int) -> None:
        """Has the reads of launches at a site decided again, for those that have the number of an earlier launch."""
        with self.lock:
            if self._library is not None:
                self._library.hcb_cell_forget_launches(self.spec.cell_id, site)

    def _tell(self, library: ctypes.PyDLL, data: bytes, at: int) -> int:
        spec = self.spec
        answer: int = library.hcb_cell_set(spec.cell_id, spec.type_id, data, len(data), at)
        if answer == native.INVALID:
            raise TypeError(
                f"an exported program that ran in this process reads {spec.name!r} with another dtype or shape than "
                f"{spec.dtype}{list(spec.shape)}: give one of the two another name"
            )
        if answer < 0:
            raise MemoryError(
                f"this process has too many knobs for one more, {spec.name!r}: use an array in place of several"
            )
        return answer


class CallbackReads:
    """The reads of one site of a program on the callback transport.

    A Python callback does not know its launch: what a device has read is counted over all launches, which every device
    runs in the same order.
    """

    _KEPT = 1024

    def __init__(self, cell: Cell, devices: int) -> None:
        """Makes the reads of a program that runs on that number of this process's devices."""
        self._cell, self._devices = cell, devices
        self._reads: dict[int, int] = {}
        # From the read of this number on, the devices read this value.
        self._decisions: deque[tuple[int, np.ndarray[Any, Any]]] = deque(maxlen=self._KEPT)
        self._decided = 0

    def of(self, device: int) -> np.ndarray[Any, Any]:
        """The value that a device reads now. XLA's threads."""
        with self._cell.lock:
            number = self._reads[device] = self._reads.get(device, -1) + 1
            if number >= self._decided:
                self._decided = number + 1
                value, _ = self._cell.state(counts=True)
                if not self._decisions or self._decisions[-1][1].tobytes() != value.tobytes():
                    self._decisions.append((number, value))
            slowest = min(self._reads.values()) if len(self._reads) >= self._devices else 0
            while len(self._decisions) > 1 and self._decisions[1][0] <= slowest:
                self._decisions.popleft()
            known = [value for first, value in self._decisions if first <= number]
            return known[-1] if known else self._decisions[0][1]


_lock = threading.RLock()  # protects `cells`; a signal handler may request a stop
cells: dict[str, Cell] = {}
"""This process's cells by name: of programs that were lowered, and what code has set."""


def cell_of(spec: CellSpec) -> Cell:
    """Returns this process's cell of that name, which it makes if there is none.

    Raises:
        TypeError: the cell has another dtype or shape.
    """
    with _lock:
        cell = cells.get(spec.name)
        if cell is None:
            cell = cells.setdefault(spec.name, Cell(spec))
    if (cell.spec.dtype, cell.spec.shape) != (spec.dtype, spec.shape):
        raise TypeError(
            f"{spec.name!r} is {cell.spec.dtype}{list(cell.spec.shape)} in this process, got "
            f"{spec.dtype}{list(spec.shape)}: give one of the two another name"
        )
    return cell


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.RLock()
    for cell in cells.values():
        cell.lock = threading.RLock()


processes.in_child(processes.Stage.RUNTIME, _after_fork_in_child)

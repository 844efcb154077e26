"""A GPU for the tests: the fake driver, streams and device memory of it, and a handler called as XLA calls it."""

from __future__ import annotations

import ctypes
import itertools
import time
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_int32, c_int64, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

from hostcallback.receiver.native import bindings as native
from hostcallback.receiver.sources.ring import RingSource
from hostcallback.receiver.sources.ring_batch import RingBatch, RingConfig
from hostcallback.receiver.wire.array_types import ArraySpec
from hostcallback.receiver.wire.decoder import Decoder
from hostcallback.receiver.wire.frame import encode_prefix

SOURCES = [Path(__file__).with_name(name) for name in ("fake_cuda.cc", "ffi_caller.cc")]

# Rings live as long as the process, so that every ring is of a new GPU.
_ordinals = itertools.count(100)

_FUNCTIONS = {
    "fake_stream": (c_void_p, ()),
    "fake_allocate": (c_uint64, (c_uint64,)),
    "fake_free": (None, (c_uint64,)),
    "fake_write": (None, (c_void_p, c_uint64, c_char_p, c_uint64)),
    "fake_read": (None, (c_uint64, c_char_p, c_uint64)),
    "fake_idle": (c_int32, (c_void_p,)),
    "fake_hold": (None, (c_int32,)),
    "fake_delay": (None, (c_int64,)),
    "fake_fail": (None, (c_char_p, c_int32, c_int64, c_int64)),
    "fake_reset": (None, ()),
    "fake_count": (c_uint64, (c_char_p,)),
    "fake_called": (c_uint64, (c_char_p, c_uint64)),
    "fake_pageable": (c_uint64, ()),
    "fake_violations": (c_uint64, ()),
    "fake_registered_bytes": (c_uint64, ()),
    "fake_context_depth": (c_uint64, ()),
    "fake_hip_device": (c_int32, ()),
    "command_buffer_compatible": (c_int32, (c_void_p,)),
    "call_handler": (
        c_int32,
        (
            c_void_p, c_int32, c_int64, c_void_p, c_char_p, c_uint64, c_uint64, POINTER(c_void_p), POINTER(c_int32),
            POINTER(c_int64), POINTER(c_void_p), c_char_p, c_uint64,
        ),
    ),
}  # fmt: skip


class Driver:
    """The fake driver, and how it behaves from now on."""

    def __init__(self, file: Path) -> None:
        """Loads the library compiled from `SOURCES`."""
        self.file = file
        self.functions = ctypes.CDLL(str(file))
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(self.functions, name)
            function.restype, function.argtypes = result, arguments

    def open(self, vendor: int = 0) -> None:
        """Makes it the process's GPU driver."""
        error = ctypes.create_string_buffer(500)
        assert native.load().hcb_gpu_open(vendor, str(self.file).encode(), error, len(error)), error.value

    def fail(self, name: str, code: int, *, skip: int = 0, times: int = 1 << 60) -> None:
        """After `skip` more calls, `times` calls of the function return `code`."""
        self.functions.fake_fail(name.encode(), code, skip, times)

    def hold(self) -> None:
        """The device does nothing until `resume`."""
        self.functions.fake_hold(1)

    def resume(self) -> None:
        """Ends `hold`."""
        self.functions.fake_hold(0)

    def reset(self) -> None:
        """Nothing fails any more, nothing was counted."""
        self.resume()
        self.functions.fake_reset()

    def count(self, name: str) -> int:
        """How often a function was called."""
        return int(self.functions.fake_count(name.encode()))

    def called(self) -> set[str]:
        """The functions that were called."""
        names = ctypes.create_string_buffer(10_000)
        self.functions.fake_called(names, len(names))
        return set(names.value.decode().split())


class Stream:
    """A stream of the fake device: it executes its operations in order."""

    def __init__(self, driver: Driver) -> None:
        """Starts the stream's thread."""
        self.functions = driver.functions
        self.handle = self.functions.fake_stream()

    def write(self, address: int, data: bytes) -> None:
        """As a kernel would: in its place among the stream's work."""
        self.functions.fake_write(self.handle, address, data, len(data))

    def idle(self) -> bool:
        """Whether all its work is done."""
        return bool(self.functions.fake_idle(self.handle))


class Gpu:
    """One device: its ring, read through a `RingSource`, and taps that run on it."""

    def __init__(
        self,
        driver: Driver,
        config: RingConfig | None = None,
        *,
        ordinal: int | None = None,
        device_id: int = 9,
    ) -> None:
        """A separate device, with one stream."""
        self.driver = driver
        self.library = native.load()
        self.ordinal = next(_ordinals) if ordinal is None else ordinal
        self.source = RingSource.open_gpu(self.ordinal, device_id, config)
        self.stream = Stream(driver)
        self.decode = Decoder().decode

    def put(self, array: np.ndarray[Any, Any], stream: Stream | None = None) -> int:
        """An array in the device's memory, written there in the stream's order; its address."""
        raw = packed(array)
        address = int(self.driver.functions.fake_allocate(len(raw)))
        (stream or self.stream).write(address, raw)
        return address

    def tap(
        self,
        *arrays: np.ndarray[Any, Any],
        consumer_id: int = 1,
        run_id: int = 1,
        flags: int = 0,
        predicate: int = 0,
        handler: str = "hcb_gpu_tap",
        stream: Stream | None = None,
        addresses: Sequence[int] | None = None,
        results: Sequence[int] | None = None,
    ) -> str | None:
        """Runs a tap of the arrays; its error, or None. `addresses` are their addresses, if they exist already."""
        specs = [ArraySpec.of(array.dtype, array.shape) for array in arrays]
        prefix = encode_prefix(consumer_id, flags, specs, predicate)
        places = [self.put(array, stream) for array in arrays] if addresses is None else list(addresses)
        count = len(arrays)
        error = ctypes.create_string_buffer(1000)
        done = self.driver.functions.call_handler(
            ctypes.cast(getattr(self.library, handler), c_void_p), self.ordinal, run_id,
            (stream or self.stream).handle, prefix, len(prefix), count, (c_void_p * count)(*places),
            (c_int32 * count)(*[spec.type_code for spec in specs]), (c_int64 * count)(*[a.size for a in arrays]),
            None if results is None else (c_void_p * count)(*results), error, len(error),
        )  # fmt: skip
        return None if done else error.value.decode()

    def take(self, count: int, timeout_sec: float = 30.0) -> list[Any]:
        """Reads until `count` messages have come; returns the decoded messages."""
        messages: list[Any] = []
        while len(messages) < count:
            batch = self.read(timeout_sec)
            messages += [self.decode(*frame) for frame in batch.frames]
            batch.release()
        assert len(messages) == count
        return messages

    def read(self, timeout_sec: float = 30.0) -> RingBatch:
        """The next batch. A read also ends without one where frames turned out to be no message."""
        end = time.monotonic() + timeout_sec
        while (batch := self.source.read(max(0, end - time.monotonic()))) is None:
            assert time.monotonic() < end, f"nothing came; {self.source.counters()}"
        return batch

    def values(self, count: int) -> list[Any]:
        """The first array of each of the next `count` messages, as a list."""
        return [message[-1][0].tolist() for message in self.take(count)]

    def settle(self) -> Any:
        """Reads until the queue is empty, without any message; returns the counters."""
        while (counters := self.source.counters()).queued_messages:
            assert self.source.read(0.05) is None
        return counters


def packed(array: np.ndarray[Any, Any]) -> bytes:
    """The bytes of an array as XLA lays them out, with garbage in the last byte's unused bits."""
    from hostcallback.receiver.wire.array_types import is_subbyte, pack_subbyte, wire_type_of

    if not is_subbyte(array.dtype):
        return array.tobytes()
    raw = bytearray(pack_subbyte(array).tobytes())
    used = array.size * wire_type_of(array.dtype).bits % 8
    if used:
        raw[-1] |= 0xFF & ~((1 << used) - 1)
    return bytes(raw)


def build(output: Path) -> Path:
    """Compiles the fake driver into `output`."""
    from compiling import compile_program

    compile_program(SOURCES, output, "-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread")
    return output

"""The source of platforms with a native handler: one device's ring in the native library."""

from __future__ import annotations

import ctypes
import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hostcallback.receiver.errors import CallFailedError
from hostcallback.receiver.native import bindings as native
from hostcallback.receiver.sources import columns, ring_batch
from hostcallback.receiver.sources.back_pressure import BackPressure, Step
from hostcallback.receiver.sources.source import CopiedBatch, SourceCounters
from hostcallback.receiver.wire.array_types import ArraySpec, is_subbyte, pack_subbyte, unpack_subbyte
from hostcallback.receiver.wire.frame import Flags, encode_prefix


def _raw(arrays: Sequence[np.ndarray[Any, Any]]) -> tuple[int, Any, Any]:
    # Count, addresses and byte lengths of contiguous arrays, as the native library takes them.
    count = len(arrays)
    addresses = (ctypes.c_void_p * count)(*[array.ctypes.data for array in arrays])
    return count, addresses, (ctypes.c_uint64 * count)(*[array.nbytes for array in arrays])


def _c_text(message: str) -> bytes:
    return message.replace("\0", "").encode(errors="replace")


# Programs may call these functions until the process ends, so they are never freed.
_host_calls: list[Any] = []


class RingSource:
    """Reads one device's ring. Rings live as long as the process; sources of one ring may follow one another.

    One thread at a time calls `read` and the batches' `release`; any thread may call the other methods.
    """

    def __init__(self, device: int, library: ctypes.CDLL, ring: int) -> None:
        """Called by the constructors `open` and `open_gpu`."""
        self.device = device
        self._library = library
        self._ring = ring
        self._config = ring_batch.RingConfig()
        self._leaves_out = False
        self._device_id = device
        capacity = ctypes.c_uint64()
        address = library.hcb_ring_memory(ring, capacity)
        # Rings are never unmapped, so this view is always valid.
        self.memory = memoryview((ctypes.c_uint8 * capacity.value).from_address(address)).cast("B")
        self._native_batch = native.Batch()
        self._batch_pointer = ctypes.byref(self._native_batch)
        self._quick = native.load_holding_lock()
        self._columns = columns.BatchColumns(self._quick, ring, self.memory, self._native_batch)
        self._batch: ring_batch.RingBatch | None = None
        self._ahead = ctypes.c_uint64()  # the position up to which `copy_ahead` has copied

    @classmethod
    def open(cls, device: int, config: ring_batch.RingConfig | None = None) -> RingSource:
        """Opens the ring of the device with FFI ordinal `device`, created if it does not exist, and configures it.

        Raises:
            NativeLibraryError: the library cannot be loaded.
            MemoryError: the system has no memory for the ring.
        """
        library = native.load()
        config = config or ring_batch.RingConfig()
        ring = library.hcb_ring_open(device, config.native())
        if not ring:
            raise MemoryError(f"no memory for a ring of {config.capacity_bytes} bytes for device {device}")
        source = cls(device, library, ring)
        source._config = config
        return source

    @classmethod
    def open_gpu(
        cls,
        ordinal: int,
        device_id: int,
        config: ring_batch.RingConfig | None = None,
        before_use: Callable[[RingSource], None] = lambda source: None,
    ) -> RingSource:
        """Opens the ring of the GPU with FFI ordinal `ordinal`, whose messages carry `device_id`.

        Raises as `open` does.

        `before_use` is called with the source before the GPU driver pins the ring's memory: after that it cannot move.
        """
        source = cls.open(native.load().hcb_gpu_ring(ordinal), config)
        source._device_id = device_id
        source._library.hcb_ring_set_device_id(source._ring, device_id)
        before_use(source)
        source._library.hcb_gpu_prepare(source._ring, ordinal)
        return source

    def keep_in_file(self, path: Path, name: str, block_bytes: int) -> None:
        """Moves the ring and its content into a new file, for good. Any thread. Producers and reader continue.

        Args:
            path: of the file.
            name: of the device.
            block_bytes: room in the file for payloads outside the ring.

        Raises:
            OSError: EEXIST if the ring is in a file already, EBUSY if a GPU uses it, or the file cannot be created.
        """
        error = self._library.hcb_ring_keep_in_file(self._ring, os.fsencode(path), name.encode(), block_bytes)
        if error:
            raise OSError(error, os.strerror(error), str(path))

    @property
    def capacity_bytes(self) -> int:
        """Memory of the ring in bytes."""
        return len(self.memory)

    def configure(self, back_pressure: BackPressure) -> None:
        """See `Source`. A RingConfig also changes the block budget; the other sizes stay."""
        if not isinstance(back_pressure, ring_batch.RingConfig):
            given = {
                field.name: getattr(back_pressure, field.name) for field in dataclasses.fields(BackPressure)
            }
            back_pressure = dataclasses.replace(self._config, **given)
        self._config = back_pressure
        self._configure()

    def list_failures(self, count: int) -> None:
        """See `Source`."""
        self._native_batch.alike_frames = count

    def leave_out(self, on: bool) -> None:
        """See `Source`."""
        self._leaves_out = on
        self._configure()

    def _configure(self) -> None:
        # Several threads may: the last of them to tell the ring sees whether it told what is wanted now.
        told: tuple[ring_batch.RingConfig, bool] | None = None
        while told != (wanted := (self._config, self._leaves_out)):
            config = wanted[0].native()
            config.steps |= Step.LEAVE_OUT if wanted[1] else 0
            self._library.hcb_ring_configure(self._ring, config)
            told = wanted

    def read(self, timeout_sec: float | None, turn_from: int = 0) -> ring_batch.RingBatch | None:
        """See `Source`. Reads at most 1024 frames, about 1 MiB of the ring, and 64 payloads or 4 MiB outside it.

        Raises:
            CorruptRingError: a damaged stretch was skipped; the next read continues after it.
            LostCopiesError: messages of a GPU were lost before they reached the ring; the next read continues.
            RuntimeError: the previous batch has not been released.
        """
        if self._batch is not None and not self._batch.released:
            raise RuntimeError(
                f"device {self.device}: read() while the previous batch is in use: release() it first, "
                "its memory and the next read's are the same"
            )
        self._batch = None
        # `_library` releases the interpreter lock during a call. `_quick` keeps it, for calls that never wait.
        timeout_ns = -1 if timeout_sec is None else max(0, round(timeout_sec * 1e9))
        found = self._library.hcb_ring_read(self._ring, timeout_ns, turn_from, self._batch_pointer)
        batch = self._native_batch
        if not found:
            if batch.damage == native.COPY_FAILED:
                raise ring_batch.LostCopiesError(
                    self._device_id, batch.damage_messages, batch.damage_start, batch.damage_end
                )
            if batch.damage:
                raise ring_batch.CorruptRingError(
                    self._device_id,
                    ring_batch.DAMAGE[batch.damage],
                    batch.damage_start,
                    batch.damage_end,
                    batch.damage_messages,
                )
            return None
        # Takes ownership of the blocks at once: the native library frees none of them any more.
        payloads: dict[int, Any] = {}
        if batch.blocks_count:
            for block in batch.blocks[: batch.blocks_count]:
                payloads[block.frame] = np.asarray(
                    ring_batch.BlockMemory(self._library, block.memory, block.nbytes)
                )
        folded = batch.folded[:found] if batch.folded_total else ()
        self._batch = ring_batch.RingBatch(
            self.memory, self.give_back, found, batch.offsets, batch.ends, payloads, folded, self._columns
        )
        return self._batch

    def copy_ahead(self) -> CopiedBatch | None:
        """See `Source`. None of a GPU, whose frames are numbered when the reader reads them."""
        nbytes = native.BATCH_BYTES
        while True:
            memory = np.empty(nbytes, np.uint8)
            offsets, needed = np.empty(native.BATCH_FRAMES, np.uint64), ctypes.c_uint64()
            found = self._library.hcb_ring_copy_ahead(
                self._ring, self._ahead, memory.ctypes.data, nbytes, offsets.ctypes.data, len(offsets), needed
            )
            if found:
                data = memory.data
                return CopiedBatch([(data, offset, None) for offset in offsets[:found].tolist()])
            if not needed.value:
                return None
            nbytes = needed.value  # the next message alone is larger than a batch

    def give_back(self, position: int, frames: int) -> None:
        """Releases the memory before a position, which held `frames` messages. Called by batches."""
        if self._quick.hcb_ring_release(
            self._ring, position, frames
        ):  # emissions wait; copying them takes time
            self._library.hcb_ring_admit(self._ring)

    def wake(self) -> None:
        """See `Source`. If no read waits, the next read that would wait returns None."""
        self._library.hcb_ring_wake(self._ring)

    def send_end(self, token: int) -> None:
        """See `Source`. Does not wait: without room the frame joins the queue of waiting emissions."""
        prefix = encode_prefix(token, Flags.END_OF_STREAM, ())
        status = self._library.hcb_ring_append(self._ring, prefix, len(prefix))
        if status < 0:
            raise RuntimeError(
                f"device {self.device}: the ring refused an end-of-stream frame (status {status})"
            )

    def post(self, prefix: bytes, arrays: Sequence[np.ndarray[Any, Any]], run_id: int = 0) -> None:
        """See `Source`. Without room the frame joins the queue of waiting emissions."""
        given = [np.ascontiguousarray(array) for array in arrays]
        status = self._library.hcb_ring_post(self._ring, prefix, len(prefix), *_raw(given), run_id)
        if status < 0:
            raise RuntimeError(f"device {self.device}: the ring refused a frame (status {status})")

    def call(
        self, prefix: bytes, arrays: Sequence[np.ndarray[Any, Any]], results: Sequence[ArraySpec]
    ) -> list[np.ndarray[Any, Any]]:
        """Emits a call from the host, after all queued frames, and waits for its reply. Any thread but the reader's.

        Args:
            prefix: header and metadata of the call's frame.
            arrays: arguments, of any shape and dtype; they are copied.
            results: shape and dtype of each result.

        Returns:
            One array per entry of `results`, of that shape and dtype.

        Raises:
            CallFailedError: the host function failed, or the ring refused the call; with the text for the program.
        """
        given = [pack_subbyte(a) if is_subbyte(a.dtype) else np.ascontiguousarray(a) for a in arrays]
        filled = [
            pack_subbyte(np.zeros(spec.shape, spec.dtype))
            if is_subbyte(spec.dtype)
            else np.empty(spec.shape, spec.dtype)
            for spec in results
        ]
        error = ctypes.create_string_buffer(10_000)  # the native library cuts longer messages
        status = self._library.hcb_ring_call(
            self._ring, prefix, len(prefix), *_raw(given), *_raw(filled), error, len(error)
        )
        if status != native.EMITTED:
            raise CallFailedError(
                error.value.decode(errors="replace") or f"the ring refused a call ({status})"
            )
        return [
            unpack_subbyte(array, spec.dtype, spec.shape) if is_subbyte(spec.dtype) else array
            for array, spec in zip(filled, results, strict=True)
        ]

    def read_call(self, timeout_sec: float) -> ring_batch.RingBatch | None:
        """Waits for a call that is the next frame, once all earlier frames are delivered.

        The threads that run host functions call it.

        The reader, which waits in `read`, pauses until `end_read_call`: the calling thread delivers the frame.

        Returns:
            That frame alone; None if `timeout_sec` has passed.
        """
        taken = native.CallFrame()
        if not self._library.hcb_ring_read_call(self._ring, round(timeout_sec * 1e9), taken):
            return None
        return self._taken(taken)

    def end_read_call(self) -> None:
        """Lets the reader continue. The thread that `read_call` gave a frame calls it once the frame is delivered."""
        self._quick.hcb_ring_end_read_call(self._ring)

    def call_on_own_threads(self, call: Callable[[int, bool, bool], bool]) -> None:
        """Runs the host functions of programs that run on a Python thread on that thread.

        Args:
            call: gets the id of the call, whether the thread resumes a program that another thread began, and whether
                an interrupt came before. It reads the call with `read_own_call` and replies. It returns whether the
                thread was interrupted, and must not raise: an exception cannot pass the native code between.
        """
        pointer = native.HostCall(call)
        _host_calls.append(pointer)
        self._library.hcb_ring_set_host_call(self._ring, pointer)

    def read_own_call(self, own: int, timeout_sec: float) -> ring_batch.RingBatch | None:
        """Reads the call of the calling thread's program, as `read_call` does.

        Returns:
            Its frame; None if `timeout_sec` has passed, or the call has failed.

        Raises:
            CallFailedError: the calling thread is the reader, which must deliver the frames before the call.
        """
        taken = native.CallFrame()
        # Usually its turn has come, so the first look keeps the interpreter lock.
        status = self._quick.hcb_own_call_read(self._ring, own, 0, taken)
        if not status and timeout_sec:
            status = self._library.hcb_own_call_read(self._ring, own, round(timeout_sec * 1e9), taken)
        if status == native.OWN_CALL_WAITS_FOR_ITSELF:
            raise CallFailedError(
                "hostcallback: a tap function runs a program with a call on its own device, which would wait until the "
                "tap function is over: run it on the thread that dispatches the computations"
            )
        return self._taken(taken) if status else None

    def withdraw_own_call(self, own: int, message: str) -> bool:
        """Fails a call that no thread has read; returns False while its frame waits for room."""
        return bool(self._library.hcb_own_call_withdraw(self._ring, own, _c_text(message)))

    def own_call_ended(self, own: int) -> bool:
        """Whether the call has its reply, or has failed."""
        return bool(self._quick.hcb_own_call_ended(own))

    def _taken(self, taken: native.CallFrame) -> ring_batch.RingBatch:
        payloads = {}
        if taken.memory is not None:
            payloads[0] = np.asarray(ring_batch.BlockMemory(self._library, taken.memory, taken.nbytes))
        return ring_batch.RingBatch(self.memory, self.give_back, 1, (taken.offset,), (taken.end,), payloads)

    def reply(self, seq: int, results: Sequence[np.ndarray[Any, Any]]) -> int | None:
        """Gives the program that waits for the reply to message `seq` its results. Any thread.

        Args:
            seq: sequence number of the call's message.
            results: contiguous arrays of the shapes and dtypes that the program expects; they are copied.

        Returns:
            The handle for `resume`; None if no program waits for the reply (any more).
        """
        raw = [pack_subbyte(a) if is_subbyte(a.dtype) else a for a in results]
        library = self._quick if sum(a.nbytes for a in raw) <= columns.QUICK_BYTES else self._library
        replied: int | None = library.hcb_call_reply(self.device, seq, *_raw(raw))
        return replied

    def resume(self, replied: int | None, *, is_own: bool = False) -> None:
        """Continues the program on the calling thread until it ends or waits again.

        For its next call see `read_call`. A call of the calling thread's program (`is_own`) only ends: its program
        continues when the thread returns to it.
        """
        if replied is not None:
            (self._quick if is_own else self._library).hcb_call_resume(replied)

    def fail(self, seq: int, message: str) -> None:
        """Fails the program that waits for the reply to message `seq`, if one does. Does not wait. Any thread."""
        self._library.hcb_call_fail(self.device, seq, _c_text(message))

    def close_calls(self, message: str) -> None:
        """See `Source`. Closes the calls of all devices."""
        self._library.hcb_call_close(_c_text(message))

    def counters(self) -> SourceCounters:
        """See `Source`."""
        c = native.Counters()
        self._library.hcb_ring_counters(self._ring, c)
        return SourceCounters(*[getattr(c, name) for name in SourceCounters._fields])

    def discarded(self) -> int:
        """See `Source`."""
        return int(self._quick.hcb_ring_discarded(self._ring))

"""The source of platforms with the native handler: one device's ring in the native library."""

from __future__ import annotations

import ctypes
import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from receiver.errors import CallFailedError
from receiver.native import bindings as native
from receiver.sources.back_pressure import BackPressure
from receiver.sources.columns import BatchColumns
from receiver.sources.ring_batch import BlockMemory, RingBatch
from receiver.sources.ring_config import RingConfig
from receiver.sources.ring_errors import DAMAGE, CorruptRingError, LostCopiesError
from receiver.sources.source import SourceCounters
from receiver.wire import ArraySpec, Flags, encode_prefix
from receiver.wire.dtypes import is_subbyte, pack_subbyte, unpack_subbyte


def _raw(arrays: Sequence[np.ndarray[Any, Any]]) -> tuple[int, Any, Any]:
    # Number, addresses and lengths of contiguous arrays, as the native library takes them.
    count = len(arrays)
    addresses = (ctypes.c_void_p * count)(*[array.ctypes.data for array in arrays])
    return count, addresses, (ctypes.c_uint64 * count)(*[array.nbytes for array in arrays])


def _c_text(message: str) -> bytes:
    return message.replace("\0", "").encode(errors="replace")


# What programs call may be called as long as the process lives.
_host_calls: list[Any] = []


class RingSource:
    """Reads one device's ring. Rings belong to the process: any number of sources may follow one another on one.

    `read` and the batches' `release` belong to one thread at a time; the rest is for any thread.
    """

    def __init__(self, device: int, library: ctypes.CDLL, ring: int) -> None:
        """Use `open`."""
        self.device = device
        self._library = library
        self._ring = ring
        self._config = RingConfig()
        self._device_id = device
        capacity = ctypes.c_uint64()
        address = library.hcb_ring_memory(ring, capacity)
        # Rings are never unmapped, so that this view outlives everything.
        self.memory = memoryview((ctypes.c_uint8 * capacity.value).from_address(address)).cast("B")
        self._native_batch = native.Batch()
        self._batch_pointer = ctypes.byref(self._native_batch)
        self._quick = native.load_holding_lock()
        self._columns = BatchColumns(self._quick, ring, self.memory, self._native_batch)
        self._batch: RingBatch | None = None

    @classmethod
    def open(cls, device: int, config: RingConfig | None = None) -> RingSource:
        """The ring of the device with FFI ordinal `device`, made if there is none, and configured.

        Raises:
            NativeLibraryError: the library cannot be loaded.
            MemoryError: the system has no memory for the ring.
        """
        library = native.load()
        config = config or RingConfig()
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
        config: RingConfig | None = None,
        before_use: Callable[[RingSource], None] = lambda source: None,
    ) -> RingSource:
        """The ring of the GPU with FFI ordinal `ordinal`, whose messages say `device_id`. Raises as `open`.

        `before_use` is called with it before its memory is pinned, and so cannot be moved any more.
        """
        source = cls.open(native.load().hcb_gpu_ring(ordinal), config)
        source._device_id = device_id
        source._library.hcb_ring_set_device_id(source._ring, device_id)
        before_use(source)
        source._library.hcb_gpu_prepare(source._ring, ordinal)
        return source

    @classmethod
    def open_beside(cls, source: RingSource, block_budget_bytes: int) -> RingSource:
        """The ring of the same device that another process is to read, made if there is none. Raises as `open`."""
        library = native.load()
        config = dataclasses.replace(source._config, block_budget_bytes=block_budget_bytes)
        ring = library.hcb_ring_beside(source.device, config.native())
        if not ring:
            raise MemoryError(
                f"no memory for a ring of {config.capacity_bytes} bytes for device {source.device}"
            )
        beside = cls(source.device, library, ring)
        beside._config = config
        library.hcb_ring_set_device_id(ring, source._device_id)
        return beside

    @classmethod
    def attach(cls, path: Path) -> RingSource:
        """The ring of another process, by its file, for reading only.

        Raises:
            OSError: it cannot be opened, or is no ring's.
            NativeLibraryError: the library cannot be loaded.
        """
        library = native.load()
        error = ctypes.c_int32()
        ring = library.hcb_ring_attach(os.fsencode(path), error)
        if not ring:
            raise OSError(error.value, os.strerror(error.value), str(path))
        return cls(0, library, ring)

    def hand_over(self, beside: RingSource) -> None:
        """From now on the messages of some consumers go to the ring `beside`, which another process reads.

        Raises:
            OSError: that is in no file.
        """
        error = self._library.hcb_ring_hand_over(self._ring, beside._ring)
        if error:
            raise OSError(error, os.strerror(error))

    def take_over(self) -> None:
        """This process reads the ring from now on, which another one read, from where that got to."""
        self._library.hcb_ring_take_over(self._ring)

    def abandon(self) -> None:
        """The process that writes is dead: what it was writing is given up."""
        self._library.hcb_ring_abandon(self._ring)

    def keep_in_file(self, path: Path, name: str, block_bytes: int) -> None:
        """Moves the ring, with what is in it, into a new file, for good. Any thread; producers and reader go on.

        Args:
            path: of the file.
            name: of the device.
            block_bytes: room in it for payloads outside the ring.

        Raises:
            OSError: EEXIST: it is in a file. EBUSY: a GPU uses it. Or the file cannot be made.
        """
        error = self._library.hcb_ring_keep_in_file(self._ring, os.fsencode(path), name.encode(), block_bytes)
        if error:
            raise OSError(error, os.strerror(error), str(path))

    @property
    def capacity_bytes(self) -> int:
        """Memory of the ring."""
        return len(self.memory)

    def configure(self, back_pressure: BackPressure) -> None:
        """See `Source`. A RingConfig changes the block budget too; the other sizes stay."""
        if not isinstance(back_pressure, RingConfig):
            back_pressure = dataclasses.replace(
                self._config,
                policy=back_pressure.policy,
                timeout_sec=back_pressure.timeout_sec,
                sample_every=back_pressure.sample_every,
            )
        self._config = back_pressure
        self._library.hcb_ring_configure(self._ring, back_pressure.native())

    def read(self, timeout_sec: float | None) -> RingBatch | None:
        """See `Source`. At most 1024 frames or about 1 MiB, payloads outside the ring included.

        Raises:
            CorruptRingError: a stretch without frames was skipped; the next read goes on behind it.
            LostCopiesError: messages of a GPU were lost before they were in the ring; the next read goes on.
            RuntimeError: the previous batch has not been released.
        """
        if self._batch is not None and not self._batch.released:
            raise RuntimeError(
                f"device {self.device}: read() while the previous batch is in use: release() it first, "
                "its memory and the next read's are the same"
            )
        self._batch = None
        timeout_ns = -1 if timeout_sec is None else max(0, round(timeout_sec * 1e9))
        found = self._library.hcb_ring_read(self._ring, timeout_ns, self._batch_pointer)
        batch = self._native_batch
        if not found:
            if batch.damage == native.COPY_FAILED:
                raise LostCopiesError(
                    self._device_id, batch.damage_messages, batch.damage_start, batch.damage_end
                )
            if batch.damage:
                raise CorruptRingError(
                    self._device_id,
                    DAMAGE[batch.damage],
                    batch.damage_start,
                    batch.damage_end,
                    batch.damage_messages,
                )
            return None
        # What the batch owns is taken over at once, even if nobody looks at it.
        payloads: dict[int, Any] = {}
        if batch.blocks_count:
            for block in batch.blocks[: batch.blocks_count]:
                payloads[block.frame] = np.asarray(BlockMemory(self._library, block.memory, block.nbytes))
        folded = batch.folded[:found] if batch.folded_total else ()
        self._batch = RingBatch(self, found, batch.offsets, batch.ends, payloads, folded, self._columns)
        return self._batch

    def give_back(self, position: int, frames: int) -> None:
        """Frees what is before a position, which that many frames were."""
        if self._quick.hcb_ring_release(self._ring, position, frames):
            self._library.hcb_ring_admit(self._ring)

    def wake(self) -> None:
        """See `Source`. If no read waits, the next one that would wait returns None."""
        self._library.hcb_ring_wake(self._ring)

    def send_end(self, token: int) -> None:
        """See `Source`. Never waits: without room the frame stands in the queue of waiting emissions."""
        prefix = encode_prefix(token, Flags.END_OF_STREAM, ())
        status = self._library.hcb_ring_append(self._ring, prefix, len(prefix))
        if status < 0:
            raise RuntimeError(
                f"device {self.device}: the ring refused an end-of-stream frame (status {status})"
            )

    def call(
        self, prefix: bytes, arrays: Sequence[np.ndarray[Any, Any]], results: Sequence[ArraySpec]
    ) -> list[np.ndarray[Any, Any]]:
        """Emits a call from the host, behind all that is queued, and waits for its reply. Any thread but the reader's.

        Raises:
            CallFailedError: with what the program is to fail with.
        """
        given = [pack_subbyte(a) if is_subbyte(a.dtype) else np.ascontiguousarray(a) for a in arrays]
        filled = [
            pack_subbyte(np.zeros(spec.shape, spec.dtype))
            if is_subbyte(spec.dtype)
            else np.empty(spec.shape, spec.dtype)
            for spec in results
        ]
        error = ctypes.create_string_buffer(10_000)
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

    def read_call(self, timeout_sec: float) -> RingBatch | None:
        """For threads that run host functions: waits for a call that is the next frame, when all before is delivered.

        The reader, which is in `read` then, stands still until `end_read_call`: the calling thread delivers meanwhile.

        Returns:
            That frame alone; None when `timeout_sec` passed.
        """
        taken = native.CallFrame()
        if not self._library.hcb_ring_read_call(self._ring, round(timeout_sec * 1e9), taken):
            return None
        return self._taken(taken)

    def end_read_call(self) -> None:
        """Lets the reader go on. By the thread that `read_call` gave a frame, once it is delivered."""
        self._quick.hcb_ring_end_read_call(self._ring)

    def call_on_own_threads(self, call: Callable[[int, bool], bool]) -> None:
        """Has programs that run on a Python thread call the host there.

        Args:
            call: what to do then, with the number of the call, and whether the thread goes on with a program that
                another one began; it reads the call with `read_own_call` and replies. It returns whether the thread
                was interrupted, and must not raise.
        """
        pointer = native.HostCall(call)
        _host_calls.append(pointer)
        self._library.hcb_ring_set_host_call(self._ring, pointer)

    def read_own_call(self, own: int, timeout_sec: float) -> RingBatch | None:
        """As `read_call`, for the call of the calling thread's own program.

        Returns:
            Its frame; None when `timeout_sec` passed, or the call has been failed.

        Raises:
            CallFailedError: the calling thread is the reader, which is to deliver what is before the call.
        """
        taken = native.CallFrame()
        # Mostly it is its turn at once.
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
        """Fails a call that has not been read; False if its frame has to find room first."""
        return bool(self._library.hcb_own_call_withdraw(self._ring, own, _c_text(message)))

    def own_call_ended(self, own: int) -> bool:
        """Whether the call has its reply, or has been failed."""
        return bool(self._quick.hcb_own_call_ended(own))

    def _taken(self, taken: native.CallFrame) -> RingBatch:
        payloads = {}
        if taken.memory is not None:
            payloads[0] = np.asarray(BlockMemory(self._library, taken.memory, taken.nbytes))
        return RingBatch(self, 1, (taken.offset,), (taken.end,), payloads)

    def reply(self, seq: int, results: Sequence[np.ndarray[Any, Any]]) -> int | None:
        """Gives the program that waits for the reply to message `seq` its results, contiguous arrays. Any thread.

        Returns:
            What to call `resume` with; None if no program waits for the reply (any more).
        """
        raw = [pack_subbyte(a) if is_subbyte(a.dtype) else a for a in results]
        replied: int | None = self._library.hcb_call_reply(self.device, seq, *_raw(raw))
        return replied

    def resume(self, replied: int | None) -> None:
        """Lets the program go on, on the calling thread, until it ends or waits again. Calls: see `read_call`."""
        if replied is not None:
            self._library.hcb_call_resume(replied)

    def fail(self, seq: int, message: str) -> None:
        """Fails the program that waits for the reply to message `seq`, if there is one. Does not wait. Any thread."""
        self._library.hcb_call_fail(self.device, seq, _c_text(message))

    def close_calls(self, message: str) -> None:
        """See `Source`. Closes those of all devices."""
        self._library.hcb_call_close(_c_text(message))

    def counters(self) -> SourceCounters:
        """See `Source`."""
        c = native.Counters()
        self._library.hcb_ring_counters(self._ring, c)
        return SourceCounters(
            emitted=c.emitted,
            dropped=c.dropped,
            emitted_bytes=c.emitted_bytes,
            queued_messages=c.queued_messages,
            queued_bytes=c.queued_bytes,
            waiting_producers=c.waiting_producers,
            next_seq=c.next_seq,
            discarded=c.discarded,
            unpinned=c.unpinned,
        )

    def discarded(self) -> int:
        """See `Source`."""
        return int(self._quick.hcb_ring_discarded(self._ring))

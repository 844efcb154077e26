"""The native transport library: finds it, loads it with ctypes, and declares its C interface.

`receiver/native/abi/exports.h` is the interface's documentation; the declarations here follow its order.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from ctypes import POINTER, c_char_p, c_int32, c_int64, c_uint8, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from hostcallback.receiver import environment, processes
from hostcallback.receiver.errors import NativeLibraryError

# Equal to the library's `hcb_abi_version`: a stale library would be called with other structures.
ABI_VERSION = 28
DIRECTORY = Path(__file__).parent

BATCH_FRAMES = 1024
BATCH_BYTES = 1 << 20
BATCH_BLOCKS = 64
BATCH_GROUPS = 128

EMITTED, DROPPED, QUEUED, NO_MEMORY = 0, 1, 2, -3
INVALID, TOO_LARGE = -1, -2

OWN_CALL_TAKEN, OWN_CALL_WAITS_FOR_ITSELF = 1, -1

EVENT_STALL, EVENT_NEW_RING, EVENT_NOT_PINNED = 1, 2, 3

COPY_FAILED = 7

HOLD_ON, HOLD_HELD_BEGINNER = 1, 2

GPU_VENDORS = {"cuda": 0, "rocm": 1}


class Config(ctypes.Structure):
    """`hcb_config`; zero sizes stand for the defaults."""

    _fields_ = (
        ("capacity_bytes", c_uint64),
        ("external_threshold_bytes", c_uint64),
        ("block_budget_bytes", c_uint64),
        ("drop_after_ns", c_int64),
        ("steps", c_uint32),
        ("sample_every", c_uint32),
    )


def _words(*names: str) -> Any:
    return [(name, c_uint64) for name in names]


class Counters(ctypes.Structure):
    """`hcb_counters`."""

    _fields_ = _words(
        "emitted", "dropped", "emitted_bytes", "queued_messages", "queued_bytes", "waiting_producers", "next_seq",
        "released_messages", "discarded", "unpinned",
    )  # fmt: skip


class Block(ctypes.Structure):
    """`hcb_block`."""

    _fields_ = _words("frame", "memory", "nbytes")


class Batch(ctypes.Structure):
    """`hcb_batch`."""

    _fields_ = (
        *_words("frames", "blocks_count", "damage", "damage_start", "damage_end", "damage_messages"),
        ("offsets", c_uint64 * BATCH_FRAMES),
        ("ends", c_uint64 * BATCH_FRAMES),
        ("blocks", Block * BATCH_BLOCKS),
        ("folded_total", c_uint64),
        ("folded", c_uint64 * BATCH_FRAMES),
        ("alike_frames", c_uint64),
    )


class Group(ctypes.Structure):
    """`hcb_group`."""

    _fields_ = _words("frame", "first", "count", "payload_bytes")


class Columns(ctypes.Structure):
    """`hcb_columns`."""

    _fields_ = (
        ("groups", c_uint64),
        ("consumer_ids", c_uint64 * BATCH_FRAMES),
        ("flags", c_uint64 * BATCH_FRAMES),
        ("seqs", c_uint64 * BATCH_FRAMES),
        ("times_ns", c_int64 * BATCH_FRAMES),
        ("run_ids", c_int64 * BATCH_FRAMES),
        ("order", c_uint64 * BATCH_FRAMES),
        ("group", Group * BATCH_GROUPS),
    )


class CallFrame(ctypes.Structure):
    """`hcb_call_frame`."""

    _fields_ = (("offset", c_uint64), ("end", c_uint64), ("memory", c_void_p), ("nbytes", c_uint64))


class Stamp(ctypes.Structure):
    """`hcb_stamp`."""

    _fields_ = (
        ("seq", c_uint64),
        ("position", c_uint64),
        ("time_ns", c_int64),
        ("run_id", c_int64),
        ("device", c_int32),
        ("flags", c_uint32),
    )


class Control(ctypes.Structure):
    """`hcb_control`."""

    _fields_ = (
        ("every", c_uint64),
        ("probe_every", c_uint64),
        ("probe_ns", c_int64),
        ("interval_ns", c_int64),
        ("truncate", c_uint64),
        ("off", c_int32),
    )


class Event(ctypes.Structure):
    """`hcb_event`."""

    _fields_ = (("kind", c_int32), ("device", c_int32))


# Of the interpreter: a thread that has a state can run Python.
_HOST_THREADS = {
    "this_thread": "PyGILState_GetThisThreadState",
    "enter": "PyGILState_Ensure",
    "leave": "PyGILState_Release",
    "interrupted": "PyOS_InterruptOccurred",
    "interrupt": "PyErr_SetInterrupt",
}


class HostThreads(ctypes.Structure):
    """`hcb_host_threads`."""

    _fields_ = tuple((name, c_void_p) for name in _HOST_THREADS)


HostCall = ctypes.CFUNCTYPE(c_int32, c_void_p, c_int32, c_int32)
"""`hcb_host_call`."""

Wait = ctypes.PYFUNCTYPE(None)
"""`hcb_wait`."""

_ARRAYS = (c_uint64, POINTER(c_void_p), POINTER(c_uint64))  # count, addresses, lengths

# The handlers that XLA calls: the addresses of these functions are passed to it.
_HANDLERS = (
    "tap tap_shard gpu_tap gpu_tap_shard call_host hold wait_for_output clock copy not_finite statistics "
    "share_statistics merged_statistics verdict cell"
)

# name -> (result, arguments)
_FUNCTIONS = {
    "hcb_ring_open": (c_void_p, (c_int32, POINTER(Config))),
    "hcb_ring_get": (c_void_p, (c_int32,)),
    "hcb_ring_set_device_id": (None, (c_void_p, c_int32)),
    "hcb_ring_configure": (None, (c_void_p, POINTER(Config))),
    "hcb_ring_keep_in_file": (c_int32, (c_void_p, c_char_p, c_char_p, c_uint64)),
    "hcb_ring_memory": (c_void_p, (c_void_p, POINTER(c_uint64))),
    "hcb_ring_copy_ahead": (
        c_uint32,
        (c_void_p, POINTER(c_uint64), c_void_p, c_uint64, c_void_p, c_uint32, POINTER(c_uint64)),
    ),
    "hcb_ring_read": (c_uint32, (c_void_p, c_int64, c_uint32, POINTER(Batch))),
    "hcb_batch_columns": (None, (c_void_p, POINTER(Batch), POINTER(Columns))),
    "hcb_batch_stack": (
        None,
        (c_void_p, POINTER(Batch), POINTER(Columns), c_uint64, c_uint64, c_uint64, c_void_p),
    ),
    "hcb_batch_layout": (c_uint64, (c_void_p, POINTER(Batch), c_void_p)),
    "hcb_batch_copy": (None, (c_void_p, POINTER(Batch), c_void_p)),
    "hcb_ring_release": (c_int32, (c_void_p, c_uint64, c_uint64)),
    "hcb_ring_admit": (None, (c_void_p,)),
    "hcb_ring_read_call": (c_uint32, (c_void_p, c_int64, POINTER(CallFrame))),
    "hcb_ring_end_read_call": (None, (c_void_p,)),
    "hcb_ring_wake": (None, (c_void_p,)),
    "hcb_ring_counters": (None, (c_void_p, POINTER(Counters))),
    "hcb_ring_discarded": (c_uint64, (c_void_p,)),
    "hcb_emissions": (c_uint64, ()),
    "hcb_settle": (None, (c_uint64,)),
    "hcb_is_settled": (c_int32, ()),
    "hcb_note_emission": (None, ()),
    "hcb_buffer_waits": (None, (c_void_p, Wait)),
    "hcb_waited": (None, ()),
    "hcb_buffer": (c_int32, (c_void_p, c_void_p, c_int32)),
    "hcb_block_free": (None, (c_void_p,)),
    "hcb_ring_send": (c_int32, (c_void_p, c_char_p, c_uint64, *_ARRAYS, c_int64)),
    "hcb_ring_append": (c_int32, (c_void_p, c_char_p, c_uint64)),
    "hcb_ring_post": (c_int32, (c_void_p, c_char_p, c_uint64, *_ARRAYS, c_int64)),
    "hcb_ring_call": (
        c_int32,
        (c_void_p, c_char_p, c_uint64, *_ARRAYS, *_ARRAYS, c_char_p, c_uint64),
    ),
    "hcb_encode_frame": (
        c_uint64,
        (POINTER(Stamp), c_char_p, c_uint64, *_ARRAYS, POINTER(c_uint8), c_uint64),
    ),
    "hcb_supervise_wait": (c_int32, (c_int64, POINTER(Event))),
    "hcb_fail_exit": (None, (c_int32,)),
    "hcb_watch_termination": (c_int32, (c_int32,)),
    "hcb_unwatch_termination": (None, ()),
    "hcb_watch_interrupt": (c_int32, (c_int32,)),
    "hcb_hold_interrupt": (c_int32, (c_int32,)),
    "hcb_end_wait": (None, (c_uint64,)),
    "hcb_unwatch_interrupt": (None, ()),
    "hcb_call_reply": (c_void_p, (c_int32, c_uint64, *_ARRAYS)),
    "hcb_call_resume": (None, (c_void_p,)),
    "hcb_call_fail": (None, (c_int32, c_uint64, c_char_p)),
    "hcb_call_count": (c_uint64, (c_int32,)),
    "hcb_call_close": (None, (c_char_p,)),
    "hcb_switch": (c_int32, (c_uint64, c_int32, c_int32)),
    "hcb_switch_all_checks": (None, (c_int32,)),
    "hcb_abort_on_check": (c_int32, (c_int32, c_int32)),
    "hcb_control_set": (c_int32, (c_uint64, POINTER(Control))),
    "hcb_latest_send": (c_uint64, ()),
    "hcb_latest_waiting": (c_uint64, ()),
    "hcb_control_gate": (None, (c_uint64, c_int32, c_int32)),
    "hcb_control_suppressed": (c_uint64, (c_uint64,)),
    "hcb_waits": (c_int64, (POINTER(c_int64),)),
    "hcb_delivery_turn_give": (None, ()),
    "hcb_delivery_turn_awaited": (c_int32, ()),
    "hcb_delivery_pause": (c_int64, (c_int64,)),
    "hcb_page_checksums": (c_int32, (c_void_p, c_uint64, c_uint64, c_void_p)),
    "hcb_gpu_open": (c_int32, (c_int32, c_char_p, c_char_p, c_uint64)),
    "hcb_gpu_prepare": (c_int32, (c_void_p, c_int32)),
    "hcb_gpu_ring": (c_int32, (c_int32,)),
    "hcb_default_float_mode": (None, ()),
    "hcb_thread_states": (c_int64, (c_void_p, c_uint64, POINTER(c_uint64))),
    "hcb_hold_begin": (None, ()),
    "hcb_hold_thread": (None, (c_int64,)),
    "hcb_hold_end": (c_int32, ()),
    "hcb_after_fork_child": (None, ()),
    "hcb_test_produce": (c_uint64, (c_void_p, c_uint32, c_uint64, c_uint64)),
    "hcb_test_call": (c_int32, (c_void_p, c_char_p, c_uint64, *_ARRAYS, c_char_p, c_uint64)),
    "hcb_verdict_forget": (None, ()),
    "hcb_cell_set": (c_int64, (c_uint64, c_uint64, c_char_p, c_uint64, c_int64)),
    "hcb_cell_get": (c_int64, (c_uint64, c_char_p, c_int32)),
    "hcb_cell_forget_launches": (None, (c_uint64, c_uint64)),
    "hcb_set_host_threads": (None, (POINTER(HostThreads),)),
    "hcb_ring_set_host_call": (None, (c_void_p, HostCall)),
    "hcb_own_call_read": (c_int32, (c_void_p, c_void_p, c_int64, POINTER(CallFrame))),
    "hcb_own_call_withdraw": (c_int32, (c_void_p, c_void_p, c_char_p)),
    "hcb_own_call_ended": (c_int32, (c_void_p,)),
    **{f"hcb_{handler}": (c_void_p, (c_void_p,)) for handler in _HANDLERS.split()},
}


def path() -> Path:
    """Path at which the package's build puts the library."""
    return DIRECTORY / ("libhostcallback.dylib" if sys.platform == "darwin" else "libhostcallback.so")


@functools.cache
def load() -> ctypes.CDLL:
    """The library, loaded once per process. Its functions are called without the interpreter lock.

    Raises:
        NativeLibraryError: it is missing, cannot be loaded here, or has another interface version.
    """
    library = load_from(path())
    functions = [getattr(ctypes.pythonapi, name) for name in _HOST_THREADS.values()]
    library.hcb_set_host_threads(
        HostThreads(*[ctypes.cast(function, c_void_p).value for function in functions])
    )
    return library


@functools.cache
def load_holding_lock() -> ctypes.PyDLL:
    """The same library, but its functions are called with the interpreter lock held: for those that take microseconds.

    Giving the lock up for so short a time invites other threads to take it, and it comes back late.

    Raises:
        NativeLibraryError: see `load`.
    """
    load()
    library = ctypes.PyDLL(str(path()))
    _declare(library)
    return library


def load_from(file: Path) -> ctypes.CDLL:
    """Loads and checks the library in `file`.

    Raises:
        NativeLibraryError: see `load`.
    """
    if not file.exists():
        raise NativeLibraryError(_cure(f"the native transport library was not found at {file}"))
    try:
        library = ctypes.CDLL(str(file))
        version = library.hcb_abi_version
    except (OSError, AttributeError) as error:
        raise NativeLibraryError(
            _cure(f"the native transport library {file} cannot be used: {error}")
        ) from error
    version.restype, version.argtypes = c_uint32, ()
    if version() != ABI_VERSION:
        raise NativeLibraryError(
            _cure(
                f"the native transport library {file} has interface version {version()}, expected {ABI_VERSION}"
            )
        )
    try:
        _declare(library)
    except AttributeError as error:
        raise NativeLibraryError(
            _cure(f"the native transport library {file} was built from other sources: {error}")
        ) from error
    return library


def _declare(library: ctypes.CDLL) -> None:
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments


def open_gpu(platform: str) -> None:
    """Loads the driver of a GPU platform, `cuda` or `rocm`, unless it is loaded.

    `HOSTCALLBACK_CUDA_LIBRARY` and `HOSTCALLBACK_ROCM_LIBRARY` name another file than the usual `libcuda.so.1` and
    `libamdhip64.so`.

    Raises:
        NativeLibraryError: the native library or the driver cannot be loaded.
    """
    variable = environment.GPU_LIBRARIES[platform]
    file = variable.read() or ""
    error = ctypes.create_string_buffer(1000)
    if not load().hcb_gpu_open(GPU_VENDORS[platform], os.fsencode(file), error, len(error)):
        reason = error.value.decode(errors="replace")
        raise NativeLibraryError(
            f"{reason}: install the GPU's driver, name its library in {variable}, or set "
            "HOSTCALLBACK_TRANSPORT=callback to do without it"
        )


def available() -> bool:
    """Whether `load` works here."""
    try:
        load()
    except NativeLibraryError:
        return False
    return True


def after_fork_in_child() -> None:
    """Empties the rings and renews the locks; does nothing if the library was never loaded."""
    if load.cache_info().currsize:
        load().hcb_after_fork_child()


def _cure(problem: str) -> str:
    return (
        f"{problem}: reinstall hostcallback with a C++17 compiler at hand (pip install --force-reinstall "
        "--no-binary hostcallback hostcallback, or `python tools/build_native.py` in a checkout), or set "
        "HOSTCALLBACK_TRANSPORT=callback to do without it"
    )


processes.in_child(processes.Stage.NATIVE, after_fork_in_child)

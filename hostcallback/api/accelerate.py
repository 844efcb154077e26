"""`accelerate`: sends the callbacks of JAX's functions, in a program and its libraries, through our transport."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Literal, get_args

from hostcallback import _jax_compat as compat
from hostcallback.lifecycle import receivers as transport
from hostcallback.lowering import takeover
from hostcallback.receiver import environment, errors
from hostcallback.receiver.log import logger
from hostcallback.receiver.native import bindings as native_library
from hostcallback.receiver.runtime.device_receiver import DeviceReceiver
from hostcallback.receiver.runtime.runtime import POLL_SEC, runtime
from hostcallback.receiver.sources.settled import settled
from hostcallback.receiver.text import say
from hostcallback.tracing.source_line import (
    SourceLine,
    first_user_line,
    hide_frames,
    public,
    user_source_line,
)

# ---- Waits for results wait for the output of their program ---------------------------------------------------------
#
# On the CPU, JAX has called the callbacks of a program, and printed its lines, by the time its results are ready. A
# program that then closes a progress bar or a file, or reads what was printed, would do so too early, because our
# callbacks run later.

STALL_SEC = 5.0
"""Seconds for which a wait for a result waits for one callback. The callback may wait for a lock of the waiting
thread."""

_undo: list[Callable[[], None]] = []
_told: set[str] = set()  # source lines of the slow callbacks that were logged


def _extend_waits() -> None:
    """Makes waits for results wait for output. Must not be called twice before `end`."""
    try:
        _undo.append(compat.extend_waits(_wait_for_output, settled().is_settled))
        _undo.append(_wait_in_buffers())
    except LookupError as error:
        logger.warning(
            "%s under hcb.accelerate(), since this JAX or Python is not known: %s. Use jax.effects_barrier(). Update "
            "hostcallback",
            "numpy.asarray(x) does not wait for callbacks"
            if _undo
            else "waits for results do not wait for callbacks",
            error,
        )


def _restore_waits() -> None:
    """Restores JAX's waits."""
    while _undo:
        _undo.pop()()


def _wait_in_buffers() -> Callable[[], None]:
    if not native_library.available():
        raise LookupError("the native library is missing")
    slot, library = compat.get_buffer_slot(), native_library.load_holding_lock()
    original = slot.value
    ours = ctypes.cast(library.hcb_buffer, ctypes.c_void_p).value
    # Otherwise the slot was left alone at the last `end`.
    library.hcb_buffer_waits(None if original == ours else original, _WAIT_IN_BUFFER)
    slot.value = ours

    def undo() -> None:
        library.hcb_buffer_waits(None, native_library.Wait())
        if slot.value == ours:
            slot.value = original

    return undo


def _wait_in_buffer() -> None:
    # Native code, which no exception can pass, calls this, and interrupts the thread once it is back in Python, unless
    # the last line has run: also after an interrupt that Python raises before the first line.
    try:
        _wait_for_output()
    except KeyboardInterrupt:
        return
    except BaseException:
        logger.exception("numpy.asarray does not wait for callbacks")
    native_library.load_holding_lock().hcb_waited()


_WAIT_IN_BUFFER = native_library.Wait(_wait_in_buffer)


def _wait_for_output() -> None:
    # All messages of programs whose results are ready have been emitted. Later messages of programs that still run are
    # not waited for.
    if not _undo or runtime.serves(threading.current_thread()):
        return
    emissions = settled().emissions()
    targets = [(r, r.source.counters().emitted) for r in runtime.receivers() if r.queued()]
    if targets and compat.in_callback_of_jax():  # the program that waits for it may be one of a tap function
        return
    stalled = [receiver.name for receiver, emitted in targets if not _wait_for(receiver, emitted)]
    if not stalled:
        settled().settle(emissions)


def _wait_for(receiver: DeviceReceiver, emitted: int) -> bool:
    seen, since = receiver.progress(), perf_counter()
    while not receiver.wait_consumed(emitted, POLL_SEC):
        now = perf_counter()
        # Progress restarts the time: the limit is for one callback, not for all of them.
        if (found := receiver.progress()) != seen:
            seen, since = found, now
        running = receiver.running_tap()
        stalled_sec = max(now - since, 0.0 if running is None else running[1])
        if stalled_sec > STALL_SEC:
            line = receiver.name if running is None else running[0].source_line
            if line not in _told:
                _told.add(line)
                logger.warning(
                    "a wait for a result stops waiting for the emitted messages: %s. The callback may wait for a "
                    "lock of the waiting thread; jax.effects_barrier() waits without this limit",
                    receiver.describe_wait(),
                )
            return False
    return True


# ---- Callbacks go through our transport ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AcceleratedCallback:
    """One place where the program or a library calls a callback function of JAX.

    Attributes:
        function: the function's name, such as "jax.debug.print".
        source_line: the line of the call.
        reason: the reason why JAX executes it; None if it was taken over.

    Example:
        with hcb.accelerate() as acceleration:
            train()
        print([callback.function for callback in acceleration.callbacks if callback.reason is None])
    """

    function: str
    source_line: SourceLine
    reason: str | None

    def __str__(self) -> str:
        """Returns one line that says whether the callback was taken over, and why not."""
        what = "taken over" if self.reason is None else "left to JAX"
        because = "" if self.reason is None else f": {self.reason}"
        return f"{what}: {self.function} at {self.source_line}{because}"


class Acceleration:
    """The state of one `accelerate` call. As a context manager it is undone at the end of the block.

    Example:
        with hcb.accelerate() as acceleration:
            train()
        print(acceleration)
    """

    def __init__(self, arrays: takeover.Arrays, verbose: bool) -> None:
        """Called by `accelerate`, which activates the object."""
        self.arrays = arrays
        self.verbose = verbose
        self.source_line = user_source_line()
        self._callbacks: dict[
            AcceleratedCallback, None
        ] = {}  # used by any thread without a lock, because operations of dict are atomic

    def __repr__(self) -> str:
        """Returns a text with its state, its options and the line of the `accelerate` call."""
        state = "active" if self.active else "undone"
        return f"<accelerate(arrays={self.arrays!r}) at {self.source_line}: {state}>"

    @property
    def active(self) -> bool:
        """Whether it has not been undone."""
        return self in _active

    @property
    def callbacks(self) -> list[AcceleratedCallback]:
        """The callbacks traced since, taken over or not, in order; each pair of line and function once."""
        return list(self._callbacks)

    def undo(self) -> None:
        """Restores JAX's own callbacks for later traces, unless another `accelerate` is still active.

        Programs that were traced before do not change, and their messages still arrive.

        Raises:
            RuntimeError: it was undone before.
        """
        if not _deactivate(self):
            raise RuntimeError(
                f"the accelerate() of {self.source_line} has been undone already, again at {user_source_line()}: undo "
                "each once, by undo() or by the end of its with block, and call hcb.accelerate() to activate it again"
            )

    def __enter__(self) -> Acceleration:
        """Returns itself.

        Raises:
            RuntimeError: it has been undone.
        """
        if not self.active:
            raise RuntimeError(
                f"the accelerate() of {self.source_line} has been undone, and is entered at {user_source_line()}: call "
                "hcb.accelerate() again, as in `with hcb.accelerate():`"
            )
        return self

    @hide_frames
    def __exit__(self, *exception: object) -> None:
        """Undoes it, unless the block did."""
        _deactivate(self)

    def note(self, callback: AcceleratedCallback) -> None:
        """Stores a callback, and prints it if it is the first of its function and line and `verbose` is set."""
        if callback in self._callbacks:
            return
        self._callbacks[callback] = None
        if self.verbose:
            say(f"hostcallback: {callback}")


@public
def accelerate(*, arrays: Literal["numpy", "jax"] = "numpy", verbose: bool = False) -> Acceleration:
    """Sends the callbacks of JAX's functions through our transport, in the program and in the libraries it uses.

    The functions are `jax.debug.print`, `jax.debug.log`, `jax.debug.callback` and `jax.experimental.io_callback`, on
    all threads, in all later traces. Programs that were traced before do not change, compiled or not. Neither do
    functions that JAX has traced within them and reuses; `jax.clear_caches()` makes JAX trace all of them again.

    Programs then do not stop for callbacks without results. The call of a program with callbacks on one CPU device
    returns when they have run, as with JAX. Where XLA ends the program on a thread of its pool, that thread waits for
    one callback for at most a second, and on a machine with one processor not at all. Ordered callbacks also work on
    several devices. Under `vmap` one message carries the batch, and a callback is called for its elements in JAX's
    order; the compile time does not grow with the batch. Callbacks without results run on a receiver thread, later than
    the point in the program that calls them. `jax.effects_barrier()` and `barrier_wait` wait for them and raise their
    errors with the line. Whatever waits for a result, such as `jax.block_until_ready(x)`, `float(x)` or
    `numpy.asarray(x)`, also waits for the callbacks of programs whose results are ready; it does not raise their
    errors. Callbacks with results work like `call`: the program waits. Code that `jax.checkpoint` recomputes does not
    call them again. docs/accelerate.md has the details.

    JAX still executes: callbacks outside of compiled code, which are called at once, after all emitted messages are
    delivered; `pure_callback`; callbacks that cannot be taps, such as those in Pallas kernels. `verbose` prints why.

    Args:
        arrays: the arguments of callbacks: "numpy" for new numpy arrays, or "jax" for JAX arrays on the CPU.
        verbose: whether to print to standard error, for each line when it is traced, whether it was taken over.

    Returns:
        An object with `undo()`, which is also a context manager. If several are active, the options of the last one
        apply, and callbacks are taken over until all are undone.

    Raises:
        ValueError: `arrays` is neither "numpy" nor "jax".
        TypeError: `verbose` is not a bool.
        RuntimeError: called in code that is being traced, where it would affect only a part of the program.

    Example:
        with hcb.accelerate():
            train()  # its jax.debug.print calls go through hostcallback
    """
    if arrays not in get_args(takeover.Arrays):
        raise ValueError(
            f"arrays={arrays!r}, expected 'numpy' (fresh numpy arrays) or 'jax' (JAX arrays on the CPU, as JAX hands "
            f"them to callbacks), at {user_source_line()}"
        )
    if not isinstance(verbose, bool):
        raise TypeError(f"verbose is {verbose!r}, expected True or False, at {user_source_line()}")
    if not compat.outside_traces():
        raise RuntimeError(
            f"hcb.accelerate() was called in code that JAX is tracing, at {user_source_line()}: it is for the whole "
            "process, and what was traced before it stays JAX's. Call it outside, before the first jitted call"
        )
    acceleration = Acceleration(arrays, verbose)
    _activate(acceleration)
    return acceleration


_lock = threading.Lock()  # protects changes of `_active` and `_replaced`; readers do not take it
_active: tuple[Acceleration, ...] = ()
_replaced: dict[str, tuple[Any, Callable[..., Any]]] = {}


def _activate(acceleration: Acceleration) -> None:
    global _active
    with _lock:
        for name in takeover.FUNCTIONS.keys() - _replaced.keys():
            try:
                primitive = compat.callback_primitive(name)
            except LookupError as error:
                logger.warning(
                    "%s stays JAX's under hcb.accelerate(), since this JAX is not known: %s. It works without "
                    "hostcallback, at JAX's speed. Update hostcallback",
                    name,
                    error,
                )
                continue
            bind = functools.partial(_bind, name, primitive.bind)
            compat.replace_bind(primitive, bind)
            _replaced[name] = primitive, bind
        if not _active:
            _extend_waits()
        _active += (acceleration,)


def _deactivate(acceleration: Acceleration) -> bool:
    global _active
    with _lock:
        if acceleration not in _active:
            return False
        _active = tuple(other for other in _active if other is not acceleration)
        if not _active:
            for primitive, bind in _replaced.values():
                compat.restore_bind(primitive, bind)
            _replaced.clear()
            _restore_waits()
        return True


class _Outside(threading.local):
    binding = False


_outside = _Outside()  # whether the thread binds an io_callback outside of compiled code


def _bind(name: str, bind_jaxs: Callable[..., Any], *args: Any, **params: Any) -> Any:
    active = _active
    if not active or _outside.binding:
        return bind_jaxs(*args, **params)
    if not (compat.is_staging() or compat.is_batching()):
        return _bind_outside(name, bind_jaxs, *args, **params)
    results, reason = None, None
    try:
        results = takeover.take_over(name, args, params, active[-1].arrays)
    except takeover.StaysWithJaxError as error:
        reason = str(error)
    except Exception as error:  # of any kind: JAX then executes the callback, or raises the user's error
        reason = f"it cannot be a tap ({type(error).__name__}: {error})"
    line = first_user_line(compat.evaluated_frames()) or user_source_line()
    callback = AcceleratedCallback(name, line, reason)
    for acceleration in active:
        acceleration.note(callback)
    return bind_jaxs(*args, **params) if results is None else results


def _bind_outside(name: str, bind_jaxs: Callable[..., Any], *args: Any, **params: Any) -> Any:
    # JAX calls it at once. Waits first, so that earlier messages are delivered before it.
    if transport.started():
        # a callback that calls this cannot wait for itself
        with contextlib.suppress(errors.ReentrantWaitError):
            runtime.wait_delivered()
    # JAX compiles a program for an io_callback and binds the primitive a second time in it.
    _outside.binding = name == "io_callback"
    try:
        return bind_jaxs(*args, **params)
    finally:
        _outside.binding = False


def _accelerate_from_environment() -> None:
    choice = environment.ACCELERATE.read()
    if choice in ("1", "verbose"):
        _activate(Acceleration("numpy", choice == "verbose"))


_accelerate_from_environment()

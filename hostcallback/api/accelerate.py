"""`accelerate`: sends the callbacks of JAX's functions, in a program and its libraries, through our transport."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from hostcallback import _jax_compat as compat
from hostcallback.lifecycle import readiness, receivers as transport
from hostcallback.lowering import takeover
from hostcallback.receiver import environment
from hostcallback.receiver.errors import ReentrantWaitError
from hostcallback.receiver.log import logger
from hostcallback.receiver.runtime.runtime import runtime
from hostcallback.receiver.text import say
from hostcallback.tracing.source_line import SourceLine, first_user_line, public, user_source_line


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
            readiness.begin()
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
            readiness.end()
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
        with contextlib.suppress(ReentrantWaitError):  # a callback that calls this cannot wait for itself
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

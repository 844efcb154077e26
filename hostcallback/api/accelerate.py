"""`accelerate`: the callbacks of JAX's own functions, in a program and its libraries, go through our transport."""

from __future__ import annotations

import contextlib
import functools
import sys
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
from hostcallback.tracing.source_line import SourceLine, first_user_line, user_source_line


@dataclass(frozen=True, slots=True)
class AcceleratedCallback:
    """One place where the program, or a library, calls a callback function of JAX's.

    Attributes:
        function: which, such as "jax.debug.print".
        source_line: where.
        reason: why it stays JAX's; None if it was taken over.
    """

    function: str
    source_line: SourceLine
    reason: str | None

    def __str__(self) -> str:
        """One line for people."""
        what = "taken over" if self.reason is None else "left to JAX"
        because = "" if self.reason is None else f": {self.reason}"
        return f"{what}: {self.function} at {self.source_line}{because}"


class Acceleration:
    """What `accelerate` began, until it is undone. Use it as a context manager to have it undone at the block's end."""

    def __init__(self, arrays: takeover.Arrays, verbose: bool) -> None:
        """Made by `accelerate`, which activates it."""
        self.arrays = arrays
        self.verbose = verbose
        self.source_line = user_source_line()
        self._callbacks: dict[
            AcceleratedCallback, None
        ] = {}  # of any thread; a dict's own operations are atomic

    def __repr__(self) -> str:
        """Whether it is active, since where, and with what."""
        state = "active" if self.active else "undone"
        return f"<accelerate(arrays={self.arrays!r}) at {self.source_line}: {state}>"

    @property
    def active(self) -> bool:
        """Whether it has not been undone."""
        return self in _active

    @property
    def callbacks(self) -> list[AcceleratedCallback]:
        """What was traced since, each line and function once, in order: taken over or not."""
        return list(self._callbacks)

    def undo(self) -> None:
        """Leaves what is traced from now on to JAX, or to an `accelerate` that is still active.

        Programs that were traced before keep what they have, and their messages arrive as ever.

        Raises:
            RuntimeError: it has been undone.
        """
        if not _deactivate(self):
            raise RuntimeError(
                f"the accelerate() of {self.source_line} has been undone already, again at {user_source_line()}: undo "
                "each once, by undo() or by the end of its with block, and call hcb.accelerate() to begin anew"
            )

    def __enter__(self) -> Acceleration:
        """Itself.

        Raises:
            RuntimeError: it has been undone.
        """
        if not self.active:
            raise RuntimeError(
                f"the accelerate() of {self.source_line} has been undone, and is entered at {user_source_line()}: call "
                "hcb.accelerate() anew, as in `with hcb.accelerate():`"
            )
        return self

    def __exit__(self, *exception: object) -> None:
        """Undoes it, unless that was done within."""
        _deactivate(self)

    def note(self, callback: AcceleratedCallback) -> None:
        """Keeps a call, and tells of it if it is the first of its kind and line."""
        if callback in self._callbacks:
            return
        self._callbacks[callback] = None
        if self.verbose:
            print(f"hostcallback: {callback}", file=sys.stderr)


def accelerate(*, arrays: Literal["numpy", "jax"] = "numpy", verbose: bool = False) -> Acceleration:
    """From now on callbacks of JAX's functions go through our transport, in the program and in libraries it uses.

    These are `jax.debug.print`, `jax.debug.log`, `jax.debug.callback` and `jax.experimental.io_callback`, on all
    threads, in whatever is traced from now on. Programs that were traced before keep what they have, compiled or not,
    and so do functions that JAX has traced within them and uses again; `jax.clear_caches()` has all traced anew.

    What changes: programs are dispatched like those without callbacks. Ordered callbacks work on several devices, too.
    Under `vmap` one message brings the batch, and callbacks are called for its elements in JAX's order; compile time
    does not grow with it. Callbacks without results run on a receiver thread, later than the program's point that
    calls them: `jax.effects_barrier()` and `barrier_wait` wait for them, and raise what they raised, with its line.
    `jax.block_until_ready` and the method of arrays wait for those of programs whose results are ready, too, unless
    there are prints only; they raise nothing.
    Callbacks with results are as `call`: the program waits. In what `jax.checkpoint` recomputes nothing is called
    again. docs/accelerate.md has it all.

    What stays JAX's: callbacks outside of compiled code, which are called at once, after all that has been emitted was
    delivered; `pure_callback`; what cannot be a tap, such as callbacks in Pallas kernels. `verbose` tells why.

    Args:
        arrays: what callbacks get: "numpy" for fresh numpy arrays, or "jax" for arrays on the CPU as from JAX.
        verbose: whether to tell of each line on standard error, once it is traced, whether it was taken over.

    Returns:
        What `undo` is to be called on, or to be used in `with`. While several are active, what the last of them says
        counts, and callbacks are taken over until all are undone.

    Raises:
        ValueError: `arrays` is none of the two.
        TypeError: `verbose` is no bool.
        RuntimeError: called in code that is being traced, of which a part would be taken over by chance.
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


_lock = threading.Lock()  # protects what follows; read without it
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
                    "%s stays JAX's under hcb.accelerate(), since this JAX is not known: %s. It works as always, at "
                    "JAX's speed. Update hostcallback",
                    name,
                    error,
                )
                continue
            bind = functools.partial(_bind, name, compat.own_bind(primitive))
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
    except Exception as error:  # of whatever kind: JAX does it, or raises what is wrong
        reason = f"it cannot be a tap ({type(error).__name__}: {error})"
    line = first_user_line(compat.evaluated_frames()) or user_source_line()
    callback = AcceleratedCallback(name, line, reason)
    for acceleration in active:
        acceleration.note(callback)
    return bind_jaxs(*args, **params) if results is None else results


def _bind_outside(name: str, bind_jaxs: Callable[..., Any], *args: Any, **params: Any) -> Any:
    # JAX calls it at once. What was emitted before it comes before it.
    if transport.started():
        with contextlib.suppress(ReentrantWaitError):  # called by a callback, which cannot wait for itself
            runtime.wait_delivered()
    # JAX compiles a program for an io_callback, and binds it a second time therein.
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

"""`breakpoint`: stops a program and opens a debugger on the values of the traced frames."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from hostcallback import _jax_compat as compat
from hostcallback.api.public import public
from hostcallback.primitives.call import emit_call
from hostcallback.receiver.sinks.debugger import sessions as stops
from hostcallback.receiver.sinks.debugger.console import SupportsReadline, SupportsWriteAndFlush
from hostcallback.receiver.wire import tap_kind
from hostcallback.tracing.frames import CapturedFrame, capture_frames
from hostcallback.tracing.retention import Unavailable
from hostcallback.tracing.source_line import SourceLine, user_source_line
from hostcallback.tracing.tap_options import TapOptions


@public
def breakpoint(
    *,
    when: Any = None,
    stdin: SupportsReadline | None = None,
    stdout: SupportsWriteAndFlush | None = None,
) -> None:
    """Stops the program here and opens a debugger on the terminal. `help` lists its commands; `c` resumes the program.

    The debugger shows the user's frames at the time of tracing, and their variables: traced values as numpy arrays
    with their values on the device, all other objects unchanged. It shows values as not available if their trace
    cannot be used here: a trace that has ended, or one around a jit or around a function defined elsewhere, whose jaxpr
    JAX may reuse. A stop keeps its place in the order of the taps and calls of its device; the device may meanwhile
    compute values that do not depend on it.

    Under vmap each element stops, one after the other, and on several devices each device stops. One stop at a time
    has the debugger, over all threads. Under grad and jvp it shows the primal values. Outside of jit and of all
    transformations it stops the calling thread.

    `q`, or the end of the input (Ctrl-D), ends the program: using its results raises a `jax.errors.JaxRuntimeError`
    that says so, and no barrier or receiver reports it once more. It also ends the programs that wait for their turn.
    Programs that run afterwards stop again. Outside of jit, `q` raises `BreakpointQuit` here. Ctrl-C interrupts the
    main thread; while the main thread waits for the program, Ctrl-C takes effect when the program goes on.

    Args:
        when: a bool scalar, traced or not: whether to stop. Under vmap only the elements stop for which it is true.
        stdin: an object with `readline()` from which commands are read; its end quits. By default the terminal, or the
            notebook's input.
        stdout: an object with `write(str)` and `flush()` for the answers; by default the value of `sys.stdout` at the
            time of the stop.

    Raises:
        TypeError: `when` is not a bool scalar.
        BreakpointError: no terminal exists to read commands from. Outside of jit it is raised here; within jit it
            fails the program.
        BreakpointQuit: see above.
        NotImplementedError: (later) the compiler partitions the program over devices; see `call`.

    Example:
        hcb.breakpoint(when=jnp.isnan(loss))
    """
    where = user_source_line()
    if when is not None:
        _check_when(when, where)
        if not isinstance(when, jax.core.Tracer) and not bool(when):
            return
    frames, values = capture_frames()
    stop = _Stop(frames, where, stdin, stdout)
    if compat.trace_context.trace is compat.eval_trace:
        stop({"values": values}, device=None)
        return
    operands: dict[str, Any] = {"values": values}
    if not isinstance(when, jax.core.Tracer):
        _stop_here(stop, operands)
        return
    # The predicate is an operand too, because if vmap batches it, JAX runs both branches for all elements.
    operands["when"] = when
    lax.cond(when, lambda operands: _stop_here(stop, operands), lambda operands: None, operands)


def _check_when(when: Any, where: SourceLine) -> None:
    shape, dtype = jnp.shape(when), getattr(when, "dtype", np.dtype(type(when)))
    if shape or dtype != np.bool_:
        raise TypeError(
            f"hcb.breakpoint's when is a {dtype}{list(shape)}, expected a bool scalar: compare and reduce, such as "
            f"when=(x > 0).any(), at {where}"
        )


def _stop_here(stop: _Stop, operands: Any) -> None:
    # JAX sorts the keys of dicts, so `missing` is the first operand, as the transposition rule of `call` expects.
    operands = {"missing": np.zeros(len(jax.tree.leaves(operands)), np.bool_), **operands}
    options = TapOptions("breakpoint", tap_tangents=False, kind=tap_kind.BREAKPOINT)
    emit_call(stop, operands, {}, (), "sequential", options)


class _Stop:
    """The host function of one breakpoint in one program."""

    def __init__(self, frames: Sequence[CapturedFrame], where: SourceLine, stdin: Any, stdout: Any) -> None:
        self._frames = frames
        self._where = str(where)
        self._stdin = stdin
        self._stdout = stdout
        self._count = itertools.count(1)

    def __call__(self, operands: dict[str, Any], *, device: Any) -> tuple[()]:
        if not operands.get("when", True):
            return ()
        missing = operands.get("missing", [False] * len(operands["values"]))
        values = [
            Unavailable("a tangent, in code that is transposed") if m else value
            for value, m in zip(operands["values"], missing, strict=False)
        ]
        frames = [frame.restore(values) for frame in self._frames]
        what = f"stop {next(self._count)} of the breakpoint at {self._where}"
        if device is not None:
            what += f", on {device}"
        stops.open_session(frames, what, self._where, self._stdin, self._stdout)
        return ()

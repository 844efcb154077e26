"""`print`, `log`, `callback` and `breakpoint`: the functions of `jax.debug` as taps and calls."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np

from hostcallback import _jax_compat as compat
from hostcallback.primitives.call import emit_call
from hostcallback.primitives.tap import bind_tap, emit_text
from hostcallback.receiver.sinks import debugger as stops, factory
from hostcallback.receiver.sinks.debugger import SupportsReadline, SupportsWriteAndFlush
from hostcallback.receiver.sinks.tap import takes_keyword
from hostcallback.receiver.tap_arguments import SupportsWrite, refuse_async
from hostcallback.receiver.wire import tap_descriptor
from hostcallback.tracing import arguments, stack_frames, tap_spec
from hostcallback.tracing.source_line import SourceLine, hide_frames, place_name, public, user_source_line

PRINT_OPTIONS = ("output_stream", "name", "processes")
LOG_OPTIONS = ("logger", "level", "name", "processes")
CALLBACK_OPTIONS = ("name", "processes")
"""Options that `jax.debug` does not have."""

LOGGER = logging.getLogger("hostcallback.log")
"""The default logger of `log`."""


@overload
def print(
    fmt: str,
    *args: Any,
    ordered: bool = ...,
    partitioned: bool = ...,
    skip_format_check: bool = ...,
    output_stream: Any = ...,
    name: Any = ...,
    processes: Any = ...,
    **kwargs: Any,
) -> None: ...


@overload
def print(
    *,
    ordered: bool = ...,
    partitioned: bool = ...,
    skip_format_check: bool = ...,
    output_stream: SupportsWrite | None = ...,
    name: str | None = ...,
    processes: str | None = ...,
) -> Callable[..., None]: ...


@public
def print(
    fmt: str | None = None,
    *args: Any,
    ordered: bool = True,
    partitioned: bool = False,
    skip_format_check: bool = False,
    **kwargs: Any,
) -> Callable[..., None] | None:
    """Prints a text with values of the program, as `jax.debug.print` does.

    The text equals that of `jax.debug.print`, under the numpy print options at trace time, with three exceptions: a
    format string with escaped braces, as in `"{{x}} {}"`, is formatted; a Python scalar's `!r` does not have
    `weak_type=True` outside of jit; a typed PRNG key prints as a key, `Array((), dtype=key<fry>) ...`, where JAX prints
    its data. A receiver thread prints the text in one write and never blocks the device. `barrier_wait` or the receiver
    reports a text that cannot be formatted, like other exceptions of taps.

    Under vmap each element prints a line, in the order in which JAX unrolls the batch; one message carries them all. A
    text without batched values prints once. If vmap batches the predicate of a `cond` or `while_loop`, only the
    elements that take part print. Under jvp and grad the primals are printed, and no tangents.

    Keyword arguments that the text has a placeholder for are values, also if they are called `name`. `step=i` needs
    none: it is the step of the message in logs. In the two-call
    form a first call takes the options and the second call takes the values:
    `print(ordered=False, output_stream=sys.stderr)("loss {name}", name=loss)`.

    Args:
        fmt: a format string for `str.format`. Not an f-string: the values are not known at trace time.
        *args: pytrees for its placeholders, traced or not. Leaves that are not arrays stay on the host.
        ordered: whether messages of one device keep program order, on several devices too. JAX's default is False.
        partitioned: if the compiler partitions an array, whether each device prints its shard instead of the whole
            array being printed once. Under vmap each device prints its shards of every element; for that the compiler
            gathers the batch axes on each device, as for JAX. Otherwise taps move no data between devices. Inside a
            shard_map over some of the axes, where JAX prints the whole array over the others, it prints shards too.
        skip_format_check: whether to allow arguments without a placeholder. If a text has no placeholders at all, its
            arguments follow it.
        output_stream: an object with `write(str)`, called on receiver threads; by default the value of `sys.stdout` at
            the time of printing.
        name: name of the tap in reports, in `hcb.taps` and for `bind`; by default the line of the tap, as in
            `print@train_step:42`. The glob `print` matches all of these.
        processes: in a program of several processes, which of them print: see `id_tap`. A replicated value is printed
            once, by the first process, as by JAX; `partitioned=True` prints it per device.
        **kwargs: pytrees for its named placeholders.

    Returns:
        None; without `fmt`, a function `(fmt, *args, **kwargs)` that prints with these options.

    Raises:
        TypeError: `fmt` is not a text, an option is unknown or not valid, or a format such as `.2f` is for a scalar and
            the value is an array.
        ValueError: an argument is not used by `fmt`, or `fmt` is malformed, does not fit a value's dtype, or is an
            f-string with a traced value.
        IndexError: `fmt` has more placeholders than there are `args`.
        KeyError: a placeholder's name is not among `kwargs`.

    Example:
        hcb.print("loss {x:.3f}", x=loss)
    """

    def tap(
        fmt: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        output_stream: SupportsWrite | None = None,
        name: str | None = None,
        processes: str | None = None,
    ) -> None:
        if output_stream is not None and not callable(getattr(output_stream, "write", None)):
            raise TypeError(
                f"hcb.print's output_stream needs a write(str) method, got {type(output_stream).__name__} "
                f"{output_stream!r}: pass an open text file, io.StringIO() or None for standard output, at "
                f"{user_source_line()}"
            )
        options = tap_spec.callback_options(
            tap_spec.name_or(name, place_name, "print"), ordered, partitioned, processes
        )
        emit_text(
            "hcb.print", fmt, args, kwargs, skip_format_check, ("print", output_stream),
            {"output_stream": output_stream}, options,
        )  # fmt: skip

    return _one_or_two_calls("hcb.print", tap, fmt, args, kwargs, PRINT_OPTIONS)


@overload
def log(
    fmt: str,
    *args: Any,
    ordered: bool = ...,
    partitioned: bool = ...,
    skip_format_check: bool = ...,
    logger: Any = ...,
    level: Any = ...,
    name: Any = ...,
    processes: Any = ...,
    **kwargs: Any,
) -> None: ...


@overload
def log(
    *,
    ordered: bool = ...,
    partitioned: bool = ...,
    skip_format_check: bool = ...,
    logger: logging.Logger | None = ...,
    level: int = ...,
    name: str | None = ...,
    processes: str | None = ...,
) -> Callable[..., None]: ...


@public
def log(
    fmt: str | None = None,
    *args: Any,
    ordered: bool = True,
    partitioned: bool = False,
    skip_format_check: bool = False,
    **kwargs: Any,
) -> Callable[..., None] | None:
    """Logs the texts of `print`, as `jax.debug.log` of JAX 0.10 does. The records name the line that called `log`.

    The logger `hostcallback.log` gets records of level INFO. They are shown if logging is set up for that level, for
    example by `logging.basicConfig(level=logging.INFO)`. See `print` for everything else.

    Args:
        fmt: as in `print`.
        *args: as in `print`.
        ordered: as in `print`.
        partitioned: as in `print`.
        skip_format_check: as in `print`.
        logger: another logger; its handlers are called on receiver threads.
        level: another level, such as `logging.WARNING`.
        name: as in `print`; by default the line of the tap, as in `log@train_step:42`.
        processes: as in `print`.
        **kwargs: as in `print`.

    Returns:
        None; without `fmt`, a function `(fmt, *args, **kwargs)` that logs with these options.

    Raises:
        TypeError: as in `print`, or `logger` is not a logger, or `level` is not a number.
        ValueError: as in `print`.
        IndexError: as in `print`.
        KeyError: as in `print`.

    Example:
        hcb.log(level=logging.WARNING)("loss {x}", x=loss)
    """

    def tap(
        fmt: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        logger: logging.Logger | None = None,
        level: int = logging.INFO,
        name: str | None = None,
        processes: str | None = None,
    ) -> None:
        logger = LOGGER if logger is None else logger
        if not isinstance(logger, logging.Logger) or not isinstance(level, int):
            raise TypeError(
                f"hcb.log takes a logging.Logger and a level as a number, got logger={logger!r} and level={level!r}: "
                f"pass such as logging.getLogger(...) and logging.WARNING, at {user_source_line()}"
            )

        options = tap_spec.callback_options(
            tap_spec.name_or(name, place_name, "log"), ordered, partitioned, processes
        )
        emit_text(
            "hcb.log", fmt, args, kwargs, skip_format_check, ("log", logger, level), {"logger": logger},
            replace(options, params={"logger": logger.name, "level": level}),
        )  # fmt: skip

    return _one_or_two_calls("hcb.log", tap, fmt, args, kwargs, LOG_OPTIONS)


@overload
def callback(
    callback: Callable[..., Any],
    *args: Any,
    ordered: bool = ...,
    partitioned: bool = ...,
    python_scalars: bool = ...,
    name: Any = ...,
    processes: Any = ...,
    **kwargs: Any,
) -> None: ...


@overload
def callback(
    *,
    ordered: bool = ...,
    partitioned: bool = ...,
    python_scalars: bool = ...,
    name: str | None = ...,
    processes: str | None = ...,
) -> Callable[..., None]: ...


@public
def callback(
    callback: Callable[..., Any] | None = None,
    *args: Any,
    ordered: bool = True,
    partitioned: bool = False,
    python_scalars: bool = False,
    **kwargs: Any,
) -> Callable[..., None] | None:
    """Calls `callback(*args, **kwargs)` on the host with values of the program, as `jax.debug.callback` does.

    `callback` runs on the receiver thread of the device that emitted the message, and never blocks the device. Its
    exceptions are deferred until `barrier_wait` or the end of the receiver. See `id_tap` for order and threads.

    Under vmap it is called for each element, in the order in which JAX unrolls the batch; one message carries them all.
    If it raises for one element, it is still called for the others. Each call gets all unbatched arguments; if no
    argument is batched, it is called once. If vmap batches the predicate of a `cond` or `while_loop`, it is called for
    the elements that take part. Under jvp and grad it gets the primals, and no tangents. Use `id_tap` for whole
    batches, tangents and cotangents.

    In the two-call form a first call takes the options, and the second call takes the arguments:
    `callback(ordered=False)(function, x, step=step)`.

    Args:
        callback: called with `args` and `kwargs`; its result is ignored.
        *args: pytrees, traced or not. Arrays and numbers arrive as new numpy arrays, which the callback may keep and
            change; other leaves stay on the host and arrive unchanged.
        ordered: as in `print`.
        partitioned: if the compiler partitions an array, whether the callback gets each device's shard instead of the
            whole array once.
        python_scalars: as in `id_tap`.
        name: as in `id_tap`, unless `callback` takes a keyword argument `name`; it gets the argument then. The two-call
            form names the tap in any case.
        processes: as in `print`, unless `callback` takes a keyword argument `processes`.
        **kwargs: keyword arguments, with leaves like those of `args`.

    Returns:
        None; without `callback`, a function `(callback, *args, **kwargs)` that calls with these options.

    Raises:
        TypeError: `callback` is not callable, or an unknown option was given without it.

    Example:
        hcb.callback(lambda step, x: history.append((int(step), x)), step, x)
    """

    def tap(
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        name: str | None = None,
        processes: str | None = None,
    ) -> None:
        if not callable(func):
            raise TypeError(
                f"first argument to hcb.callback must be callable, but got {type(func).__name__} {func!r}: "
                f"hcb.callback(function, *args), at {user_source_line()}"
            )

        refuse_async(func, "hcb.callback", user_source_line)
        tap_spec.check_switch("python_scalars", python_scalars)
        options = replace(
            tap_spec.callback_options(
                tap_spec.name_or(name, tap_spec.default_name, func), ordered, partitioned, processes
            ),
            kind=tap_descriptor.CALLBACK,
            params={"python_scalars": True} if python_scalars else {},
        )
        identity = ("callback", func, python_scalars)
        bind_tap(
            (tuple(args), dict(kwargs)), (), {}, factory.Binding(func), identity=identity, options=options
        )

    return _one_or_two_calls("hcb.callback", tap, callback, args, kwargs, CALLBACK_OPTIONS)


def _one_or_two_calls(
    what: str,
    tap: Callable[..., None],
    first: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    known: Sequence[str],
) -> Callable[..., None] | None:
    # Binds the tap; in the two-call form, without `first`, returns the function that binds it.
    if first is not None:
        options = {key: kwargs[key] for key in known if key in kwargs and not _is_value(key, first)}
        tap(first, args, {key: value for key, value in kwargs.items() if key not in options}, **options)
        return None
    if args or not set(kwargs) <= set(known):
        raise TypeError(
            f"{what} received unexpected arguments in the two-call form: {args=} {kwargs=}. The first call takes "
            f"options only (in addition to JAX's: {', '.join(known)}), the second one everything else, at "
            f"{user_source_line()}"
        )
    return hide_frames(lambda first, /, *args, **more: tap(first, args, more, **kwargs))


def _is_value(key: str, first: Any) -> bool:
    # Whether a keyword argument with the name of an option belongs to the text or to the callback.
    if isinstance(first, str):
        return key in arguments.named_fields(first)
    return takes_keyword(first, key)


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
    has the debugger, over all threads; the next one takes it during code that you evaluate in it for half a second,
    which may wait for that stop. Under grad and jvp it shows the primal values. Outside of jit and of all
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
    frames, values = stack_frames.capture_frames()
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
    jax.lax.cond(when, lambda operands: _stop_here(stop, operands), lambda operands: None, operands)


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
    options = tap_spec.TapOptions("breakpoint", tap_tangents=False, kind=tap_descriptor.BREAKPOINT)
    emit_call(stop, operands, {}, (), "sequential", options)


class _Stop:
    """The host function of one breakpoint in one program."""

    def __init__(
        self, frames: Sequence[stack_frames.CapturedFrame], where: SourceLine, stdin: Any, stdout: Any
    ) -> None:
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
            stack_frames.Unavailable("a tangent, in code that is transposed") if m else value
            for value, m in zip(operands["values"], missing, strict=False)
        ]
        frames = [frame.restore(values) for frame in self._frames]
        what = f"stop {next(self._count)} of the breakpoint at {self._where}"
        if device is not None:
            what += f", on {device}"
        stops.open_session(frames, what, self._where, self._stdin, self._stdout)
        return ()

"""The functions of `jax.debug` as taps: `print`, `log` and `callback`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, overload

from hostcallback.primitives.bind import bind_tap
from hostcallback.primitives.formatted import emit_text
from hostcallback.receiver.sinks.factory import Binding
from hostcallback.receiver.sinks.print import SupportsWrite
from hostcallback.receiver.wire import tap_kind
from hostcallback.tracing.fingerprint import callable_name
from hostcallback.tracing.source_line import user_source_line
from hostcallback.tracing.tap_options import callback_options

LOGGER = logging.getLogger("hostcallback.log")
"""Where `log` logs unless told otherwise."""


@overload
def print(
    fmt: str,
    *args: Any,
    ordered: bool = ...,
    partitioned: bool = ...,
    skip_format_check: bool = ...,
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
) -> Callable[..., None]: ...


def print(
    fmt: str | None = None,
    *args: Any,
    ordered: bool = True,
    partitioned: bool = False,
    skip_format_check: bool = False,
    **kwargs: Any,
) -> Callable[..., None] | None:
    """Prints a text with values of the program in it, as `jax.debug.print` does: `print("loss {x:.3f}", x=loss)`.

    The text is that of `jax.debug.print`, under the numpy print options that were in force when the call was traced;
    but a format string with escaped braces, as in `"{{x}} {}"`, is formatted, a Python scalar's `!r` does not say
    `weak_type=True` outside of jit either, and a typed PRNG key prints as a key, `Array((), dtype=key<fry>) ...`, where
    JAX prints its data. A receiver thread prints it, in one write, and never holds the device up; a
    text that cannot be formatted is reported by `barrier_wait` or the receiver, like what any tap raises.

    Under vmap each element has its line, in the order in which JAX unrolls the batch, and one message brings them all.
    What is not batched prints once. If vmap batches the predicate of a `cond`, JAX runs both branches, and both
    print. Under jvp and grad the primals are printed, and no tangents.

    In the two-call form the options come first, apart from the values, and there are more of them:
    `print(ordered=False, output_stream=sys.stderr)("loss {x}", x=loss)`.

    Args:
        fmt: a format string, as `str.format` takes it. Not an f-string: the values are not known yet.
        *args: pytrees for its placeholders, traced or not. What is no array stays on the host.
        ordered: whether messages of one device keep program order, on several devices too. JAX's default is False.
        partitioned: whether each device prints its shard of what the compiler partitions, rather than the whole
            array being printed once. Under vmap: its shards of every element. For those the compiler brings the axes of
            the batch together on each device, as for JAX's; nothing else of a tap moves data between devices. Inside a
            shard_map over some axes only, where JAX prints the whole of the others, it prints shards as well.
        skip_format_check: whether to let arguments without placeholder pass. Those of a text without any
            placeholder follow it.
        output_stream: two-call form only. An object with `write(str)`, called on receiver threads; by default
            `sys.stdout` as it is then.
        name: two-call form only. What the tap is called in reports, and the name to bind its consumer by.
        **kwargs: as `args`, by name.

    Returns:
        None; without `fmt`, the function `(fmt, *args, **kwargs)` that prints so.

    Raises:
        TypeError: `fmt` is no text, or an unknown option was given without `fmt`.
        ValueError: an argument is not used by `fmt`, or `fmt` is malformed.
        IndexError: `fmt` has more placeholders than there are `args`.
        KeyError: a placeholder's name is not among `kwargs`.
    """

    def tap(
        fmt: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        output_stream: SupportsWrite | None = None,
        name: str | None = None,
    ) -> None:
        if output_stream is not None and not callable(getattr(output_stream, "write", None)):
            raise TypeError(
                f"hcb.print's output_stream needs a write(str) method, got {type(output_stream).__name__} "
                f"{output_stream!r}: pass an open text file, io.StringIO() or None for standard output, at "
                f"{user_source_line()}"
            )
        emit_text(
            "hcb.print", fmt, args, kwargs, skip_format_check, ("print", output_stream),
            {"output_stream": output_stream}, callback_options(name or "print", ordered, partitioned),
        )  # fmt: skip

    return _one_or_two_calls("hcb.print", tap, fmt, args, kwargs, ("output_stream", "name"))


@overload
def log(
    fmt: str,
    *args: Any,
    ordered: bool = ...,
    partitioned: bool = ...,
    skip_format_check: bool = ...,
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
) -> Callable[..., None]: ...


def log(
    fmt: str | None = None,
    *args: Any,
    ordered: bool = True,
    partitioned: bool = False,
    skip_format_check: bool = False,
    **kwargs: Any,
) -> Callable[..., None] | None:
    """Logs what `print` would print, as `jax.debug.log` of JAX 0.10 does; the records name the line that called `log`.

    The logger `hostcallback.log` gets records of level INFO. It shows them where logging is set up to show that
    level, such as by `logging.basicConfig(level=logging.INFO)`. See `print` for everything else.

    Args:
        fmt: as in `print`.
        *args: as in `print`.
        ordered: as in `print`.
        partitioned: as in `print`.
        skip_format_check: as in `print`.
        logger: two-call form only. Another logger; its handlers are called on receiver threads.
        level: two-call form only. Another level, such as `logging.WARNING`.
        name: as in `print`.
        **kwargs: as in `print`.

    Returns:
        None; without `fmt`, the function `(fmt, *args, **kwargs)` that logs so.

    Raises:
        TypeError: as in `print`, or `logger` is no logger, or `level` no number.
        ValueError: as in `print`.
        IndexError: as in `print`.
        KeyError: as in `print`.
    """

    def tap(
        fmt: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        logger: logging.Logger | None = None,
        level: int = logging.INFO,
        name: str | None = None,
    ) -> None:
        logger = LOGGER if logger is None else logger
        if not isinstance(logger, logging.Logger) or not isinstance(level, int):
            raise TypeError(
                f"hcb.log takes a logging.Logger and a level as a number, got logger={logger!r} and level={level!r}: "
                f"pass such as logging.getLogger(...) and logging.WARNING, at {user_source_line()}"
            )

        options = callback_options(name or "log", ordered, partitioned)
        emit_text(
            "hcb.log", fmt, args, kwargs, skip_format_check, ("log", logger, level), {"logger": logger},
            replace(options, params={"logger": logger.name, "level": level}),
        )  # fmt: skip

    return _one_or_two_calls("hcb.log", tap, fmt, args, kwargs, ("logger", "level", "name"))


@overload
def callback(
    callback: Callable[..., Any],
    *args: Any,
    ordered: bool = ...,
    partitioned: bool = ...,
    **kwargs: Any,
) -> None: ...


@overload
def callback(
    *, ordered: bool = ..., partitioned: bool = ..., name: str | None = ...
) -> Callable[..., None]: ...


def callback(
    callback: Callable[..., Any] | None = None,
    *args: Any,
    ordered: bool = True,
    partitioned: bool = False,
    **kwargs: Any,
) -> Callable[..., None] | None:
    """Calls `callback(*args, **kwargs)` on the host with values of the program, as `jax.debug.callback` does.

    `callback` runs on the receiver thread of the device that emitted the message, and never holds the device up. What
    it raises is deferred until `barrier_wait` or the end of the receiver. See `id_tap` for order and threads.

    Under vmap it is called for each element, in the order in which JAX unrolls the batch, and one message brings them
    all; if it raises for one element, it is called for the others nevertheless. What is not batched is passed to
    every call, and where nothing is batched there is one call. Under jvp and grad it gets the primals, and no tangents.
    `id_tap` hands over whole batches, tangents and cotangents.

    In the two-call form the options come first, apart from the arguments:
    `callback(ordered=False)(function, x, step=step)`.

    Args:
        callback: called with `args` and `kwargs`; its result is ignored.
        *args: pytrees, traced or not. Arrays and numbers arrive as numpy arrays that are the callback's own; what is
            no array stays on the host and comes back in its place.
        ordered: as in `print`.
        partitioned: whether each device's shard of what the compiler partitions is handed over, rather than the whole
            array once.
        name: two-call form only. What the tap is called in reports, and the name to bind its consumer by.
        **kwargs: as `args`, by name.

    Returns:
        None; without `callback`, the function `(callback, *args, **kwargs)` that calls so.

    Raises:
        TypeError: `callback` is not callable, or an unknown option was given without it.
    """

    def tap(
        func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], name: str | None = None
    ) -> None:
        if not callable(func):
            raise TypeError(
                f"first argument to hcb.callback must be callable, but got {type(func).__name__} {func!r}: "
                f"hcb.callback(function, *args), at {user_source_line()}"
            )

        options = replace(
            callback_options(name or callable_name(func), ordered, partitioned), kind=tap_kind.CALLBACK
        )
        bind_tap(
            (tuple(args), dict(kwargs)), (), {}, Binding(func), identity=("callback", func), options=options
        )

    return _one_or_two_calls("hcb.callback", tap, callback, args, kwargs, ("name",))


def _one_or_two_calls(
    what: str,
    tap: Callable[..., None],
    first: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    known: Sequence[str],
) -> Callable[..., None] | None:
    # Taps; or in the two-call form, without `first`, makes the function that does. Options other than JAX's can be
    # given in that form only, where no value of the program can have their name.
    if first is not None:
        tap(first, args, kwargs)
        return None
    if args or not set(kwargs) <= set(known):
        raise TypeError(
            f"{what} received unexpected arguments in the two-call form: {args=} {kwargs=}. The first call takes "
            f"options only (beside JAX's: {', '.join(known)}), the second one everything else, at {user_source_line()}"
        )
    return lambda first, /, *args, **more: tap(first, args, more, **kwargs)

"""The taps that users write in traced code: `tap`, also called `id_tap`, and `id_print`; `jit`, a synonym of JAX's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, overload

import jax

from hostcallback.primitives.tap import bind_tap
from hostcallback.receiver.sinks.factory import Binding
from hostcallback.receiver.tap_arguments import SupportsWrite, refuse_async
from hostcallback.receiver.wire import tap_descriptor
from hostcallback.tracing.arguments import check_arguments
from hostcallback.tracing.source_line import UsedName, place_name, public, user_source_line
from hostcallback.tracing.tap_spec import TapOptions, check_switch, default_name, name_or

_OPTIONS = ["batched", "name", "ordered", "processes", "python_scalars", "result", "sharding", "tap_tangents"]

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")


@overload
def id_tap(
    tap_func: Callable[..., object],
    arg: T,
    *,
    result: None = ...,
    ordered: bool = ...,
    tap_tangents: bool | None = ...,
    sharding: str = ...,
    batched: bool = ...,
    python_scalars: bool = ...,
    name: str | None = ...,
    processes: str | None = ...,
    **kwargs: Any,
) -> T: ...


@overload
def id_tap(
    tap_func: Callable[..., object],
    arg: object,
    *,
    result: R,
    ordered: bool = ...,
    tap_tangents: bool | None = ...,
    sharding: str = ...,
    batched: bool = ...,
    python_scalars: bool = ...,
    name: str | None = ...,
    processes: str | None = ...,
    **kwargs: Any,
) -> R: ...


@public
def id_tap(
    tap_func: Callable[..., Any],
    arg: Any,
    *more: Any,
    result: Any = None,
    ordered: bool = True,
    tap_tangents: bool | None = None,
    sharding: str = "global",
    batched: bool = False,
    python_scalars: bool = False,
    name: str | None = None,
    processes: str | None = None,
    **kwargs: Any,
) -> Any:
    """Sends `arg` to the host, which calls `tap_func(arg, **kwargs)`. In the program it is an identity.

    `hcb.tap` and `hcb.id_tap` are the same function; `id_tap` is the name in `jax.experimental.host_callback`.

    Works inside and outside of traced code. `tap_func` runs on the receiver thread of the device that emitted the
    message, one message at a time per device and in order; several devices call it concurrently. It never blocks the
    device: messages queue, and the device waits only while the byte budget of the queue is full. Its exceptions are
    deferred until `barrier_wait` or the end of the receiver. It may call JAX. But a program with taps that it
    dispatches on its device may wait for room in a full queue, which is freed only after the tap function returns. To
    tap from tap functions, emit less than the queue holds (8 MiB), or dispatch from another thread.

    Under jvp the tangents are tapped too, with `transforms` ending in `("jvp", {})`; under grad the cotangents, with
    `("jvp", {}), ("transpose", {})`; under vmap one message holds the batched arrays, with `("batch", {"batch_dims":
    (0, None, ...)})`. If vmap batches the predicate of a `cond` or `while_loop`, the message holds the elements that
    take part, with `("mask", {"elements": (indices, ...)})`. docs/transformations.md lists the arguments under each
    transformation.

    Args:
        tap_func: called as `tap_func(arg, **kwargs)`, and with `transforms=` (a tuple of (name, params)) and
            `device=` (a `jax.Device`) if its signature names them without a default. Its result is ignored.
        arg: a pytree of arrays and numbers of any shape and dtype. The tap function receives the same pytree
            with new numpy arrays, which it may keep and change. (Small arrays that arrive together share up to
            8 KiB of memory, which is kept as long as any of them.) Typed PRNG keys arrive as keys, references
            (`jax.new_ref`) as their value at that point, objects with `__jax_array__` as that array. Other leaves
            (functions, strings, any other object) stay on the host and arrive unchanged.
        result: the value to return; `arg` if None.
        ordered: whether messages of one device keep program order (the default). Unordered taps leave the
            compiler free to run them concurrently.
        tap_tangents: whether tangents and cotangents are tapped too. None: yes, unless the environment variable
            `HOSTCALLBACK_TAP_TANGENTS` is 0.
        sharding: if the compiler partitions the program over several devices: "global" (the tap function gets the
            whole array, once) or "local" (it gets each device's shard, with its place as `index=`).
        batched: whether `tap_func` takes many messages at once, for a fraction of the cost: it gets the same pytree,
            each array stacked along a new first axis over consecutive messages of this tap (1 to 1024 of them, as many
            as the receiver found waiting; all of this tap, one device and equal shapes). It is called in place of the
            last of them.
        python_scalars: whether arrays without dimensions arrive as `bool`, `int`, `float` or `complex`, which `json`
            takes, instead of as numpy arrays.
        name: name of the tap in reports, in `hcb.taps` and for `bind` in another process. By default the qualified name
            of `tap_func`; for a lambda the line of the tap, as in `lambda@train_step:42`.
        processes: in a program of several processes (`jax.distributed`), which of them call `tap_func`:

            - None: as `jax.debug.callback`. If the compiler partitions the program, a value that several processes
              have, such as a replicated loss, is delivered once, by the first of them; so is a shard that several
              have. In `shard_map` each device of each process delivers, and programs of one process deliver there.
            - "all": each process delivers what it has, a replicated value once.
            - "first": one process delivers. Of a program that is not partitioned by the compiler, or whose tap has
              `sharding="local"`, the first process, and of a program on devices of one process, process 0 of the job.

            docs/transformations.md has a table. For a message per device take `sharding="local"`.
        **kwargs: host values passed on to `tap_func`; never traced.

    Returns:
        `result`, or `arg` if it is None. Use it, because gradients reach the cotangent tap through it. Keys,
        references, Python numbers and leaves that are not arrays are the same objects as in `arg`.

    Raises:
        TypeError: `tap_func` is not callable, is async, or does not take one value; there are several values, a switch
            is not a bool, or a leaf of `arg` is an array of another library or of a dtype that JAX cannot put on a
            device. Other errors have a note with the tap's line.
        ValueError: `sharding` or `processes` has another value than those above.

    Example:
        x = hcb.id_tap(lambda arg, *, step: log(step, arg), x, step=3)
    """
    what: Any = UsedName("id_tap")
    if not callable(tap_func):
        raise TypeError(
            f"{what} takes a function to call on the host as its first argument, got {type(tap_func).__name__} "
            f"{tap_func!r}: call {what}(tap_func, arg), at {user_source_line()}"
        )
    if more:
        raise TypeError(
            f"{what} sends one value, got {1 + len(more)}: put them into a tuple, {what}(tap_func, (x, y)), at "
            f"{user_source_line()}"
        )
    refuse_async(tap_func, what, user_source_line)
    check_arguments(what, tap_func, kwargs, _OPTIONS)
    if not isinstance(batched, bool):
        raise TypeError(
            f"batched is {batched!r}, expected True or False: a stack has as many messages as were waiting"
        )
    check_switch("python_scalars", python_scalars)

    switches = {"batched": batched, "python_scalars": python_scalars}
    params = {switch: True for switch, on in switches.items() if on}
    options = TapOptions(
        name_or(name, default_name, tap_func),
        ordered,
        tap_tangents,
        sharding,
        params=params,
        processes=processes,
    )
    identity = (" ".join([*params, "tap"]), tap_func)
    return bind_tap(arg, result, kwargs, Binding(tap_func), identity=identity, options=options)


tap = id_tap
"""The same function as `id_tap`, by its short name."""


@overload
def id_print(
    arg: T,
    *,
    result: None = ...,
    output_stream: SupportsWrite | None = ...,
    threshold: int = ...,
    ordered: bool = ...,
    tap_tangents: bool | None = ...,
    sharding: str = ...,
    name: str | None = ...,
    processes: str | None = ...,
    **kwargs: Any,
) -> T: ...


@overload
def id_print(
    arg: object,
    *,
    result: R,
    output_stream: SupportsWrite | None = ...,
    threshold: int = ...,
    ordered: bool = ...,
    tap_tangents: bool | None = ...,
    sharding: str = ...,
    name: str | None = ...,
    processes: str | None = ...,
    **kwargs: Any,
) -> R: ...


@public
def id_print(
    arg: Any,
    *,
    result: Any = None,
    output_stream: SupportsWrite | None = None,
    threshold: int = 1024,
    ordered: bool = True,
    tap_tangents: bool | None = None,
    sharding: str = "global",
    name: str | None = None,
    processes: str | None = None,
    **kwargs: Any,
) -> Any:
    """Prints `arg` on the host. In the program it is an identity. See `id_tap` for order, threads and transforms.

    It prints the keyword arguments on one line, `key: value`, sorted by key (including `transforms` if there are any),
    then the value: arrays by `numpy.array2string`, tuples as `( a b )`, lists as `[ a b ]`, dicts as `{ key=a }`. This
    is the format of `jax.experimental.host_callback.id_print`.

    Args:
        arg: as in `id_tap`.
        result: the value to return; `arg` if None.
        output_stream: an object with `write(str)`, called on receiver threads; `sys.stdout` by default.
        threshold: number of elements above which arrays are summarised, as in numpy.
        ordered: as in `id_tap`.
        tap_tangents: as in `id_tap`.
        sharding: as in `id_tap`.
        name: as in `id_tap`; by default the line of the tap, as in `id_print@train_step:42`.
        processes: as in `id_tap`.
        **kwargs: host values to print.

    Returns:
        `result`, or `arg` if it is None.

    Raises:
        TypeError: `output_stream` has no `write`, or as in `id_tap`.

    Example:
        x = hcb.id_print(x, what="activations")
    """
    if output_stream is not None and not callable(getattr(output_stream, "write", None)):
        raise TypeError(
            f"id_print's output_stream needs a write(str) method, got {type(output_stream).__name__} "
            f"{output_stream!r}: pass an open text file, io.StringIO() or None for standard output"
        )

    options = TapOptions(
        name_or(name, place_name, "id_print"),
        ordered,
        tap_tangents,
        sharding,
        kind=tap_descriptor.PRINT,
        params={"threshold": threshold},
        processes=processes,
    )
    identity = ("print", output_stream, threshold)
    binding = Binding(objects={"output_stream": output_stream})
    return bind_tap(arg, result, kwargs, binding, identity=identity, options=options)


_jax_jit: Any = jax.jit  # so that a program may say `jax.jit = hostcallback.jit`


@overload
def jit(fun: Callable[P, R], /, **jax_jit_kwargs: Any) -> Callable[P, R]: ...
@overload
def jit(**jax_jit_kwargs: Any) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def jit(fun: Callable[..., Any] | None = None, /, **jax_jit_kwargs: Any) -> Any:
    """Calls `jax.jit`. Taps cost the same under every jit, so programs need not use this one.

    Args:
        fun: the function; omitted in the decorator form, which `jax.jit` has from JAX 0.9 on.
        **jax_jit_kwargs: the keyword arguments of `jax.jit`.

    Returns:
        The result of `jax.jit`; in the decorator form, a decorator.

    Example:
        @hcb.jit(donate_argnums=0)
        def step(state):
            return hcb.id_print(state + 1)
    """
    if fun is None:
        return functools.partial(jit, **jax_jit_kwargs)
    return _jax_jit(fun, **jax_jit_kwargs)

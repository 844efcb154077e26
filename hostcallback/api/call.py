"""`call`: runs a Python function on the host in the middle of a program and returns its results to the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hostcallback.primitives.call import emit_call
from hostcallback.receiver.tap_arguments import refuse_async
from hostcallback.tracing.arguments import check_arguments
from hostcallback.tracing.source_line import public, user_source_line
from hostcallback.tracing.tap_spec import TapOptions, default_name, name_or

VMAP_METHODS = ("sequential", "sequential_unrolled", "expand_dims", "broadcast_all", None)


_MISSING = object()


@public
def call(
    host_func: Callable[..., Any],
    arg: Any,
    *more: Any,
    result_shape: Any = _MISSING,
    vmap_method: str | None = None,
    ordered: bool = True,
    name: str | None = None,
    **kwargs: Any,
) -> Any:
    """Calls `host_func(arg, **kwargs)` on the host and returns its result to the program, which waits for it.

    Works inside and outside of traced code. Calls and taps of a device keep their order: the taps before a call have
    been delivered when `host_func` begins. A call is kept even if its result is unused. On several devices each device
    calls with its part of `arg`.

    If a program runs on one CPU device and its arguments are ready, it runs on the dispatching thread, and so does
    `host_func`; the dispatching call returns when the program has ended. Other programs (over several devices, behind a
    running computation, parts of large ones) call it on a thread of this library. If several devices or threads call,
    several host functions run at a time. On the native transport, a program that waits for another thread holds no
    thread of XLA; on the callback transport it does.

    `host_func` may use JAX, also on the waiting device, and may run programs with taps and calls. It must not wait for
    a barrier. If a program over several devices calls it, it may only run programs on one device at a time, because XLA
    starts programs over several devices in order, behind the waiting one. XLA queues 32 programs per CPU device. If
    `host_func` uses JAX on a device, do not queue more programs there behind the waiting one: wait for results in
    between, or set `jax_cpu_enable_async_dispatch` to False before JAX starts. Otherwise the program waits without end,
    as with `jax.pure_callback`.

    An exception of `host_func` ends the program, and `barrier_wait` or the end of the receiver raises the exception
    itself. Later programs are not affected. The program's caller gets an error with the traceback, whose type JAX
    chooses: `ValueError("INTERNAL: ...")` for a program on the dispatching thread from a jitted function that was
    called before, because JAX's fast dispatch raises no other type (also for `jax.pure_callback`); otherwise
    `jax.errors.JaxRuntimeError`. Ctrl-C while the main thread runs `host_func` or waits for its turn also ends the
    program, and raises KeyboardInterrupt in the main thread as soon as JAX returns to Python.

    A tap function must not wait for a program with calls on its device, because the call would wait for the tap. If it
    dispatches such a program that would run at once, the call fails.

    Args:
        host_func: called as `host_func(arg, **kwargs)`, and with `transforms=` (a tuple of (name, params)) and
            `device=` (a `jax.Device`) if its signature names them without a default.
        arg: a pytree of arrays and numbers; see `id_tap`. The host function gets numpy arrays, which it may keep.
        result_shape: a pytree of `jax.ShapeDtypeStruct`, arrays or numbers: the structure, shapes and dtypes of the
            result. A bare shape such as `(3, 4)` is refused. 64-bit dtypes become 32-bit ones unless `jax_enable_x64`
            is set, as everywhere in JAX. A Python number in the result takes the announced dtype.
        vmap_method: effect of `vmap`, as in `jax.pure_callback`: "sequential" (a call per element, in a loop),
            "sequential_unrolled", "expand_dims" (one call; unbatched arrays get a leading dimension of 1),
            "broadcast_all" (one call; unbatched arrays are repeated), or None (an error). If vmap batches the predicate
            of a `cond` or `while_loop`, the first two call only for the elements that take part.
        ordered: whether later taps and calls wait for this one. The program waits for the result at its first use.
        name: name of the call in reports; by default that of `host_func`.
        **kwargs: host values passed on to `host_func`; never traced.

    Returns:
        The result, a pytree of arrays with the structure, shapes and dtypes of `result_shape`.

    Raises:
        TypeError: `host_func` is not callable or is async, there are several arguments, JAX cannot trace a leaf of
            `arg`, or `result_shape` is missing, is a bare shape, or has a leaf without a shape and dtype.
        ValueError: `vmap_method` is unknown; or, later, the call is differentiated.
        NotImplementedError: (later) `vmap` without a `vmap_method`, or a program that the compiler partitions.

    Example:
        y = hcb.call(lambda a: scipy.special.lambertw(a).real, x, result_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))
    """
    if not callable(host_func):
        raise TypeError(
            f"hcb.call takes a function to call on the host as its first argument, got {type(host_func).__name__} "
            f"{host_func!r}: call(host_func, arg, result_shape=...)"
        )
    refuse_async(host_func, "hcb.call", user_source_line)
    _check_arguments(more, result_shape)
    check_arguments("hcb.call", host_func, kwargs, ["name", "ordered", "result_shape", "vmap_method"])
    if vmap_method not in VMAP_METHODS:
        raise ValueError(f"vmap_method={vmap_method!r}, expected one of {', '.join(map(repr, VMAP_METHODS))}")
    options = TapOptions(name_or(name, default_name, host_func), ordered, tap_tangents=False)
    return emit_call(host_func, arg, kwargs, result_shape, vmap_method, options)


def _check_arguments(more: tuple[Any, ...], result_shape: Any) -> None:
    if more:
        raise TypeError(
            f"hcb.call passes one argument to the host function, got {1 + len(more)}: put them into a tuple, "
            f"call(host_func, (x, y), result_shape=...), at {user_source_line()}"
        )
    announced = "result_shape=jax.ShapeDtypeStruct(x.shape, x.dtype)"
    if result_shape is _MISSING:
        raise TypeError(
            "hcb.call needs result_shape=, the shapes and dtypes of the host function's result: for a result like x, "
            f"{announced}, at {user_source_line()}"
        )
    if isinstance(result_shape, tuple | list) and result_shape and all(type(n) is int for n in result_shape):
        raise TypeError(
            f"hcb.call's result_shape={result_shape!r} is a bare shape, without a dtype: for a result like x, "
            f"{announced}; for a tuple of integers, a ShapeDtypeStruct((), 'int32') each, at {user_source_line()}"
        )

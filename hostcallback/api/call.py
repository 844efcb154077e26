"""`call`: runs a Python function on the host in the middle of a program, and brings its results back to the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hostcallback.primitives.call import emit_call
from hostcallback.tracing.fingerprint import callable_name
from hostcallback.tracing.tap_options import TapOptions

VMAP_METHODS = ("sequential", "sequential_unrolled", "expand_dims", "broadcast_all", None)


def call(
    host_func: Callable[..., Any],
    arg: Any,
    *,
    result_shape: Any,
    vmap_method: str | None = None,
    ordered: bool = True,
    name: str | None = None,
    **kwargs: Any,
) -> Any:
    """Calls `host_func(arg, **kwargs)` on the host and returns its result to the program, which waits for it.

    Works in any traced code, and outside of it. A call has its place among the taps of its device (the taps before it
    have been delivered when `host_func` begins) and is kept if its result is unused. On several devices each calls with
    its own part of `arg`.

    A program on one CPU device whose arguments are computed runs on the thread that dispatches it, and `host_func` does
    too; the dispatch comes back when the program is over. Other programs (over several devices, behind a computation
    that still runs, large ones in part) call it on a thread of the library's. Several run at a time where several
    devices or threads call. On the native transport a program that waits for another thread holds none of XLA's; on
    the callback transport it does.

    `host_func` may use JAX, also on the device that waits, and run programs with taps and calls; it may not wait for a
    barrier. Called by a program over several devices, it may run programs on one device at a time only: XLA starts
    those over several in order, behind the program that waits. XLA takes 32 programs at a time for each CPU device:
    do not queue more of them behind a program whose `host_func` uses JAX there, but wait for results now and then (or
    set `jax_cpu_enable_async_dispatch` to False before JAX starts); as with `jax.pure_callback`, it waits for ever
    else.

    What `host_func` raises ends the program, and `barrier_wait` or the end of the receiver raises the exception itself.
    A program that runs after it is not affected. What the program's caller gets holds the traceback. It is JAX's to
    say which type that has: of a program that runs on the dispatching thread, `ValueError("INTERNAL: ...")` from a
    jitted function that has been called before, since JAX's fast dispatch raises nothing else (as it does for
    `jax.pure_callback`); a `jax.errors.JaxRuntimeError` in every other case. Ctrl-C while the main thread runs
    `host_func`, or waits for its turn, ends the program likewise, and raises KeyboardInterrupt there as soon as JAX
    lets it.

    A tap function must not wait for a program with calls on its own device: the call would wait for the tap. Where it
    dispatches such a program that would run at once, the call fails.

    Args:
        host_func: called as `host_func(arg, **kwargs)`, and with `transforms=` (a tuple of (name, params)) and
            `device=` (a `jax.Device`) if its signature names them.
        arg: a pytree of arrays and numbers; see `id_tap`. The host function gets numpy arrays, which it may keep.
        result_shape: a pytree of `jax.ShapeDtypeStruct`, arrays or numbers: the structure, shapes and dtypes of the
            result. 64-bit dtypes are those of 32 bits unless `jax_enable_x64` is set, as everywhere in JAX. A number
            that the host function returns takes the dtype that is announced for it.
        vmap_method: what `vmap` does, as in `jax.pure_callback`: "sequential" (a call per element, in a loop),
            "sequential_unrolled", "expand_dims" (one call; unbatched arrays get a leading dimension of 1),
            "broadcast_all" (one call; unbatched arrays are repeated), or None (an error).
        ordered: whether later taps and calls wait for this one. The program waits for the result where it uses it.
        name: what the call is called in reports.
        **kwargs: host values passed on to `host_func`; never traced.

    Returns:
        The result, a pytree of arrays as `result_shape` says.

    Raises:
        TypeError: `host_func` is not callable, a leaf of `arg` is nothing JAX can trace, or one of `result_shape` has
            no shape and dtype.
        ValueError: `vmap_method` is unknown; or, later, the call is differentiated.
        NotImplementedError: (later) `vmap` without a `vmap_method`, or a program that the compiler partitions.
    """
    if not callable(host_func):
        raise TypeError(
            f"hcb.call takes a function to call on the host as its first argument, got {type(host_func).__name__} "
            f"{host_func!r}: call(host_func, arg, result_shape=...)"
        )
    if vmap_method not in VMAP_METHODS:
        raise ValueError(f"vmap_method={vmap_method!r}, expected one of {', '.join(map(repr, VMAP_METHODS))}")
    options = TapOptions(name or callable_name(host_func), ordered, tap_tangents=False)
    return emit_call(host_func, arg, kwargs, result_shape, vmap_method, options)

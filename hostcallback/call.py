"""`call`: runs a Python function on the host in the middle of a program, and brings its results back to the device."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from hostcallback import _jax_compat as compat, inflight, reentrant, transport
from hostcallback.emit import Options, bind_spec
from hostcallback.fingerprint import callable_name, describe_structure
from hostcallback.primitive import CALL_EFFECT, TAP_EFFECT
from hostcallback.tap_spec import ON_ONE_DEVICE, Absent, TapSpec, Transform
from receiver.errors import CallResultError
from receiver.messages.consumer import Sink
from receiver.runtime.runtime import runtime
from receiver.sinks.call import CallSink, Expected
from receiver.sinks.tap import tap_sink
from receiver.wire import ArraySpec, Flags, encode_prefix
from receiver.wire.dtypes import wire_type_of
from receiver.wire.tap_descriptor import Described

VMAP_METHODS = ("sequential", "sequential_unrolled", "expand_dims", "broadcast_all", None)

BREAKPOINT = "breakpoint"
"""The `kind` of a call that sends primals and may be transposed: its first operand says which of the others have no
values then."""

call_p = Primitive("host_call")
call_p.multiple_results = True


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
    options = Options(name or callable_name(host_func), ordered, tap_tangents=False)
    return emit_call(host_func, arg, kwargs, result_shape, vmap_method, options)


def emit_call(
    host_func: Callable[..., Any],
    arg: Any,
    kwargs: dict[str, Any],
    result_shape: Any,
    vmap_method: str | None,
    options: Options,
) -> Any:
    """Binds one call, of any kind; see `call` for the arguments, and for what it returns and raises."""
    expected, result_tree = _expected(result_shape)
    config: Any = jax.config  # the attribute exists in every version, and its annotation in none
    narrow = not config.jax_enable_x64

    def make_sink(spec: TapSpec, transforms: tuple[Transform, ...], absent: Absent) -> Sink:
        what = f"the call of {spec.name} at {spec.source_line}"
        flatten = functools.partial(_leaves_of, tree=result_tree, what=what)
        host = tap_sink(host_func, spec.kwargs, spec.structure.unflatten_with(absent))
        return CallSink(host, flatten, expected, what=what, narrow=narrow)

    def bind(spec: TapSpec, arrays: list[Any]) -> Any:
        avals = tuple(jax.core.ShapedArray(e.shape, e.dtype) for e in expected)
        outs = call_p.bind(*arrays, call=spec, transforms=(), result_avals=avals, vmap_method=vmap_method)
        return jax.tree.unflatten(result_tree, outs)

    described = (describe_structure(result_tree), tuple((e.name, e.shape, e.dtype.name) for e in expected))
    identity = ("call", host_func, described, narrow)
    return bind_spec(bind, arg, kwargs, make_sink, identity=identity, options=options)


def _expected(result_shape: Any) -> tuple[list[Expected], Any]:
    paths, tree = jax.tree_util.tree_flatten_with_path(result_shape)
    expected = []
    for path, leaf in paths:
        name = "result" + jax.tree_util.keystr(path)
        try:
            shape, dtype = np.shape(leaf), jax.dtypes.canonicalize_dtype(jnp.result_type(leaf))
            wire_type_of(dtype)
        except (TypeError, ValueError) as error:  # ValueError: of a typed key
            raise TypeError(
                f"result_shape{jax.tree_util.keystr(path)} is {leaf!r}, expected something with a shape and a numeric "
                "dtype: jax.ShapeDtypeStruct(shape, dtype), an array or a number"
            ) from error
        expected.append(Expected(name, shape, np.dtype(dtype)))
    return expected, tree


def _leaves_of(result: Any, *, tree: Any, what: str) -> Sequence[Any]:
    found, structure = jax.tree.flatten(result)
    if structure != tree:
        raise CallResultError(
            f"{what}: the host function returned a {structure}, expected a {tree}: make it return a "
            "pytree of the structure "
            "that result_shape has, or announce what it returns in result_shape"
        )
    return found


def _abstract(*avals: Any, result_avals: Any, **_: Any) -> Any:
    return compat.results_that_vary_as(avals, result_avals), {TAP_EFFECT, CALL_EFFECT}


def _impl(*args: Any, **params: Any) -> Any:
    with jax.disable_jit(False):
        try:
            return _eager_program(tuple(sorted(params.items())))(*args)
        except ValueError as error:
            # JAX's fast dispatch raises another type than its other paths do.
            if str(error).startswith("INTERNAL: "):
                raise jax.errors.JaxRuntimeError(str(error)) from None
            raise


@functools.lru_cache(maxsize=32)
def _eager_program(params: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    # A call outside jit is a program of one equation. The last few are kept, and with them what they captured.
    return jax.jit(lambda *operands: call_p.bind(*operands, **dict(params)))


def _jvp(primals: Any, tangents: Any, *, call: TapSpec, **params: Any) -> Any:
    differentiated = any(
        type(t) is not ad.Zero and getattr(t, "dtype", None) != jax.dtypes.float0 for t in tangents
    )
    if differentiated:
        refuse_to_differentiate(call)
    outs = call_p.bind(*primals, call=call, **params)
    return outs, [compat.zero_tangent(out) for out in outs]


def _transpose(cotangents: Any, *args: Any, call: TapSpec, **params: Any) -> Any:
    refuse_to_differentiate(call)
    # It sends what it found, tangents in the rule of a custom derivative too. They have no values in transposed code;
    # the first operand says which those are.
    missing = [ad.is_undefined_primal(arg) for arg in args]
    known = [jnp.zeros(a.aval.shape, a.aval.dtype) if m else a for a, m in zip(args, missing, strict=True)]
    call_p.bind(jnp.array(missing[1:]), *known[1:], call=call, **params)
    return [None] * len(args)


def refuse_to_differentiate(call: TapSpec) -> None:
    """Refuses to differentiate a call, unless it is a breakpoint's.

    Raises:
        ValueError: it is not.
    """
    if call.kind == BREAKPOINT:
        return
    raise ValueError(
        f"the call of {call.name} at {call.source_line} was differentiated, and JAX cannot look into "
        "a host function: put "
        "it into a function with jax.custom_vjp or jax.custom_jvp, whose rules may call the host "
        "too, or stop the gradient "
        "with jax.lax.stop_gradient(arg)"
    )


def _batch(
    args: Any, dims: Any, *, call: TapSpec, transforms: Any, result_avals: Any, vmap_method: str | None
) -> Any:
    if vmap_method is None:
        raise NotImplementedError(
            f"the call of {call.name} at {call.source_line} is under vmap, and it is not said what "
            "that does: give hcb.call "
            'a vmap_method: "sequential" (a call per element) or "expand_dims" or "broadcast_all" '
            "(one call with arrays that "
            "have a leading batch dimension)"
        )
    if vmap_method in ("expand_dims", "broadcast_all"):
        # From the front, where each leaf has its batch dimension then.
        shown = tuple(None if d is None and vmap_method == "expand_dims" else 0 for d in dims)
        transforms = (*transforms, ("batch", shown))
    return compat.batch_call(
        call_p,
        args,
        dims,
        vmap_method=vmap_method,
        result_avals=result_avals,
        call=call,
        transforms=transforms,
    )


def _describe(call: TapSpec, transforms: Any, consumer_id: int) -> Described:
    return dataclasses.replace(call.describe(transforms, ()), consumer_id=consumer_id)


def _lower(
    ctx: Any, *operands: Any, call: TapSpec, transforms: Any, result_avals: Any, vmap_method: str | None
) -> Any:
    context = compat.LoweringContext(ctx)
    _check_program(context, call)
    transport.start(context.platform)
    inflight.expect(context.local_devices())
    consumer = call.consumer(transforms, ())
    # JAX's own callback gathers the operands on the device that calls, and spreads the results.
    native = transport.calls_natively(context.platform) and not context.automatic
    if native:
        several = context.device_count > 1
        sink = reentrant.ReentrantSink(consumer.sink, several_devices=several)
        # Another id for each of the two, since equal ids are equal consumers.
        consumer_id = call.consumer_id((*transforms, ("several devices", several)), ())
        described = functools.partial(_describe, call, transforms, consumer_id)
        consumer = dataclasses.replace(consumer, consumer_id=consumer_id, sink=sink, describe=described)
    context.keep_alive(runtime.registry.lease(consumer))
    compat.dispatch_synchronously(context)
    flags = Flags.CALL | (Flags.ORDERED if call.ordered else Flags(0))
    dtypes = [np.dtype(aval.dtype) for aval in ctx.avals_in]
    specs = [ArraySpec.of(dtype, aval.shape) for dtype, aval in zip(dtypes, ctx.avals_in, strict=True)]
    prefix = encode_prefix(consumer.consumer_id, flags, specs)
    token = context.token_in(TAP_EFFECT)
    if native:
        attributes = {"prefix": compat.uint8_attribute(prefix)}
        token_out, results = compat.custom_call_with_results(
            context, transport.FFI_CALL_TARGET, token, operands, ctx.avals_out, attributes
        )
    else:
        results = [ArraySpec.of(np.dtype(aval.dtype), aval.shape) for aval in ctx.avals_out]
        ask = transport.callback_caller(context.platform, prefix, dtypes, results, context.devices())
        # Before 0.10, XLA refuses callbacks with results on one device that take a token.
        ask_token = None if context.automatic and not call.ordered else token
        token_out, results = compat.python_callback_with_results(
            context, ask, ask_token, operands, ctx.avals_in, ctx.avals_out
        )
    context.set_token_out(TAP_EFFECT, token_out if call.ordered else token)
    return results


def _check_program(context: compat.LoweringContext, call: TapSpec) -> None:
    where = f"the call of {call.name} at {call.source_line} is in a program that"
    if len(context.platforms) > 1:
        raise NotImplementedError(
            f"{where} is lowered for several platforms at once, {', '.join(context.platforms)}: lower "
            "it for one at a time"
        )
    if context.for_export:
        raise NotImplementedError(
            f"{where} is exported, and no other process has its host function: export the code before "
            "it and behind it, "
            "or compute what it returns with JAX"
        )
    if context.automatic and (context.partially_manual or ON_ONE_DEVICE not in call.params):
        raise NotImplementedError(
            f"{where} the compiler partitions over {context.device_count} devices, where a call "
            "cannot run yet: put the code "
            "around it into jax.shard_map over all axes of the mesh, where each device calls with its shard"
        )


call_p.def_effectful_abstract_eval(_abstract)
call_p.def_impl(_impl)
ad.primitive_jvps[call_p] = _jvp
ad.primitive_transposes[call_p] = _transpose
batching.primitive_batchers[call_p] = _batch
compat.lower_with_devices(call_p)
compat.register_lowering(call_p, _lower)

"""The primitive of calls of host functions with results, and its rules for JAX's transformations."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, batching
from jax.tree_util import PyTreeDef

from hostcallback import _jax_compat as compat
from hostcallback.primitives import effects
from hostcallback.primitives.effects import CALL_EFFECT, TAP_EFFECT
from hostcallback.primitives.tap import bind_spec, is_float0, jvp_without_tangents, run_eagerly
from hostcallback.receiver.errors import CallResultError
from hostcallback.receiver.failures.deferred_errors import FailureOfProgram
from hostcallback.receiver.messages import Message, Sink
from hostcallback.receiver.sinks.call import CallSink, Expected
from hostcallback.receiver.sinks.factory import Binding
from hostcallback.receiver.wire.array_types import wire_type_of
from hostcallback.tracing.leaves import describe_structure
from hostcallback.tracing.source_line import user_source_line
from hostcallback.tracing.tap_spec import TapOptions, TapSpec, Transforms

call_p = compat.Primitive("host_call")
call_p.multiple_results = True
masked_call_p = compat.Primitive(call_p.name)  # by which a second run of a step knows calls
"""A call in a branch or loop that vmap runs for all elements, see `batched_predicates`: its first operand is a mask.
Called for one element at a time, the host function is called where the mask holds, and the other results are zeros. One
that takes batches is called with the whole batch, unless the mask holds for no element."""
masked_call_p.multiple_results = True


def emit_call(
    host_func: Callable[..., Any],
    arg: Any,
    kwargs: dict[str, Any],
    result_shape: Any,
    vmap_method: str | None,
    options: TapOptions,
    *,
    deferred: bool = True,
) -> Any:
    """Binds one call of any kind; see `hostcallback.call` for arguments, result and errors.

    `deferred`: whether the next barrier raises the exceptions of `host_func`, too, and not only the program's caller.
    """
    expected, result_tree = _expected(result_shape)
    source_line = user_source_line()
    config: Any = jax.config  # every version has the attribute, none has an annotation for mypy
    # Read when it is traced: the receiver's threads may have another setting when the result comes.
    narrow = not config.jax_enable_x64

    def with_results(sink: Sink) -> Sink:
        what = f"the call of {options.name} at {source_line}"
        flatten = functools.partial(_leaves_of, tree=result_tree, what=what)
        results = CallSink(functools.partial(_apart, sink), flatten, expected, what=what, narrow=narrow)
        return results if deferred else functools.partial(_of_program, results)

    def bind(spec: TapSpec, arrays: list[jax.Array]) -> Any:
        avals = tuple(jax.core.ShapedArray(e.shape, e.dtype) for e in expected)
        outs = call_p.bind(*arrays, call=spec, transforms=(), result_avals=avals, vmap_method=vmap_method)
        return jax.tree.unflatten(result_tree, outs)

    described = (describe_structure(result_tree), tuple((e.name, e.shape, e.dtype.name) for e in expected))
    identity = ("call", host_func, described, narrow)
    binding = Binding(host_func, around=with_results)
    return bind_spec(bind, arg, kwargs, binding, identity=identity, options=options)


def _apart(sink: Sink, message: Message) -> Any:
    if effects.apart is None:
        return sink(message)
    with effects.apart():
        return sink(message)


def _of_program(sink: Sink, message: Message) -> Any:
    try:
        return sink(message)
    except BaseException as error:
        raise FailureOfProgram(error) from None


def _expected(result_shape: Any) -> tuple[list[Expected], PyTreeDef]:
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


def _leaves_of(result: Any, *, tree: PyTreeDef, what: str) -> Sequence[Any]:
    found, structure = jax.tree.flatten(result)
    if structure != tree:
        raise CallResultError(
            f"{what}: the host function returned a {structure}, expected a {tree}: make it return a pytree with the "
            "structure of result_shape, or change result_shape"
        )
    return found


def _abstract(*avals: compat.Aval, result_avals: Sequence[compat.Aval], **_: Any) -> Any:
    return compat.results_that_vary_as(avals, result_avals), {TAP_EFFECT, CALL_EFFECT}


def _impl(primitive: compat.Primitive, *args: Any, **params: Any) -> Any:
    try:
        return run_eagerly(primitive, *args, **params)
    except ValueError as error:
        # JAX's fast dispatch raises ValueError where its other paths raise JaxRuntimeError.
        if str(error).startswith("INTERNAL: "):
            raise jax.errors.JaxRuntimeError(str(error)) from None
        raise


def _jvp(
    primitive: compat.Primitive,
    primals: Sequence[jax.Array],
    tangents: Sequence[Any],
    *,
    call: TapSpec,
    **params: Any,
) -> Any:
    if any(type(t) is not ad.Zero and not is_float0(t) for t in tangents):
        refuse_to_differentiate(call)
    return jvp_without_tangents(primitive, primals, tangents, call=call, **params)


# In the rules, the host function does not get the first `own` operands.


def _transpose(
    primitive: compat.Primitive, own: int, cotangents: Sequence[Any], *args: Any, call: TapSpec, **params: Any
) -> Any:
    refuse_to_differentiate(call)
    # Only breakpoints arrive here. Their operands may be tangents, in the rule of a custom derivative. Tangents have no
    # values in transposed code; the first operand marks them as missing.
    missing = [ad.is_undefined_primal(arg) for arg in args[own:]]
    known = [
        jnp.zeros(a.aval.shape, a.aval.dtype) if m else a for a, m in zip(args[own:], missing, strict=True)
    ]
    primitive.bind(*args[:own], jnp.array(missing[1:]), *known[1:], call=call, **params)
    return [None] * len(args)


def call_where(mask: jax.Array, *operands: Sequence[Any], **params: Any) -> list[jax.Array]:
    """The results of `masked_call_p`: those of the call if the mask holds for any element, else zeros."""

    def call() -> list[jax.Array]:
        return list(call_p.bind(*operands, **params))

    def zeros() -> list[jax.Array]:
        return [jnp.zeros(aval.shape, aval.dtype) for aval in params["result_avals"]]

    results: list[jax.Array] = jax.lax.cond(jnp.any(mask), call, zeros)
    return results


def refuse_to_differentiate(call: TapSpec) -> None:
    """Refuses to differentiate a call, except that of a breakpoint.

    Raises:
        ValueError: the call is not that of a breakpoint.
    """
    if call.options.kind.sends_primals:
        return
    raise ValueError(
        f"the call of {call.name} at {call.source_line} was differentiated, and JAX cannot look into a host function: "
        "put it into a function with jax.custom_vjp or jax.custom_jvp, whose rules may call the host too, or stop the "
        "gradient with jax.lax.stop_gradient(arg)"
    )


def _batch(
    primitive: compat.Primitive,
    own: int,
    args: Sequence[jax.Array],
    dims: Sequence[int | None],
    *,
    call: TapSpec,
    transforms: Transforms,
    result_avals: Sequence[compat.Aval],
    vmap_method: str | None,
) -> Any:
    if vmap_method is None:
        raise NotImplementedError(
            f"the call of {call.name} at {call.source_line} is under vmap and has no vmap_method: give hcb.call "
            'vmap_method="sequential" (a call per element), or "expand_dims" or "broadcast_all" (one call, with arrays '
            "that have a leading batch dimension)"
        )
    if vmap_method in ("expand_dims", "broadcast_all"):
        # With these methods, the batch dimension of each leaf is its first.
        shown = tuple(None if d is None and vmap_method == "expand_dims" else 0 for d in dims[own:])
        transforms = (*transforms, ("batch", shown))
    return compat.batch_call(
        primitive,
        args,
        dims,
        vmap_method=vmap_method,
        result_avals=result_avals,
        call=call,
        transforms=transforms,
    )


for primitive, own in ((call_p, 0), (masked_call_p, 1)):
    primitive.def_effectful_abstract_eval(_abstract)
    primitive.def_impl(functools.partial(_impl, primitive))
    ad.primitive_jvps[primitive] = functools.partial(_jvp, primitive)
    ad.primitive_transposes[primitive] = functools.partial(_transpose, primitive, own)
    batching.primitive_batchers[primitive] = functools.partial(_batch, primitive, own)

"""The tap primitive: an identity on its operands that sends them to the host, its rules, and how a tap is bound.

One equation stands for one tap: `tap_p.bind(*leaves, tap=TapSpec, transforms=(...), float0_leaves=(...))`. If the
transforms have an entry `("mask", levels)`, the last operand is a mask and no leaf: see `batched_predicates`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, batching

from hostcallback import _jax_compat as compat
from hostcallback._jax_compat.types import Aval, Primitive
from hostcallback.primitives import partial_evaluation as loops
from hostcallback.primitives.effects import PASSED_TOKEN_EFFECT, REGION_TAP_EFFECT, TAP_EFFECT, TapEffect
from hostcallback.receiver.failures.call_site import note_place
from hostcallback.receiver.messages import NAME as STEP
from hostcallback.receiver.sinks.factory import Binding
from hostcallback.receiver.wire import array_types, tap_descriptor
from hostcallback.tracing import arguments, tap_spec
from hostcallback.tracing.leaves import Float0Leaves, split_leaves
from hostcallback.tracing.source_line import user_source_line

if TYPE_CHECKING:
    from hostcallback.receiver.sinks.printing import Template


def effect_here() -> TapEffect:
    """The effect of taps that are traced now."""
    # Before JAX 0.12, XLA aborts the process if a token enters a partially manual shard_map. Taps in there are chained
    # by separate tokens (`LoweringContext.token_in`): they keep their order within each block of code, but a tap in a
    # loop or branch does not wait for a tap before the loop or branch.
    if compat.TOKENS_ENTER_PARTIALLY_MANUAL_REGIONS or not compat.in_partially_manual_region():
        return TAP_EFFECT
    return REGION_TAP_EFFECT


if not compat.TOKENS_ENTER_PARTIALLY_MANUAL_REGIONS:
    # Out of nested regions, which take all axes only together.
    compat.keep_tokens_out(TapEffect, REGION_TAP_EFFECT)


tap_p = Primitive("tap")
tap_p.multiple_results = True


def _abstract(*avals: Aval, **_: Any) -> tuple[list[Aval], set[TapEffect]]:
    return list(avals), {effect_here(), PASSED_TOKEN_EFFECT}


def run_eagerly(primitive: Primitive, *args: Any, **params: Any) -> Any:
    """Runs an equation outside of jit: as a program of one equation."""
    # The primitive has no meaning outside of a program: under `disable_jit` this would call itself without end.
    with jax.disable_jit(False):
        return _eager_program(primitive, tuple(sorted(params.items())))(*args)


@functools.lru_cache(maxsize=32)
def _eager_program(primitive: Primitive, params: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    # The last few programs are cached with the objects that they captured.
    return jax.jit(lambda *operands: primitive.bind(*operands, **dict(params)))


def jvp_without_tangents(
    primitive: Primitive, primals: Sequence[jax.Array], tangents: Sequence[Any], **params: Any
) -> Any:
    """The jvp rule of a primitive whose results have no derivatives."""
    outs = primitive.bind(*primals, **params)
    return outs, jax.tree.map(compat.zero_tangent, outs)


def _jvp(
    primals: Sequence[jax.Array],
    tangents: Sequence[Any],
    *,
    tap: tap_spec.TapSpec,
    transforms: tap_spec.Transforms,
    float0_leaves: Float0Leaves,
) -> Any:
    primals_out = tap_p.bind(*primals, tap=tap, transforms=transforms, float0_leaves=float0_leaves)
    if not tap.options.tap_tangents or all(type(t) is ad.Zero for t in tangents):
        return primals_out, list(tangents)
    leaves, mask = split_mask(primals, transforms)
    # Integer leaves have float0 tangents, which have no bytes and stay on the host.
    carried = [i for i, t in enumerate(tangents[: len(leaves)]) if not is_float0(t)]
    kept_float0 = absent_after(float0_leaves, len(leaves), carried, [np.shape(p) for p in leaves])
    outs = tap_p.bind(
        *(ad.instantiate_zeros(tangents[i]) for i in carried),
        *mask,
        tap=tap,
        transforms=_without_operands(with_transform(transforms, ("jvp", None)), carried),
        float0_leaves=kept_float0,
    )
    tangents_out = list(tangents)
    for i, out in zip(carried, outs, strict=False):  # a mask is the last result
        if type(tangents[i]) is not ad.Zero:
            tangents_out[i] = out
    return primals_out, tangents_out


def _transpose(
    cotangents: Sequence[Any],
    *args: Any,
    tap: tap_spec.TapSpec,
    transforms: tap_spec.Transforms,
    float0_leaves: Float0Leaves,
) -> Any:
    undefined = [ad.is_undefined_primal(arg) for arg in args]
    if not tap.options.tap_transposed or all(type(ct) is ad.Zero for ct in cotangents):
        return [ct if flows else None for ct, flows in zip(cotangents, undefined, strict=True)]
    _, mask = split_mask(args, transforms)
    outs = tap_p.bind(
        *map(ad.instantiate_zeros, cotangents[: len(cotangents) - len(mask)]),
        *mask,
        tap=tap,
        transforms=with_transform(transforms, ("transpose", None)),
        float0_leaves=float0_leaves,
    )
    # A symbolic zero stays symbolic, as without the tap, so that no computation uses it.
    outs = [ct if type(ct) is ad.Zero else out for ct, out in zip(cotangents, outs, strict=True)]
    return [out if flows else None for out, flows in zip(outs, undefined, strict=True)]


def _batch(
    args: Sequence[jax.Array],
    dims: Sequence[int | None],
    *,
    tap: tap_spec.TapSpec,
    transforms: tap_spec.Transforms,
    float0_leaves: Float0Leaves,
) -> Any:
    args, dims = list(args), [None if d is None else int(d) for d in dims]
    leaves, mask = split_mask(args, transforms)
    if mask and tap.options.kind.by_element and dims[-1] is not None and dims[:-1] == [None] * len(leaves):
        # The elements that take part are told by the mask alone: each of them is one of this value.
        args[0], dims[0] = jnp.broadcast_to(args[0], (mask[0].shape[dims[-1]], *np.shape(args[0]))), 0
    shown = iter(dims)
    held = dict(float0_leaves)
    all_dims = tuple(None if i in held else next(shown) for i in range(len(leaves) + len(float0_leaves)))
    transforms = with_transform(transforms, ("batch", all_dims))
    if mask:
        transforms = (*transforms[:-1], ("mask", (*mask_levels(transforms), tuple(dims))))
    outs = tap_p.bind(*args, tap=tap, transforms=transforms, float0_leaves=float0_leaves)
    return outs, dims


def mask_levels(transforms: tap_spec.Transforms) -> Any:
    """Of a tap with a mask: for each vmap, innermost first, the dimension of every operand; else None."""
    return transforms[-1][1] if transforms and transforms[-1][0] == "mask" else None


def split_mask(
    operands: Sequence[jax.Array], transforms: tap_spec.Transforms
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Returns the leaves among a tap's operands, and a list with the mask, which is empty if there is none."""
    count = len(operands) - (mask_levels(transforms) is not None)
    return list(operands[:count]), list(operands[count:])


def with_transform(transforms: tap_spec.Transforms, entry: tap_spec.Transform) -> tap_spec.Transforms:
    """Returns the transforms with one more; the mask's stays the last."""
    if mask_levels(transforms) is None:
        return (*transforms, entry)
    return (*transforms[:-1], entry, transforms[-1])


def _without_operands(transforms: tap_spec.Transforms, carried: list[int]) -> tap_spec.Transforms:
    levels = mask_levels(transforms)
    if levels is None:
        return transforms
    kept = tuple((*(dims[i] for i in carried), dims[-1]) for dims in levels)
    return (*transforms[:-1], ("mask", kept))


def bind_where(mask: jax.Array, operands: Sequence[jax.Array], params: dict[str, Any]) -> list[jax.Array]:
    """Binds a tap with the operands and parameters of an equation, for elements for which the scalar `mask` holds.

    The predicate of a check holds for the others, so a check needs no mask. For other kinds, `mask` is combined with
    the mask that the tap has, or becomes its mask.
    """
    transforms, float0_leaves = params["transforms"], params["float0_leaves"]
    if params["tap"].options.kind.is_check:
        predicate, *rest = operands
        return [predicate, *tap_p.bind(predicate | ~mask, *rest, **params)[1:]]
    leaves, old = split_mask(operands, transforms)
    if old:
        return [*tap_p.bind(*leaves, old[0] & mask, **params)[:-1], *old]
    held = dict(float0_leaves)
    levels = [
        (*(dim for i, dim in enumerate(dims) if i not in held), None)
        for name, dims in transforms
        if name == "batch"
    ]
    params = {**params, "transforms": (*transforms, ("mask", tuple(levels)))}
    return list(tap_p.bind(*leaves, mask, **params)[:-1])


def is_float0(tangent: Any) -> bool:
    """Whether a tangent is one of an integer, which has no bytes."""
    aval = tangent.aval if type(tangent) is ad.Zero else tangent
    return bool(getattr(aval, "dtype", None) == jax.dtypes.float0)


def absent_after(
    float0_leaves: Float0Leaves, count: int, carried: list[int], shapes: list[Any]
) -> Float0Leaves:
    """Returns `float0_leaves` after only the operands at `carried` of `count` go on; `shapes` has all shapes."""
    held = dict(float0_leaves)
    position = [i for i in range(count + len(float0_leaves)) if i not in held]  # leaf index of each operand
    for operand in set(range(count)) - set(carried):
        held[position[operand]] = tuple(shapes[operand])
    return tuple(sorted(held.items()))


rematerialized_tap_p = Primitive("tapped")
"""An identity that replaces a tap in the code that jax.checkpoint recomputes, because the tap has run already."""
rematerialized_tap_p.multiple_results = True


def _tapped_jvp(primals: Sequence[jax.Array], tangents: Sequence[Any]) -> Any:
    return rematerialized_tap_p.bind(*primals), list(tangents)


def _tapped_batch(args: Sequence[jax.Array], dims: Sequence[int | None]) -> Any:
    return rematerialized_tap_p.bind(*args), dims


tap_p.def_effectful_abstract_eval(_abstract)
tap_p.def_impl(functools.partial(run_eagerly, tap_p))
ad.primitive_jvps[tap_p] = _jvp
ad.primitive_transposes[tap_p] = _transpose
batching.primitive_batchers[tap_p] = _batch
rematerialized_tap_p.def_abstract_eval(lambda *avals: list(avals))
rematerialized_tap_p.def_impl(lambda *args: list(args))
ad.primitive_jvps[rematerialized_tap_p] = _tapped_jvp
batching.primitive_batchers[rematerialized_tap_p] = _tapped_batch
compat.register_lowering(rematerialized_tap_p, lambda ctx, *operands: operands)
compat.cache_weakly(tap_spec.TapSpec)
compat.lower_with_devices(tap_p)
loops.keep_in_scans(TapEffect)
loops.run_once_when_recomputed(TapEffect, tap_p, rematerialized_tap_p)
# Lowering is registered in hostcallback.lowering, which knows the transports.


# ---- Rules for parts of JAX that most programs never import ----------------------------------------------------------


def when_imported(name: str, register: Callable[[Any], None]) -> None:
    """Calls `register` with the module of that name: now, or at the first trace of a tap after the module's import.

    The rules are needed only for taps traced after that import, except for taps in a jitted function that was traced
    before and is transformed now; those do not get the rules.
    """
    _waiting[name] = register
    _register_imported()


def _register_imported() -> None:
    # A copy, because other threads trace and remove names meanwhile.
    for name in list(_waiting):
        module = sys.modules.get(name)
        # If another thread is importing the module, JAX's rules would overwrite ours.
        if module is not None and not getattr(module.__spec__, "_initializing", False):
            register = _waiting.pop(name, None)  # one thread gets it
            if register is not None:
                register(module)


_waiting: dict[str, Callable[[Any], None]] = {}


# ---- How a tap is bound ----------------------------------------------------------------------------------------------


def bind_tap(
    arg: Any,
    result: Any,
    kwargs: dict[str, Any],
    binding: Binding,
    *,
    identity: tuple[Any, ...],
    options: tap_spec.TapOptions,
) -> Any:
    """Binds one tap of `arg`.

    Args:
        arg: the pytree to send.
        result: the value to return; the tapped `arg` if None.
        kwargs: host values for the sink; none may be traced.
        binding: the functions and objects that take its messages in this process.
        identity: all values that determine the sink's behaviour, except `kwargs` and the structure of `arg`.
        options: the options of the tap.

    Raises:
        TypeError: a leaf of `arg` cannot be sent, or a keyword argument is traced. The text names the user's line.
        Exception: an error of JAX or of a pytree's code, with a note that names the user's line.
    """

    def bind(spec: tap_spec.TapSpec, arrays: list[jax.Array]) -> Any:
        outs = tap_p.bind(*arrays, tap=spec, transforms=(), float0_leaves=())
        return spec.structure.restore(arg, outs) if result is None else result

    return bind_spec(bind, arg, kwargs, binding, identity=identity, options=options)


def bind_spec(
    bind: Callable[[tap_spec.TapSpec, list[Any]], Any],
    arg: Any,
    kwargs: dict[str, Any],
    binding: Binding,
    *,
    identity: tuple[Any, ...],
    options: tap_spec.TapOptions,
) -> Any:
    """Calls `bind` with the spec of a tap or call and the arrays of `arg`, and returns its result; see `bind_tap`."""
    source_line = user_source_line()
    tap = f"{options.name} at {source_line}"
    # Here, since the rules of a module that was imported meanwhile must be there before the tap is bound.
    _register_imported()
    try:
        arrays, structure = split_leaves(arg, "arg", tap, keep_objects=options.keep_objects)
        tap_spec.check_kwargs(kwargs, options.name, tap)
        spec = tap_spec.TapSpec(
            options,
            source_line=source_line,
            kwargs=kwargs,
            structure=structure,
            identity=(*identity, structure.static_values),
            binding=binding,
        )
        spec = spec.intern()
        if options.place is not None:
            note_place(spec.places, options.place)
        return bind(spec, arrays)
    except Exception as error:
        if str(source_line) not in str(error):  # errors of JAX, such as for a leaked tracer
            error.add_note(f"This was raised in the tap {tap}")
        raise


def emit_text(
    what: str,
    fmt: str,
    args: Sequence[jax.Array],
    kwargs: Mapping[str, Any],
    skip_format_check: bool,
    identity: tuple[Any, ...],
    objects: Mapping[str, Any],
    options: tap_spec.TapOptions,
) -> None:
    """Binds one tap of `args` and `kwargs`, which the host formats as a text.

    Args:
        what: name of the caller, for errors.
        fmt: the format string.
        args: values of its placeholders; may be traced.
        kwargs: values of its named placeholders; may be traced.
        skip_format_check: whether arguments may lack a placeholder.
        identity: all values that determine `objects`.
        objects: consumer of the texts, an output stream or a logger, by its name in the sink of that kind.
        options: the options of the tap.

    Raises:
        TypeError: `fmt` is not a text.
        ValueError: see `check_format`; or there are keyword arguments other than `step` and no placeholders.
        IndexError: see `check_format`.
        KeyError: see `check_format`.
    """
    if not isinstance(fmt, str):
        raise TypeError(
            f"{what} takes a format string first, got {type(fmt).__name__} {fmt!r}: {what}('{{}}', x), at "
            f"{user_source_line()}"
        )
    tap_spec.check_switch("skip_format_check", skip_format_check)
    args, kwargs = arguments.with_scalars(fmt, args, kwargs)
    if not skip_format_check:
        arguments.check_format(what, fmt, args, kwargs)
    template = template_of(fmt, args, kwargs)
    if kwargs.keys() - {STEP} and not template.has_placeholders:
        raise ValueError(
            f"the format string {fmt!r} has no placeholders and {what} got keyword arguments {[*kwargs]}: pass them "
            f"by position to have them follow the text, at {user_source_line()}"
        )

    identity = (*identity, fmt, str(template.printoptions))
    options = replace(options, kind=tap_descriptor.FORMAT, params={**options.params, **template.params()})
    binding = Binding(objects={**objects, "template": template})
    bind_tap((args, kwargs), (), {}, binding, identity=identity, options=options)


def template_of(fmt: str, args: Sequence[jax.Array], kwargs: Mapping[str, Any]) -> Template:
    """Returns the template for these arguments, with the current print options of numpy."""
    from hostcallback.receiver.sinks.printing import Template  # here, because most taps print nothing

    fields = list(arguments.placeholders(fmt))
    # Arrays of numpy and JAX have the same format, but other attributes, elements and reprs (which containers show).
    alike = all(field.replace("_", "").isalnum() or not field for field in fields)
    alike = alike and jax.tree_util.all_leaves([*args, *kwargs.values()]) and bool(fields or not args)
    return Template(fmt, bool(fields), np.get_printoptions(), None if alike else as_jax_array)


def as_jax_array(array: array_types.Array) -> Any:
    """Converts an array of a message into a JAX array on the CPU with the same dtype, as JAX's callbacks get it."""
    # The receiver thread's settings may differ from the tracing thread's, and guards are for the program's transfers.
    with jax.enable_x64(True), jax.transfer_guard("allow"):
        return jax.device_put(array, jax.local_devices(backend="cpu")[0])

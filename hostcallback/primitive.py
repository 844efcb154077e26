"""The tap primitive: an identity on its operands that sends them to the host, and its rules.

One equation stands for one tap: `tap_p.bind(*leaves, tap=TapSpec, transforms=(...), absent=(...))`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from hostcallback import _jax_compat as compat, inflight
from hostcallback.tap_spec import Absent, TapSpec, Transform


class TapEffect(compat.Effect):  # type: ignore[misc]
    """Keeps taps alive and, through the token JAX threads for it, in order.

    JAX hashes the effect whenever it dispatches a computation that has it (outside `hostcallback.jit`). The
    hash notes the dispatching thread: a barrier must wait for what other threads dispatched, and JAX keeps each
    thread's tokens where no other thread can find them.
    """

    def __str__(self) -> str:
        """As jaxprs print it."""
        return "Tap"

    def __eq__(self, other: object) -> bool:
        """All tap effects are one."""
        return isinstance(other, TapEffect)

    def __hash__(self) -> int:
        """One value for all, after noting the calling thread."""
        inflight.note_dispatching_thread()
        return 0x746170  # not by address: JAX orders some effects by their hash, and programs must not vary


TAP_EFFECT = TapEffect()
compat.register_ordered_effect(TapEffect)
inflight.wait_for_effect(TAP_EFFECT)

tap_p = Primitive("tap")
tap_p.multiple_results = True


def _abstract(*avals: Any, tap: TapSpec, transforms: Any, absent: Any) -> Any:
    return list(avals), {TAP_EFFECT}


def _impl(*args: Any, tap: TapSpec, transforms: tuple[Transform, ...], absent: Absent) -> Any:
    with jax.disable_jit(False):
        return _eager_program(tap, transforms, absent)(*args)


@functools.lru_cache(maxsize=32)
def _eager_program(tap: TapSpec, transforms: tuple[Transform, ...], absent: Absent) -> Callable[..., Any]:
    # A tap outside jit is a program of one equation. The last few are kept, and with them what their taps captured.
    from hostcallback.jit import jit  # the boundary discharges this primitive's effect: it imports us

    return jit(lambda *leaves: tap_p.bind(*leaves, tap=tap, transforms=transforms, absent=absent))


def _jvp(primals: Any, tangents: Any, *, tap: TapSpec, transforms: Any, absent: Absent) -> Any:
    primals_out = tap_p.bind(*primals, tap=tap, transforms=transforms, absent=absent)
    if not tap.tangents or all(type(t) is ad.Zero for t in tangents):
        return primals_out, list(tangents)
    # Integer leaves have float0 tangents, which hold no bytes: they stay on the host.
    carried = [i for i, t in enumerate(tangents) if not _is_float0(t)]
    kept_absent = absent_after(absent, len(tangents), carried, [np.shape(p) for p in primals])
    outs = tap_p.bind(
        *(ad.instantiate_zeros(tangents[i]) for i in carried),
        tap=tap,
        transforms=(*transforms, ("jvp", None)),
        absent=kept_absent,
    )
    tangents_out = list(tangents)
    for i, out in zip(carried, outs, strict=True):
        if type(tangents[i]) is not ad.Zero:
            tangents_out[i] = out
    return primals_out, tangents_out


def _transpose(cotangents: Any, *args: Any, tap: TapSpec, transforms: Any, absent: Absent) -> Any:
    outs = tap_p.bind(
        *map(ad.instantiate_zeros, cotangents),
        tap=tap,
        transforms=(*transforms, ("transpose", None)),
        absent=absent,
    )
    return [out if ad.is_undefined_primal(arg) else None for arg, out in zip(args, outs, strict=True)]


def _batch(args: Any, dims: Any, *, tap: TapSpec, transforms: Any, absent: Absent) -> Any:
    shown = iter(None if d is None else int(d) for d in dims)
    held = dict(absent)
    all_dims = tuple(None if i in held else next(shown) for i in range(len(args) + len(absent)))
    outs = tap_p.bind(*args, tap=tap, transforms=(*transforms, ("batch", all_dims)), absent=absent)
    return outs, dims


def _is_float0(tangent: Any) -> bool:
    aval = tangent.aval if type(tangent) is ad.Zero else tangent
    return bool(getattr(aval, "dtype", None) == jax.dtypes.float0)


def absent_after(absent: Absent, count: int, carried: list[int], shapes: list[Any]) -> Absent:
    """`absent` after of `count` operands only those at `carried` go on; `shapes` are all operands' shapes."""
    held = dict(absent)
    position = [i for i in range(count + len(absent)) if i not in held]  # leaf index of each operand
    for operand in set(range(count)) - set(carried):
        held[position[operand]] = tuple(shapes[operand])
    return tuple(sorted(held.items()))


tap_p.def_effectful_abstract_eval(_abstract)
tap_p.def_impl(_impl)
ad.primitive_jvps[tap_p] = _jvp
ad.primitive_transposes[tap_p] = _transpose
batching.primitive_batchers[tap_p] = _batch
compat.cache_weakly(TapSpec)
compat.lower_with_devices(tap_p)
compat.never_hoist_from_loops(tap_p)
# Lowering is registered in hostcallback.lowering, which knows the transports.

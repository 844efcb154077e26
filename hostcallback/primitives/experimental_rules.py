"""Rules of `jax.experimental.jet` and `jax.experimental.sparse.sparsify` for taps and calls."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from hostcallback._jax_compat.types import Primitive
from hostcallback.primitives.call import call_p, refuse_to_differentiate
from hostcallback.primitives.tap import rematerialized_tap_p, tap_p, when_imported


def _jet_tap(primitive: Primitive, primals: Sequence[Any], series: Sequence[Any], **params: Any) -> Any:
    # Taps the primal value only, as jax.debug.callback does under jvp. The series passes through.
    return primitive.bind(*primals, **params), series


def _jet_call(primals: Sequence[Any], series: Sequence[Any], **params: Any) -> Any:
    refuse_to_differentiate(params["call"])
    return call_p.bind(*primals, **params), []  # a breakpoint, which has no results


def _register_jet_rules(jet: Any) -> None:
    for primitive in (tap_p, rematerialized_tap_p):
        jet.jet_rules[primitive] = functools.partial(_jet_tap, primitive)
    jet.jet_rules[call_p] = _jet_call


def _register_sparse_rules(sparse: Any) -> None:
    def with_dense_operands(primitive: Primitive, *, is_identity: bool) -> Callable[..., Any]:
        def rule(env: Any, *values: Any, **params: Any) -> Any:
            arrays = [sparse.spvalues_to_arrays(env, value) for value in values]
            outs = primitive.bind(
                *(
                    array.todense() if value.is_sparse() else array
                    for array, value in zip(arrays, values, strict=True)
                ),
                **params,
            )
            return values if is_identity else [env.dense(out) for out in outs]

        return rule

    for rules in (sparse.sparse_rules_bcoo, sparse.sparse_rules_bcsr):
        for primitive in (tap_p, rematerialized_tap_p):
            rules[primitive] = with_dense_operands(primitive, is_identity=True)
        rules[call_p] = with_dense_operands(call_p, is_identity=False)


when_imported("jax.experimental.jet", _register_jet_rules)
when_imported("jax.experimental.sparse.transform", _register_sparse_rules)

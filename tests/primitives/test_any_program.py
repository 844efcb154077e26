"""Properties of arbitrary JAX programs: random compositions of its constructs and of taps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

import hostcallback as hcb
from recorder import Recorder
from transforming import PRIMAL, delivered

Tap = Callable[[Any], Any]
Program = Callable[[Tap, Any, Any], Any]
"""(tap, x, k) -> y, all of them numbers: differentiated by x, never by k."""


def leaf(name: str) -> Program:
    return {
        "tap": lambda tap, x, k: tap(jnp.sin(x)),
        "tap constant": lambda tap, x, k: tap(jnp.cos(k)) * x,
        "unused": lambda tap, x, k: (tap(2 * x), jnp.sin(x))[1],
        "unused constant": lambda tap, x, k: (tap(2 * k), jnp.sin(x))[1],
        "literal": lambda tap, x, k: (tap(jnp.float32(3.0)), 1.5 * x)[1],
        "no tap": lambda tap, x, k: jnp.cos(x),
    }[name]


def scan(f: Program) -> Program:
    return lambda tap, x, k: lax.scan(lambda c, _: (f(tap, c, k), None), x, None, length=2)[0]


def scan_of_values(f: Program) -> Program:
    return lambda tap, x, k: x * lax.scan(lambda c, v: (c, f(tap, v, k)), 0, jnp.stack([x, x + 1]))[1].sum()


def scan_of_constants(f: Program) -> Program:
    return lambda tap, x, k: lax.scan(lambda c, _: (c * f(tap, x, k), None), 0.5, None, length=2)[0]


def fori_loop(f: Program) -> Program:
    return lambda tap, x, k: lax.fori_loop(0, 2, lambda _, c: f(tap, c, k), x)


def while_loop_of_constants(f: Program) -> Program:
    def program(tap: Tap, x: Any, k: Any) -> Any:
        return x * lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, f(tap, s[1], k)), (0, k))[1]

    return program


def condition_of_constants(f: Program) -> Program:
    def program(tap: Tap, x: Any, k: Any) -> Any:
        return x * lax.while_loop(lambda c: 0 * f(tap, c, k) + c < 2.2, lambda c: c + 0.7, k)

    return program


def cond(f: Program) -> Program:
    return lambda tap, x, k: lax.cond(x > 0, lambda x: f(tap, x, k), lambda x: f(tap, -x, k), x)


def cond_of_constants(f: Program) -> Program:
    return lambda tap, x, k: lax.cond(k > 0, lambda: f(tap, x, k), lambda: x)


def switch(f: Program) -> Program:
    return lambda tap, x, k: lax.switch(jnp.int32(k), [lambda x: x, lambda x: f(tap, x, k)], x)


def unused(f: Program) -> Program:
    return lambda tap, x, k: (f(tap, k, k), jnp.sin(x))[1]


def jit(f: Program) -> Program:
    return lambda tap, x, k: jax.jit(lambda x, k: f(tap, x, k))(x, k)


def hcb_jit(f: Program) -> Program:
    return lambda tap, x, k: hcb.jit(lambda x, k: f(tap, x, k))(x, k)


def checkpoint(f: Program) -> Program:
    return lambda tap, x, k: jax.checkpoint(lambda x: jnp.sin(f(tap, x, k)))(x)


def checkpoint_with_policy(f: Program) -> Program:
    policy = jax.checkpoint_policies.dots_saveable
    return lambda tap, x, k: jax.checkpoint(lambda x, k: f(tap, x, k), policy=policy)(x, k)


def custom_jvp(f: Program) -> Program:
    def program(tap: Tap, x: Any, k: Any) -> Any:
        g = jax.custom_jvp(lambda x, k: f(tap, x, k))
        g.defjvp(lambda primals, tangents: (f(tap, *primals), 2 * tangents[0]))
        return g(x, k)

    return program


def vmap(f: Program) -> Program:
    return lambda tap, x, k: jax.vmap(lambda v: f(tap, v, k))(jnp.stack([x, x + 1])).sum()


def lax_map(f: Program) -> Program:
    return lambda tap, x, k: lax.map(lambda v: f(tap, v, k), jnp.stack([x, x + 1])).sum()


def shard_map(f: Program) -> Program:
    whole, mesh = PartitionSpec(), Mesh(jax.devices()[:1], ("i",))

    def program(tap: Tap, x: Any, k: Any) -> Any:
        per_device = jax.shard_map(
            lambda x, k: f(tap, x, k), mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False
        )
        return per_device(x, k)

    return program


def after(f: Program, g: Program) -> Program:
    return lambda tap, x, k: g(tap, f(tap, x, k), k)


CONSTRUCTS = [
    scan, scan_of_values, scan_of_constants, fori_loop, while_loop_of_constants, condition_of_constants, cond,
    cond_of_constants, switch, unused, jit, hcb_jit, checkpoint, checkpoint_with_policy, custom_jvp, vmap, lax_map,
    shard_map,
]  # fmt: skip

LEAVES = ["tap", "tap constant", "unused", "unused constant", "literal", "no tap"]


def described(name: str, *parts: tuple[str, Program], make: Callable[..., Program]) -> tuple[str, Program]:
    return f"{name}({', '.join(text for text, _ in parts)})", make(*(program for _, program in parts))


def larger(smaller: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    wrapped = st.builds(
        lambda make, part: described(make.__name__, part, make=make), st.sampled_from(CONSTRUCTS), smaller
    )
    chained = st.builds(lambda one, two: described("after", one, two, make=after), smaller, smaller)
    return wrapped | wrapped | chained


PROGRAMS = st.recursive(st.sampled_from(LEAVES).map(lambda name: (name, leaf(name))), larger, max_leaves=3)

X, K = jnp.float32(0.5), jnp.float32(1.0)

# Each takes x -> y to a function of x whose primal taps should be those of x -> y.
DIFFERENTIATIONS: dict[str, Callable[[Callable[[Any], Any]], Callable[[Any], Any]]] = {
    "grad": jax.value_and_grad,
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x,)),
    "hessian": jax.hessian,
    "grad of checkpoint": lambda f: jax.grad(jax.checkpoint(f)),
}


def run(program: Program, transform: Callable[[Any], Any], compile: Any) -> tuple[Any, list[Any]]:
    """The result of the transformed program, and its messages."""
    rec = Recorder()
    out = compile(lambda x, k: transform(lambda x: program(lambda v: hcb.id_tap(rec, v), x, k))(x))(X, K)
    return jax.tree.map(np.asarray, out), delivered(rec)


def run_untapped(program: Program, transform: Callable[[Any], Any]) -> Any:
    return jax.jit(lambda x, k: transform(lambda x: program(lambda v: v, x, k))(x))(X, K)


def primals(messages: list[Any]) -> list[Any]:
    return [
        (transforms, value)
        for transforms, value in messages
        if not {"jvp", "transpose"} & {n for n, _ in transforms}
    ]


@pytest.mark.slow
@hypothesis.settings(max_examples=25, derandomize=True)
@hypothesis.given(
    described_program=PROGRAMS,
    differentiation=st.sampled_from(sorted(DIFFERENTIATIONS)),
    compile=st.sampled_from([jax.jit, hcb.jit]),
)
def test_differentiation_taps_the_same_primals_and_taps_change_no_derivative(
    described_program: tuple[str, Program], differentiation: str, compile: Any
) -> None:
    _, program = described_program
    transform = DIFFERENTIATIONS[differentiation]
    _, plain_messages = run(program, lambda f: f, compile)
    out, messages = run(program, transform, compile)
    assert primals(messages) == plain_messages
    assert all(transforms != PRIMAL for transforms, _ in messages if (transforms, _) not in plain_messages)
    np.testing.assert_allclose(
        jax.tree.leaves(out), jax.tree.leaves(run_untapped(program, transform)), rtol=1e-4, atol=1e-5
    )


@pytest.mark.slow
@hypothesis.settings(max_examples=25, derandomize=True)
@hypothesis.given(described_program=PROGRAMS, compile=st.sampled_from([jax.jit, hcb.jit]))
def test_batching_loses_no_tap_and_taps_change_no_result(
    described_program: tuple[str, Program], compile: Any
) -> None:
    _, program = described_program
    xs, ks = jnp.array([0.5, -0.3, 2.0]), jnp.array([1.0, 0.0, 1.7])
    rec = Recorder()
    out = compile(jax.vmap(lambda x, k: program(lambda v: hcb.id_tap(rec, v), x, k)))(xs, ks)
    expected = jax.jit(jax.vmap(lambda x, k: program(lambda v: v, x, k)))(xs, ks)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)
    count = len(delivered(rec))
    for x, k in zip(
        xs, ks, strict=True
    ):  # one message is for all elements: at least as many as for each of them
        one = Recorder()
        jax.jit(lambda x, k, one=one: program(lambda v: hcb.id_tap(one, v), x, k))(x, k)
        assert count >= len(delivered(one))

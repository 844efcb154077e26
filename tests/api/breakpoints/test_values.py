"""Variables that the debugger shows; a breakpoint leaks no tracer and keeps no value alive."""

from __future__ import annotations

import functools
import gc
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import hostcallback as hcb
from scripted import Script
from transforming import Jit

script = Script()  # one for all: JAX keeps the jaxprs of functions


@pytest.fixture(autouse=True)
def _forget() -> None:
    script.text, script.commands = "", []


def inner(c: Any, i: Any) -> Any:
    d = c + i
    hcb.breakpoint(stdin=script, stdout=script)
    return d, None


@jax.jit
def inner_jit(x: Any) -> Any:
    y = x + 1
    hcb.breakpoint(stdin=script, stdout=script)
    return y


def test_values_of_an_enclosing_trace_are_there() -> None:
    script.commands = ["u", "p float(y['a'][0]), float(x), label", "u", "c"]

    def outer(x: Any) -> Any:
        y = {"a": (2 * x, None)}
        label = "outer"
        assert label

        def body(c: Any) -> Any:
            hcb.breakpoint(stdin=script, stdout=script)
            return c + 1

        return lax.cond(x > 0, body, lambda c: c, y["a"][0])

    assert float(jax.jit(outer)(3.0)) == 7
    assert script.answers[1] == "(6.0, 3.0, 'outer')"


@pytest.mark.slow
def test_a_reused_body_gets_no_variables_of_its_caller() -> None:
    # JAX keeps the jaxpr of `inner` and of `inner_jit`, and uses it under the next trace.
    def f(x: Any) -> Any:
        k = x + 1
        total, _ = lax.scan(inner, k, jnp.arange(1.0))
        return inner_jit(total) * k.sum()

    for x in (1, 2, 3):
        script.text = ""
        script.commands = ["p d.shape", "u", "p k", "c", "p y.shape", "u", "p k", "c"]
        jax.jit(lambda x: f(x))(jnp.float32(x))
        assert not script.commands
        missing = [answer for answer in script.answers if answer.startswith("<")]
        assert len(missing) == 2
        assert all("tracer of an outer trace, and JAX may use the function traced here" in m for m in missing)


def test_a_cached_jitted_function_gets_no_variables_of_its_caller() -> None:
    kept: list[Any] = []

    def f(x: Any) -> Any:
        z = 2 * x

        def step(c: Any) -> Any:
            hcb.breakpoint(stdin=script, stdout=script)
            return c + 1

        kept.append(jax.jit(step))
        return kept[0](x) + z

    for _ in range(2):
        script.commands = ["p float(c)", "u", "p z", "c"]
        assert float(jax.jit(lambda x: f(x))(1.0)) == 4
        assert script.answers[0] == "1.0"
        assert "tracer of an outer trace" in script.answers[2]


def test_values_of_transformations_around_are_there(jit: Jit) -> None:
    script.commands = ["p float(x)", "u", "p float(z)", "c"] * 2

    def g(x: Any) -> Any:
        hcb.breakpoint(stdin=script, stdout=script)
        return x * 2

    def f(z: Any) -> Any:
        return jax.vmap(g)(jnp.stack([z, z + 1])).sum()

    jax.block_until_ready(jit(jax.grad(f))(jnp.float32(1)))
    assert [a for a in script.answers if a and not a.startswith(">")] == ["1.0", "1.0", "2.0", "1.0"]
    assert not script.commands


def test_tracers_that_cannot_be_used_are_told() -> None:
    script.commands = ["p stale", "p [stale, 1]", "p box", "p maker", "c"]

    class Box:
        pass

    def f(x: Any) -> Any:
        stale: Any = []
        jax.make_jaxpr(lambda y: stale.append(y) or y)(1.0)
        stale = stale[0]
        box = Box()
        box.value = x  # type: ignore[attr-defined]
        maker = (y for y in [x])
        assert maker
        hcb.breakpoint(stdin=script, stdout=script)
        return x

    jax.jit(f)(1.0)
    over = "<not available here: tracer of another trace, an inner one or one that has ended, ~float32[]>"
    assert script.answers[0] == over
    assert script.answers[1] == f"[{over}, 1]"
    assert "Box that does not exist any more>" in script.answers[2]
    assert "<not available here: a builtins.generator" in script.answers[3]


@pytest.mark.slow
def test_values_of_the_traces_within_are_told_where_a_rule_stops() -> None:
    script.commands = ["p float(x)", "u", "p z", "c"]

    @jax.custom_jvp
    def double(x: Any) -> Any:
        hcb.breakpoint(stdin=script, stdout=script)
        return 2 * x

    double.defjvps(lambda t, ans, x: 2 * t)

    def f(x: Any) -> Any:
        z = jnp.sin(x)
        return double(z)

    assert np.isfinite(jax.jit(jax.grad(f))(1.0))
    assert not script.commands


def test_a_non_array_is_the_same_object() -> None:
    class Config:
        rate = 0.5

    config, text, table = Config(), "text", {1: "one", "two": 2}  # keys without an order
    concrete = jnp.arange(2)
    script.commands = ["p config", "p config.rate, text, table, concrete", "p helper(2)", "p np.pi", "c"]

    def helper(x: Any) -> Any:
        return x + 1

    def f(x: Any) -> Any:
        assert len([config, text, table, concrete, helper]) == 5
        hcb.breakpoint(stdin=script, stdout=script)
        return x

    jax.jit(f)(1.0)
    assert script.answers[0] == repr(config)
    assert script.answers[1] == "(0.5, 'text', {1: 'one', 'two': 2}, Array([0, 1], dtype=int32))"
    assert script.answers[2:4] == ["3", str(np.pi)]


def test_values_of_many_types_arrive() -> None:
    script.commands = ["p half.dtype, small.dtype, flag, empty.shape, number", "p jax.random.key_data(key)",
                       "p ref", "p flags", "c"]  # fmt: skip

    def f(x: Any) -> Any:
        half, small = x.astype(jnp.bfloat16), x.astype(jnp.int4)
        flag, empty, number = x > 0, jnp.zeros((0, 2)) * x, x * 1j
        key = jax.random.key(x.astype(int))
        flags = [flag, None, "text", (1, x.astype(np.uint8))]
        ref = jax.new_ref(x)
        hcb.breakpoint(stdin=script, stdout=script)
        return (
            ref[...]
            + number.real
            + len(half.shape)
            + len(small.shape)
            + empty.sum()
            + jax.random.uniform(key)
            + len(flags)
        )

    jax.jit(f)(1.0)
    assert (
        script.answers[0]
        == "(dtype(bfloat16), dtype(int4), array(True), (0, 2), array(0.+1.j, dtype=complex64))"
    )
    assert script.answers[1] == "Array([0, 1], dtype=uint32)"
    assert "read it into a variable" in script.answers[2]
    assert script.answers[3] == "[array(True), None, 'text', (1, array(1, dtype=uint8))]"


@pytest.mark.slow
def test_no_tracer_leaks(jit: Jit) -> None:
    def f(x: Any) -> Any:
        pair = [x, functools.partial(jnp.add, x)]
        closure = lambda: x  # noqa: E731

        def step(c: Any, i: Any) -> Any:
            hcb.breakpoint(when=c > 2, stdin=script, stdout=script)
            return c + i + closure(), None

        return lax.scan(step, x, jnp.arange(3.0))[0] + pair[1](x)

    with jax.checking_leaks():
        script.commands = ["c"] * 100
        jax.block_until_ready(jit(f)(1.0))
        jax.block_until_ready(jit(jax.vmap(f))(jnp.ones(2)))
        # Not in a loop: there JAX itself reports a leak for every effect (that of jax.debug.print, for example).
        jax.block_until_ready(jit(jax.grad(lambda x: inner(x, x)[0]))(1.0))
    assert script.stops


def test_a_program_is_freed_with_its_function() -> None:
    class Marker:
        pass

    def make() -> Any:
        marker = Marker()
        array = jnp.arange(3.0)
        script.commands = ["p marker", "c"]

        def f(x: Any) -> Any:
            assert marker is not None
            hcb.breakpoint(stdin=script, stdout=script)
            return x + array

        compiled = jax.jit(f)
        parts = [compiled, {"f": f}]
        jax.block_until_ready(compiled(1.0))
        assert parts
        return weakref.ref(marker), weakref.ref(f)

    refs = make()
    gc.collect()
    hcb.barrier_wait()  # which forgets the consumers of programs that are gone
    gc.collect()
    assert [ref() for ref in refs] == [None, None]


def test_the_innermost_frames_are_the_users() -> None:
    script.commands = ["u", "c"]

    @functools.partial(jax.jit)
    @functools.partial(jax.named_call, name="f")
    def f(x: Any) -> Any:
        return functools.partial(g, x)()

    def g(x: Any) -> Any:
        hcb.breakpoint(stdin=script, stdout=script)
        return x

    f(1.0)
    assert ".f()" in script.answers[0]

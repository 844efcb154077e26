"""Where programs read knobs: in loops, branches, under every transformation, and in what order."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hostcallback as hcb

NOTHING = jax.ShapeDtypeStruct((), jnp.int32)


def setting(name: str) -> Any:
    """An operation of a program that sets a knob to a number on the host, and returns 0."""

    def set_it(value: Any) -> Any:
        hcb.knobs[name] = value.item()
        return np.int32(0)

    return lambda value: hcb.call(set_it, value, result_shape=NOTHING)


@pytest.mark.parametrize("loop", ["scan", "fori_loop", "while_loop"])
def test_a_loop_reads_in_every_iteration(name: str, loop: str) -> None:
    hcb.knob(name, 0.0)

    def step(i: Any, total: Any) -> Any:
        setting(name)(i.astype(jnp.float32))
        return total + hcb.knob(name, 0.0)

    def program() -> Any:
        if loop == "scan":
            return jax.lax.scan(lambda c, i: (step(i, c), None), 0.0, jnp.arange(5))[0]
        if loop == "fori_loop":
            return jax.lax.fori_loop(0, 5, step, 0.0)
        return jax.lax.while_loop(lambda s: s[0] < 5, lambda s: (s[0] + 1, step(s[0], s[1])), (0, 0.0))[1]

    assert jax.jit(program)() == 0 + 1 + 2 + 3 + 4


def test_a_loop_ends_by_a_knob_in_its_condition(name: str) -> None:
    def body(i: Any) -> Any:
        setting(name)(jnp.where(i == 3, 0.0, 1.0))
        return i + 1

    ended = jax.jit(lambda: jax.lax.while_loop(lambda i: hcb.knob(name, 1.0) > 0, body, 0))()
    assert ended == 4


def test_reads_are_neither_merged_nor_moved(name: str) -> None:
    def program() -> Any:
        first = hcb.knob(name, 1.0)
        setting(name)(jnp.float32(2))
        second = hcb.knob(name, 1.0)
        setting(name)(jnp.float32(3))
        return first, second, hcb.knob(name, 1.0)

    assert [float(x) for x in jax.jit(program)()] == [1, 2, 3]


def test_a_function_that_is_called_twice_reads_twice(name: str) -> None:
    inner = jax.jit(lambda: hcb.knob(name, 1.0))

    def program() -> Any:
        first = inner()
        setting(name)(jnp.float32(2))
        return first, inner()

    assert [float(x) for x in jax.jit(program)()] == [1, 2]


def test_grad_takes_it_for_a_constant_and_reads_in_every_iteration(name: str) -> None:
    def loss(x: Any) -> Any:
        def step(c: Any, i: Any) -> Any:
            setting(name)(i.astype(jnp.float32))
            return c * hcb.knob(name, 1.0), None

        return jax.lax.scan(step, x, jnp.arange(1, 4))[0]

    for transformed in (loss, jax.checkpoint(loss)):
        value, slope = jax.jit(jax.value_and_grad(transformed))(2.0)
        assert value == 2 * 1 * 2 * 3
        assert slope == 6


def test_a_scan_that_depends_on_nothing_else_reads_in_every_iteration_under_grad(name: str) -> None:
    # JAX moves what depends on a scan's constants only out of the scan that it differentiates.
    def loss(x: Any) -> Any:
        def step(c: Any, i: Any) -> Any:
            c = c * hcb.knob(name, 1.0)
            setting(name)(hcb.knob(name, 1.0) + 1)
            return c, None

        return jax.lax.scan(step, x, None, length=3)[0]

    assert jax.jit(jax.grad(loss))(1.0) == 1 * 2 * 3


def test_a_checkpoint_does_not_read_again(name: str) -> None:
    @jax.checkpoint
    def part(x: Any) -> Any:
        return jnp.sin(x * hcb.knob(name, 2.0))

    def loss(x: Any) -> Any:
        y = part(x)
        setting(name)(jnp.float32(5))
        return y

    slope = jax.jit(jax.grad(loss))(1.0)
    np.testing.assert_allclose(slope, 2 * np.cos(2.0), rtol=1e-6)
    assert hcb.knobs[name] == 5


def test_jvp_takes_it_for_a_constant(name: str, jit: Any) -> None:
    out, tangent = jit(lambda x: jax.jvp(lambda x: x * hcb.knob(name, 3.0), (x,), (1.0,)))(2.0)
    assert (out, tangent) == (6, 3)


def test_vmap_has_one_value_for_all_elements(name: str, jit: Any) -> None:
    hcb.knob(name, 2.0)
    reads = jit(jax.vmap(lambda x: (x * hcb.knob(name, 2.0), hcb.knob(name, 2.0)), out_axes=(0, None)))
    products, value = reads(jnp.arange(3.0))
    np.testing.assert_array_equal(products, [0, 2, 4])
    assert value == 2


def test_branches_and_loops_that_differ_under_vmap(name: str) -> None:
    def f(x: Any) -> Any:
        y = jax.lax.cond(x > 1, lambda: x * hcb.knob(name, 2.0), lambda: x)
        return jax.lax.while_loop(lambda y: y < 5, lambda y: y + hcb.knob(name, 2.0), y)

    np.testing.assert_array_equal(jax.jit(jax.vmap(f))(jnp.arange(4.0)), [6, 5, 6, 6])


def test_custom_derivatives_may_read(name: str) -> None:
    @jax.custom_vjp
    def f(x: Any) -> Any:
        return x * hcb.knob(name, 2.0)

    f.defvjp(lambda x: (f(x), None), lambda _, ct: (ct * hcb.knob(name, 2.0) * 10,))
    assert jax.jit(jax.value_and_grad(f))(1.0) == (2, 20)


def test_an_unused_knob_changes_no_result(name: str) -> None:
    def f(x: Any) -> Any:
        return jnp.sin(x) * 3

    def with_knob(x: Any) -> Any:
        hcb.knob(name, 2.0)
        return f(x)

    x = jnp.linspace(0, 1, 100)
    np.testing.assert_array_equal(jax.jit(f)(x), jax.jit(with_knob)(x))


@pytest.mark.native_only
def test_reads_of_a_call_have_the_value_of_the_first(name: str) -> None:
    def program() -> Any:
        first = hcb.knob(name, 1.0, read="call")
        setting(name)(first + 1)
        return first, hcb.knob(name, 1.0, read="call"), hcb.knob(name, 1.0)

    f = jax.jit(program)
    assert [float(x) for x in f()] == [1, 1, 2]
    assert [float(x) for x in f()] == [2, 2, 3]


@pytest.mark.native_only
def test_a_program_that_is_compiled_again_reads_again(name: str) -> None:
    def program(x: Any) -> Any:
        return x * hcb.knob(name, 1.0, read="call")

    for value in (1, 2, 3):
        hcb.knob(name, 1.0)
        hcb.knobs[name] = value
        jax.clear_caches()  # up to JAX 0.8, the launches have the same numbers again
        assert [float(jax.jit(program)(1.0)) for _ in range(3)] == [value] * 3


def test_a_program_before_and_after_a_thread_sets_it(name: str) -> None:
    f = jax.jit(lambda: jax.lax.scan(lambda c, _: (c + hcb.knob(name, 1.0), None), 0.0, None, length=10)[0])
    assert f() == 10
    hcb.knobs[name] = 2
    assert f() == 20

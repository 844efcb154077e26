"""Control flow: one message each time a tap is reached, in order, whether its result is used or not."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import hostcallback as hcb
from recorder import Recorder
from transforming import COTANGENT, JVP, PRIMAL, TANGENT, Jit, batch, delivered, places


def primals(*values: Any) -> list[tuple[Any, Any]]:
    return [(PRIMAL, value) for value in values]


def tangents(*values: Any) -> list[tuple[Any, Any]]:
    return [(TANGENT, value) for value in values]


def cotangents(*values: Any) -> list[tuple[Any, Any]]:
    return [(COTANGENT, value) for value in values]


# Without differentiation.


def test_scan_taps_every_iteration_in_order(jit: Jit, rec: Recorder) -> None:
    def step(total: Any, i: Any) -> Any:
        return hcb.id_tap(rec, total + i), None

    out, _ = jit(lambda x: lax.scan(step, x, jnp.arange(5.0)))(0.0)
    assert delivered(rec) == primals(0.0, 1.0, 3.0, 6.0, 10.0)
    assert float(out) == 10.0


def test_scan_backwards_and_unrolled(jit: Jit, rec: Recorder) -> None:
    def f(x: Any) -> Any:
        return lax.scan(lambda c, v: (hcb.id_tap(rec, c + v), None), 0.0, x, reverse=True, unroll=3)[0]

    jit(f)(jnp.arange(5.0))
    assert delivered(rec) == primals(4.0, 7.0, 9.0, 10.0, 10.0)


def test_scan_without_iterations_taps_nothing(jit: Jit, rec: Recorder) -> None:
    jit(jax.grad(lambda x: lax.scan(lambda c, _: (hcb.id_tap(rec, c), None), x, None, length=0)[0]))(1.0)
    assert delivered(rec) == []


def test_while_loop_taps_its_condition_and_its_body(jit: Jit, rec: Recorder) -> None:
    def f(x: Any) -> Any:
        return lax.while_loop(
            lambda c: hcb.id_tap(rec, c, place="condition") < 2,
            lambda c: hcb.id_tap(rec, c, place="body") + 1,
            x,
        )

    assert int(jit(f)(0)) == 2
    expected = [("condition", 0), ("body", 0), ("condition", 1), ("body", 1), ("condition", 2)]
    assert places(rec) == expected


def test_cond_taps_the_branch_that_is_taken(jit: Jit, rec: Recorder) -> None:
    def f(x: Any) -> Any:
        return lax.cond(x > 0, lambda x: hcb.id_tap(rec, x), lambda x: hcb.id_tap(rec, -100 * x), x)

    g = jit(f)
    g(2.0)
    g(-3.0)
    assert delivered(rec) == primals(2.0, 300.0)


def test_switch_in_a_fori_loop(jit: Jit, rec: Recorder) -> None:
    def f(x: Any) -> Any:
        branches = [lambda x, k=k: hcb.id_tap(rec, x + 10 * k) for k in range(3)]
        return lax.fori_loop(0, 3, lambda i, c: lax.switch(i, branches, c), x)

    jit(f)(1.0)
    assert delivered(rec) == primals(1.0, 11.0, 31.0)


def test_fori_loop_with_a_traced_bound(jit: Jit, rec: Recorder) -> None:
    jit(lambda n: lax.fori_loop(0, n, lambda i, c: hcb.id_tap(rec, c + i), 0))(4)
    assert delivered(rec) == primals(0, 1, 3, 6)


def test_map_taps_every_element(jit: Jit, rec: Recorder) -> None:
    jit(lambda x: lax.map(lambda v: hcb.id_tap(rec, v), x))(jnp.arange(4))
    assert delivered(rec) == primals(0, 1, 2, 3)


def test_map_in_batches_taps_every_batch_and_the_rest(jit: Jit, rec: Recorder) -> None:
    jit(lambda x: lax.map(lambda v: hcb.id_tap(rec, v), x, batch_size=2))(jnp.arange(5))
    assert delivered(rec) == [((batch(0),), [0, 1]), ((batch(0),), [2, 3]), ((batch(0),), [4])]


def test_associative_scan_taps_every_level_of_its_tree(jit: Jit, rec: Recorder) -> None:
    # It combines slices: pairs, pairs of those, and then the slices between; the third slice is empty here.
    jit(lambda x: lax.associative_scan(lambda a, b: hcb.id_tap(rec, a + b), x))(jnp.arange(4))
    assert delivered(rec) == primals([1, 5], [6], [], [3])


def in_jit(tap: Any, x: Any) -> None:
    jax.jit(tap)(x)


def in_scan(tap: Any, x: Any) -> None:
    lax.scan(lambda c, _: (c, tap(c)), x, None, length=2)


def in_scanned_values(tap: Any, x: Any) -> None:
    lax.scan(lambda c, v: (c, tap(v)), 0, jnp.stack([x, x]))


def in_while_loop(tap: Any, x: Any) -> None:
    def body(state: Any) -> Any:
        i, v = state
        tap(v)
        return i + 1, v

    lax.while_loop(lambda state: state[0] < 2, body, (0, x))


def in_condition(tap: Any, x: Any) -> None:
    def condition(state: Any) -> Any:
        i, v = state
        tap(v)
        return i < 1

    lax.while_loop(condition, lambda state: (state[0] + 1, state[1]), (0, x))


def in_fori_loop(tap: Any, x: Any) -> None:
    lax.fori_loop(0, 2, lambda i, c: (tap(c), c)[1], x)


def in_cond(tap: Any, x: Any) -> None:
    lax.cond(x > 0, tap, lambda x: None, x)
    lax.cond(x < 0, lambda x: None, tap, x)


def in_switch(tap: Any, x: Any) -> None:
    for i in (1, 2):
        lax.switch(jnp.int32(x) + i, [lambda x: None, lambda x: None, tap, tap], x)


def in_map(tap: Any, x: Any) -> None:
    lax.map(tap, jnp.stack([x, x]))


def in_checkpoint(tap: Any, x: Any) -> None:
    for _ in range(2):
        jax.checkpoint(tap)(x)


CONSTRUCTS = [
    in_jit, in_scan, in_scanned_values, in_while_loop, in_condition, in_fori_loop, in_cond, in_switch, in_map,
    in_checkpoint,
]  # fmt: skip


@pytest.mark.parametrize("construct", CONSTRUCTS)
def test_a_tap_in_a_construct_whose_results_are_all_unused_still_fires(
    jit: Jit, construct: Any, rec: Recorder
) -> None:
    def f(x: Any) -> Any:
        def tap(v: Any) -> None:
            hcb.id_tap(rec, 2 * v)

        construct(tap, x)
        return 3 * x

    times = 1 if construct is in_jit else 2
    jit(f)(1.0)
    assert delivered(rec) == primals(*[2.0] * times)
    forward = construct in (in_while_loop, in_condition)  # which JAX differentiates in no other way
    jit((lambda x: jax.jvp(f, (x,), (x,))) if forward else jax.grad(f))(1.0)
    rest = delivered(rec)[times:]
    assert [message for message in rest if message[0] != TANGENT] == primals(*[2.0] * times)


# Differentiated.


def test_grad_of_scan_taps_primals_forward_and_cotangents_backward(jit: Jit, rec: Recorder) -> None:
    def f(x: Any) -> Any:
        return lax.scan(lambda c, _: (hcb.id_tap(rec, 2.0 * c), None), x, None, length=3)[0]

    assert float(jit(jax.grad(f))(1.0)) == 8.0
    assert delivered(rec) == primals(2.0, 4.0, 8.0) + cotangents(1.0, 2.0, 4.0)


def test_grad_of_scan_with_respect_to_its_inputs(jit: Jit, rec: Recorder) -> None:
    def f(x: Any) -> Any:
        return lax.scan(lambda c, v: (c + hcb.id_tap(rec, v * v), None), 0.0, x, reverse=True)[0]

    jit(jax.grad(f))(jnp.arange(3.0))
    assert delivered(rec) == primals(4.0, 1.0, 0.0) + cotangents(1.0, 1.0, 1.0)


def test_jvp_of_scan_taps_primal_and_tangent_of_each_iteration(jit: Jit, rec: Recorder) -> None:
    def f(x: Any) -> Any:
        return lax.scan(lambda c, _: (hcb.id_tap(rec, 2.0 * c), None), x, None, length=2)[0]

    jit(lambda x: jax.jvp(f, (x,), (0.5,)))(1.0)
    assert delivered(rec) == primals(2.0) + tangents(1.0) + primals(4.0) + tangents(2.0)


def test_linearize_of_scan_taps_primals_once(jit: Jit, rec: Recorder) -> None:
    def f(x: Any) -> Any:
        _, linear = jax.linearize(
            lambda x: lax.scan(lambda c, _: (hcb.id_tap(rec, 2.0 * c), None), x, None, length=2)[0], x
        )
        return linear(1.0)

    jit(f)(1.0)
    assert delivered(rec) == primals(2.0, 4.0) + tangents(2.0, 4.0)


def test_hessian_of_scan_taps_primals_once(jit: Jit, rec: Recorder) -> None:
    def f(x: Any) -> Any:
        return lax.scan(lambda c, _: (hcb.id_tap(rec, x * c), None), x, None, length=2)[0]

    assert float(jit(jax.hessian(f))(2.0)) == 12.0
    tangent, cotangent = (JVP, batch(0)), (*COTANGENT, batch(0))
    assert delivered(rec) == [
        (PRIMAL, 4.0),
        (tangent, [4.0]),
        (PRIMAL, 8.0),
        (tangent, [12.0]),
        (cotangent, [1.0]),
        ((*cotangent, *tangent), [[0.0]]),
        (cotangent, [2.0]),
        ((*cotangent, *tangent), [[1.0]]),
    ]


def test_jvp_of_while_loop_taps_primal_and_tangent_of_each_iteration(jit: Jit, rec: Recorder) -> None:
    def f(x: Any) -> Any:
        return lax.while_loop(lambda c: c < 4, lambda c: hcb.id_tap(rec, 2.0 * c), x)

    jit(lambda x: jax.jvp(f, (x,), (1.0,)))(1.0)
    assert delivered(rec) == primals(2.0) + tangents(2.0) + primals(4.0) + tangents(4.0)


def test_jvp_of_while_loop_taps_the_primals_of_its_condition_only(jit: Jit, rec: Recorder) -> None:
    # A condition has no tangent.
    def f(x: Any) -> Any:
        return lax.while_loop(lambda c: hcb.id_tap(rec, c) < 4, lambda c: 2.0 * c, x)

    jit(lambda x: jax.jvp(f, (x,), (1.0,)))(1.0)
    assert delivered(rec) == primals(1.0, 2.0, 4.0)


def test_linearize_of_while_loop_runs_it_again_in_the_linear_function(jit: Jit, rec: Recorder) -> None:
    # JAX cannot save the intermediate values of a while_loop: its linear function recomputes all of them.
    def f(x: Any) -> Any:
        _, linear = jax.linearize(
            lambda x: lax.while_loop(lambda c: c < 4, lambda c: hcb.id_tap(rec, 2.0 * c), x), x
        )
        return linear(1.0)

    jit(f)(1.0)
    again = primals(2.0) + tangents(2.0) + primals(4.0) + tangents(4.0)
    assert delivered(rec) == primals(2.0, 4.0) + again


def test_grad_around_a_while_loop_of_constants_taps_its_iterations_once(jit: Jit, rec: Recorder) -> None:
    def f(x: Any) -> Any:
        return x * lax.while_loop(lambda c: c < 9, lambda c: hcb.id_tap(rec, 2 * c), lax.stop_gradient(x))

    jit(jax.grad(f))(2.0)
    assert delivered(rec) == primals(4.0, 8.0, 16.0)


def test_grad_of_fori_loop_with_a_static_trip_count(jit: Jit, rec: Recorder) -> None:
    jit(jax.grad(lambda x: lax.fori_loop(0, 3, lambda i, c: hcb.id_tap(rec, 2.0 * c), x)))(1.0)
    assert delivered(rec) == primals(2.0, 4.0, 8.0) + cotangents(1.0, 2.0, 4.0)


def test_jvp_of_fori_loop_with_a_traced_bound(jit: Jit, rec: Recorder) -> None:
    def f(x: Any, n: Any) -> Any:
        return lax.fori_loop(0, n, lambda i, c: hcb.id_tap(rec, 2.0 * c), x)

    jit(lambda x, n: jax.jvp(lambda x: f(x, n), (x,), (1.0,)))(1.0, 2)
    assert delivered(rec) == primals(2.0) + tangents(2.0) + primals(4.0) + tangents(4.0)


def test_grad_of_cond_and_of_switch_tap_the_branch_that_is_taken(jit: Jit, rec: Recorder) -> None:
    def f(x: Any) -> Any:
        y = lax.cond(x > 0, lambda x: hcb.id_tap(rec, 2 * x), lambda x: hcb.id_tap(rec, -x), x)
        return lax.switch(2, [lambda y: hcb.id_tap(rec, y), lambda y: y, lambda y: hcb.id_tap(rec, 5 * y)], y)

    assert float(jit(jax.grad(f))(1.0)) == 10.0
    assert delivered(rec) == primals(2.0, 10.0) + cotangents(1.0, 5.0)


def test_grad_of_map_taps_every_element_each_way(jit: Jit, rec: Recorder) -> None:
    jit(jax.grad(lambda x: lax.map(lambda v: hcb.id_tap(rec, v * v), x).sum()))(jnp.arange(3.0))
    assert delivered(rec) == primals(0.0, 1.0, 4.0) + cotangents(1.0, 1.0, 1.0)


def test_grad_of_associative_scan_taps_every_level_each_way(jit: Jit, rec: Recorder) -> None:
    jit(jax.grad(lambda x: lax.associative_scan(lambda a, b: hcb.id_tap(rec, a + b), x)[-1]))(jnp.arange(4.0))
    messages = delivered(rec)
    assert messages[:4] == primals([1.0, 5.0], [6.0], [], [3.0])
    assert messages[4:] == cotangents([0.0], [], [1.0], [1.0, 1.0])


def test_grad_of_control_flow_inside_control_flow(jit: Jit, rec: Recorder) -> None:
    def step(c: Any, i: Any) -> Any:
        c = lax.cond(i % 2 == 0, lambda c: hcb.id_tap(rec, 2 * c), lambda c: c, c)
        return jax.jit(lambda c: lax.fori_loop(0, 2, lambda _, c: hcb.id_tap(rec, 3 * c), c))(c), None

    jit(jax.grad(lambda x: lax.scan(step, x, jnp.arange(2))[0]))(1.0)
    assert delivered(rec) == primals(2.0, 6.0, 18.0, 54.0, 162.0) + cotangents(1.0, 3.0, 9.0, 27.0, 81.0)

"""`vmap`: one message for the batch, with the dimension of each leaf; nested transformations stack in order."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import hostcallback as hcb
from recorder import Recorder
from transforming import (
    COTANGENT,
    JVP,
    PRIMAL,
    TANGENT,
    TRANSPOSE,
    Jit,
    batch,
    delivered,
    delivered_parts,
    elements,
    places,
    plain,
)


def test_vmap_sends_one_message_with_the_batch(jit: Jit, rec: Recorder) -> None:
    jit(jax.vmap(lambda x: hcb.id_tap(rec, 2 * x)))(jnp.arange(3))
    assert delivered(rec) == [((batch(0),), [0, 2, 4])]


def test_each_leaf_has_its_dimension_and_none_where_it_has_no_batch(jit: Jit, rec: Recorder) -> None:
    def f(x: Any, y: Any) -> Any:
        return hcb.id_tap(rec, {"x": x, "y": y, "none": None, "constant": 7})["x"]

    x = jnp.arange(6).reshape(2, 3)
    out = jit(jax.vmap(f, in_axes=(1, None), out_axes=1))(x, 5)
    # In the order of the leaves: the constant, x, y. The array is as it is on the device, not moved.
    expected = {"constant": 7, "none": None, "x": [[0, 1, 2], [3, 4, 5]], "y": 5}
    assert delivered(rec) == [((batch(None, 1, None),), expected)]
    np.testing.assert_array_equal(out, x)


def test_unbatched_values_are_tapped_once_and_untransformed(jit: Jit, rec: Recorder) -> None:
    def f(x: Any, y: Any) -> Any:
        hcb.id_tap(rec, y)
        hcb.id_tap(rec, 1.0)
        return x

    jit(jax.vmap(f, in_axes=(0, None)))(jnp.arange(3), 5)
    assert delivered(rec) == [(PRIMAL, 5), (PRIMAL, 1.0)]


def test_nested_vmaps_stack_from_the_inside_out(jit: Jit, rec: Recorder) -> None:
    def f(x: Any, y: Any) -> Any:
        return hcb.id_tap(rec, (x, y))[0]

    x, y = jnp.arange(24).reshape(2, 3, 4), jnp.arange(3)
    jit(jax.vmap(jax.vmap(f, in_axes=(1, 0)), in_axes=(2, None)))(x, y)
    # Seen from the inner vmap x has shape (2, 3) and is mapped along 1; the outer vmap maps dimension 2 of the whole.
    assert delivered(rec) == [((batch(1, 0), batch(2, None)), plain((x, y)))]


def test_nested_vmaps_over_one_argument_each(jit: Jit, rec: Recorder) -> None:
    def f(x: Any, y: Any) -> Any:
        return hcb.id_tap(rec, (x, y))[0]

    jit(jax.vmap(jax.vmap(f, in_axes=(0, None)), in_axes=(None, 0)))(jnp.arange(3), jnp.arange(2))
    assert delivered(rec) == [((batch(0, None), batch(None, 0)), ([0, 1, 2], [0, 1]))]


def test_vmap_of_jvp_and_jvp_of_vmap(jit: Jit, rec: Recorder) -> None:
    def f(x: Any) -> Any:
        return hcb.id_tap(rec, x) ** 2

    x = jnp.arange(3.0)
    jit(jax.vmap(lambda x, t: jax.jvp(f, (x,), (t,))))(x, x)
    assert delivered(rec) == [((batch(0),), [0.0, 1.0, 2.0]), ((JVP, batch(0)), [0.0, 1.0, 2.0])]
    jit(lambda x: jax.jvp(jax.vmap(f), (x,), (x,)))(x)
    assert delivered(rec)[2:] == [((batch(0),), [0.0, 1.0, 2.0]), ((batch(0), JVP), [0.0, 1.0, 2.0])]


def test_vmap_of_grad_and_grad_of_vmap(jit: Jit, rec: Recorder) -> None:
    def f(x: Any) -> Any:
        return hcb.id_tap(rec, x) ** 2

    x = jnp.arange(3.0)
    jit(jax.vmap(jax.grad(f)))(x)
    assert delivered(rec) == [((batch(0),), [0.0, 1.0, 2.0]), ((JVP, TRANSPOSE, batch(0)), [0.0, 2.0, 4.0])]
    jit(jax.grad(lambda x: jax.vmap(f)(x).sum()))(x)
    assert delivered(rec)[2:] == [
        ((batch(0),), [0.0, 1.0, 2.0]),
        ((batch(0), JVP, TRANSPOSE), [0.0, 2.0, 4.0]),
    ]


def test_a_tangent_that_is_the_same_for_all_elements_has_no_batch(jit: Jit, rec: Recorder) -> None:
    jit(jax.vmap(lambda x: jax.jvp(lambda x: hcb.id_tap(rec, x), (x,), (1.0,))))(jnp.arange(3.0))
    assert delivered(rec) == [((batch(0),), [0.0, 1.0, 2.0]), (TANGENT, 1.0)]


def test_a_float0_leaf_has_no_dimension(jit: Jit, rec: Recorder) -> None:
    def f(x: Any, n: Any) -> Any:
        return hcb.id_tap(rec, (n, x))[1] * 2

    x, n = jnp.arange(3.0), jnp.arange(3)
    jit(jax.vmap(jax.grad(f)))(x, n)
    whole = ([0, 1, 2], [0.0, 1.0, 2.0])
    assert delivered(rec) == [((batch(0, 0),), whole), (COTANGENT, ("float0", 2.0))]
    jit(jax.vmap(lambda x, n: jax.jvp(lambda x: f(x, n), (x,), (x,))))(x, n)
    assert delivered(rec)[2:] == [
        ((batch(0, 0),), whole),
        ((JVP, batch(None, 0)), ("float0", [0.0, 1.0, 2.0])),
    ]


def test_vmap_of_scan_sends_one_message_for_each_iteration(jit: Jit, rec: Recorder) -> None:
    def f(x: Any) -> Any:
        def step(c: Any, i: Any) -> Any:
            hcb.id_tap(rec, i)
            return hcb.id_tap(rec, c) + 1, None

        return lax.scan(step, x, jnp.arange(2))[0]

    jit(jax.vmap(f))(jnp.array([5, 7]))
    assert delivered(rec) == [(PRIMAL, 0), ((batch(0),), [5, 7]), (PRIMAL, 1), ((batch(0),), [6, 8])]


# Where elements would go different ways, JAX goes all of them. Only the elements that take part are tapped.


def test_cond_with_a_batched_predicate_taps_each_element_in_its_branch(jit: Jit, rec: Recorder) -> None:
    def f(x: Any) -> Any:
        return lax.cond(
            x > 1,
            lambda x: hcb.id_tap(rec, x, place="true"),
            lambda x: hcb.id_tap(rec, -x, place="false"),
            x,
        )

    out = jit(jax.vmap(f))(jnp.arange(3))
    assert places(rec) == [("false", [0, -1]), ("true", [2])]
    assert [transforms for transforms, _ in delivered_parts(rec)] == [
        (batch(0), elements([0, 1])),
        (batch(0), elements([2])),
    ]
    np.testing.assert_array_equal(out, [0, -1, 2])


def test_cond_with_one_predicate_for_all_elements_taps_its_branch_only(jit: Jit, rec: Recorder) -> None:
    def f(x: Any, p: Any) -> Any:
        return lax.cond(p, lambda x: hcb.id_tap(rec, x), lambda x: hcb.id_tap(rec, -x), x)

    jit(jax.vmap(f, in_axes=(0, None)))(jnp.arange(3), True)
    assert delivered(rec) == [((batch(0),), [0, 1, 2])]


def test_switch_with_a_batched_index_taps_each_element_in_its_branch_in_order(
    jit: Jit, rec: Recorder
) -> None:
    branches = [lambda x, k=k: hcb.id_tap(rec, x + 10 * k) for k in range(3)]
    out = jit(jax.vmap(lambda i: lax.switch(i, branches, i)))(jnp.array([2, 0]))
    assert delivered_parts(rec) == [((batch(0), elements([1])), [0]), ((batch(0), elements([0])), [22])]
    np.testing.assert_array_equal(out, [22, 0])


def test_grad_of_cond_with_a_batched_predicate(jit: Jit, rec: Recorder) -> None:
    def f(x: Any) -> Any:
        return lax.cond(x > 1, lambda x: hcb.id_tap(rec, 2 * x), lambda x: hcb.id_tap(rec, 3 * x), x)

    jit(jax.vmap(jax.grad(f)))(jnp.array([1.0, 2.0]))
    first, second = elements([0]), elements([1])
    assert delivered_parts(rec)[:2] == [((batch(0), first), [3.0]), ((batch(0), second), [4.0])]
    cotangents = [((JVP, TRANSPOSE, batch(0), first), [1.0]), ((JVP, TRANSPOSE, batch(0), second), [1.0])]
    assert sorted(delivered_parts(rec)[2:], key=str) == cotangents


def test_while_loop_with_a_batched_condition_taps_until_the_last_element_is_done(
    jit: Jit, rec: Recorder
) -> None:
    def f(x: Any) -> Any:
        return lax.while_loop(lambda c: c < 3, lambda c: hcb.id_tap(rec, c) + 1, x)

    out = jit(jax.vmap(f))(jnp.array([0, 2]))
    # The second element is done after one iteration.
    assert delivered_parts(rec) == [((batch(0), elements([0, 1])), [0, 2])] + [
        ((batch(0), elements([0])), values) for values in ([1], [2])
    ]
    np.testing.assert_array_equal(out, [3, 3])


def test_a_tap_in_a_batched_condition_and_body_leaves_the_results_as_they_are(
    jit: Jit, rec: Recorder
) -> None:
    def f(x: Any) -> Any:
        return lax.while_loop(
            lambda c: hcb.id_tap(rec, c, place="condition") < 3,
            lambda c: hcb.id_tap(rec, c, place="body") + 1,
            x,
        )

    out = jit(jax.vmap(f))(jnp.array([0, 2]))
    np.testing.assert_array_equal(out, [3, 3])
    assert places(rec) == [
        ("condition", [0, 2]),
        ("body", [0, 2]),
        ("condition", [1, 3]),
        ("body", [1]),
        ("condition", [2]),
        ("body", [2]),
        ("condition", [3]),
    ]


def test_a_tap_in_a_batched_condition_under_nested_and_mixed_transformations(jit: Jit, rec: Recorder) -> None:
    def f(x: Any, limit: Any) -> Any:
        return lax.while_loop(lambda c: hcb.id_tap(rec, c) < limit, lambda c: 2 * c, x)

    xs, limits = jnp.array([1.0, 3.0]), jnp.array([2.0, 9.0, 4.0])
    expected = [[2.0, 3.0], [16.0, 12.0], [4.0, 6.0]]
    out = jit(jax.vmap(jax.vmap(f, in_axes=(0, None)), in_axes=(None, 0)))(xs, limits)
    np.testing.assert_array_equal(out, expected)
    # Nine is reached in four steps: five conditions. At the first the value is still the same for all limits.
    assert delivered_parts(rec) == [
        ((batch(0),), [1.0, 3.0]),
        ((batch(0), elements([0, 1, 2, 1, 2], [0, 0, 0, 1, 1])), [2.0, 2.0, 2.0, 6.0, 6.0]),
        ((batch(0), elements([1, 2, 1], [0, 0, 1])), [4.0, 4.0, 12.0]),
        ((batch(0), elements([1], [0])), [8.0]),
        ((batch(0), elements([1], [0])), [16.0]),
    ]
    slopes = jit(jax.vmap(jax.jacfwd(f), in_axes=(0, None)))(xs, 9.0)
    np.testing.assert_array_equal(slopes, [16.0, 4.0])
    assert [value for _, value in delivered(rec)[5:]] == [[1, 3], [2, 6], [4, 12], [8], [16]]


def test_a_batched_condition_with_arrays_of_several_kinds(jit: Jit, rec: Recorder) -> None:
    def f(n: Any, key: Any) -> Any:
        def condition(state: Any) -> Any:
            i, *_ = hcb.id_tap(rec, (state[0], state[2]))
            return i < n

        def body(state: Any) -> Any:
            i, key, flag, empty = state
            return i + 1, jax.random.split(key)[0], ~flag, empty

        return lax.while_loop(condition, body, (jnp.int8(0), key, jnp.bool_(False), jnp.zeros((0, 2))))

    keys = jax.random.split(jax.random.key(0), 2)
    i, out_keys, flag, empty = jit(jax.vmap(f))(jnp.int8([1, 3]), keys)
    np.testing.assert_array_equal(i, [1, 3])
    np.testing.assert_array_equal(flag, [True, True])
    once = jax.random.split(keys[0])[0]
    np.testing.assert_array_equal(jax.random.key_data(out_keys[0]), jax.random.key_data(once))
    assert empty.shape == (2, 0, 2)
    # The counters start out the same for all.
    assert [value[0] for _, value in delivered(rec)] == [0, [1, 1], [2], [3]]

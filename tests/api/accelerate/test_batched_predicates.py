"""Accelerated callbacks where vmap batches the predicate of a `cond` or `while_loop`: for the elements that take part.

JAX refuses `io_callback` there, and runs `jax.debug` callbacks for all elements. Ours run as if
each element ran by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

import hostcallback as hcb
from accelerated import Calls, ran, what_stays
from transforming import Jit

XS = jnp.arange(1, 5)
SCALAR = jax.ShapeDtypeStruct((), np.dtype(np.int32))
ORDERED = pytest.mark.parametrize("ordered", [False, True], ids=["unordered", "ordered"])
Emit = Callable[[Calls, Any, bool], Any]


def io(calls: Calls, x: Any, ordered: bool) -> Any:
    io_callback(calls, None, x, ordered=ordered)
    return x


def io_with_result(calls: Calls, x: Any, ordered: bool) -> Any:
    def host(x: Any) -> Any:
        calls(x)
        return x

    return io_callback(host, SCALAR, x, ordered=ordered)


def debug_callback(calls: Calls, x: Any, ordered: bool) -> Any:
    jax.debug.callback(calls, x, ordered=ordered)
    return x


CALLBACKS = pytest.mark.parametrize(
    "emit", [io, io_with_result, debug_callback], ids=lambda emit: emit.__name__
)


def accelerated(program: Callable[[Calls], Any]) -> Any:
    with hcb.accelerate() as acceleration:
        found = ran(program)
    assert {callback.reason for callback in acceleration.callbacks} == {None}
    return found


@ORDERED
@CALLBACKS
def test_cond_calls_for_the_elements_of_the_branch(jit: Jit, emit: Emit, ordered: bool) -> None:
    def program(calls: Calls) -> Any:
        return jit(jax.vmap(lambda x: lax.cond(x > 2, lambda x: emit(calls, x, ordered), lambda x: -x, x)))(
            XS
        )

    ours = accelerated(program)
    assert ours.calls == [[3], [4]]
    assert ours.result == [-1, -2, 3, 4]


@ORDERED
@CALLBACKS
def test_while_loop_calls_for_the_elements_that_have_not_ended(jit: Jit, emit: Emit, ordered: bool) -> None:
    def program(calls: Calls) -> Any:
        return jit(
            jax.vmap(lambda x: lax.while_loop(lambda c: c < 4, lambda c: emit(calls, c, ordered) + 1, x))
        )(XS)

    ours = accelerated(program)
    # By steps: the elements of each in their order.
    assert ours.calls == [[1], [2], [3], [2], [3], [3]]
    assert ours.result == [4, 4, 4, 4]


@ORDERED
def test_prints_are_of_the_elements_that_take_part(jit: Jit, ordered: bool) -> None:
    def program(calls: Calls) -> Any:
        def f(x: Any) -> Any:
            lax.cond(
                x > 2,
                lambda: jax.debug.print("x {}", x, ordered=ordered),
                lambda: jax.debug.print("small", ordered=ordered),
            )
            return lax.while_loop(lambda c: c < 3, lambda c: (jax.debug.print("c {}", c), c + 1)[1], x)

        return jit(jax.vmap(f))(XS)

    ours = accelerated(program)
    assert sorted(ours.lines) == sorted(["small"] * 2 + ["x 3", "x 4"] + ["c 1", "c 2", "c 2"])


@CALLBACKS
def test_no_element_no_call(emit: Emit) -> None:
    def program(calls: Calls) -> Any:
        return jax.jit(jax.vmap(lambda x: lax.cond(x > 9, lambda x: emit(calls, x, False), lambda x: -x, x)))(
            XS
        )

    ours = accelerated(program)
    assert (ours.calls, ours.result) == ([], [-1, -2, -3, -4])


@CALLBACKS
def test_a_loop_that_waits_for_results_ends_for_elements_that_do_not_get_them(emit: Emit) -> None:
    def program(calls: Calls) -> Any:
        def count(x: Any) -> Any:
            step = emit(calls, jnp.int32(1), False)
            return lax.while_loop(lambda c: c < 4, lambda c: c + step, x)

        return jax.jit(jax.vmap(lambda x: lax.cond(x > 2, count, lambda x: -x, x)))(XS)

    ours = accelerated(program)
    assert ours.calls == [[1], [1]]
    assert ours.result == [-1, -2, 4, 4]


@ORDERED
def test_nested_vmaps_branches_and_loops(ordered: bool) -> None:
    def f(calls: Calls, x: Any, y: Any) -> Any:
        def body(c: Any) -> Any:
            return 1 + lax.cond(c > y, lambda c: io_with_result(calls, c, ordered), lambda c: c, c)

        return lax.while_loop(lambda c: c < x + y, body, x)

    def program(calls: Calls) -> Any:
        inner = jax.vmap(lambda x, y: f(calls, x, y), in_axes=(0, None))
        return jax.jit(jax.vmap(inner, in_axes=(None, 0)))(XS, XS)

    ours = accelerated(program)
    one_by_one = accelerated(
        lambda calls: [[jax.jit(lambda x, y: f(calls, x, y))(x, y) for x in XS] for y in XS]
    )
    assert ours.result == one_by_one.result
    assert sorted(ours.calls) == sorted(one_by_one.calls)


@ORDERED
@pytest.mark.parametrize("loop", [False, True], ids=["cond", "while"])
def test_a_callback_left_to_jax_is_refused_as_by_jax(loop: bool, ordered: bool) -> None:
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def f(x: Any, taps: bool) -> Any:
        def emit(x: Any) -> Any:
            io_callback(Calls(), None, x, ordered=ordered, sharding=here)
            if taps:
                hcb.print("x is {}", x)
            return x + 1

        if loop:
            return lax.while_loop(lambda c: c < 4, emit, x)
        return lax.cond(x > 2, emit, lambda x: -x, x)

    def refusal(taps: bool) -> Any:
        with pytest.raises(Exception, match="IO effect") as caught:
            jax.jit(jax.vmap(lambda x: f(x, taps))).lower(XS)
        return caught.type, str(caught.value)

    jaxs = refusal(taps=False)
    with what_stays() as left:
        ours = refusal(taps=True)
    assert ours == jaxs
    assert [callback.function for callback in left] == ["io_callback"]

"""`jax.debug.callback` under `hcb.accelerate()` makes the same calls as JAX, with the same values, once each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import hostcallback as hcb
from accelerated import Calls, both, ran

Program = Callable[[Calls], Any]

X = np.float32(3)
ROW = np.arange(3, dtype=np.float32)


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()), ("d",))


def sharded() -> jax.Array:
    return jax.device_put(jnp.arange(8.0), NamedSharding(mesh(), PartitionSpec("d")))


def over_devices(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return jax.jit(jax.shard_map(f, mesh=mesh(), in_specs=PartitionSpec("d"), out_specs=PartitionSpec("d")))


def tapped(tap: Callable[..., Any], x: Any) -> Any:
    tap(x)
    return jnp.sin(x)


def in_scan(tap: Callable[..., Any], x: Any) -> Any:
    def step(carry: Any, i: Any) -> Any:
        tap(carry, i)
        return carry * x, None

    return lax.scan(step, x, jnp.arange(3))[0]


def in_while(tap: Callable[..., Any], x: Any) -> Any:
    def condition(c: Any) -> Any:
        tap("condition", c)
        return c < 6

    def body(c: Any) -> Any:
        tap("body", c)
        return c + 1

    return lax.while_loop(condition, body, x)


def in_cond(tap: Callable[..., Any], x: Any) -> Any:
    return lax.cond(x > 1, lambda x: tapped(lambda v: tap("yes", v), x), lambda x: x, x)


def in_custom_vjp(tap: Callable[..., Any], x: Any) -> Any:
    @jax.custom_vjp
    def f(x: Any) -> Any:
        tap("primal", x)
        return x * 2

    def forward(x: Any) -> Any:
        tap("forward", x)
        return x * 2, x

    def backward(residual: Any, g: Any) -> Any:
        tap("backward", residual, g)
        return (g * 2,)

    f.defvjp(forward, backward)
    return f(x)


def in_custom_jvp(tap: Callable[..., Any], x: Any) -> Any:
    @jax.custom_jvp
    def f(x: Any) -> Any:
        tap("primal", x)
        return x * 2

    @f.defjvp
    def rule(primals: Any, tangents: Any) -> Any:
        tap("rule", primals[0])
        return primals[0] * 2, tangents[0] * 2

    return f(x)


BODIES = [tapped, in_scan, in_while, in_cond, in_custom_vjp, in_custom_jvp]


def under(transform: Callable[[Any], Any], body: Callable[..., Any], x: Any) -> Program:
    """A program of a transformed body, whose callbacks are ordered."""

    def program(calls: Calls) -> Any:
        def tap(*args: Any) -> None:
            jax.debug.callback(calls, *args, ordered=True)

        return jax.jit(transform(lambda x: body(tap, x)))(x)

    return program


@pytest.mark.parametrize(
    ("transform", "body", "x", "calls"),
    [
        *(pytest.param(lambda f: f, body, X, 1, id=body.__name__) for body in BODIES),
        *(
            pytest.param(jax.grad, body, X, 1, id=f"grad {body.__name__}")
            for body in (tapped, in_scan, in_cond, in_custom_vjp, in_custom_jvp)
        ),
        *(pytest.param(jax.vmap, body, ROW, 3, id=f"vmap {body.__name__}") for body in (tapped, in_scan)),
    ],
)
def test_ordered_callbacks_are_called_as_by_jax(
    transform: Callable[[Any], Any], body: Callable[..., Any], x: Any, calls: int
) -> None:
    jaxs, ours = both(under(transform, body, x))
    assert ours == jaxs
    assert len(ours.calls) >= calls


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_unordered_callbacks_are_called_as_often_as_by_jax(body: Callable[..., Any]) -> None:
    def program(calls: Calls) -> Any:
        return jax.jit(lambda x: body(lambda *args: jax.debug.callback(calls, *args), x))(X)

    jaxs, ours = both(program)
    assert sorted(map(str, ours.calls)) == sorted(map(str, jaxs.calls))
    assert ours.result == jaxs.result


def test_nested_vmaps_of_several_axes_come_in_jaxs_order() -> None:
    def program(calls: Calls) -> Any:
        def f(x: Any, y: Any) -> Any:
            jax.debug.callback(calls, x, y, ordered=True)
            return x + y

        outer = jax.vmap(jax.vmap(f, (0, None)), (1, 0))
        return jax.jit(outer)(jnp.arange(6.0).reshape(2, 3), jnp.arange(3))

    jaxs, ours = both(program)
    assert ours == jaxs
    assert len(ours.calls) == 6


def test_vmap_of_many_is_one_equation() -> None:
    def element(x: Any) -> Any:
        jax.debug.callback(lambda x: None, x)
        return x

    with hcb.accelerate():
        jaxpr = jax.make_jaxpr(jax.vmap(element))(jnp.zeros(1024))
    assert len(jaxpr.jaxpr.eqns) == 1


def test_pytrees_keywords_and_non_arrays_arrive_in_their_places() -> None:
    def program(calls: Calls) -> Any:
        @jax.jit
        def f(x: Any) -> Any:
            jax.debug.callback(calls, {"a": x, "b": (x + 1, "text")}, None, number=2, flag=True, of="x")
            return x

        return f(X)

    jaxs, ours = both(program)
    assert ours == jaxs


def test_calls_without_arguments_are_called() -> None:
    jaxs, ours = both(lambda calls: jax.jit(lambda x: [jax.debug.callback(calls), x][1])(X))
    assert ours == jaxs
    assert ours.calls == [[]]


def test_callbacks_get_separate_numpy_arrays_by_default() -> None:
    calls = Calls()
    with hcb.accelerate():
        jax.block_until_ready(jax.jit(lambda x: tapped(lambda v: jax.debug.callback(calls, v), x))(ROW))
    hcb.barrier_wait()
    ((array,),) = calls.raw
    assert type(array) is np.ndarray
    array += 1


def test_callbacks_get_jax_arrays_on_the_cpu_if_asked_to() -> None:
    calls = Calls()
    with hcb.accelerate(arrays="jax"):
        jax.block_until_ready(jax.jit(lambda x: tapped(lambda v: jax.debug.callback(calls, v), x))(ROW))
    hcb.barrier_wait()
    ((array,),) = calls.raw
    assert isinstance(array, jax.Array)
    assert array.at[0].set(5).tolist() == [5, 1, 2]


def test_partitioned_programs_hand_over_the_whole_array_once() -> None:
    jaxs, ours = both(
        lambda calls: jax.jit(lambda x: tapped(lambda v: jax.debug.callback(calls, v), x))(sharded())
    )
    assert ours == jaxs
    assert ours.calls == [[[float(i) for i in range(8)]]]


def test_partitioned_callbacks_get_each_shard() -> None:
    def program(calls: Calls) -> Any:
        return jax.jit(lambda x: tapped(lambda v: jax.debug.callback(calls, v, partitioned=True), x))(
            sharded()
        )

    jaxs, ours = both(program)
    assert sorted(ours.calls) == sorted(jaxs.calls)
    assert len(ours.calls) == 4


@pytest.mark.parametrize("ordered", [False, True])
def test_each_device_of_a_shard_map_calls(ordered: bool) -> None:
    def program(calls: Calls) -> Any:
        return over_devices(lambda x: tapped(lambda v: jax.debug.callback(calls, v, ordered=ordered), x))(
            sharded()
        )

    with hcb.accelerate():
        ours = ran(program)
    assert sorted(ours.calls) == [[[0.0, 1.0]], [[2.0, 3.0]], [[4.0, 5.0]], [[6.0, 7.0]]]


def test_ordered_callbacks_work_on_several_devices_where_jax_refuses_them() -> None:
    def program(calls: Calls) -> Any:
        def f(x: Any) -> Any:
            for i in range(3):
                jax.debug.callback(calls, i, x, ordered=True)
            return x

        return jax.jit(f)(sharded())

    with pytest.raises(ValueError, match="ordered effects are not supported for more than 1 device"):
        ran(program)
    with hcb.accelerate():
        ours = ran(program)
    assert [call[0] for call in ours.calls] == [0, 1, 2]


def test_recomputation_under_jax_checkpoint_calls_no_callback_again() -> None:
    jaxs, ours = both(under(lambda f: jax.grad(jax.checkpoint(f)), tapped, X))
    assert ours.result == jaxs.result
    assert len(ours.calls) == 1


def test_an_exception_reaches_the_barrier_with_its_line_and_later_calls_go_on() -> None:
    calls = Calls()

    def fails(x: Any) -> None:
        raise ValueError(f"got {x}")

    @jax.jit
    def f(x: Any) -> Any:
        jax.debug.callback(fails, x)
        jax.debug.callback(calls, x)
        return x

    with hcb.accelerate():
        jax.block_until_ready(f(X))
    with pytest.raises(hcb.TapFunctionException) as caught:
        hcb.barrier_wait()
    (error,) = caught.value.exceptions
    assert str(error) == "got 3.0"
    assert "test_accelerated_callbacks.py" in "".join(error.__notes__)
    assert len(calls.args) == 1


def test_callbacks_may_use_jax() -> None:
    seen: list[float] = []
    with hcb.accelerate():
        program = jax.jit(
            lambda x: tapped(lambda v: jax.debug.callback(lambda v: seen.append(float(jnp.sum(v))), v), x)
        )
        jax.block_until_ready(program(ROW))
    hcb.barrier_wait()
    assert seen == [3.0]

"""`io_callback` under `hcb.accelerate()`: calls without results are taps, and those with results are calls."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import hostcallback as hcb
from accelerated import Calls, both, ran
from python_process import run_python

X = np.float32(3)
SCALAR = jax.ShapeDtypeStruct((), np.dtype(np.float32))

ORDERED = pytest.mark.parametrize("ordered", [False, True], ids=["unordered", "ordered"])


def doubling(calls: Calls) -> Any:
    def double(x: Any) -> Any:
        calls(x)
        return np.asarray(x) * np.float32(2)

    return double


def sharded() -> jax.Array:
    mesh = Mesh(np.array(jax.devices()), ("d",))
    return jax.device_put(jnp.arange(8.0), NamedSharding(mesh, PartitionSpec("d")))


@ORDERED
def test_calls_without_results_are_called_as_by_jax(ordered: bool) -> None:
    def program(calls: Calls) -> Any:
        def step(c: Any, i: Any) -> Any:
            io_callback(calls, None, c, step=i, ordered=ordered)
            return c + 1, None

        return jax.jit(lambda x: lax.scan(step, x, jnp.arange(4))[0])(X)

    jaxs, ours = both(program)
    assert ours == jaxs


@ORDERED
def test_results_come_back(ordered: bool) -> None:
    def program(calls: Calls) -> Any:
        double = doubling(calls)
        return jax.jit(
            lambda x: lax.fori_loop(0, 3, lambda i, c: io_callback(double, SCALAR, c, ordered=ordered), x)
        )(X)

    jaxs, ours = both(program)
    assert ours == jaxs
    assert ours.result == 24


@ORDERED
def test_vmap_calls_for_each_element(ordered: bool) -> None:
    def program(calls: Calls) -> Any:
        double = doubling(calls)

        def f(x: Any) -> Any:
            io_callback(calls, None, x, ordered=ordered)
            return io_callback(double, SCALAR, x, ordered=ordered)

        return jax.jit(jax.vmap(f))(jnp.arange(3.0))

    with hcb.accelerate():
        ours = ran(program)
    assert ours.result == [0, 2, 4]
    assert sorted(ours.calls) == [[0.0], [0.0], [1.0], [1.0], [2.0], [2.0]]
    if not ordered:
        jaxs = ran(program)
        assert (jaxs.result, sorted(jaxs.calls)) == (ours.result, sorted(ours.calls))


@ORDERED
def test_results_come_back_to_each_device_of_a_shard_map(ordered: bool) -> None:
    result = jax.ShapeDtypeStruct((2,), jnp.float32)

    def program(calls: Calls) -> Any:
        double = doubling(calls)
        mesh = Mesh(np.array(jax.devices()), ("d",))
        f = jax.shard_map(
            lambda x: io_callback(double, result, x, ordered=ordered),
            mesh=mesh,
            in_specs=PartitionSpec("d"),
            out_specs=PartitionSpec("d"),
        )
        return jax.jit(f)(sharded())

    jaxs, ours = both(program)
    assert ours.result == jaxs.result
    assert sorted(ours.calls) == sorted(jaxs.calls)


def test_results_come_back_where_the_compiler_partitions() -> None:
    result = jax.ShapeDtypeStruct((8,), jnp.float32)

    def program(calls: Calls) -> Any:
        double = doubling(calls)
        return jax.jit(lambda x: io_callback(double, result, x) + 1)(sharded())

    jaxs, ours = both(program)
    assert ours == jaxs


@pytest.mark.skipif(
    jax.__version_info__ < (0, 9), reason="XLA of JAX 0.8 refuses the ordered call with a result"
)
def test_ordered_calls_keep_their_order_where_the_compiler_partitions() -> None:
    result = jax.ShapeDtypeStruct((8,), jnp.float32)

    def program(calls: Calls) -> Any:
        double = doubling(calls)

        def f(x: Any) -> Any:
            for _ in range(3):
                io_callback(calls, None, x, ordered=True)
                x = io_callback(double, result, x + 1, ordered=True)
            return x

        return jax.jit(f)(sharded())

    jaxs, ours = both(program)
    assert ours == jaxs
    assert len(ours.calls) == 6


def test_calls_with_and_without_results_keep_one_order() -> None:
    state: list[float] = []

    def read() -> Any:
        return np.float32(state[-1])

    @jax.jit
    def f(x: Any) -> Any:
        total = jnp.float32(0)
        for i in range(3):
            io_callback(lambda v: state.append(float(v)), None, x + i, ordered=True)
            total += io_callback(read, SCALAR, ordered=True)
        return total

    with hcb.accelerate():
        assert float(f(X)) == 3 + 4 + 5


def test_any_container_of_the_announced_leaves_will_do_as_for_jax() -> None:
    def program(calls: Calls) -> Any:
        return jax.jit(lambda x: io_callback(lambda v: [v, v + 1], (SCALAR, SCALAR), x))(X)

    jaxs, ours = both(program)
    assert ours.result == jaxs.result == (3, 4)


def test_jax_arrays_come_and_go_if_asked_for() -> None:
    def add(x: Any) -> Any:
        assert isinstance(x, jax.Array)
        return x.at[...].add(1)

    with hcb.accelerate(arrays="jax"):
        assert float(jax.jit(lambda x: io_callback(add, SCALAR, x))(X)) == 4


@pytest.mark.parametrize(
    ("returned", "complaint"),
    [
        (np.zeros(3, np.float32), r"returned float32\[3\]"),
        ((np.float32(1), np.float32(2)), "returned a PyTreeDef"),
        (np.int8(1), r"returned int8\[\]"),
        ("text", "returned"),
        (2, r"returned int(32|64)\[\]"),
        (True, r"returned bool\[\]"),
        (2j, r"returned complex(64|128)\[\]"),
    ],
    ids=["another shape", "too many", "another dtype", "no array", "an int", "a bool", "a complex number"],
)
def test_an_unannounced_result_fails_with_both_shapes_and_the_line(returned: Any, complaint: str) -> None:
    with hcb.accelerate():
        program = jax.jit(lambda x: io_callback(lambda v: returned, SCALAR, x))
        with pytest.raises(jax.errors.JaxRuntimeError, match=complaint) as caught:
            jax.block_until_ready(program(X))
    assert "CallResultError" in str(caught.value)
    assert "test_accelerated_io_callbacks.py" in str(caught.value)
    hcb.barrier_wait()


@pytest.mark.parametrize(
    ("returned", "dtype"), [(2, np.int32), (2.5, np.float32), (2j, np.complex64), (True, np.bool_)]
)
def test_a_python_number_is_of_the_dtype_that_it_has_in_jax(returned: Any, dtype: Any) -> None:
    def program(calls: Calls) -> Any:
        return jax.jit(lambda: io_callback(lambda: returned, jax.ShapeDtypeStruct((), dtype)))()

    jaxs, ours = both(program)
    assert ours.result == jaxs.result == returned


@ORDERED
@pytest.mark.parametrize("arrays", ["numpy", "jax"])
def test_a_result_is_an_error_where_none_was_announced(arrays: Any, ordered: bool) -> None:
    returned: list[Any] = [None, (), {"a": None}, np.float32(1)]
    with hcb.accelerate(arrays=arrays):
        f = jax.jit(lambda x: io_callback(lambda x: returned.pop(0), None, x, ordered=ordered))
        for _ in range(3):
            f(X)
        hcb.barrier_wait()
        f(X)
        with pytest.raises(hcb.TapFunctionException, match="of type float32, and no result was announced"):
            hcb.barrier_wait()
        jax.jit(lambda x: jax.debug.callback(lambda x: x, x))(X)
        hcb.barrier_wait()


@pytest.mark.parametrize(("ordered", "devices"), [(False, 1), (True, 1), (False, 2)])
def test_an_exception_ends_the_program_and_is_raised_once(ordered: bool, devices: int) -> None:
    def fails(x: Any) -> Any:
        raise KeyError("nothing there")

    def program(x: Any) -> Any:
        return io_callback(fails, SCALAR, x, ordered=ordered)

    f, x = (jax.jit(program), X) if devices == 1 else (jax.pmap(program), np.stack([X, X]))
    with hcb.accelerate():
        for _ in range(3):
            with pytest.raises(jax.errors.JaxRuntimeError, match="nothing there"):
                jax.block_until_ready(f(x))
    hcb.barrier_wait()
    jax.effects_barrier()


@pytest.mark.slow_variants
def test_a_handled_exception_is_not_in_the_exit_status() -> None:
    program = """
import jax, numpy as np, hostcallback as hcb
def fails(x): raise ValueError("mine")
with hcb.accelerate():
    try:
        jax.jit(lambda x: jax.experimental.io_callback(fails, x, x))(np.float32(1)).block_until_ready()
    except jax.errors.JaxRuntimeError:
        print("handled")
"""
    result = run_python("-c", program, timeout_sec=90)
    assert (result.returncode, result.stdout) == (0, "handled\n")
    assert "raised on cpu:0: ValueError: mine" in result.stderr
    assert "no barrier_wait() or receiver reported it" not in result.stderr


def test_callbacks_with_results_may_use_jax_on_the_device_that_waits() -> None:
    with hcb.accelerate():
        program = jax.jit(lambda x: io_callback(lambda v: jnp.sum(jnp.ones(100) * v), SCALAR, x))
        assert float(program(X)) == 300


def test_differentiating_a_result_is_refused_as_by_jax() -> None:
    def f(x: Any) -> Any:
        return io_callback(lambda v: v, SCALAR, x)

    with hcb.accelerate(), pytest.raises(ValueError, match="IO callbacks do not support JVP"):
        jax.jit(jax.grad(f))(X)

"""`truncate`: the first elements of large arrays arrive, and every display of them marks the truncation."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import hostcallback as hcb
from recorder import Recorder


def deliver(program: Any, *args: Any) -> None:
    program(*args)
    hcb.barrier_wait()


@pytest.mark.parametrize("dtype", ["float32", "bool", "bfloat16", "int4", "complex64", "uint8"])
def test_heads_are_the_first_elements_in_row_major_order(dtype: str, rec: Recorder) -> None:
    x = (jnp.arange(105).reshape(5, 3, 7) % 5).astype(dtype)
    program = hcb.jit(
        lambda x: hcb.id_tap(rec, {"large": x, "small": x[0, 0], "one": x[0, 0, 0]}, name="heads")
    )
    hcb.taps["heads"].truncate(9)
    deliver(program, x)
    (value,) = rec.values
    assert isinstance(value["large"], hcb.TruncatedArray)
    assert value["large"].whole_shape == (5, 3, 7)
    np.testing.assert_array_equal(np.asarray(value["large"]), np.asarray(x).reshape(-1)[:9])
    assert value["large"].dtype == x.dtype
    for name, shape in (("small", (7,)), ("one", ())):
        assert type(value[name]) is np.ndarray
        assert value[name].shape == shape
    hcb.taps["heads"].truncate(None)
    deliver(program, x)
    np.testing.assert_array_equal(rec.values[1]["large"], x)


def test_prints_mark_a_truncated_array(capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()

    def program(x: Any) -> None:
        hcb.id_print({"x": x, "n": x[0, 0]}, output_stream=stream, what="value", name="shown")
        hcb.print("{} and {n}", x, n=x[0, 1])

    hcb.taps["*"].truncate(3)
    deliver(hcb.jit(program), jnp.arange(6.0).reshape(2, 3))
    assert stream.getvalue() == "what: value\n{ n=0. x=first 3 of (2, 3): [0. 1. 2.] }\n"
    assert capsys.readouterr().out == "first 3 of (2, 3): [0. 1. 2.] and 1.0\n"


def test_a_batch_of_prints_is_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    program = hcb.jit(jax.vmap(lambda x: hcb.print("{} {}", x, x.sum())))
    hcb.taps["*"].truncate(4)
    deliver(program, jnp.arange(10.0).reshape(5, 2))
    assert capsys.readouterr().out == "first 4 of (5, 2): [0. 1. 2. 3.] first 4 of (5,): [ 1.  5.  9. 13.]\n"


def test_stacks_are_of_heads() -> None:
    stacks: list[Any] = []

    def step(carry: Any, _: Any) -> Any:
        hcb.id_tap(stacks.append, carry, batched=True, name="stacked")
        return carry + 1, None

    program = hcb.jit(lambda x: lax.scan(step, x, None, length=50)[0])
    hcb.taps["stacked"].truncate(2)
    deliver(program, jnp.arange(12.0).reshape(3, 4))
    assert {stack.whole_shape for stack in stacks} == {(3, 4)}
    assert {stack.shape[1:] for stack in stacks} == {(2,)}
    rows = np.concatenate([np.asarray(stack) for stack in stacks])
    np.testing.assert_array_equal(rows, [[n, n + 1] for n in range(50)])
    assert str(stacks[0]).startswith("first 2 of (3, 4) each: [[")


def test_large_arrays_that_travel_outside_the_ring_are_cut_too(rec: Recorder) -> None:
    program = hcb.jit(lambda x: hcb.id_tap(rec, x, name="large"))
    hcb.taps["large"].truncate(100_000)
    deliver(program, jnp.arange(1_000_000.0))
    assert rec.values[0].shape == (100_000,)
    assert rec.values[0].whole_shape == (1_000_000,)
    assert rec.values[0][-1] == 99_999


def test_of_shards_the_whole_value_is_cut_on_the_host(rec: Recorder) -> None:
    x = jax.device_put(
        jnp.arange(32.0).reshape(8, 4), NamedSharding(Mesh(jax.devices(), ("i",)), PartitionSpec("i"))
    )
    program = hcb.jit(lambda x: hcb.id_tap(rec, x, name="cut whole") + 1)
    hcb.taps["cut whole"].truncate(6)
    deliver(program, x)
    assert rec.values[0].tolist() == [0, 1, 2, 3, 4, 5]
    assert rec.values[0].whole_shape == (8, 4)
    hcb.taps["cut whole"].reset()
    deliver(program, x)
    assert rec.values[1].shape == (8, 4)


def test_typed_keys_that_are_cut_arrive_as_their_data(rec: Recorder) -> None:
    program = hcb.jit(lambda key: hcb.id_tap(rec, key, name="keys"))
    keys = jax.random.split(jax.random.key(0), 10)
    hcb.taps["keys"].truncate(3)
    deliver(program, keys)
    assert rec.values[0].tolist() == jax.random.key_data(keys).reshape(-1)[:3].tolist()


def test_the_values_of_the_program_are_whole() -> None:
    program = hcb.jit(lambda x: hcb.id_tap(lambda v: None, x, name="whole inside") * 2)
    hcb.taps["whole inside"].truncate(1)
    np.testing.assert_array_equal(program(jnp.arange(50.0)), jnp.arange(50.0) * 2)
    hcb.barrier_wait()


def test_a_head_is_an_array_like_any_other(rec: Recorder) -> None:
    hcb.taps["like any"].truncate(3)
    deliver(hcb.jit(lambda x: hcb.id_tap(rec, x, name="like any")), jnp.arange(10.0))
    (head,) = rec.values
    assert type(head * 2) is np.ndarray
    assert type(head.sum()) is not hcb.TruncatedArray
    assert str(head[1:]) == "[1. 2.]"
    assert jnp.asarray(head).tolist() == [0, 1, 2]
    head[0] = 7
    for again in (pickle.loads(pickle.dumps(head)), copy.copy(head), copy.deepcopy([head])[0]):
        assert (again.tolist(), again.whole_shape) == ([7, 1, 2], (10,))
        assert not np.shares_memory(again, head)
    assert f"{head}" == "first 3 of (10,): [7. 1. 2.]"
    assert repr([head]) == "[first 3 of (10,): array([7., 1., 2.], dtype=float32)]"

"""`hcb.callback` makes the same calls as `jax.debug.callback`, with the same values, under every transformation."""

from __future__ import annotations

import functools
import threading
import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import hostcallback as hcb
from transforming import Jit


class Calls:
    """Remembers the arguments of every call."""

    def __init__(self) -> None:
        self.args: list[tuple[Any, ...]] = []
        self.kwargs: list[dict[str, Any]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.args.append(args)
        self.kwargs.append(kwargs)

    def __len__(self) -> int:
        return len(self.args)

    def plain(self) -> list[Any]:
        """The calls as Python values, for comparison."""
        return [
            jax.tree.map(lambda leaf: np.asarray(leaf).tolist() if hasattr(leaf, "dtype") else leaf, call)
            for call in zip(self.args, self.kwargs, strict=True)
        ]


@pytest.fixture
def calls() -> Calls:
    return Calls()


def alike(program: Callable[..., Any]) -> list[Any]:
    """The calls that `program(callback)` makes, with ours and with JAX's."""
    ours, jaxs = Calls(), Calls()
    program(functools.partial(hcb.callback, ours))
    hcb.barrier_wait()
    program(functools.partial(jax.debug.callback, jaxs, ordered=True))
    jax.effects_barrier()
    assert ours.plain() == jaxs.plain()
    return ours.plain()


def test_arguments_arrive_as_they_were_passed(jit: Jit, calls: Calls) -> None:
    marker = object()

    def f(x: Any) -> Any:
        tree = {"f": jnp.sin, "x": (x, None), "text": "t"}
        assert hcb.callback(calls, x, tree, 1, marker, {3}, y=x + 1, s="s", m=marker) is None
        return x

    jit(f)(jnp.arange(2.0))
    hcb.barrier_wait()
    (x, tree, one, got, three), kwargs = calls.args[0], calls.kwargs[0]
    np.testing.assert_array_equal(x, [0.0, 1.0])
    assert tree["f"] is jnp.sin
    assert (tree["x"][1], tree["text"]) == (None, "t")
    assert isinstance(one, np.ndarray)
    assert one.dtype == np.int32
    assert got is kwargs["m"] is marker
    assert three == {3}
    assert kwargs["s"] == "s"
    np.testing.assert_array_equal(kwargs["y"], [1.0, 2.0])


def test_calls_match_jax_debug_callback(jit: Jit) -> None:
    def program(callback: Any) -> None:
        def f(x: Any) -> Any:
            callback()
            callback(x, 2, 1.5, True, "s", None, len, [x, {"k": x}])
            callback(x, named=x, other="o")
            return x

        jit(f)(jnp.float32(3))

    assert len(alike(program)) == 3


@pytest.mark.parametrize(
    ("inner", "outer"), [((0, None), (1, 0)), ((1, 0), (0, None)), ((0, 0), (1, 1)), ((None, 1), (0, None))]
)
def test_nested_vmaps_call_for_each_element_in_jaxs_order(jit: Jit, inner: Any, outer: Any) -> None:
    def batched(*axes: int | None) -> Any:
        shape = [4]
        for axis, size in zip(axes, (2, 3), strict=True):
            if axis is not None:
                shape.insert(axis, size)
        return jnp.arange(np.prod(shape)).reshape(shape)

    def program(callback: Any) -> None:
        def f(x: Any, y: Any) -> Any:
            callback(x, "text", y=y)
            callback(y)
            return x

        arrays = [batched(*axes) for axes in zip(inner, outer, strict=True)]
        jit(jax.vmap(jax.vmap(f, in_axes=inner), in_axes=outer))(*arrays)

    assert len(alike(program)) > 6


def test_a_batch_is_one_message(jit: Jit, calls: Calls) -> None:
    with hcb.outfeed_receiver() as receiver:
        jit(jax.vmap(lambda x: hcb.callback(calls, x)))(jnp.arange(5))
    assert [int(x) for (x,) in calls.args] == [0, 1, 2, 3, 4]
    assert sum(stats.delivered for stats in receiver.stats) == 1


def test_where_nothing_is_batched_there_is_one_call(jit: Jit) -> None:
    def program(callback: Any) -> None:
        jit(jax.vmap(lambda x, y: (callback("text"), callback(y), x)[2], in_axes=(0, None)))(jnp.arange(3), 7)

    assert alike(program) == [(("text",), {}), ((7,), {})]


def test_every_element_gets_separate_arrays(jit: Jit) -> None:
    seen = []

    def change(x: Any, shared: Any) -> None:
        assert x.flags.writeable
        assert shared.flags.writeable
        x += 100
        shared += 100
        seen.append((x, shared))

    jit(jax.vmap(lambda x, y: hcb.callback(change, x, y), in_axes=(0, None)))(jnp.arange(3), jnp.arange(2))
    hcb.barrier_wait()
    assert [int(x) for x, _ in seen] == [100, 101, 102]
    assert all(isinstance(x, np.ndarray) and x.shape == () for x, _ in seen)
    assert [shared.tolist() for _, shared in seen] == [[100, 101]] * 3


def test_typed_keys_arrive_as_keys_also_from_a_batch(jit: Jit, calls: Calls) -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    jit(jax.vmap(lambda key: hcb.callback(calls, key)))(keys)
    hcb.barrier_wait()
    for (key,), expected in zip(calls.args, keys, strict=True):
        assert jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key)
        assert key.shape == ()
        np.testing.assert_array_equal(jax.random.key_data(key), jax.random.key_data(expected))


def test_an_element_that_fails_leaves_the_others_and_every_failure_is_reported(jit: Jit) -> None:
    seen = []

    def odd_only(x: Any) -> None:
        seen.append(int(x))
        if not x % 2:
            raise ValueError(f"{x} is even")

    jit(jax.vmap(lambda x: hcb.callback(odd_only, x)))(jnp.arange(5))
    with pytest.raises(hcb.TapFunctionException) as info:
        hcb.barrier_wait()
    assert seen == [0, 1, 2, 3, 4]
    assert [str(failure.exception) for failure in info.value.failures] == [
        "0 is even",
        "2 is even",
        "4 is even",
    ]
    assert [failure.exception.__notes__[0] for failure in info.value.failures] == [
        f"element {i} of the batch" for i in (0, 2, 4)
    ]
    for failure in info.value.failures:
        assert "odd_only" in failure.tap
        assert "test_callback.py" in failure.source_line
        (frame,) = traceback.extract_tb(failure.exception.__traceback__)
        assert frame.name == "odd_only"


def test_failures_of_a_large_batch_are_bounded_and_counted() -> None:
    def fail(x: Any) -> None:
        raise ValueError(x)

    jax.vmap(lambda x: hcb.callback(fail, x))(jnp.arange(1000))
    with pytest.raises(hcb.TapFunctionException) as info:
        hcb.barrier_wait()
    assert len(info.value.failures) == 100
    assert sum(info.value.suppressed.values()) == 900


def test_an_exception_is_deferred_with_its_own_traceback(jit: Jit) -> None:
    def fail(x: Any, *, why: str) -> None:
        raise KeyError(why)

    assert float(jit(lambda x: (hcb.callback(fail, x, why="because"), x + 1)[1])(1.0)) == 2.0
    with pytest.raises(hcb.TapFunctionException) as info:
        hcb.barrier_wait()
    (error,) = info.value.exceptions
    assert isinstance(error, KeyError)
    assert [frame.name for frame in traceback.extract_tb(error.__traceback__)] == ["fail"]
    assert "test_callback.py" in error.__notes__[0]


def test_differentiation_calls_with_primals_only(jit: Jit) -> None:
    def program(callback: Any) -> None:
        def f(x: Any, n: Any) -> Any:
            y = jnp.sin(x) * n
            callback(y, n, x=x)
            return y * x

        jit(jax.grad(f))(2.0, 3)
        jit(lambda x: jax.jvp(lambda x: f(x, 3), (x,), (1.0,)))(2.0)
        jit(lambda x: jax.vjp(lambda x: f(x, 3), x)[1](1.0))(2.0)
        jit(jax.hessian(f))(2.0, 3)
        jit(jax.vmap(jax.grad(f), in_axes=(0, None)))(jnp.arange(2.0), 3)

    assert len(alike(program)) == 6


def test_control_flow_calls_in_the_order_of_the_program(jit: Jit) -> None:
    def program(callback: Any) -> None:
        def body(i: Any, c: Any) -> Any:
            callback("before", i)
            c = lax.cond(
                c > 2,
                lambda c: (callback("large", c), c * 1)[1],
                lambda c: (callback("small", c), c * 2)[1],
                c,
            )
            callback("after", c)
            return c

        jit(lambda x: lax.fori_loop(0, 4, body, x))(1)
        jit(lambda x: lax.while_loop(lambda c: (callback("while", c), c < 3)[1], lambda c: c + 1, x))(0)
        jit(lambda x: lax.map(lambda v: (callback(v), v)[1], x))(jnp.arange(3))
        jit(lambda x: lax.switch(x, [lambda: callback("zero"), lambda: callback("one")]))(1)

    assert len(alike(program)) == 12 + 4 + 3 + 1


def test_custom_derivatives_and_checkpoint(jit: Jit, calls: Calls) -> None:
    @jax.custom_vjp
    def f(x: Any) -> Any:
        return x

    f.defvjp(
        lambda x: (hcb.callback(calls, "forward", x), (x, x))[1],
        lambda res, g: (hcb.callback(calls, "backward", res, g), (g * 2,))[1],
    )

    @jax.checkpoint
    def g(x: Any) -> Any:
        hcb.callback(calls, "checkpoint", x)
        return f(jnp.sin(x))

    jit(jax.grad(g))(0.0)
    hcb.barrier_wait()
    assert sorted(call[0] for call in calls.args) == ["backward", "checkpoint", "forward"]


@pytest.mark.parametrize("ordered", [True, False])
def test_shard_map_calls_for_every_device_and_keeps_its_order(ordered: bool) -> None:
    seen: dict[int, list[int]] = {i: [] for i in range(4)}
    mesh = Mesh(jax.devices(), ("i",))
    spec = PartitionSpec("i")

    def per_device(x: Any) -> Any:
        def step(c: Any, i: Any) -> Any:
            hcb.callback(lambda d, i: seen[int(d)].append(int(i)), lax.axis_index("i"), i, ordered=ordered)
            return c, None

        return lax.scan(step, x, jnp.arange(100))[0]

    jax.jit(jax.shard_map(per_device, mesh=mesh, in_specs=spec, out_specs=spec))(jnp.arange(4.0))
    hcb.barrier_wait()
    if ordered:
        assert seen == {i: list(range(100)) for i in range(4)}
    else:
        assert {i: sorted(values) for i, values in seen.items()} == {i: list(range(100)) for i in range(4)}


def test_pmap_calls_for_every_device(calls: Calls) -> None:
    jax.pmap(lambda x: hcb.callback(calls, x, index=lax.axis_index("d")), axis_name="d")(jnp.arange(4) * 10)
    hcb.barrier_wait()
    assert sorted((int(k["index"]), int(x)) for (x,), k in zip(calls.args, calls.kwargs, strict=True)) == [
        (i, 10 * i) for i in range(4)
    ]


@pytest.mark.parametrize("partitioned", [False, True])
def test_partitioned_chooses_between_the_whole_array_and_each_devices_shard(
    partitioned: bool, calls: Calls
) -> None:
    lock = threading.Lock()
    shards: list[list[float]] = []

    def keep(x: Any) -> None:
        with lock:
            shards.append(x.tolist())

    mesh = Mesh(jax.devices(), ("i",))
    x = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, PartitionSpec("i")))
    f = jax.jit(lambda x: (hcb.callback(keep, x + 1, partitioned=partitioned), x)[1])
    for _ in range(3):
        f(x)
    hcb.barrier_wait()
    parts = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]]
    assert sorted(shards) == (sorted(parts * 3) if partitioned else [[*map(float, range(1, 9))]] * 3)


@pytest.mark.parametrize("other", ["m", None])
def test_shards_of_a_batch_with_different_layouts_are_never_mixed_up(other: str | None) -> None:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("d", "m"))
    x = jax.device_put(jnp.arange(4.0), NamedSharding(mesh, PartitionSpec("d")))
    y = jax.device_put(10 * jnp.arange(4.0), NamedSharding(mesh, PartitionSpec(other)))
    lock = threading.Lock()
    pairs: list[tuple[float, float]] = []

    def keep(a: Any, b: Any) -> None:
        with lock:
            pairs.append((float(a), float(b)))

    jax.jit(jax.vmap(lambda x, y: hcb.callback(partitioned=True)(keep, x, y)))(x, y)
    hcb.barrier_wait()
    assert set(pairs) == {(0, 0), (1, 10), (2, 20), (3, 30)}


def test_the_elements_of_a_partitioned_batch_come_in_order(calls: Calls) -> None:
    mesh = Mesh(jax.devices(), ("i",))
    x = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, PartitionSpec("i")))
    jax.jit(jax.vmap(lambda x: hcb.callback(calls, x)))(x)
    hcb.barrier_wait()
    assert [float(x) for (x,) in calls.args] == list(range(8))


def test_the_two_call_form_takes_the_options_first(jit: Jit, calls: Calls) -> None:
    tap = hcb.callback(ordered=True, partitioned=False, name="mine")

    def f(x: Any) -> Any:
        # Options are names like any other in the second call.
        assert tap(calls, x, ordered=x, name="n", callback="c") is None
        return x

    jit(f)(5)
    hcb.barrier_wait()
    assert Calls.plain(calls) == [((5,), {"ordered": 5, "name": "n", "callback": "c"})]


def test_reports_use_name_for_the_tap() -> None:
    def fail() -> None:
        raise ValueError

    hcb.callback(name="mine")(fail)
    hcb.callback(fail)
    with pytest.raises(hcb.TapFunctionException) as info:
        hcb.barrier_wait()
    mine, other = (failure.tap for failure in info.value.failures)
    assert mine == "mine"
    assert other.endswith("fail")


@pytest.mark.parametrize("first", [3, "text", None])
def test_a_non_callable_is_refused_with_the_users_line(first: Any) -> None:
    with pytest.raises(TypeError, match=r"must be callable, but got .*test_callback.py:\d+"):
        hcb.callback()(first, 1)


@pytest.mark.parametrize("arguments", [{"x": 1}, {"ordered": True, "output_stream": None}])
def test_the_first_of_two_calls_refuses_unknown_options(arguments: Any) -> None:
    with pytest.raises(TypeError, match=r"hcb.callback received unexpected arguments in the two-call form"):
        hcb.callback(**arguments)


def test_equal_callbacks_of_one_program_share_no_arguments() -> None:
    calls = Calls()
    f = hcb.jit(lambda x: [hcb.callback(calls, x, which=text) for text in ("a", "b")])
    f(1.0)
    hcb.barrier_wait()
    assert [kwargs["which"] for kwargs in calls.kwargs] == ["a", "b"]

"""`batched=True`: consecutive messages of one tap as one stacked array."""

from __future__ import annotations

import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import hostcallback as hcb
from recorder import Recorder
from transforming import JVP, TRANSPOSE, Jit, batch


class Stacks:
    """Keeps the stacks it was given, by device."""

    def __init__(self) -> None:
        self.by_device: dict[Any, list[Any]] = {}
        self.transforms: list[Any] = []
        self.kwargs: list[Any] = []

    def __call__(self, arg: Any, *, device: Any, transforms: Any, **kwargs: Any) -> None:
        self.by_device.setdefault(device, []).append(arg)
        self.transforms.append(transforms)
        self.kwargs.append(kwargs)

    def joined(self, device: Any = None) -> Any:
        stacks = self.by_device[device or jax.devices()[0]]
        return jax.tree.map(lambda *parts: np.concatenate(parts), *stacks)

    @property
    def count(self) -> int:
        return sum(len(stacks) for stacks in self.by_device.values())


def test_every_value_arrives_in_order_in_few_calls(jit: Jit) -> None:
    stacks = Stacks()

    def step(carry: Any, _: Any) -> Any:
        hcb.id_tap(stacks, {"x": carry, "y": (carry * jnp.ones((2, 3)), carry > 3)}, batched=True, tag="t")
        return carry + 1, None

    jit(lambda x: lax.scan(step, x, None, length=3000)[0])(jnp.float32(0))
    hcb.barrier_wait()
    joined = stacks.joined()
    np.testing.assert_array_equal(joined["x"], np.arange(3000, dtype=np.float32))
    np.testing.assert_array_equal(
        joined["y"][0], np.arange(3000)[:, None, None] * np.ones((2, 3), np.float32)
    )
    np.testing.assert_array_equal(joined["y"][1], np.arange(3000) > 3)
    assert joined["x"].dtype == np.float32
    assert joined["y"][1].dtype == np.bool_
    assert set(map(str, stacks.kwargs)) == {"{'tag': 't'}"}


def test_stacks_have_many_messages_where_the_receiver_was_busy() -> None:
    sizes: list[int] = []
    f = hcb.jit(
        lambda x: lax.scan(
            lambda c, _: (hcb.id_tap(lambda v: sizes.append(len(v)), c, batched=True) + 1, None),
            x,
            None,
            length=20_000,
        )[0]
    )
    f(jnp.float32(0))
    hcb.barrier_wait()
    assert sum(sizes) == 20_000
    assert max(sizes) <= 1024
    assert max(sizes) > 1


def test_alternating_taps_have_separate_stacks() -> None:
    one, two, single = Stacks(), Stacks(), Recorder()

    def step(carry: Any, _: Any) -> Any:
        hcb.id_tap(one, carry, batched=True)
        hcb.id_tap(two, carry + 100, batched=True)
        hcb.id_tap(single, carry)
        return carry + 1, None

    jax.jit(lambda x: lax.scan(step, x, None, length=2000)[0])(jnp.int32(0))
    hcb.barrier_wait()
    assert one.joined().tolist() == list(range(2000))
    assert two.joined().tolist() == list(range(100, 2100))
    assert single.floats() == list(range(2000))
    if hcb.jit is jax.jit:
        assert one.count < 2000


def test_shapes_are_not_mixed() -> None:
    stacks = Stacks()

    def tap(x: Any) -> Any:
        return hcb.id_tap(stacks, x, batched=True)

    f = jax.jit(lambda: [tap(jnp.full(n % 3, n)) for n in range(30)])
    f()
    hcb.barrier_wait()
    seen: dict[int, list[int]] = {}
    for stack in stacks.by_device[jax.devices()[0]]:
        seen.setdefault(stack.shape[1], []).extend(stack[:, 0].tolist() if stack.shape[1] else [])
        assert stack.ndim == 2
    assert seen[1] == list(range(1, 30, 3))
    assert seen[2] == list(range(2, 30, 3))


def test_transformations() -> None:
    stacks = Stacks()

    def f(x: Any) -> Any:
        return hcb.id_tap(stacks, x, batched=True) * 2

    jax.jit(jax.vmap(f))(jnp.arange(3.0))
    jax.jit(jax.grad(f))(1.0)
    hcb.barrier_wait()
    values = stacks.by_device[jax.devices()[0]]
    assert stacks.transforms == [(batch(0),), (), (JVP, TRANSPOSE)]
    assert [v.tolist() for v in values] == [[[0, 1, 2]], [1], [2]]


def test_each_device_has_its_own() -> None:
    stacks = Stacks()
    mesh = Mesh(jax.devices(), ("i",))

    def f(x: Any) -> Any:
        return lax.scan(lambda c, _: (hcb.id_tap(stacks, c, batched=True) + 1, None), x, None, length=500)[0]

    spec = PartitionSpec("i")
    jax.jit(jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec))(jnp.arange(4) * 1000)
    hcb.barrier_wait()
    for number, device in enumerate(jax.devices()):
        np.testing.assert_array_equal(stacks.joined(device)[:, 0], np.arange(500) + 1000 * number)


def test_shards_are_assembled_to_stacks_of_one() -> None:
    stacks = Stacks()
    mesh = Mesh(jax.devices(), ("i",))
    x = jax.device_put(jnp.arange(8), NamedSharding(mesh, PartitionSpec("i")))
    hcb.jit(lambda x: hcb.id_tap(stacks, x, batched=True) + 1)(x)
    hcb.barrier_wait()
    (stack,) = stacks.by_device[jax.devices()[0]]
    assert stack.tolist() == [list(range(8))]


def test_messages_emitted_before_a_receiver_ends_are_in_it() -> None:
    counts: list[int] = []
    f = hcb.jit(lambda x: [hcb.id_tap(lambda v: counts.append(len(v)), x, batched=True) for _ in range(50)])
    for _ in range(20):
        with hcb.outfeed_receiver() as rx:
            f(1.0)
        assert sum(counts) == 50
        assert sum(row.delivered for row in rx.stats) == 50
        assert sum(row.delivered_bytes for row in rx.stats) == 200
        assert sum(row.dropped for row in rx.stats) == 0
        counts.clear()


def test_a_failure_is_one_of_all_messages_in_the_stack() -> None:
    def fail(stack: Any) -> None:
        raise ValueError(f"stack of {len(stack)}")

    with pytest.raises(hcb.TapFunctionException, match="tap function call"):
        with hcb.outfeed_receiver() as rx:
            hcb.jit(lambda x: [hcb.id_tap(fail, x, batched=True) for _ in range(100)])(1.0)
    assert sum(row.failed for row in rx.stats) == 100


def test_a_barrier_waits_for_a_stack_that_comes_later_in_its_read() -> None:
    order: list[str] = []
    began, go_on = threading.Event(), threading.Event()

    def slow(value: Any) -> None:
        order.append("slow")
        began.set()
        go_on.wait(20)

    stack = hcb.jit(lambda x: hcb.id_tap(lambda v: order.append(f"stack of {len(v)}"), x, batched=True) * 1)
    other = hcb.jit(lambda x: hcb.id_tap(slow, x) * 1)
    first = hcb.jit(lambda x: hcb.id_tap(slow, x) * 1)
    first(1.0).block_until_ready()
    assert began.wait(20)
    # All of this is in one read: the stack of two comes after the slow ones.
    stack(1.0).block_until_ready()
    waited = threading.Thread(target=lambda: (hcb.barrier_wait(), order.append("barrier")))
    waited.start()
    for _ in range(10):
        other(1.0).block_until_ready()
    stack(1.0).block_until_ready()
    go_on.set()
    waited.join(20)
    hcb.barrier_wait()
    assert order.index("barrier") > min(n for n, what in enumerate(order) if what.startswith("stack"))


def test_without_arrays_each_message_is_one_call() -> None:
    seen: list[Any] = []

    def f() -> None:
        for _ in range(20):
            hcb.id_tap(seen.append, ("no array",), batched=True)

    hcb.jit(f)()
    hcb.barrier_wait()
    assert seen == [("no array",)] * 20


def test_the_user_may_keep_and_change_a_stack() -> None:
    kept: list[Any] = []

    def keep(stack: Any) -> None:
        stack += 1
        kept.append(stack)

    f = hcb.jit(
        lambda x: lax.scan(
            lambda c, _: (hcb.id_tap(keep, c, batched=True) + 1, None), x, None, length=30_000
        )[0]
    )
    f(jnp.float32(0))
    hcb.barrier_wait()
    np.testing.assert_array_equal(np.concatenate(kept), np.arange(1, 30_001, dtype=np.float32))


def test_batched_must_be_a_truth_value() -> None:
    with pytest.raises(TypeError, match=r"batched is 64, expected True or False"):
        hcb.id_tap(print, 1.0, batched=64)  # type: ignore[arg-type]

"""Messages that must arrive from any device: each function runs programs on it and counts the messages.

A wrong, lost, repeated or disordered message is an AssertionError. `check.py` runs them on a GPU, the tests on CPU.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import hostcallback as hcb
from hostcallback import _jax_compat as compat
from hostcallback.lifecycle import receivers as transport


class Received:
    """A tap function that keeps its arguments."""

    def __init__(self) -> None:
        """Nothing has come yet."""
        self.values: list[Any] = []

    def __call__(self, value: Any) -> None:
        """Keeps one message."""
        self.values.append(value)

    def are(self, expected: list[Any]) -> int:
        """Waits for all messages and compares them; how many there are."""
        hcb.barrier_wait()
        assert len(self.values) == len(expected), (
            f"{len(self.values)} messages came, expected {len(expected)}"
        )
        for index, (value, wanted) in enumerate(zip(self.values, expected, strict=True)):
            jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b, f"message {index}"), value, wanted)  # noqa: B023
        return len(expected)


def scalars_in_a_scan(device: jax.Device) -> int:
    """100,000 scalars, more than a ring holds, in order."""
    received, steps = Received(), 100_000
    f = jax.jit(
        lambda x: lax.scan(lambda c, _: (hcb.id_tap(received, c) + 1, None), x, None, length=steps)[0]
    )
    f(jax.device_put(jnp.int32(0), device)).block_until_ready()
    return received.are(list(range(steps)))


DTYPES = (
    np.bool_, np.int8, np.int16, np.int32, np.uint8, np.uint16, np.uint32, np.float16, np.float32, np.complex64,
    ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.int4, ml_dtypes.uint4,
)  # fmt: skip


def dtypes(device: jax.Device) -> int:
    """Arrays of every dtype, of none, one, several and many elements, in one message each."""
    received = Received()
    f = jax.jit(lambda tree: hcb.id_tap(received, tree))
    sent = [
        {np.dtype(dtype).name: np.resize(np.array([1, 0, 1]), size).astype(dtype) for dtype in DTYPES}
        for size in (0, 1, 7, 1000)
    ]
    for tree in sent:
        f(jax.device_put(tree, device))
    return received.are(sent)


def large_arrays(device: jax.Device) -> int:
    """Arrays of 16 MiB in a scan, each computed from the one before it, and all kept."""
    received, steps = Received(), 12
    x = jax.device_put(jnp.arange(4 << 20, dtype=jnp.int32), device)
    f = jax.jit(
        lambda x: lax.scan(lambda c, _: (hcb.id_tap(received, c) + 1, None), x, None, length=steps)[0]
    )
    f(x).block_until_ready()
    return received.are([np.arange(4 << 20, dtype=np.int32) + step for step in range(steps)])


def control_flow(device: jax.Device) -> int:
    """Taps in a while loop and in branches, with others around them, in the order of the program."""
    received = Received()

    def body(c: Any) -> Any:
        hcb.id_tap(received, c)
        lax.cond(c % 2 == 0, lambda: hcb.id_tap(received, 1000 + c), lambda: hcb.id_tap(received, 2000 + c))
        return c + 1

    def program(n: Any) -> Any:
        hcb.id_tap(received, -n)
        n = lax.while_loop(lambda c: c < 200, body, n)
        return hcb.id_tap(received, -n)

    jax.jit(program)(jax.device_put(jnp.int32(1), device)).block_until_ready()
    loop = [value for c in range(1, 200) for value in (c, (1000 if c % 2 == 0 else 2000) + c)]
    return received.are([-1, *loop, -200])


def transformations(device: jax.Device) -> int:
    """A batch is one message; a gradient brings the cotangent too."""
    received = Received()
    x = jax.device_put(jnp.arange(4.0), device)
    jax.jit(jax.vmap(lambda x: hcb.id_tap(received, x * 2)))(x)
    assert received.are([np.arange(4.0, dtype=np.float32) * 2]) == 1
    jax.jit(jax.grad(lambda x: hcb.id_tap(received, x) ** 2))(x[3])
    return received.are([np.arange(4.0, dtype=np.float32) * 2, 3, 6])


def eager_and_plain_jit(device: jax.Device) -> int:
    """Outside of jit, and under plain jax.jit, calls in order."""
    received = Received()
    x = jax.device_put(jnp.float32(0), device)
    f = jax.jit(lambda x: hcb.id_tap(received, x) + 1)
    for _ in range(50):
        x = f(hcb.id_tap(received, x))
    return received.are([value for step in range(50) for value in (step, step)])


def threads(device: jax.Device) -> int:
    """Programs of several threads on one device: each thread's messages are in order, and none is lost."""
    received, steps, count = Received(), 200, 4
    f = jax.jit(
        lambda x: lax.scan(lambda c, _: (hcb.id_tap(received, c) + 1, None), x, None, length=steps)[0]
    )

    def run(number: int) -> None:
        f(jax.device_put(jnp.int32(10_000 * number), device)).block_until_ready()

    running = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    hcb.barrier_wait()
    for number in range(count):
        of_thread = [int(value) for value in received.values if value // 10_000 == number]
        assert of_thread == list(range(10_000 * number, 10_000 * number + steps))
    assert len(received.values) == count * steps
    return count * steps


def checks(device: jax.Device) -> int:
    """Checks that hold send nothing; those that fail are counted, each once."""
    steps = 5_000

    def step(c: Any, _: Any) -> Any:
        hcb.check(c % 10 != 3, "{} ends in three", c)
        return c + 1, None

    f = jax.jit(lambda x: lax.scan(step, x, None, length=steps)[0])
    errors: tuple[Any, ...] = ()
    try:
        with hcb.error_collector():
            f(jax.device_put(jnp.int32(0), device)).block_until_ready()
    except hcb.TapFunctionException as raised:
        errors = raised.exceptions
    assert len(errors) == 1, f"{errors}, expected one for one line"
    failure = errors[0].check
    assert failure.count == steps // 10, f"{failure.count} failures, expected {steps // 10}"
    assert "3 ends in three" in failure.report(), failure.report()
    return steps // 10


def calls(device: jax.Device) -> int:
    """A host function in a loop, whose results the device goes on with, among taps: all in order."""
    received, steps = Received(), 30

    def step(c: Any, _: Any) -> Any:
        hcb.id_tap(received, c)
        c = hcb.call(lambda x: (received(-x), x + 1)[1], c, result_shape=c)
        return hcb.id_tap(received, c), None

    f = jax.jit(lambda x: lax.scan(step, x, None, length=steps)[0])
    assert float(f(jax.device_put(jnp.float32(0), device))) == steps
    return received.are([value for n in range(steps) for value in (n, -n, n + 1)])


def slow_taps(device: jax.Device) -> int:
    """A tap function slower than the device, until the ring is full: the device waits, and no message is lost."""
    received, steps = Received(), 40

    def slow(value: Any) -> None:
        time.sleep(0.01)
        received(value[0])

    x = jax.device_put(jnp.zeros(1 << 20, jnp.int32), device)
    f = jax.jit(lambda x: lax.scan(lambda c, _: (hcb.id_tap(slow, c) + 1, None), x, None, length=steps)[0])
    f(x).block_until_ready()
    return received.are(list(range(steps)))


def shards(device: jax.Device) -> int:
    """An array that the compiler partitions over all devices arrives as one array, without a collective."""
    devices = jax.devices(device.platform)
    if len(devices) == 1:
        return 0
    received = Received()
    mesh = Mesh(np.array(devices), ("i",))
    x = jax.device_put(jnp.arange(8.0 * len(devices)), NamedSharding(mesh, P("i")))
    f = jax.jit(lambda x: hcb.id_tap(received, x * 2))
    for _ in range(10):
        f(x).block_until_ready()
    assert "all-gather" not in f.lower(x).compile().as_text()
    return received.are([np.arange(8.0 * len(devices), dtype=np.float32) * 2] * 10)


CASES: tuple[Callable[[jax.Device], int], ...] = (
    scalars_in_a_scan, dtypes, large_arrays, control_flow, transformations, eager_and_plain_jit, threads, checks, calls,
    slow_taps, shards,
)  # fmt: skip


def uses_native_transport(device: jax.Device) -> bool:
    """Whether taps on the device do not go through Python callbacks."""
    return transport.use_native(compat.lowering_platform(device.platform))

"""Host functions use JAX while programs wait for them: on the same devices, all at once, with large arrays."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

import hostcallback as hcb
from hostcallback.lifecycle.reentrant_calls import call_inside_callback
from recorder import Recorder
from threads import in_threads

SIDE = 2048  # of a square of 16 MiB
MESH = Mesh(np.array(jax.devices()), ("i",))
SPEC = PartitionSpec("i")


@jax.jit
def work(x: Any) -> Any:
    """A program that XLA does not run on the calling thread, being large."""
    return jnp.sin(x) @ jnp.ones((x.shape[1], 1)) + x[:, :1]


def expected(x: Any) -> Any:
    return np.sin(x) @ np.ones((x.shape[1], 1)) + x[:, :1]


def on_every_device(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return jax.shard_map(f, mesh=MESH, in_specs=SPEC, out_specs=SPEC)


def column(x: Any) -> Any:
    return jax.ShapeDtypeStruct((x.shape[0], 1), x.dtype)


def test_a_host_function_uses_jax_on_the_device_that_waits() -> None:
    def host(x: Any, device: Any) -> Any:
        return work(jax.device_put(x, device))

    f = jax.jit(lambda x: hcb.call(host, x, result_shape=column(x)) * 2)
    for device in jax.devices():
        x = np.full((SIDE, SIDE), device.id, np.float32)
        np.testing.assert_allclose(f(jax.device_put(x, device)), 2 * expected(x), rtol=1e-3)


@pytest.mark.slow_variants
def test_all_devices_at_once_with_16_mib_each() -> None:
    def host(x: Any, device: Any) -> Any:
        return work(jax.device_put(x, device))

    f = jax.jit(on_every_device(lambda x: hcb.call(host, x, result_shape=column(x)) * 2))
    x = np.repeat(np.arange(4, dtype=np.float32), SIDE)[:, None] * np.ones((1, SIDE), np.float32)
    for _ in range(2):
        np.testing.assert_allclose(f(x), 2 * expected(x), rtol=1e-3)


def test_all_devices_at_once_in_a_loop_with_collectives() -> None:
    def host(x: Any, device: Any) -> Any:
        return work(jax.device_put(x, device))

    def step(x: Any, _: Any) -> Any:
        y = hcb.call(host, x, result_shape=column(x))
        return x * 0 + lax.pmean(y, "i") * 1e-3, y

    f = jax.jit(on_every_device(lambda x: lax.scan(step, x, None, 10)[0]))
    out = f(jnp.ones((4 * 256, 256)))
    assert np.isfinite(out).all()


def test_pmap() -> None:
    def host(x: Any, device: Any) -> Any:
        return work(jax.device_put(x, device))

    x = np.ones((4, 512, 512), np.float32)
    out = jax.pmap(lambda x: hcb.call(host, x, result_shape=column(x)))(x)
    np.testing.assert_allclose(out, np.stack([expected(part) for part in x]), rtol=1e-3)


def test_host_functions_run_programs_with_calls_and_taps(rec: Recorder) -> None:
    def make(depth: int) -> Callable[[Any], Any]:
        if depth == 0:
            return jax.jit(lambda x: hcb.id_tap(rec, work(x)))
        inner = make(depth - 1)

        def host(x: Any, device: Any) -> Any:
            return inner(jax.device_put(x, device))

        return jax.jit(lambda x: hcb.call(host, hcb.id_tap(rec, x, depth=depth), result_shape=column(x)) + 1)

    x = np.ones((512, 512), np.float32)
    for _ in range(2):
        np.testing.assert_allclose(make(6)(x), expected(x) + 6, rtol=1e-3)
    hcb.barrier_wait()
    assert [kwargs.get("depth", 0) for kwargs in rec.kwargs] == [6, 5, 4, 3, 2, 1, 0] * 2


def test_nested_on_all_devices_at_once(rec: Recorder) -> None:
    inner = hcb.jit(lambda x: hcb.id_tap(rec, hcb.call(lambda x: x + 1, work(x), result_shape=column(x))))

    def host(x: Any, device: Any) -> Any:
        return inner(jax.device_put(x, device))

    f = hcb.jit(on_every_device(lambda x: hcb.call(host, x, result_shape=column(x))))
    x = np.ones((4 * 512, 512), np.float32)
    np.testing.assert_allclose(f(x), expected(x) + 1, rtol=1e-3)
    hcb.barrier_wait()
    assert sorted(d.id for d in rec.devices) == [0, 1, 2, 3]


def test_more_threads_than_xla_has() -> None:
    def host(x: Any) -> Any:
        return work(x)

    f = jax.jit(
        lambda x: lax.fori_loop(0, 5, lambda i, c: c + hcb.call(host, c, result_shape=column(c)) * 0, x)
    )
    x = np.ones((256, 256), np.float32)
    f(x)
    outs: dict[int, Any] = {}
    in_threads(lambda i: outs.update({i: f(x + i).block_until_ready()}), 12)
    assert sorted(outs) == list(range(12))
    assert all((out == 1 + i).all() for i, out in outs.items())


def test_more_programs_than_a_device_takes_at_a_time() -> None:
    # XLA:CPU takes 32 for each device: programs of a host function need a slot among the programs that wait for it. So
    # the dispatch of a program whose arguments are ready returns after the program has run.
    f = jax.jit(lambda x: hcb.call(lambda x: work(x) * np.ones_like(x), x, result_shape=x) * 0 + x + 1)
    x = jnp.ones((256, 256))
    arguments = jax.block_until_ready([x + i for i in range(20)])
    outs = [f(argument) for _ in range(5) for argument in arguments]
    assert all(out.is_ready() for out in outs)
    for _ in range(50):
        x = f(x)
    assert [float(out[0, 0]) for out in outs] == [2.0 + i for i in range(20)] * 5
    assert float(x[0, 0]) == 51


class _HeldProgram:
    """A program that waits in a callback of JAX. XLA queues later programs of the same thread behind it.

    A program with a call would not do: without fast dispatch its dispatch returns when the program has ended.

    Attributes:
        run: the program, compiled.
        held: whether its callback waits.
        go: lets it return.
        was_released: for each run, whether `go` was set within a minute.
    """

    def __init__(self) -> None:
        self.held, self.go = threading.Event(), threading.Event()
        self.was_released: list[bool] = []

        def hold(x: Any) -> Any:
            self.held.set()
            self.was_released.append(self.go.wait(60))
            return x

        self.run = jax.jit(lambda x: jax.pure_callback(hold, x[:1, 0], x[:1, 0]))
        self._large = jnp.ones((2048, 2048))
        self._compute = jax.jit(lambda x: lax.fori_loop(0, 3, lambda _, c: jnp.sin(c @ c), x))
        self.go.set()
        self.run(self.argument()).block_until_ready()
        self.go.clear()
        self.held.clear()
        self.was_released.clear()

    def argument(self) -> jax.Array:
        """An argument that is still to be computed."""
        return self._compute(self._large)


@pytest.mark.native_only
def test_a_host_function_finds_another_thread_where_xla_holds_its_own_back() -> None:
    program = _HeldProgram()
    errors: list[BaseException] = []

    def function() -> Any:
        try:
            hcb.barrier_wait()
        except hcb.ReentrantWaitError as error:
            errors.append(error)
        return np.asarray(work(np.ones((256, 256), np.float32)))

    def host(x: Any) -> Any:
        program.run(program.argument())
        program.held.wait(60)
        made = call_inside_callback(jax.devices()[0], function)
        return made[0] * 0 + x

    f = jax.jit(lambda x: hcb.call(host, x, result_shape=x))
    zeros = jnp.zeros(1)
    try:
        assert np.asarray(f(zeros)).tolist() == [0]
    finally:
        program.go.set()
    assert len(errors) == 1
    hcb.barrier_wait()


@pytest.mark.native_only
def test_a_later_host_function_finds_another_thread_if_an_earlier_one_left_a_program_behind() -> None:
    program = _HeldProgram()

    def host(operands: Any, device: Any) -> Any:
        x, step = operands
        if device.id == 0 and step == 0:
            made: list[jax.Array] = []
            in_threads(lambda _: made.append(program.argument()), 1)  # here it would be computed at once
            program.run(made[0])
            program.held.wait(60)
        elif device.id == 0:
            # It runs on the thread of the last call if XLA continued the program there, behind that program.
            np.asarray(work(np.ones((256, 256), np.float32)))
            program.go.set()
        return x

    def step(x: Any, i: Any) -> Any:
        return hcb.call(host, (x, i), result_shape=x), None

    f = jax.jit(on_every_device(lambda x: lax.scan(step, x, jnp.arange(2))[0]))
    try:
        np.testing.assert_array_equal(f(np.zeros(4, np.float32)), np.zeros(4, np.float32))
    finally:
        program.go.set()
    hcb.barrier_wait()
    assert program.was_released == [True]


def test_programs_that_follow_a_call_do_not_shut_out_its_host_function() -> None:
    f = jax.jit(lambda x: hcb.call(lambda x: work(x) * np.ones_like(x), x, result_shape=x) * 0 + x)
    y = f(jnp.ones((256, 256)))
    for _ in range(100):
        y = y + 1
    assert float(y[0, 0]) == 101


def test_a_host_function_may_read_and_make_any_array() -> None:
    constant = jnp.arange(5.0)

    def host(x: Any) -> Any:
        key = jax.random.key(int(x))
        sampled = jax.random.normal(key, (1000, 100))
        return jnp.sum(sampled) * 0 + constant.sum() + jnp.float32(x)

    f = hcb.jit(lambda x: hcb.call(host, x, result_shape=x))
    assert float(f(jnp.float32(2))) == 12


@pytest.mark.native_only  # on the other transport it runs in XLA's floating-point mode, as JAX's own callbacks do
def test_a_host_function_computes_with_denormals_as_numpy_does() -> None:
    tiny = np.float32(1e-40)

    def host(x: Any) -> Any:
        return np.float32(x * tiny != 0) + np.float32(np.float32(1e-30) * np.float32(1e-10) != 0)

    f = hcb.jit(lambda x: hcb.call(host, x, result_shape=x))
    on_all = hcb.jit(on_every_device(lambda x: hcb.call(lambda x: np.full(1, host(x[0])), x, result_shape=x)))
    assert float(f(jnp.float32(1))) == 2
    np.testing.assert_array_equal(on_all(jnp.ones(4)), 2)


def test_programs_after_a_call_compute_as_before_it() -> None:
    def program(x: Any, call: Any) -> Any:
        def step(c: Any, _: Any) -> Any:
            c = call(c * jnp.float32(0.5))
            return c + c * jnp.float32(1e-3), c

        return lax.scan(step, x, None, length=200)[1]

    x = jnp.linspace(1e-38, 1e-30, 64, dtype=jnp.float32)
    peer = jax.jit(lambda x: program(x, lambda c: jax.pure_callback(lambda c: c, c, c)))(x)
    ours = hcb.jit(lambda x: program(x, lambda c: hcb.call(lambda c: c, c, result_shape=c)))(x)
    np.testing.assert_array_equal(np.asarray(peer).view(np.uint32), np.asarray(ours).view(np.uint32))

"""Loops that can be stopped: what they return with and without a request, under every transformation."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import hcb_command
import hostcallback as hcb
from hostcallback.lifecycle import receivers

EVER = 10**9
STEPS = 300
WITHIN_SEC = 20.0


@pytest.fixture(autouse=True)
def _no_request() -> Iterator[None]:
    hcb.clear_stop()
    yield
    hcb.barrier_wait()  # the tap functions of stopped loops may request it again
    hcb.clear_stop()


def scan(f: Any, init: Any, xs: Any = None, **options: Any) -> Any:
    return hcb.scan(f, init, xs, stop=True, progress=False, **options)


def step(c: Any, x: Any) -> tuple[Any, Any]:
    return jnp.sin(c) * 1.5 + x, (c * 2, x > 0)


SCALAR = jax.ShapeDtypeStruct((), np.float32)
XS = jnp.linspace(-1.0, 1.0, STEPS)

# ---- Without a request -----------------------------------------------------------------------------------------------

LOOPS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "scan": (lambda x: scan(step, x, XS), lambda x: lax.scan(step, x, XS)),
    "reverse": (lambda x: scan(step, x, XS, reverse=True), lambda x: lax.scan(step, x, XS, reverse=True)),
    "unrolled": (lambda x: scan(step, x, XS, unroll=4), lambda x: lax.scan(step, x, XS, unroll=4)),
    "fori_loop": (
        lambda x: hcb.fori_loop(5, 5 + STEPS, lambda i, x: jnp.sin(x) + i, x, stop=True, progress=False),
        lambda x: (lax.fori_loop(5, 5 + STEPS, lambda i, x: jnp.sin(x) + i, x),),
    ),
    "fori_loop with traced bounds": (
        lambda x: hcb.fori_loop(
            0, x.astype(int) * 0 + STEPS, lambda i, x: jnp.sin(x) + i, x, stop=True, progress=False
        ),
        lambda x: (lax.fori_loop(0, x.astype(int) * 0 + STEPS, lambda i, x: jnp.sin(x) + i, x),),
    ),
    "while_loop": (
        lambda x: hcb.while_loop(
            lambda s: s[0] < STEPS, lambda s: (s[0] + 1, jnp.sin(s[1])), (0, x), stop=True, progress=False
        ),
        lambda x: (lax.while_loop(lambda s: s[0] < STEPS, lambda s: (s[0] + 1, jnp.sin(s[1])), (0, x)),),
    ),
}


def assert_same_bits(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
        assert jnp.result_type(ours) == jnp.result_type(theirs)


TRANSFORMS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "eager": (lambda f: f, np.float32(0.5)),
    "jit": (jax.jit, np.float32(0.5)),
    "vmap": (lambda f: jax.jit(jax.vmap(f)), np.linspace(0.1, 0.9, 3, dtype=np.float32)),
}


@pytest.mark.slow_variants(every=4)
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("loop", LOOPS)
def test_without_a_request_a_loop_has_the_bits_of_jax_and_counts_all_its_steps(
    loop: str, transform: str
) -> None:
    ours, theirs = LOOPS[loop]
    transformed, x = TRANSFORMS[transform]
    *found, count = transformed(ours)(jnp.asarray(x))
    assert_same_bits(tuple(found), tuple(transformed(theirs)(jnp.asarray(x))))
    assert (np.asarray(count) == STEPS).all()


@pytest.mark.parametrize("derive", [jax.grad, jax.jacfwd, lambda f: jax.grad(jax.checkpoint(f))])
def test_without_a_request_derivatives_have_the_bits_of_jax(derive: Any) -> None:
    def loss(loop: Any) -> Any:
        return lambda x: jnp.sum(loop(lambda c, x: (jnp.sin(c) + 0.1 * x, c * 2), x, XS[:20])[1])

    for x in (0.3, 0.7):
        assert_same_bits(jax.jit(derive(loss(scan)))(x), jax.jit(derive(loss(lax.scan)))(x))


# ---- With a request --------------------------------------------------------------------------------------------------


def request_at(number: int) -> Callable[[Any], Any]:
    """A function of the step's number that makes the request in that step, before the step ends.

    It takes longer than the time between two looks, so that the loop looks after each step.
    """

    def host(i: Any) -> Any:
        threading.Event().wait(0.0025)
        if i == number:
            hcb.request_stop("the test")
        return np.float32(0)

    return lambda i: hcb.call(host, i, result_shape=SCALAR, vmap_method="sequential")


def requested_scan(x: Any, length: int = STEPS, at: int = 20, **options: Any) -> Any:
    ask = request_at(at)

    def body(c: Any, i: Any) -> tuple[Any, Any]:
        return jnp.sin(c) * 1.1 + 0.01 * i + ask(i), c + 1

    return scan(body, x, jnp.arange(length), **options)


def plain(x: Any, count: int) -> Any:
    return lax.scan(lambda c, i: (jnp.sin(c) * 1.1 + 0.01 * i, c + 1), x, jnp.arange(count))


@pytest.mark.parametrize("unroll", [1, 2])
def test_the_carry_is_that_of_the_last_step_that_ran_and_the_other_outputs_are_zeros(unroll: int) -> None:
    carry, ys, count = jax.jit(lambda x: requested_scan(x, unroll=unroll))(0.5)
    assert 21 <= count <= 22  # at most two steps from the request on
    expected = jax.jit(plain, static_argnums=1)(0.5, int(count))
    np.testing.assert_allclose(carry, expected[0], rtol=1e-6)
    np.testing.assert_allclose(ys[:count], expected[1], rtol=1e-6)
    assert (np.asarray(ys[count:]) == 0).all()


def test_outputs_of_a_stopped_reverse_scan_are_at_the_end() -> None:
    ask = request_at(STEPS - 20)
    _, ys, count = jax.jit(
        lambda: scan(lambda c, i: (c + ask(i), i + 1), jnp.float32(0), jnp.arange(STEPS), reverse=True)
    )()
    assert 20 <= count <= 22
    expected = np.where(np.arange(STEPS) >= STEPS - count, np.arange(STEPS) + 1, 0)
    np.testing.assert_array_equal(ys, expected)


@pytest.mark.parametrize("loop", ["fori_loop", "scan", "while_loop"])
def test_a_request_during_a_step_without_effects_ends_the_loop_after_it(loop: str) -> None:
    # Nothing but the values orders such a step and the read of the request.
    def asks(x: Any) -> Any:
        hcb.request_stop("asked by a step")
        return np.asarray(x) + 1

    def body(x: Any) -> Any:
        return jax.pure_callback(asks, SCALAR, x)

    loops: dict[str, Callable[[Any], Any]] = {
        "fori_loop": lambda x: hcb.fori_loop(0, STEPS, lambda i, x: body(x), x, stop=True, progress=False),
        "scan": lambda x: scan(lambda x, _: (body(x), x), x, XS)[::2],
        "while_loop": lambda x: hcb.while_loop(lambda x: x < STEPS, body, x, stop=True, progress=False),
    }
    value, count = jax.jit(loops[loop])(jnp.float32(0))
    assert (float(value), int(count)) == (1, 1)


def test_a_billion_steps_end_at_once() -> None:
    def body(_: Any, state: Any) -> Any:
        number, x = state
        return number + 1, jnp.sin(x)  # a sum alone is no loop for some compilers

    start = (0, jnp.float32(1))
    run = jax.jit(lambda n: hcb.fori_loop(0, n, body, start, stop=True, progress=False))
    run(10)
    timer = threading.Timer(0.2, hcb.request_stop, ["the test"])
    timer.start()
    (value, _), count = run(EVER)
    asked = time.monotonic()
    assert 0 < value == count < EVER
    assert hcb.stop_requested() is True
    (value, _), count = run(EVER)  # until the request is cleared
    assert value == count == 0
    assert time.monotonic() - asked < WITHIN_SEC
    timer.join()
    hcb.clear_stop()
    assert hcb.stop_requested() is False
    (value, _), count = run(10)
    assert value == count == 10


def test_a_loop_of_ones_own_reads_the_request_in_its_condition() -> None:
    run = jax.jit(lambda: lax.while_loop(lambda i: (i < EVER) & ~hcb.stop_requested(), lambda i: i + 1, 0))
    hcb.request_stop("to compile it")
    assert run() == 0
    hcb.clear_stop()
    timer = threading.Timer(0.2, hcb.request_stop, ["the test"])
    timer.start()
    assert 0 < run() < EVER
    timer.join()


def test_a_stopped_loop_has_the_gradient_of_the_steps_that_ran() -> None:
    def loss(x: Any) -> Any:
        carry, ys, count = requested_scan(x)
        return carry + jnp.sum(ys * (jnp.arange(STEPS) < count)), count

    found, count = jax.jit(jax.grad(loss, has_aux=True))(0.5)
    assert 21 <= count <= 22

    def expected(x: Any) -> Any:
        carry, ys = plain(x, int(count))
        return carry + jnp.sum(ys)

    np.testing.assert_allclose(found, jax.jit(jax.grad(expected))(0.5), rtol=1e-5)


@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.dots_saveable], ids=["none", "dots"])
@pytest.mark.parametrize("progress", [False, "bar"])
def test_a_checkpoint_recomputes_the_steps_that_ran(policy: Any, progress: Any) -> None:
    def loss(w: Any) -> Any:
        def step(c: Any, i: Any) -> Any:
            hcb.id_tap(lambda n: n > 30 and hcb.request_stop("enough"), c[0], tap_tangents=False)
            return (c[0] + 1, c[1] + w), None

        carry, _, count = hcb.scan(step, (0, 0.0), jnp.arange(200_000), stop=True, progress=progress)
        return carry[1], count

    run = jax.jit(jax.value_and_grad(jax.checkpoint(loss, policy=policy), has_aux=True))
    (value, count), gradient = run(1.0)
    assert 30 < count < 200_000
    assert value == gradient == count


def test_all_elements_of_a_vmap_stop_together_and_keep_their_own_ends() -> None:
    def run(last: Any) -> Any:
        ask = request_at(20)
        body = lambda i, x: x + 1 + ask(i).astype(int)  # noqa: E731
        return hcb.fori_loop(0, last, body, 0, stop=True, progress=False)

    value, count = jax.jit(jax.vmap(run))(jnp.array([5, STEPS, 2 * STEPS]))
    assert count[0] == 5
    assert 21 <= count[1] == count[2] <= 22
    np.testing.assert_array_equal(value, count)


def test_an_inner_loop_is_stopped_and_the_outer_one_too() -> None:
    def outer(c: Any, i: Any) -> tuple[Any, Any]:
        ask = request_at(20)
        c, _, count = scan(lambda c, j: (c + 1 + ask(10 * i + j), None), c, jnp.arange(10))
        return c, count

    total, counts, count = jax.jit(lambda: scan(outer, jnp.float32(0), jnp.arange(50)))()
    assert count == 3
    np.testing.assert_array_equal(counts[:2], 10)
    assert 1 <= counts[2] <= 2
    assert not counts[3:].any()
    assert total == counts.sum()


@pytest.mark.slow_variants
@pytest.mark.parametrize("exchanges", [False, True])
def test_devices_of_a_shard_map_stop_after_the_same_step(exchanges: bool) -> None:
    mesh = Mesh(np.array(jax.devices()[:4]), ("i",))

    def each(x: Any) -> Any:
        def body(i: Any, x: Any) -> Any:
            return x + 1 + (0 * lax.psum(x, "i") if exchanges else 0)

        value, count = hcb.fori_loop(0, EVER, body, x, stop=True, progress=False)
        return value, jnp.reshape(count, (1,))

    run = jax.jit(jax.shard_map(each, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False))
    hcb.request_stop("to compile it")
    np.testing.assert_array_equal(run(jnp.zeros(4, int)), np.zeros((2, 4)))
    for _ in range(3):
        hcb.clear_stop()
        timer = threading.Timer(0.3, hcb.request_stop, ["the test"])
        timer.start()
        value, counts = run(jnp.zeros(4, int))
        timer.join()
        assert counts[0] > 0
        np.testing.assert_array_equal(counts, np.full(4, counts[0]))
        np.testing.assert_array_equal(value, counts)


def test_devices_that_the_compiler_partitions_for_stop_after_the_same_step() -> None:
    if jax.__version_info__ < (0, 9) and not receivers.use_native("cpu"):
        pytest.skip("XLA of JAX 0.8 refuses the callback that reads the request")
    mesh = Mesh(np.array(jax.devices()[:4]), ("i",))

    @jax.jit
    def run(x: Any) -> Any:
        return hcb.fori_loop(0, EVER, lambda i, x: x + 1, x, stop=True, progress=False)

    x = jax.device_put(jnp.zeros(8, int), NamedSharding(mesh, P("i")))
    hcb.request_stop("to compile it")
    assert run(x)[1] == 0
    hcb.clear_stop()
    timer = threading.Timer(0.5, hcb.request_stop, ["the test"])
    timer.start()
    value, count = run(x)
    timer.join()
    assert count > 0
    np.testing.assert_array_equal(value, np.full(8, count))


@pytest.mark.parametrize("divided", [False, True], ids=["shard_map", "by the compiler"])
@pytest.mark.parametrize("loop", ["fori_loop", "scan", "while_loop"])
def test_a_loop_with_a_bar_on_several_devices_can_be_stopped(loop: str, divided: bool) -> None:
    if divided and jax.__version_info__ < (0, 9) and not receivers.use_native("cpu"):
        pytest.skip("XLA of JAX 0.8 refuses the callback that reads the request")
    mesh = Mesh(np.array(jax.devices()[:4]), ("i",))

    def each(x: Any) -> Any:
        if loop == "fori_loop":
            return hcb.fori_loop(0, 3, lambda i, x: x + 1, x, stop=True)[0]
        if loop == "scan":
            return hcb.scan(lambda x, y: (x + y, None), x, jnp.ones(3), stop=True)[0]
        return hcb.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] + 1), (0, x), stop=True)[0][1]

    x = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P("i")))
    run = each if divided else jax.shard_map(each, mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    np.testing.assert_array_equal(jax.jit(run)(x), np.arange(8.0) + 3)
    derived = jax.jit(jax.grad(lambda x: jnp.sum(run(x) ** 2)))
    if loop == "scan":
        np.testing.assert_array_equal(derived(x), 2 * (np.arange(8.0) + 3))
    hcb.request_stop("before it begins")
    np.testing.assert_array_equal(jax.jit(run)(x), np.arange(8.0))


# ---- Who asks --------------------------------------------------------------------------------------------------------


def test_a_tap_function_stops_the_loop() -> None:
    def body(i: Any, x: Any) -> Any:
        hcb.id_tap(lambda i: i >= 20 and hcb.request_stop("far enough"), i)
        return x + 1

    value, count = jax.jit(lambda: hcb.fori_loop(0, EVER, body, 0, stop=True, progress=False))()
    assert 20 <= value == count < EVER


def test_a_failed_check_stops_the_loop_and_is_raised_by_the_receiver(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def body(i: Any, x: Any) -> Any:
        hcb.check(x < 20, "x is {}", x)
        return x + 1

    run = jax.jit(lambda: hcb.fori_loop(0, EVER, body, 0, stop=True, progress=False))
    with pytest.raises(hcb.TapFunctionException) as raised, hcb.outfeed_receiver(on_error="stop"):
        value, count = run()
    assert 20 <= value == count < EVER
    assert isinstance(raised.value.exceptions[0], hcb.CheckError)
    said = capfd.readouterr().err
    assert "stop requested (check failed: x is 20, at " in said
    assert said.count("stop requested") == 1


@pytest.mark.slow
@pytest.mark.parametrize("after_sec", [0.0, 0.1, 0.4])
def test_a_signal_handler_asks_before_anything_is_loaded(after_sec: float) -> None:
    program = f"""
import os, signal, threading, time
import hostcallback as hcb
signal.signal(signal.SIGUSR1, lambda *_: hcb.request_stop("a signal"))
timer = threading.Timer({after_sec}, os.kill, (os.getpid(), signal.SIGUSR1))
timer.start()
import jax
hcb.tap
timer.join()
time.sleep(0.1)
print(hcb.fori_loop(0, 100, lambda i, x: x + 1, 0, stop=True, progress=False)[1], hcb.stop_requested())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "0 True\n"
    assert done.stderr.count("stop requested (a signal)") == 1


def test_a_reason_is_a_text() -> None:
    with pytest.raises(TypeError, match="the reason of a stop is a text"):
        hcb.request_stop(3)  # type: ignore[arg-type]


def test_a_stopped_bar_ends_at_the_last_step_that_ran_and_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tqdm")
    ask = request_at(20)
    with hcb.outfeed_receiver(record=tmp_path):
        value, count = jax.jit(
            lambda: hcb.fori_loop(0, STEPS, lambda i, x: x + 1 + ask(i), 0.0, stop=True, progress="bar")
        )()
    assert 21 <= value == count <= 22
    assert re.search(rf"{count}/{STEPS} .*stopped\]", capfd.readouterr().err)
    assert f"bar: {count}/{STEPS} (stopped)" in hcb_command.hcb(tmp_path, "cat", ".").stdout
    hcb.clear_stop()
    hcb.fori_loop(0, 3, lambda i, x: x + 1, 0, stop=True, progress="bar")
    hcb.barrier_wait()
    assert "stopped" not in capfd.readouterr().err

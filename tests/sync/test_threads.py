"""Several Python threads dispatch to one device: nothing is lost or mixed, and everything is waited for."""

from __future__ import annotations

import textwrap
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import hostcallback as hcb
from python_process import python_output
from recorder import Recorder
from threads import in_threads
from transforming import COTANGENT, PRIMAL, Jit, no_jit

THREADS = 4
CALLS = 100
SIDE = 64  # large enough for XLA to run the programs on its own threads


def numbers_of(rec: Recorder, thread: int) -> list[int]:
    """The second number of each message whose first is `thread`."""
    return [int(value[1]) for value in rec.values if int(value[0]) == thread]


def test_four_threads_with_one_program(jit: Jit, rec: Recorder) -> None:
    f = jit(lambda t, i, x: hcb.id_tap(rec, (t, i, (x @ x).sum()))[2])
    x = jnp.ones((SIDE, SIDE))

    def work(thread: int) -> None:
        for i in range(CALLS):
            f(thread, i, x * thread)

    in_threads(work, THREADS)
    hcb.barrier_wait()
    assert len(rec) == THREADS * CALLS
    for thread in range(THREADS):
        assert numbers_of(rec, thread) == list(range(CALLS))
    # No message holds an array of another's.
    assert all(float(total) == SIDE**3 * int(thread) ** 2 for thread, _, total in rec.values)


def test_four_threads_with_a_program_each(jit: Jit) -> None:
    recorders = [Recorder() for _ in range(THREADS)]

    def work(thread: int) -> None:
        rec = recorders[thread]

        def f(x: Any) -> Any:
            return lax.scan(lambda c, i: (hcb.id_tap(rec, c + i), None), x, jnp.arange(10))[0]

        program = jit(f)  # traced and compiled at the same time as the others
        for i in range(10):
            program(100 * i)

    in_threads(work, THREADS)
    hcb.barrier_wait()
    expected = [100 * i + k * (k + 1) // 2 for i in range(10) for k in range(10)]
    assert [[int(v) for v in rec.values] for rec in recorders] == [expected] * THREADS


def test_four_threads_that_differentiate(jit: Jit, rec: Recorder) -> None:
    f = jit(jax.grad(lambda x, t: hcb.id_tap(rec, (t, x))[1] ** 2))
    calls = CALLS if jit is not no_jit else CALLS // 5

    def work(thread: int) -> None:
        for i in range(calls):
            f(float(i), thread)

    in_threads(work, THREADS)
    hcb.barrier_wait()
    primals = [
        value for transforms, value in zip(rec.transforms, rec.values, strict=True) if transforms == PRIMAL
    ]
    cotangents = [
        v for transforms, v in zip(rec.transforms, rec.values, strict=True) if transforms == COTANGENT
    ]
    for thread in range(THREADS):
        assert [int(x) for t, x in primals if t == thread] == list(range(calls))
    assert sorted(float(g) for _, g in cotangents) == sorted([2.0 * i for i in range(calls)] * THREADS)


@pytest.mark.parametrize("where", ["one device", "a device each"])
def test_the_end_of_a_receiver_waits_for_programs_other_threads_dispatched(where: str, rec: Recorder) -> None:
    def f(t: Any, i: Any, x: Any) -> Any:
        x = lax.fori_loop(0, 100, lambda _, c: c @ c * 1e-3, x)
        return hcb.id_tap(rec, (t, i, x[0, 0]))[2]

    program = jax.jit(f)
    x = jnp.ones((SIDE, SIDE)) * 1e-2
    devices = jax.devices() if where == "a device each" else [jax.devices()[0]] * THREADS

    def work(thread: int) -> None:
        arguments = jax.device_put((thread, jnp.arange(20), x), devices[thread])
        for i in range(20):
            program(arguments[0], arguments[1][i], arguments[2])

    with hcb.outfeed_receiver() as receiver:
        in_threads(work, THREADS)
    assert [numbers_of(rec, thread) for thread in range(THREADS)] == [list(range(20))] * THREADS
    assert sum(device.delivered for device in receiver.stats) == THREADS * 20
    assert sum(device.dropped + device.failed + device.unknown for device in receiver.stats) == 0


def test_threads_that_wait_while_others_dispatch(rec: Recorder) -> None:
    program = jax.jit(lambda t, i, x: hcb.id_tap(rec, (t, i, (x @ x).sum()))[2])
    x = jnp.ones((SIDE, SIDE))
    too_few: list[tuple[int, int]] = []

    def work(thread: int) -> None:
        for i in range(20):
            program(thread, i, x)
            hcb.barrier_wait()
            if len(numbers_of(rec, thread)) < i + 1:
                too_few.append((thread, i))

    in_threads(work, THREADS)
    assert not too_few
    assert len(rec) == THREADS * 20


def test_a_daemon_thread_that_runs_programs_is_held_when_the_process_ends() -> None:
    program = """
    import atexit, threading

    def tell():  # runs after the exit handlers of hostcallback
        before = len(calls)
        threading.Event().wait(0.1)
        print(before > 9, len(calls) - before)

    atexit.register(tell)
    import jax
    import hostcallback as hcb

    calls, begun = [], threading.Event()
    count = jax.jit(lambda x: hcb.id_tap(lambda value: None, x + 1))

    def work():
        x = 0.0
        while True:
            x = count(x)
            calls.append(None)
            if len(calls) == 10:
                begun.set()

    threading.Thread(target=work, daemon=True).start()
    begun.wait()
    """
    assert python_output("-c", textwrap.dedent(program)) == "True 0\n"

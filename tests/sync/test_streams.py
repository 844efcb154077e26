"""A barrier waits for the programs of known threads without a fence; for an unknown thread it makes one."""

from __future__ import annotations

import _thread
import ctypes
import itertools
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import hostcallback as hcb
from hostcallback._jax_compat import sync
from hostcallback.receiver.native import bindings as native_library
from hostcallback.sync import fence, inflight, threads
from hostcallback.sync.threads import DispatchingThreads
from python_process import run_python
from recorder import Recorder
from threads import in_another_thread

if not native_library.available():
    pytest.skip("without the native library there are no fences to do without", allow_module_level=True)


@pytest.fixture(autouse=True)
def runners_thread_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    # pytest-xdist starts a thread below `threading`, which only `_current_frames` shows. It dispatches no program.
    processor_ns = threads._processor_ns

    def known(thread: threading.Thread | None) -> int | None:
        return 0 if thread is None else processor_ns(thread)

    monkeypatch.setattr(threads, "_processor_ns", known)


@pytest.fixture
def fences(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The devices of each fence that is made."""
    made: list[Any] = []
    wait = fence.fence.wait

    def note(devices: Any, look: Any) -> bool:
        made.append(devices)
        return wait(devices, look)

    monkeypatch.setattr(fence.fence, "wait", note)
    return made


@pytest.fixture
def worker() -> Iterator[Callable[[Callable[[], Any]], None]]:
    """Calls functions on a thread that goes on."""
    jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
    done: queue.SimpleQueue[None] = queue.SimpleQueue()

    def run() -> None:
        for job in iter(jobs.get, None):
            job()
            done.put(None)

    thread = threading.Thread(target=run)
    thread.start()

    def call(job: Callable[[], Any]) -> None:
        jobs.put(job)
        done.get(timeout=60)

    yield call
    jobs.put(None)
    thread.join()


def slow(x: Any, steps: int = 300) -> Any:
    return lax.fori_loop(0, steps, lambda i, c: c @ c * 1e-3, x)


def settle() -> None:
    """Has barriers know all threads that are."""
    for _ in range(3):
        hcb.barrier_wait()


@pytest.mark.native_only  # Python callbacks run on XLA's threads, which start and end
@pytest.mark.parametrize("device", [0, 1])
def test_the_calling_threads_dropped_results_need_no_fence(
    fences: list[Any], worker: Any, device: int, rec: Recorder
) -> None:
    f = jax.jit(lambda x: hcb.id_tap(rec, slow(x)[0, 0]))
    x = jax.device_put(jnp.ones((128, 128)) * 1e-2, jax.devices()[device])
    f(x)
    worker(lambda: f(x))  # a thread that is there, and does nothing from then on
    settle()
    before = len(rec)
    fences.clear()
    for _ in range(3):
        f(x)
    hcb.barrier_wait()
    assert len(rec) == before + 3
    assert not fences


@pytest.mark.parametrize("thread", ["another", "ended since"])
def test_another_threads_dropped_results_need_a_fence(
    fences: list[Any], worker: Any, thread: str, rec: Recorder
) -> None:
    f = jax.jit(lambda x: hcb.id_tap(rec, slow(x)[0, 0]))
    x = jnp.ones((128, 128)) * 1e-2
    f(x)
    go = threading.Event()
    short = threading.Thread(target=lambda: [go.wait(60), *(f(x) for _ in range(3))].clear())
    short.start()
    settle()
    fences.clear()
    if thread == "another":
        worker(lambda: [f(x) for _ in range(3)] and None)
    go.set()
    short.join()
    hcb.barrier_wait()
    assert len(rec) == 1 + (6 if thread == "another" else 3)
    assert len(fences) == 1


@pytest.mark.native_only
def test_a_tap_functions_dropped_results_need_no_fence(fences: list[Any], rec: Recorder) -> None:
    x = jnp.ones((128, 128)) * 1e-2
    inner = jax.jit(lambda x: hcb.id_tap(rec, slow(x)[0, 0]))
    inner(x)
    dispatched = threading.Event()

    def tap(value: Any) -> None:
        inner(x)
        dispatched.set()

    outer = jax.jit(lambda x: hcb.id_tap(tap, x))
    outer(1.0)
    settle()
    before = len(rec)
    fences.clear()
    dispatched.clear()
    outer(1.0)
    assert dispatched.wait(60)
    hcb.barrier_wait()
    assert len(rec) == before + 1
    assert not fences


@pytest.mark.native_only
@pytest.mark.parametrize("program", ["shard_map", "sharded by the compiler"])
def test_dropped_results_of_a_program_for_several_devices_need_no_fence(
    fences: list[Any], program: str, rec: Recorder
) -> None:
    count = jax.device_count()
    mesh = Mesh(np.array(jax.devices()), ("i",))
    x = jax.device_put(jnp.ones((count, 64, 64)) * 1e-2, NamedSharding(mesh, P("i")))

    def body(x: Any) -> Any:
        return hcb.id_tap(rec, jax.vmap(slow)(x)[:, 0, 0])

    if program == "shard_map":
        f = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False))
    else:
        f = jax.jit(body)
    f(x)
    settle()
    before = len(rec)
    fences.clear()
    for _ in range(2):
        f(x)
    hcb.barrier_wait()
    assert len(rec) == 3 * before
    assert not fences


def test_a_thread_that_started_and_ended_unseen_needs_a_fence(fences: list[Any], rec: Recorder) -> None:
    f = jax.jit(lambda x: hcb.id_tap(rec, slow(x)[0, 0]))
    x = jnp.ones((128, 128)) * 1e-2
    f(x)
    settle()
    fences.clear()
    in_another_thread(lambda: [f(x) for _ in range(3)] and None)
    hcb.barrier_wait()
    assert len(rec) == 1 + 3
    assert len(fences) == 1
    counts = [len(fences)]
    for _ in range(3):  # a thread of the test runner or of JAX may run before one of them
        hcb.barrier_wait()
        counts.append(len(fences))
    assert any(before == after for before, after in itertools.pairwise(counts)), "later barriers need none"


def test_a_thread_whose_state_is_older_than_its_code_hides_no_other(fences: list[Any], rec: Recorder) -> None:
    # A new thread has a number before it runs anything, and may first be seen when another one has come and gone.
    f = jax.jit(lambda x: hcb.id_tap(rec, slow(x)[0, 0]))
    x = jnp.ones((128, 128)) * 1e-2
    f(x)
    hcb.barrier_wait()
    for n in range(10):
        go, runs = threading.Event(), threading.Event()
        _thread.start_new_thread(lambda go=go, runs=runs: (runs.set(), go.wait(60)), ())
        hcb.barrier_wait()
        assert runs.wait(60)
        short = threading.Thread(target=lambda: (f(x), None)[1])
        short.start()
        short.join()
        hcb.barrier_wait()
        assert len(rec) == n + 2
        go.set()


def test_a_jax_with_other_streams_needs_a_fence(
    fences: list[Any], monkeypatch: pytest.MonkeyPatch, rec: Recorder
) -> None:
    f = jax.jit(lambda x: hcb.id_tap(rec, slow(x)[0, 0]))
    x = jnp.ones((128, 128)) * 1e-2
    f(x)
    settle()
    monkeypatch.setattr(sync, "_hash_of_thread", lambda ident: ident)
    monkeypatch.setattr(inflight._Trials, "known", False)
    monkeypatch.setattr(inflight._Trials, "ended", 0)
    fences.clear()
    for _ in range(3):
        f(x)
    hcb.barrier_wait()
    assert len(rec) == 1 + 3
    assert len(fences) == 1


@pytest.mark.native_only  # computations with Python callbacks are over when their calls return
def test_barriers_that_give_up_leave_slots_to_programs_of_tap_functions() -> None:
    seen: list[Any] = []

    def tap(x: Any) -> None:
        jnp.sum(jnp.ones((64, 64)) @ jnp.ones((64, 64))).block_until_ready()
        seen.append(x[0])

    # First it runs for a while, in which barriers give up; then it fills the queue, and waits for tap functions.
    f = jax.jit(
        lambda x, s: lax.scan(
            lambda c, _: (hcb.id_tap(tap, c), None), x + slow(s, 3000)[0, 0] * 0, None, length=200
        )[0]
    )
    x, s = jnp.ones(200_000), jnp.ones((128, 128)) * 1e-2
    f(x, s)
    settle()
    before = len(seen)
    discarded: list[Exception] = []

    def poll() -> None:
        deadline = time.monotonic() + 60
        f(x, s)
        while time.monotonic() < deadline:
            try:
                hcb.barrier_wait(timeout_sec=0.002)
                return
            except hcb.TapTimeoutError as error:
                discarded.append(error)

    # On a separate thread: until JAX 0.9, a callback that raised leaves behind a thread that runs programs inline.
    polling = threading.Thread(target=poll)
    polling.start()
    polling.join()
    assert discarded
    assert len(seen) == before + 200


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_client_that_dispatches_synchronously(when: str) -> None:
    """Its programs for several devices run on other threads all the same."""
    result = run_python("-c", SYNCHRONOUS, when, timeout_sec=90)
    assert result.stderr == ""
    assert result.stdout == "10 40\n"


SYNCHRONOUS = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import hostcallback as hcb

if sys.argv[1] == "before":
    jax.config.update("jax_cpu_enable_async_dispatch", False)
jnp.ones(1) + 1
if sys.argv[1] == "after":
    jax.config.update("jax_cpu_enable_async_dispatch", False)
seen = []
def one(x):
    return hcb.id_tap(seen.append, lax.fori_loop(0, 500, lambda i, c: c @ c * 1e-3, x)[0, 0])
f = jax.jit(one)
x = jnp.ones((64, 64)) * 1e-2
early = 0
for n in range(10):
    f(x)
    hcb.barrier_wait()
    early += len(seen) - n - 1
print(len(seen) + early, end=" ")
seen.clear()
mesh = Mesh(np.array(jax.devices()[:2]), ("i",))
g = jax.jit(jax.shard_map(lambda x: one(x[0])[None], mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False))
y = jax.device_put(jnp.ones((2, 64, 64)) * 1e-2, NamedSharding(mesh, P("i")))
for n in range(10):
    g(y)
    g(y)
    hcb.barrier_wait()
    early += len(seen) - 4 * (n + 1)
print(len(seen) + early)
"""


def test_a_signal_handler_that_interrupts_a_barrier_is_told_so() -> None:
    f = jax.jit(lambda x: hcb.id_tap(lambda v: None, x))
    f(1.0)
    hcb.barrier_wait()
    refused: list[Exception] = []

    def handler(*_: Any) -> None:
        try:
            hcb.barrier_wait()
        except hcb.ReentrantWaitError as error:
            refused.append(error)

    before = signal.signal(signal.SIGALRM, handler)
    try:
        deadline = time.monotonic() + 60
        while not refused and time.monotonic() < deadline:
            signal.setitimer(signal.ITIMER_REAL, 1e-4)
            hcb.barrier_wait()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert "set a flag in the handler" in str(refused[0])


def test_threads_are_distinguished() -> None:
    threads = DispatchingThreads()
    here = threading.get_ident()

    def waited() -> frozenset[int] | None:
        census = threads.count()
        threads.waited(census)
        return census.suspects

    def settled() -> frozenset[int]:
        """Of the first wait in which no other thread has run: those of pytest and of receivers may, now and then."""
        deadline = time.monotonic() + 60
        while (suspects := waited()) is None:
            assert time.monotonic() < deadline
        return suspects

    settled()
    go, runs = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: (runs.set(), go.wait(60)))
    thread.start()
    assert runs.wait(60)
    assert waited() is None  # a new one
    settled()  # it sleeps
    go.set()
    thread.join()
    assert waited() is None  # it has run, and ended
    assert here in settled()
    in_another_thread(lambda: None)
    assert waited() is None
    assert here in settled()


def test_no_more_than_the_given_number_of_thread_states_is_written() -> None:
    guard = 0xDEADBEEF
    ids, made = (ctypes.c_uint64 * 3)(guard, guard, guard), ctypes.c_uint64()
    ends = threading.Event()
    waiting = [threading.Thread(target=ends.wait) for _ in range(4)]
    for thread in waiting:
        thread.start()
    count = native_library.load_holding_lock().hcb_thread_states(ids, 2, made)
    ends.set()
    for thread in waiting:
        thread.join()
    assert count >= 5
    assert guard not in ids[:2]
    assert ids[2] == guard


class _Unfinished:
    def is_ready(self) -> bool:
        return False


def test_sentinels_take_a_part_of_a_devices_places_only(monkeypatch: pytest.MonkeyPatch) -> None:
    # XLA runs 32 programs of a device at a time: with all of them taken, tap functions could dispatch nothing.
    asked: list[Any] = []

    def program(devices: Any) -> tuple[Callable[[Any], Any], Any]:
        return (lambda _: asked.append(devices) or _Unfinished()), None

    monkeypatch.setattr(inflight, "sentinel_program", program)
    monkeypatch.setattr(inflight, "_pending", {})
    sentinels = inflight.Sentinels([], [], several=False)
    started = [sentinels._dispatch((None, (device,))) for device in [*jax.devices(), *range(2)]]  # type: ignore[arg-type]
    assert len(jax.devices()) == 4
    assert started == [True] * 4 + [False] * 2
    assert len(asked) == 4

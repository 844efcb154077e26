"""A barrier waits behind what known threads dispatched, without a fence; and makes one where a thread is unknown."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import hostcallback as hcb
from hostcallback import _jax_compat as compat
from hostcallback.sync import fence, streams
from hostcallback.sync.dispatching_threads import DispatchingThreads
from receiver.native import bindings as native_library
from recorder import Recorder

if not native_library.available():
    pytest.skip("without the native library there are no fences to do without", allow_module_level=True)


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


@pytest.mark.parametrize("thread", ["own", "another", "ended since"])
@pytest.mark.parametrize("device", [0, 1])
def test_dropped_results_of_a_known_thread_need_no_fence(
    fences: list[Any], worker: Any, thread: str, device: int
) -> None:
    rec = Recorder()
    f = jax.jit(lambda x: hcb.id_tap(rec, slow(x)[0, 0]))
    x = jax.device_put(jnp.ones((128, 128)) * 1e-2, jax.devices()[device])
    f(x)
    settle()
    fences.clear()

    def dispatch() -> None:
        for _ in range(3):
            f(x)

    if thread == "own":
        dispatch()
    elif thread == "another":
        worker(dispatch)
    else:
        go, dispatched = threading.Event(), threading.Event()
        short = threading.Thread(target=lambda: (go.wait(60), dispatch(), dispatched.set()))
        short.start()
        settle()  # has seen it
        fences.clear()
        go.set()
        short.join()
    hcb.barrier_wait()
    assert len(rec) == 1 + 3
    assert not fences


@pytest.mark.parametrize("program", ["shard_map", "sharded by the compiler"])
def test_dropped_results_of_a_program_for_several_devices_need_no_fence(
    fences: list[Any], worker: Any, program: str
) -> None:
    rec = Recorder()
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
    worker(lambda: [f(x) for _ in range(2)] and None)
    hcb.barrier_wait()
    assert len(rec) == 3 * before
    assert not fences


def test_a_thread_that_came_and_went_unseen_needs_a_fence(fences: list[Any]) -> None:
    rec = Recorder()
    f = jax.jit(lambda x: hcb.id_tap(rec, slow(x)[0, 0]))
    x = jnp.ones((128, 128)) * 1e-2
    f(x)
    settle()
    fences.clear()
    thread = threading.Thread(target=lambda: [f(x) for _ in range(3)] and None)
    thread.start()
    thread.join()
    hcb.barrier_wait()
    assert len(rec) == 1 + 3
    assert len(fences) == 1
    hcb.barrier_wait()
    assert len(fences) == 1


def test_a_jax_whose_streams_are_others_needs_a_fence(
    fences: list[Any], worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rec = Recorder()
    f = jax.jit(lambda x: hcb.id_tap(rec, slow(x)[0, 0]))
    x = jnp.ones((128, 128)) * 1e-2
    f(x)
    settle()
    monkeypatch.setattr(compat, "_hash_of_thread", lambda ident: ident)
    monkeypatch.setattr(streams, "_known", False)
    monkeypatch.setattr(streams, "_trials", 0)
    fences.clear()
    worker(lambda: [f(x) for _ in range(3)] and None)
    hcb.barrier_wait()
    assert len(rec) == 1 + 3
    assert len(fences) == 1


def test_threads_are_told_apart() -> None:
    threads = DispatchingThreads()
    assert threads.count().suspects == frozenset(threads.count().alive)
    go = threading.Event()
    alive = threading.Thread(target=go.wait)
    alive.start()
    seen = threads.count()
    assert seen.suspects is not None
    assert alive.ident in seen.suspects
    go.set()
    alive.join()
    ended = threads.count()
    assert ended.suspects is not None
    assert alive.ident in ended.suspects - ended.alive
    threads.waited(ended)
    assert alive.ident not in (threads.count().suspects or ())
    unseen = threading.Thread(target=lambda: None)
    unseen.start()
    unseen.join()
    unknown = threads.count()
    assert unknown.suspects is None
    threads.waited(unknown)
    assert threads.count().suspects is not None

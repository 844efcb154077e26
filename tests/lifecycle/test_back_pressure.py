"""A device that emits faster than its taps consume: waiting, dropped messages, and reports."""

from __future__ import annotations

import subprocess
import textwrap
import threading
from typing import Any

import pytest

import hostcallback as hcb
from python_process import run_python


def run(body: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a program with queues of the given sizes, which are fixed once a process has made them."""
    prelude = """
    import os, sys, threading, time, logging
    import jax, jax.numpy as jnp
    from jax import lax
    import hostcallback as hcb
    seen = []
    gate = threading.Event()
    def tap(v):
        gate.wait()
        seen.append(int(v))
    def scan(n):
        return hcb.jit(lambda x: lax.scan(
            lambda c, i: (c + hcb.id_tap(tap, i) * 0, None), x, jnp.arange(n))[0])
    """
    return run_python("-c", textwrap.dedent(prelude) + textwrap.dedent(body), timeout_sec=90, **env)


def run_with_small_queues(body: str) -> subprocess.CompletedProcess[str]:
    result = run(body, HOSTCALLBACK_RING_BYTES="16384", HOSTCALLBACK_BLOCK_BUDGET_BYTES="1000000")
    assert result.returncode == 0, result.stderr
    return result


@pytest.mark.native_only
def test_the_device_waits_when_the_ring_is_full_and_nothing_is_lost() -> None:
    result = run_with_small_queues(
        """
        f = scan(5000)
        from hostcallback.receiver.runtime.runtime import runtime
        def open_gate():
            source = runtime.receivers(["cpu:0"])[0].source
            while not source.counters().waiting_producers: pass
            print("waits with", len(seen))
            gate.set()
        with hcb.outfeed_receiver() as rx:
            # JAX may run the program on the calling thread, which then waits too: another one opens the gate.
            threading.Thread(target=open_gate).start()
            f(0)
        print(len(seen), seen == list(range(5000)))
        print("dropped", sum(s.dropped for s in rx.stats))
        """
    )
    assert result.stdout.splitlines()[:2] == ["waits with 0", "5000 True"]
    assert "dropped 0" in result.stdout


@pytest.mark.native_only
def test_a_receiver_gives_up_while_the_device_waits_for_room_behind_a_tap_that_stands_still() -> None:
    result = run_with_small_queues(
        """
        from hostcallback.receiver.runtime.runtime import runtime
        scan(1)(0)
        source = runtime.receivers(["cpu:0"])[0].source
        try:
            with hcb.outfeed_receiver(timeout_sec=0.5):
                program = threading.Thread(target=lambda: scan(5000)(0).block_until_ready())
                program.start()
                while not source.counters().waiting_producers: pass
        except hcb.TapTimeoutError as error:
            print("gave up:", error)
        threading.Timer(60, os._exit, [9]).start()
        gate.set()
        program.join()
        hcb.barrier_wait()
        print(len(seen))
        sys.stdout.flush()
        os._exit(0)
        """
    )
    assert result.stdout.startswith("gave up: device cpu:0: tap tap at "), result.stdout
    assert result.stdout.splitlines()[-1] == "5001"


@pytest.mark.slow_variants
@pytest.mark.native_only
@pytest.mark.parametrize("policy", ["drop_newest", "sample", "block_then_drop", "overwrite_oldest"])
def test_dropping_policies_never_stop_the_device_and_count_every_drop(policy: str) -> None:
    result = run_with_small_queues(
        f"""
        f = scan(3000)
        with hcb.outfeed_receiver(
            back_pressure=hcb.BackPressure(policy={policy!r}, timeout_sec=0.0, sample_every=10)) as rx:
            f(0).block_until_ready()        # ends although no tap returns
            gate.set()
        stats = [s for s in rx.stats if s.device == "cpu:0"][0]
        assert len(seen) == stats.delivered and 0 < len(seen) < 3000, len(seen)
        assert seen == sorted(seen)
        gate.set(); f(0).block_until_ready(); hcb.barrier_wait()
        print("sum", stats.delivered + stats.dropped)
        print(rx.summary())
        """
    )
    # Drops behind the last delivered message show when the next one arrives.
    assert int(result.stdout.split()[1]) <= 3000


@pytest.mark.slow
@pytest.mark.native_only
def test_large_arrays_beyond_the_budget_wait_and_all_arrive() -> None:
    result = run_with_small_queues(
        """
        n = 200_000                              # 800 kB each, the budget admits one
        f = hcb.jit(lambda x: lax.scan(
            lambda c, i: (hcb.id_tap(lambda v: tap(v[0]), c) + 1, None), x, jnp.arange(10))[0])
        with hcb.outfeed_receiver():
            out = f(jnp.zeros(n, jnp.int32))
            gate.set()
        print(seen)
        """
    )
    assert result.stdout.strip() == str(list(range(10)))


@pytest.mark.slow
@pytest.mark.native_only
def test_a_stalled_ring_names_the_slow_tap_within_seconds() -> None:
    result = run_with_small_queues(
        """
        class Opens(logging.StreamHandler):
            def emit(self, record):
                super().emit(record)
                gate.set()
        logging.basicConfig(level=logging.WARNING, handlers=[Opens()])
        f = scan(3000)
        threading.Timer(60, gate.set).start()  # if nothing is said
        f(0)
        hcb.barrier_wait()
        print(len(seen))
        sys.stdout.flush()
        os._exit(0)  # not to wait for the timer
        """
    )
    assert result.stdout.strip() == "3000"
    assert "the device waits for a slow tap: device cpu:0: tap" in result.stderr
    assert "waiting for room" in result.stderr


@pytest.mark.slow
@pytest.mark.native_only
def test_tap_functions_may_call_jax_on_a_device_that_waits_for_room() -> None:
    result = run_with_small_queues(
        """
        def jax_tap(v):
            seen.append(float(jnp.dot(jnp.ones((200, 200)) * v, jnp.ones((200, 200)))[0, 0]))
        f = hcb.jit(lambda x: lax.scan(lambda c, i: (hcb.id_tap(jax_tap, c) + 1, None), x, None, length=400)[0])
        for _ in range(2): f(0.0)
        hcb.barrier_wait()
        print(len(seen), seen[399])
        """
    )
    assert result.stdout.split() == ["800", "79800.0"]


def test_the_callback_queue_follows_the_same_policies() -> None:
    import numpy as np

    from hostcallback.receiver.sources.back_pressure import BackPressure
    from hostcallback.receiver.sources.queue import QueueSource
    from hostcallback.receiver.wire.array_types import ArraySpec
    from hostcallback.receiver.wire.frame import decode_header, encode_prefix

    prefix = encode_prefix(7, 0, [ArraySpec.of(np.dtype(np.float32), ())])
    value = [np.float32(1).reshape(())]

    def emitted(policy: str, count: int, **kwargs: Any) -> QueueSource:
        source = QueueSource(0, capacity_bytes=1920)
        source.configure(BackPressure(policy=policy, **kwargs))
        for _ in range(count):
            source.emit(prefix, value)
        return source

    for policy, kept in (("drop_newest", 10), ("block_then_drop", 10)):
        source = emitted(policy, 25, timeout_sec=0.0)
        assert source.counters().emitted == kept
        assert source.counters().dropped == 25 - kept
        assert source.counters().next_seq == 25
    sampled = emitted("sample", 100, sample_every=20)
    batch = sampled.read(0)
    assert batch is not None
    seqs = [decode_header(memory, offset).seq for memory, offset, _ in batch.frames]
    assert seqs[:6] == [0, 1, 2, 3, 4, 5]
    assert all(seq % 20 == 0 for seq in seqs[6:])

    blocking = QueueSource(0, capacity_bytes=192)
    blocking.emit(prefix, value)
    done = threading.Event()
    thread = threading.Thread(target=lambda: (blocking.emit(prefix, value), done.set()))
    thread.start()
    while not blocking.counters().waiting_producers:
        pass
    assert not done.is_set()
    first = blocking.read(0)
    assert first is not None
    first.release()
    thread.join(10)
    assert blocking.counters().emitted == 2


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"policy": "drop_oldest"}, r"unknown back-pressure policy 'drop_oldest': use one of 'block'"),
        ({"timeout_sec": -1.0}, r"timeout_sec is -1.0, expected"),
        ({"sample_every": 0}, r"sample_every is 0, expected at least 1"),
    ],
)
def test_a_wrong_policy_is_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        hcb.BackPressure(**wrong)
    if "policy" in wrong:
        with pytest.raises(ValueError, match=says):
            hcb.outfeed_receiver(back_pressure=wrong["policy"])


@pytest.mark.slow
@pytest.mark.native_only
def test_a_wrong_size_in_the_environment_is_refused() -> None:
    result = run("scan(3)(0)", HOSTCALLBACK_RING_BYTES="4MB")
    assert "HOSTCALLBACK_RING_BYTES='4MB': expected a number of bytes" in result.stderr

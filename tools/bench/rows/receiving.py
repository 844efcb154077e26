"""The benchmarks of receivers: latency, back-pressure, their cost while idle and while busy, memory."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from time import perf_counter, sleep
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import hostcallback as hcb
from hostcallback.receiver.runtime.runtime import runtime
from hostcallback.receiver.sources.ring_batch import RingConfig
from tools.bench.handlers import pace
from tools.bench.machine import resident_mib
from tools.bench.row import Figure, Row, figure, measure
from tools.bench.separate_process import rows_of_process
from tools.bench.timing import Counter, seconds


def latency(rounds: int) -> list[Row]:
    """From emission to the tap function: 1,000 times, after 12 ms of rest, so that the receiver's thread sleeps.

    Device code has no clock to read. The first lines start at the time in the message's header, which the handler on
    the device stamps (`DeviceStats.last_time_ns`), and have absolute limits; next to them is the time this machine
    takes to wake a Python thread. The last ones start before the jitted call on both sides, and so hold the dispatch as
    well.
    """
    emissions, rest = 1_000, 0.004
    arrived = 0

    def arrive(value: Any) -> None:
        nonlocal arrived
        arrived = time.time_ns()

    def calling_back(x: Any) -> Any:
        jax.debug.callback(arrive, x)
        return x + 1

    ours, peer = jax.jit(lambda x: hcb.id_tap(arrive, x) + 1), jax.jit(calling_back)
    x = jnp.float32(1)
    ours(x).block_until_ready(), peer(x).block_until_ready()
    hcb.barrier_wait()
    request = threading.Semaphore(0)

    def wait_and_arrive() -> None:
        while request.acquire() and not finished:
            arrive(None)

    finished = False
    sleeper = threading.Thread(target=wait_and_arrive)
    sleeper.start()

    def time_us(start: Callable[[], Any]) -> float:
        nonlocal arrived
        sleep(rest)
        arrived = 0
        called = time.time_ns()
        start()
        sleep(rest)  # no barrier: its caller would take the interpreter lock while the message is on its way
        while not arrived:
            sleep(rest)
        return (arrived - called) / 1e3

    from_emission, from_call, peer_from_call, wakes = [], [], [], []
    with hcb.outfeed_receiver() as receiver:
        for _ in range(emissions):
            from_call.append(time_us(lambda: ours(x).block_until_ready()))
            from_emission.append((arrived - receiver.stats[0].last_time_ns) / 1e3)
            peer_from_call.append(time_us(lambda: peer(x).block_until_ready()))
            wakes.append(time_us(request.release))
    finished = True
    request.release()
    sleeper.join()
    name = "latency from emission to the tap function, receiver idle"
    whole = "the same from the call of the program"
    rows = []
    for percent, limit in ((50, 100.0), (99, 300.0)):
        mine, wake = _percentile(from_emission, percent), _percentile(wakes, percent)
        rows.append(mine.within(limit, f"{name}: p{percent}", "us"))
        rows.append(mine.versus(wake, f"the same: p{percent}", "us", "waking a Python thread", None))
    for percent in (50, 99):
        mine, theirs = _percentile(from_call, percent), _percentile(peer_from_call, percent)
        rows.append(mine.versus(theirs, f"{whole}: p{percent}", "us", "jax.debug.callback", None))
    return rows


def _percentile(values: list[float], percent: int) -> Figure:
    """Percentiles of all values; the spread is the spread over six parts of them."""
    parts = [statistics.quantiles(values[part::6], n=100)[percent - 1] for part in range(6)]
    return Figure(statistics.quantiles(values, n=100)[percent - 1], figure(parts).spread)


def slow_consumer(rounds: int) -> list[Row]:
    """A tap function that takes 1 ms a message, under the policy `block`: when the device waits, and for how long.

    While what is queued stays below the budget (the ring's 8 MiB) the loop takes the time of the untapped loop. With
    twice as many messages as fit it must wait for room: it then takes the tap function's time for the messages that do
    not fit. The ring fits, and on average half of a batch of 1 MiB that the receiver has taken out. No message is lost.
    """
    rounds = min(rounds, 3)
    side, budget = 64, RingConfig().capacity_bytes
    frame = 4 * side * side + 128
    count = 0
    took = 0.0

    def slow(value: Any) -> None:
        nonlocal count, took
        start = perf_counter()
        sleep(1e-3)
        count += 1
        took += perf_counter() - start

    def loop(jit: Any, tap: Callable[[Any], Any], steps: int) -> Callable[[Any], Any]:
        def step(carry: Any, _: Any) -> Any:
            carry = lax.fori_loop(0, 16, lambda _, c: jnp.tanh(c @ c), carry)
            tap(carry)
            return carry, None

        return jit(lambda x: lax.scan(step, x, None, length=steps)[0])

    x = jnp.eye(side)
    below, beyond = round(0.8 * budget / frame), 2 * (budget // frame)
    tapped, plain = (
        [loop(jit, tap, steps) for steps in (below, beyond)]
        for jit, tap in ((jax.jit, lambda c: hcb.id_tap(slow, c)), (jax.jit, lambda c: None))
    )

    def run(program: Callable[[Any], Any]) -> float:
        elapsed = seconds(lambda: program(x)) * 1e3
        hcb.barrier_wait()
        return elapsed

    fast, plain_fast = measure([lambda: run(tapped[0]), lambda: run(plain[0])], rounds)
    full = measure([lambda: run(tapped[1])], rounds)[0]
    assert count == (below + beyond) * (rounds + 1), count
    surplus = beyond - (budget + (1 << 19)) // frame
    expected = Figure(surplus * took / count * 1e3, 0.0)
    name = "slow consumer (1 ms a message), block policy"
    return [
        fast.versus(
            plain_fast, f"{name}: a loop that stays below the budget", "ms", "the untapped loop", None
        ),
        full.versus(
            expected, f"{name}: a loop of twice the budget", "ms", "delivery of what finds no room", None
        ),
    ]


def idle(rounds: int) -> list[Row]:
    """Processor time of a process with four receivers that have nothing to do, less that before they started."""
    return rows_of_process(__name__, "idle_here", min(rounds, 3), devices=4)


def idle_here(rounds: int) -> list[Row]:
    """In a process with four devices; see `idle`."""

    def cpu_ms_per_sec() -> float:
        start, cpu = perf_counter(), time.process_time()
        sleep(2)
        return (time.process_time() - cpu) / (perf_counter() - start) * 1e3

    devices = jax.devices()
    for device in devices:
        jax.device_put(1.0, device).block_until_ready()
    without = statistics.median(cpu_ms_per_sec() for _ in range(rounds))
    count = Counter()
    tapped = jax.jit(lambda x: hcb.id_tap(count, x) + 1)
    for device in devices:
        tapped(jax.device_put(1.0, device)).block_until_ready()
    hcb.barrier_wait()
    assert count.count == len(runtime.receivers()) == 4
    sleep(0.5)
    mine = figure([cpu_ms_per_sec() - without for _ in range(rounds)])
    return [mine.within(1.0, "four idle receivers: processor time, compared with none", "ms/s")]


PACE_SEC, PACES = 1e-3, 100


def busy(rounds: int) -> list[Row]:
    """How fast the main thread dispatches a small untapped program while another device's receiver is busy.

    Another thread dispatches long scans to another device and sleeps in `block_until_ready`; the device takes 1 ms a
    step without using a processor, as an accelerator would. In each step it taps a scalar so often that the
    receiver's thread (a tap function in pure Python) uses 20 % of a processor; or it taps without rest, more than the
    receiver can deliver. The baseline is the same with the scan untapped. The floor of each is a Python thread that
    calls the tap function in place of the receiver, for the same share of the time, and does nothing else.
    """
    return rows_of_process(__name__, "busy_here", rounds, devices=2)


def busy_here(rounds: int) -> list[Row]:
    """In a process with two devices; see `busy`."""
    emitting, dispatching = jax.devices()[1], jax.devices()[0]
    start = jax.device_put(jnp.float32(1), emitting)
    small, y = jax.jit(lambda x: x * 0.5 + 1), jax.device_put(jnp.ones(16), dispatching)
    count = Counter()

    def tap_often(x: Any, taps: int) -> Any:
        return lax.fori_loop(0, taps, lambda _, c: hcb.id_tap(count, c * 1.0001), x)

    def paced(taps: int) -> Callable[[Any], Any]:
        def step(carry: Any, _: Any) -> Any:
            return tap_often(pace(carry, PACE_SEC), taps), None

        return jax.jit(lambda x: lax.scan(step, x, None, length=PACES)[0])

    def dispatch_us() -> float:
        nonlocal y
        calls, begin = 0, perf_counter()
        while perf_counter() - begin < 0.3:
            for _ in range(50):
                y = small(y)
            calls += 50
        y.block_until_ready()
        return (perf_counter() - begin) / calls * 1e6

    quiet = paced(0)
    taps = 20
    for _ in range(4):
        loaded = paced(taps)
        with _emitting(loaded, start), _busy_share(emitting) as share:
            dispatch_us()
        taps = max(1, round(taps * 0.2 / share[0]))
    loaded, flood = paced(taps), jax.jit(lambda x: tap_often(x, 20_000))

    shares: dict[Any, list[float]] = {loaded: [], flood: []}

    def loop_during(program: Callable[[Any], Any]) -> float:
        with _emitting(program, start), _busy_share(emitting) as share:
            time_us = dispatch_us()
        shares.get(program, []).append(share[0])
        return time_us

    def loop_beside_thread(program: Callable[[Any], Any]) -> float:
        stop = threading.Event()

        def work() -> None:
            work_sec = PACE_SEC * shares[program][-1]
            while not stop.wait(PACE_SEC - work_sec):
                until = time.thread_time() + work_sec
                while time.thread_time() < until:
                    count(None)

        thread = threading.Thread(target=work)
        thread.start()
        time_us = dispatch_us()
        stop.set()
        thread.join()
        return time_us

    sides: list[Callable[[], float]] = [partial(loop_during, program) for program in (loaded, quiet, flood)]
    sides += [partial(loop_beside_thread, program) for program in (loaded, flood)]
    mine, peer, flooded, floor, flooded_floor = measure(sides, rounds)
    share, flood_share = (statistics.median(shares[program]) for program in (loaded, flood))
    name = f"dispatch during deliveries, the receiver busy {share:.0%} of the time"
    saturated = f"dispatch during deliveries, the receiver saturated (busy {flood_share:.0%})"
    return [
        mine.versus(peer, name, "us/call", "with an idle receiver", 1.1),
        mine.versus(floor, "the same", "us/call", "with a Python thread that works as long", None),
        flooded.versus(peer, saturated, "us/call", "with an idle receiver", 1.3),
        flooded.versus(flooded_floor, "the same", "us/call", "with a Python thread that works as long", None),
    ]


@contextlib.contextmanager
def _emitting(program: Callable[[Any], Any], x: Any) -> Iterator[None]:
    """Runs the program over and over on another thread; on leaving, waits until all is delivered."""
    program(x).block_until_ready()
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            program(x).block_until_ready()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        hcb.barrier_wait()


@contextlib.contextmanager
def _busy_share(device: Any) -> Iterator[list[float]]:
    """Appends to the list, at the end, the share of a processor that the device's receiver thread used."""
    (receiver,) = runtime.receivers([f"{device.platform}:{device.id}"])
    clock = time.pthread_getcpuclockid(receiver.thread.ident)
    share: list[float] = []
    begin, used = perf_counter(), time.clock_gettime(clock)
    yield share
    share.append((time.clock_gettime(clock) - used) / (perf_counter() - begin))


def memory(messages: int) -> list[Row]:
    """Growth of resident memory over many scalar messages, in a separate process."""
    return rows_of_process(__name__, "memory_here", messages)


def memory_here(messages: int) -> list[Row]:
    """In this process; see `memory`."""
    count, steps = Counter(), 100_000
    f = jax.jit(lambda x: lax.scan(lambda c, _: (hcb.id_tap(count, c) + 1, None), x, None, length=steps)[0])
    f(jnp.float32(0)).block_until_ready()
    hcb.barrier_wait()
    start = high = resident_mib()
    for _ in range(messages // steps):
        f(jnp.float32(0)).block_until_ready()
        high = max(high, resident_mib())
    hcb.barrier_wait()
    high = max(high, resident_mib())
    assert count.count == messages // steps * steps + steps, count.count
    budget = RingConfig().capacity_bytes / 2**20
    name = f"growth of resident memory over {messages / 1e6:g} million messages"
    return [Row(name, "MiB", high - start, budget + 30, "ring budget + 30 MiB", 1.0, 0.0)]

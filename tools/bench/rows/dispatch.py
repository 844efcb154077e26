"""The benchmarks of single calls: the cost of a tap to the caller, on one device and on several."""

from __future__ import annotations

import statistics
import struct
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter, sleep
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.sharding import NamedSharding, PartitionSpec

import hostcallback as hcb
from hostcallback.receiver.runtime.dispatch.gil_share import INTERVAL_SEC
from hostcallback.receiver.runtime.runtime import runtime
from tools.bench.handlers import Copies, empty_call
from tools.bench.row import Row, measure, measure_together
from tools.bench.separate_process import rows_of_process
from tools.bench.timing import Counter, delivered_us, scan

CALLS = 400


def untapped(x: Any) -> Any:
    """The function that is called."""
    return x * 0.5 + 1


def medians_of_calls(
    functions: Sequence[Callable[[Any], Any]], x: Any, copies: Copies | None = None
) -> list[float]:
    """Microseconds of one call until its result is there: the functions in turn, at rest in between, medians.

    `copies` delivers what the last function emits.
    """
    times: list[list[float]] = [[] for _ in functions]
    turns = list(zip(functions, times, strict=True))
    for call in range(CALLS):
        # The order alternates, because the messages delivered just before make a call quicker or slower: each program
        # follows each other program.
        for function, its_times in reversed(turns) if call % 2 else turns:
            start = perf_counter()
            function(x).block_until_ready()
            its_times.append(perf_counter() - start)
            # The messages of the call are delivered between the timed calls; every side rests equally long.
            if copies is not None and function is functions[-1]:
                copies.begin(1)
                copies.wait()
            jax.effects_barrier()  # this call waits for taps as well
            sleep(50e-6)
    return [statistics.median(its_times) * 1e6 for its_times in times]


def one_call(rounds: int) -> list[Row]:
    """One call until its result is ready, with one tap and without, under each jit; delivered after the clock stops.

    Under `jax.jit` also with an empty FFI call in the tap's place, and with one that copies the array, which a thread
    gives to the function when the clock has stopped: no tap can cost less.
    """
    model = eqx.nn.MLP(4, 4, 8, 2, key=jax.random.key(0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from flax import nnx
    layer = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    jits: dict[str, Callable[[Any], Callable[[Any], Any]]] = {
        "jax.jit": lambda tap: jax.jit(lambda x: untapped(tap(x))),
        "eqx.filter_jit": lambda tap: partial(eqx.filter_jit(lambda model, x: tap(model(x))), model),
        "nnx.jit": lambda tap: partial(nnx.jit(lambda layer, x: tap(layer(x))), layer),
    }
    rows = []
    for jit, make in jits.items():
        count, least = Counter(), Counter()
        programs = [make(partial(hcb.id_tap, count)), make(lambda x: x)]
        x = jnp.ones(16 if jit == "jax.jit" else 4)
        copies = Copies(x, least, slots=1) if jit == "jax.jit" else None
        if copies is not None:
            programs += [make(empty_call), make(copies)]
        mine, peer, *floors = measure_together(partial(medians_of_calls, programs, x, copies), rounds)
        assert count.count == CALLS * (rounds + 1)
        name = f"one {jit} call, one tap (delivered between the timed calls)"
        rows.append(
            mine.versus(peer, name, "us/call", f"the untapped {jit} call", 1.08 if jit == "jax.jit" else 1.1)
        )
        for floor, what in zip(floors, ("an empty FFI call in it", COPYING), strict=False):
            rows.append(mine.versus(floor, "the same", "us/call", what, None))
        if floors:
            assert least.count == count.count
            rows.append(floors[1].versus(peer, COPYING, "us/call", f"the untapped {jit} call", None))
    return rows


COPYING = "an FFI call in it that copies, and a thread that makes an array"


def one_call_of_the_host(rounds: int) -> Row:
    """One call until its result is ready, of a program that calls a host function that does nothing."""
    shape, count, theirs = jax.ShapeDtypeStruct((), jnp.float32), Counter(), Counter()

    def program(call: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return jax.jit(lambda x: untapped(call(x)))

    def host(counter: Counter) -> Callable[[Any], Any]:
        def nothing(x: Any) -> Any:
            counter(x)
            return x

        return nothing

    ours = program(lambda x: hcb.call(host(count), x, result_shape=shape))
    peer = program(lambda x: jax.pure_callback(host(theirs), shape, x))
    mine, other = measure_together(lambda: medians_of_calls([ours, peer], jnp.float32(1)), rounds)
    assert count.count == theirs.count == CALLS * (rounds + 1)
    return mine.versus(other, "one jax.jit call, one `hcb.call`", "us/call", "jax.pure_callback", 1.0)


class _State:
    """What a receiver that delivers messages shows to other threads."""

    __slots__ = ("current", "delivered", "lost", "nbytes", "since")

    def __init__(self) -> None:
        """Nothing was delivered."""
        self.lost = self.delivered = self.nbytes = 0
        self.since = 0.0
        self.current: Counter | None = None


def back_to_back(rounds: int) -> list[Row]:
    """Calls as fast as they can be dispatched, while the receiver wants the interpreter lock as well, all delivered.

    The floor is a program with an empty FFI call, and a Python thread that makes an array for each call and gives it to
    the function, in batches as a receiver does: nothing is counted, ordered, named or bounded. Calls arrive there at
    the pace of untapped ones, measured just before. In a second one the thread does what each message needs in the
    simplest Python: it makes the arrays of a batch at once, reads each header, finds the function by its id, checks the
    number, notes the function that runs and since when, and counts messages and bytes. Nothing bounds its memory.
    """
    count, calls = Counter(), 5_000
    tapped, plain = jax.jit(lambda x: untapped(hcb.id_tap(count, x))), jax.jit(untapped)
    empty = jax.jit(lambda x: untapped(empty_call(x)))

    def per_call(f: Callable[[Any], Any]) -> float:
        y = jnp.ones(16)
        start = perf_counter()
        for _ in range(calls):
            y = f(y)
        y.block_until_ready()
        hcb.barrier_wait()
        return (perf_counter() - start) / calls * 1e6

    def floor(deliver_until: Callable[[Counter, int], None]) -> float:
        pace_sec = per_call(plain) * 1e-6  # in which a call arrives
        start, done = perf_counter(), Counter()

        def deliver() -> None:
            while done.count < calls:
                arrived = min(calls, round((perf_counter() - start) / pace_sec))
                deliver_until(done, arrived)
                sleep(5e-4)

        thread = threading.Thread(target=deliver)
        thread.start()
        y = jnp.ones(16)
        for _ in range(calls):
            y = empty(y)
        y.block_until_ready()
        thread.join()
        return (perf_counter() - start) / calls * 1e6

    memory = np.zeros(16, np.float32)
    header = struct.Struct("<QQqQ")  # an id, a number, a time and a launch
    unpack_from, size, many = header.unpack_from, header.size, np.zeros((calls, 16), np.float32)
    frames = b"".join(header.pack(7, number, 0, number) for number in range(calls))
    state = _State()

    def arrays(done: Counter, arrived: int) -> None:
        while done.count < arrived:
            done(np.array(memory))

    def messages(done: Counter, arrived: int) -> None:
        functions, expected = {7: done}, done.count
        stack = np.array(many[: arrived - expected])
        for place, array in enumerate(stack, expected):
            consumer_id, number, _, _ = unpack_from(frames, place * size)
            state.lost += number - expected
            expected = number + 1
            state.since = perf_counter()
            state.current = function = functions[consumer_id]
            function(array)
            state.delivered += 1
        state.nbytes += stack.nbytes

    mine, peer, least, same = measure(
        [
            lambda: per_call(tapped),
            lambda: per_call(plain),
            lambda: floor(arrays),
            lambda: floor(messages),
        ],
        rounds,
    )
    assert count.count == calls * (rounds + 1)
    assert not state.lost
    name = "jax.jit calls back to back, one tap each, all delivered"
    return [
        mine.versus(peer, name, "us/call", "the untapped jax.jit calls", 1.25),
        mine.versus(least, "the same", "us/call", "an empty FFI call, and a thread that makes arrays", None),
        mine.versus(
            same, "the same", "us/call", "an empty FFI call, and a thread that does a message's work", None
        ),
    ]


def four_devices(rounds: int) -> list[Row]:
    """One call of a `shard_map` over four CPU devices, an ordered tap on each; messages are delivered between calls.

    The ordered `io_callback` shown for comparison delivers while it is timed.
    """
    return rows_of_process(__name__, "four_devices_here", rounds, devices=4)


def four_devices_here(rounds: int) -> list[Row]:
    """In a process with four devices; see `four_devices`."""
    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.device_put(jnp.ones(64), NamedSharding(mesh, PartitionSpec("i")))
    count, theirs = Counter(), Counter()
    shard_map = partial(jax.shard_map, mesh=mesh, in_specs=PartitionSpec("i"), out_specs=PartitionSpec("i"))
    tapped, plain = jax.jit(shard_map(lambda x: untapped(hcb.id_tap(count, x)))), jax.jit(shard_map(untapped))

    def calling_back(x: Any) -> Any:
        io_callback(theirs, None, x, ordered=True)
        return untapped(x)

    calling = jax.jit(shard_map(calling_back))

    def once() -> list[float]:
        return [*medians_of_calls([tapped, plain], x), *medians_of_calls([calling], x)]

    mine, peer, io = measure_together(once, rounds)
    assert count.count == 4 * CALLS * (rounds + 1)
    name = "one jax.jit call, shard_map over 4 devices, ordered tap (delivered between the timed calls)"
    return [
        mine.versus(peer, name, "us/call", "the untapped jax.jit call", 1.3),
        mine.versus(io, "the same", "us/call", "io_callback(ordered=True)", None),
    ]


def eight_devices(rounds: int) -> list[Row]:
    """Messages from eight CPU devices at a time, compared with the same number from one device.

    Each device taps a scalar in a scan. The floor is the same programs with an empty FFI call, and a Python thread per
    device that calls the function, and nothing else, until they have worked together for the processor time of the
    receiver of the one device. The switch interval is that of deliveries.
    """
    return rows_of_process(__name__, "eight_devices_here", rounds, devices=8)


def eight_devices_here(rounds: int) -> list[Row]:
    """In a process with eight devices; see `eight_devices`."""
    devices, steps = 8, 10_000
    mesh = jax.make_mesh((devices,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec("i")
    sharded, single = jax.device_put(jnp.ones(devices), NamedSharding(mesh, spec)), jnp.ones(1)
    count = Counter()

    def on_all(program: Callable[[Any], Any]) -> Any:
        return jax.jit(jax.shard_map(program, mesh=mesh, in_specs=spec, out_specs=spec))

    def programs(tap: Callable[[Any], Any]) -> list[Callable[[], Any]]:
        many, one = scan(on_all, tap, steps), scan(jax.jit, tap, steps * devices)
        return [partial(many, sharded), partial(one, single)]

    def run(program: Callable[[], Any]) -> float:
        return delivered_us(program, hcb.barrier_wait, steps * devices)

    def run_one() -> float:
        nonlocal worked_sec
        (receiver,) = runtime.receivers([f"cpu:{jax.devices()[0].id}"])
        clock = time.pthread_getcpuclockid(receiver.thread.ident)
        begin = time.clock_gettime(clock)
        time_us = run(one)
        worked_sec = time.clock_gettime(clock) - begin
        return time_us

    def floor(program: Callable[[], Any], threads: int) -> float:
        def work() -> None:
            end, done = time.thread_time() + worked_sec / threads, Counter()
            while time.thread_time() < end:
                for _ in range(100):
                    done(None)

        def join_all() -> None:
            for thread in working:
                thread.join()

        working = [threading.Thread(target=work) for _ in range(threads)]
        interval = sys.getswitchinterval()
        sys.setswitchinterval(INTERVAL_SEC)
        for thread in working:
            thread.start()
        time_us = delivered_us(program, join_all, steps * devices)
        sys.setswitchinterval(interval)
        return time_us

    many, one = programs(partial(hcb.id_tap, count))
    empty_many, empty_one = programs(empty_call)
    worked_sec = 0.0
    jax.block_until_ready(one())
    sides = [run_one, partial(run, many), partial(floor, empty_one, 1), partial(floor, empty_many, devices)]
    peer, mine, least_of_one, least = measure(sides, rounds)
    expected = steps * devices * (2 * rounds + 3)
    assert count.count > expected * 0.9, (count.count, expected)  # `+= 1` on 8 threads may miss some
    name, threads = "cost per message from 8 devices at a time", "threads that work as long"
    return [
        mine.versus(peer, name, "us/message", "one device", 1.25),
        mine.versus(least, "the same", "us/message", f"empty FFI calls, and eight {threads}", None),
        least.versus(least_of_one, f"empty FFI calls, and eight {threads}", "us/message", "one thread", None),
    ]

"""Scenarios of the FFI handler under JAX, each run in a separate process: `python ffi_program.py SCENARIO`.

The processes are separate because a device has one ring per process, and the package's receivers would read it.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from hostcallback.receiver.native import bindings as native
from hostcallback.receiver.sources.back_pressure import Policy
from hostcallback.receiver.sources.ring import RingSource
from hostcallback.receiver.sources.ring_batch import RingConfig
from hostcallback.receiver.wire.array_types import ArraySpec
from hostcallback.receiver.wire.decoder import Decoder
from hostcallback.receiver.wire.frame import Flags, encode_prefix

LIBRARY = native.load()
jax.ffi.register_ffi_target("tap", jax.ffi.pycapsule(LIBRARY.hcb_tap), platform="cpu")
TINY = 4096


def tap(*arrays, consumer_id=1, alias=True, prefix=None):
    """Emits the arrays and returns them."""
    specs = [ArraySpec.of(a.dtype, a.shape) for a in arrays]
    prefix = encode_prefix(consumer_id, 0, specs) if prefix is None else prefix
    results = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]
    aliases = {i: i for i in range(len(arrays))} if alias else None
    call = jax.ffi.ffi_call("tap", results, has_side_effect=True, input_output_aliases=aliases)
    return call(*arrays, prefix=np.frombuffer(prefix, np.uint8))


def tap_only(*arrays, consumer_id=1):
    """Emits the arrays, without results."""
    prefix = encode_prefix(consumer_id, 0, [ArraySpec.of(a.dtype, a.shape) for a in arrays])
    jax.ffi.ffi_call("tap", (), has_side_effect=True)(*arrays, prefix=np.frombuffer(prefix, np.uint8))


class Reader(threading.Thread):
    """Collects decoded messages until the end-of-stream frame, once `run_now` is set."""

    def __init__(self, source: RingSource, run: bool = True) -> None:
        super().__init__()
        self.source = source
        self.run_now = threading.Event()
        if run:
            self.run_now.set()
        self.messages: list[tuple] = []
        self.start()

    def run(self) -> None:
        self.run_now.wait()
        decoder = Decoder()
        while True:
            batch = self.source.read(None)
            for frame in batch.frames:
                message = decoder.decode(*frame)
                if message[1] & Flags.END_OF_STREAM:
                    batch.release()
                    return
                self.messages.append(message)
            batch.release()

    def finish(self) -> list[tuple]:
        """Everything emitted so far: (consumer_id, flags, seq, time_ns, run_id, device, arrays)."""
        self.run_now.set()
        self.source.send_end(0)
        self.join()
        return self.messages


def open_reader(device: int = 0, run: bool = True, **config) -> Reader:
    return Reader(RingSource.open(device, RingConfig(**{"capacity_bytes": TINY, **config})), run)


def scan(body, x, length):
    return jax.lax.scan(lambda c, _: (body(c), None), x, None, length=length)[0]


def back_pressure():
    """A device far ahead of its reader waits, loses nothing and keeps the order."""
    reader = open_reader()
    count = 20_000
    out = jax.jit(lambda x: scan(lambda c: tap(c + 1.0)[0], x, count))(jnp.float32(0))
    assert float(out) == count
    messages = reader.finish()
    assert [m[2] for m in messages] == list(range(count))
    assert [float(m[6][0]) for m in messages] == [i + 1.0 for i in range(count)]
    assert len({m[4] for m in messages}) == 1, "one run"
    assert {m[5] for m in messages} == {0}


def waiting_holds_no_thread():
    """While more programs wait for room than XLA has worker threads, those threads run another program."""
    reader = open_reader(run=False)
    waiting = 2 * (os.cpu_count() or 1) + 8
    program = jax.jit(lambda x: scan(lambda c: tap(c + 1.0)[0], x, 100)).lower(jnp.float32(0)).compile()
    with ThreadPoolExecutor(waiting) as pool:
        outs = [pool.submit(lambda i: float(program(jnp.float32(i))), i) for i in range(waiting)]
        moment = threading.Event()
        while reader.source.counters().waiting_producers < waiting:
            moment.wait(0.001)
        # Wide enough that XLA spreads it over its worker threads.
        xs = jax.device_put([jnp.full((256, 256), i, jnp.float32) for i in range(10)], jax.devices()[1])
        assert float(jax.jit(lambda xs: sum((x @ x).sum() for x in xs))(xs)) == 256**3 * 285
        reader.run_now.set()
        assert [out.result() for out in outs] == [i + 100 for i in range(waiting)]
    assert len(reader.finish()) == waiting * 100


def several_threads():
    """Programs of several Python threads share a ring: each keeps its own order."""
    reader = open_reader()
    count, threads = 3000, 4

    def work(thread):
        program = jax.jit(lambda x: scan(lambda c: tap(c + 1, consumer_id=thread)[0], x, count))
        for _ in range(3):
            assert int(program(jnp.int32(0))) == count

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))
    messages = reader.finish()
    assert [m[2] for m in messages] == list(range(3 * count * threads))
    by_run = defaultdict(list)
    for consumer_id, _, _, _, run_id, _, (value,) in messages:
        by_run[consumer_id, run_id].append(int(value))
    assert len(by_run) == 3 * threads
    assert all(values == list(range(1, count + 1)) for values in by_run.values())


def concurrent_thunks():
    """Taps without an order between them, in a program that XLA runs on several threads at once."""
    reader = open_reader()

    def body(c):
        for i in range(6):
            tap_only(jnp.sin(c) * i, consumer_id=i)
        return c + 1.0

    jax.block_until_ready(jax.jit(lambda x: scan(body, x, 200))(jnp.ones((64, 64))))
    jax.effects_barrier()
    seen = defaultdict(int)
    for consumer_id, _, _, _, _, _, (value,) in reader.finish():
        np.testing.assert_allclose(value, np.sin(1.0 + seen[consumer_id]) * consumer_id, atol=1e-4)
        seen[consumer_id] += 1
    assert seen == dict.fromkeys(range(6), 200)


def big_arrays():
    """Arrays larger than the ring, over the budget, with a reader that starts late."""
    reader = open_reader(run=False, block_budget_bytes=3 << 20)
    out = jax.jit(lambda x: scan(lambda c: tap(c + 1.0)[0], x, 50))(jnp.zeros((512, 512)))
    reader.run_now.set()
    assert float(out[0, 0]) == 50
    messages = reader.finish()
    assert len(messages) == 50
    for i, message in enumerate(messages):
        assert message[6][0].shape == (512, 512)
        assert (message[6][0] == i + 1).all()


def results_pass_through():
    """Results equal operands, whether or not XLA aliases the two."""
    reader = open_reader(capacity_bytes=1 << 20)
    for alias in (True, False):
        x, y, z = jnp.arange(300.0), jnp.int8(5), jnp.zeros((0, 3))
        program = jax.jit(lambda x, y, z, alias=alias: tap(x * 2, y, z, alias=alias))
        a, b, c = program(x, y, z)
        np.testing.assert_array_equal(a, np.arange(300.0) * 2)
        assert int(b) == 5
        assert c.shape == (0, 3)
    messages = reader.finish()
    assert len(messages) == 2
    for message in messages:
        np.testing.assert_array_equal(message[6][0], np.arange(300, dtype=np.float32) * 2)
        assert message[6][1] == 5
        assert message[6][2].shape == (0, 3)


def dtypes():
    """Every dtype, computed on the device, with odd numbers of sub-byte elements."""
    reader = open_reader(capacity_bytes=1 << 20)
    names = (
        "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128 bfloat16 "
        "float8_e5m2 float8_e4m3fn float8_e4m3b11fnuz float8_e5m2fnuz float8_e4m3fnuz float8_e4m3 float8_e3m4 "
        "float8_e8m0fnu float4_e2m1fn int4 uint4 int2 uint2"
    )
    expected = []
    with jax.experimental.enable_x64() if hasattr(jax.experimental, "enable_x64") else jax.enable_x64(True):
        for name in names.split():
            dtype = np.dtype(getattr(ml_dtypes, name, None) or name)
            for shape in [(), (5,), (7, 129)]:
                host = (np.arange(np.prod(shape, dtype=int)) % 2).reshape(shape).astype(dtype)
                if "int" in name or name == "bool":
                    host = (
                        (np.arange(np.prod(shape, dtype=int)) % 4 - 2 * (name[0] == "i"))
                        .reshape(shape)
                        .astype(dtype)
                    )
                # Reversed on the device, so that XLA's own code packs it.
                jax.jit(lambda x: tap_only(jnp.flip(x)))(jnp.asarray(host))
                expected.append(np.flip(host))
    jax.effects_barrier()
    messages = reader.finish()
    assert len(messages) == len(expected)
    for message, want in zip(messages, expected, strict=True):
        (got,) = message[6]
        assert got.dtype == want.dtype, (got.dtype, want.dtype)
        np.testing.assert_array_equal(got.astype(complex), want.astype(complex), err_msg=str(want.dtype))


def many_operands():
    """More arrays than fit the handler's stack, of sizes that need every kind of gap."""
    reader = open_reader(capacity_bytes=1 << 20)
    arrays = [np.full(i % 70, i, np.uint8) for i in range(100)]
    jax.jit(tap_only)(*map(jnp.asarray, arrays))
    jax.effects_barrier()
    ((*_, got),) = reader.finish()
    for a, b in zip(got, arrays, strict=True):
        np.testing.assert_array_equal(a, b)


def devices():
    """Each device emits into its own ring; a ring that no reader opened is made and announced."""
    jax.pmap(lambda x: tap(x + 1)[0])(jnp.arange(4))
    event = native.Event()
    announced = set()
    while len(announced) < 4:
        assert LIBRARY.hcb_supervise_wait(30_000_000_000, event)
        assert event.kind == native.EVENT_NEW_RING
        announced.add(event.device)
    assert announced == {0, 1, 2, 3}
    runs = set()
    for device in range(4):
        ((_, _, seq, _, run_id, emitter, (value,)),) = open_reader(device).finish()
        assert (seq, emitter, int(value)) == (0, device, device + 1)
        runs.add(run_id)
    assert len(runs) == 1


def drop_newest():
    """A full ring drops and counts, and the program goes on without any reader."""
    source = RingSource.open(0, RingConfig(capacity_bytes=TINY, policy=Policy.DROP_NEWEST))
    out = jax.jit(lambda x: scan(lambda c: tap(c + 1.0)[0], x, 5000))(jnp.float32(0))
    assert float(out) == 5000
    counters = source.counters()
    assert counters.dropped > 4900
    assert counters.emitted + counters.dropped == counters.next_seq == 5000


def block_then_drop():
    """A program without a reader is held for the timeouts only."""
    source = RingSource.open(0, RingConfig(TINY, policy=Policy.BLOCK_THEN_DROP, timeout_sec=0.001))
    assert float(jax.jit(lambda x: scan(lambda c: tap(c + 1.0)[0], x, 100))(jnp.float32(0))) == 100
    assert source.counters().emitted + source.counters().dropped == 100


def bad_prefix():
    """A prefix that contradicts itself fails the program with a sentence."""
    for prefix in (b"", bytes(63), bytes(44) + b"\x05" + bytes(19)):
        try:
            jax.block_until_ready(jax.jit(lambda x, prefix=prefix: tap(x, prefix=prefix))(jnp.float32(0)))
        except Exception as error:
            assert "`prefix` is not" in str(error), error
        else:
            raise AssertionError(f"{len(prefix)} bytes were accepted")


def same_numbers():
    """A program computes with the same denormal mode after a wait as without one."""

    def program(x):
        def body(c):
            c = tap(c * jnp.float32(0.5))[0]
            return c + c * jnp.float32(1e-3)

        return jax.lax.scan(lambda c, _: (body(c),) * 2, x, None, length=200)[1]

    source = RingSource.open(0, RingConfig(capacity_bytes=1 << 20))
    x = jnp.linspace(1e-38, 1e-30, 64, dtype=jnp.float32)
    free = np.asarray(jax.jit(program)(x))
    assert source.counters().waiting_producers == 0
    reader = Reader(source)
    reader.finish()
    source = RingSource.open(1, RingConfig(capacity_bytes=TINY))
    reader = Reader(source, run=False)
    x = jax.device_put(x, jax.devices()[1])
    with ThreadPoolExecutor(1) as pool:
        waited = pool.submit(lambda: np.asarray(jax.jit(program)(x)))
        event = native.Event()
        while not (LIBRARY.hcb_supervise_wait(30_000_000_000, event) and event.kind == native.EVENT_STALL):
            pass
        reader.run_now.set()
        np.testing.assert_array_equal(free.view(np.uint32), waited.result().view(np.uint32))
    assert len(reader.finish()) == 200


if __name__ == "__main__":
    globals()[sys.argv[1]]()

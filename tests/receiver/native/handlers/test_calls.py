"""Calls in the native library: taken in order, answered once, failed whenever no thread can answer them."""

from __future__ import annotations

import ctypes
import subprocess
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkout import HELPERS, ROOT
from compiling import build_native, compile_program, needs_compiler
from hostcallback.receiver.errors import CorruptStreamError, UnknownConsumerError
from hostcallback.receiver.messages import Consumer, Registry
from hostcallback.receiver.native import bindings as native
from hostcallback.receiver.runtime.device_receiver import DeviceReceiver
from hostcallback.receiver.runtime.dispatch.scope import Scope
from hostcallback.receiver.sources.back_pressure import Policy
from hostcallback.receiver.wire.frame import Flags, decode_header, encode_prefix
from python_process import python_output
from rings import TestRing

pytestmark = pytest.mark.native_only

LOST = b"no reply came"


class Caller(threading.Thread):
    """A program that calls with `request` and waits for one float32 array of `size`."""

    def __init__(self, ring: Any, request: bytes = b"", size: int = 2, consumer_id: int = 1) -> None:
        super().__init__(daemon=True)
        self.ring = ring
        self.prefix = encode_prefix(consumer_id, Flags.CALL | Flags.ORDERED, ())
        self.result = np.zeros(size, np.float32)
        self.error = ctypes.create_string_buffer(LOST, 200)
        self.status: int | None = None
        self.start()

    def run(self) -> None:
        self.status = self.ring.library.hcb_test_call(
            self.ring.handle, self.prefix, len(self.prefix), 1,
            (ctypes.c_void_p * 1)(self.result.ctypes.data), (ctypes.c_uint64 * 1)(self.result.nbytes),
            self.error, len(self.error),
        )  # fmt: skip

    def end(self) -> tuple[int | None, list[float], str]:
        self.join(30)
        return self.status, self.result.tolist(), self.error.value.decode()

    def waits(self) -> None:
        """Returns once the call waits for its reply."""
        while self.is_alive() and not self.ring.library.hcb_call_count(self.ring.device):
            pass


def take(ring: Any) -> Any:
    """Takes the next call as a thread that runs host functions does; its header."""
    batch = ring.source.read_call(30)
    ((memory, offset, _),) = batch.frames
    header = decode_header(memory, offset)
    batch.release()
    ring.source.end_read_call()
    return header


def test_the_reply_is_copied_and_the_program_goes_on_when_it_is_resumed(ring: TestRing) -> None:
    caller = Caller(ring)
    header = take(ring)
    assert header.flags == Flags.CALL | Flags.ORDERED
    results = [np.array([1.5, -2], np.float32)]
    replied = ring.source.reply(header.seq, results)
    results[0][:] = 7
    assert caller.is_alive()
    assert ring.library.hcb_call_count(ring.device) == 0
    ring.source.resume(replied)
    assert caller.end() == (native.EMITTED, [1.5, -2], LOST.decode())


def test_a_call_is_answered_once(ring: TestRing) -> None:
    caller = Caller(ring)
    seq = take(ring).seq
    replied = ring.source.reply(seq, [np.zeros(2, np.float32)])
    assert ring.source.reply(seq, [np.ones(2, np.float32)]) is None
    ring.source.fail(seq, "too late")
    assert ring.source.reply(seq + 1, [np.ones(2, np.float32)]) is None
    ring.source.resume(replied)
    assert caller.end()[:2] == (native.EMITTED, [0, 0])


@pytest.mark.parametrize("results", [[], [np.zeros(3, np.float32)], [np.zeros(2, np.float32)] * 2], ids=len)
def test_a_reply_of_other_lengths_fails_the_program(ring: TestRing, results: Any) -> None:
    caller = Caller(ring)
    assert ring.source.reply(take(ring).seq, results) is None
    status, _, error = caller.end()
    assert status == native.DROPPED
    assert "other lengths" in error


def test_a_failure_brings_its_message(ring: TestRing) -> None:
    caller = Caller(ring)
    ring.source.fail(take(ring).seq, "the host function raised: \u00fc \0 and more" + "x" * 500)
    status, _, error = caller.end()
    assert status == native.DROPPED
    assert error.startswith("the host function raised: \u00fc  and more")


def test_a_call_waits_until_all_before_it_has_been_delivered(ring: TestRing) -> None:
    ring.send(b"a tap before it")
    caller = Caller(ring)
    caller.waits()
    assert ring.source.read_call(0) is None
    batch = ring.source.read(30)
    assert len(batch.frames) == 1, "the reader leaves the call to others"
    batch.release()
    assert ring.source.read_call(0) is None, "the tap is still being delivered"
    (call,) = ring.take(1)
    assert call.header.flags & Flags.CALL
    ring.source.resume(ring.source.reply(call.header.seq, [np.ones(2, np.float32)]))
    assert caller.end()[0] == native.EMITTED


def test_messages_behind_a_call_wait_until_the_call_is_delivered(ring: TestRing) -> None:
    caller = Caller(ring)
    batch = ring.source.read_call(30)
    ring.send(b"a tap behind it")
    assert ring.source.read(0.01) is None
    batch.release()
    ring.source.end_read_call()
    assert len(ring.take(1)) == 1
    ring.source.fail(0, "enough")
    assert caller.end()[0] == native.DROPPED


def test_a_reader_without_helpers_takes_the_call_itself(ring: TestRing) -> None:
    caller = Caller(ring)
    (taken,) = ring.take(1)
    assert taken.header.flags & Flags.CALL
    ring.source.fail(taken.header.seq, "enough")
    assert caller.end()[2] == "enough"


@pytest.mark.parametrize("policy", list(Policy))
def test_a_full_ring_keeps_a_call_waiting_but_never_drops_it(make_ring: Any, policy: Policy) -> None:
    ring = make_ring(policy=Policy.DROP_NEWEST)
    count = ring.fill()
    ring.source.configure(type(ring.source._config)(policy=policy, timeout_sec=0))
    caller = Caller(ring)
    lost = 1 if policy is Policy.OVERWRITE_OLDEST else 0  # this makes room for the call
    while not ring.counters.waiting_producers and ring.counters.dropped == 1:  # the drop at the end of `fill`
        pass
    frames = ring.take(count + 1 - lost)
    assert [f.header.seq for f in frames[:-1]] == list(range(lost, count))
    assert frames[-1].header.flags & Flags.CALL
    ring.source.resume(ring.source.reply(frames[-1].header.seq, [np.full(2, 3, np.float32)]))
    assert caller.end()[:2] == (native.EMITTED, [3, 3])


def test_a_damaged_call_fails_its_program(ring: TestRing) -> None:
    ring.send(b"intact")
    caller = Caller(ring)
    caller.waits()
    ring.corrupt(192, b"XYZ")
    ring.take(1)
    with pytest.raises(CorruptStreamError):
        ring.source.read(30)
    status, _, error = caller.end()
    assert status == native.DROPPED
    assert "was damaged" in error
    assert ring.library.hcb_call_count(ring.device) == 0


class Host:
    """A receiver whose only consumer has a host function."""

    def __init__(self, ring: Any, function: Any) -> None:
        self.registry, self.scope = Registry(), Scope("test")
        self.lease = self.registry.lease(Consumer(1, "host", "here.py:1 (f)", function))
        self.receiver = DeviceReceiver("cpu:901", None, ring.source, self.registry, self.scope)

    def stop(self) -> None:
        assert self.receiver.stop(30)


def test_separate_threads_answer_calls_of_many_programs(ring: TestRing) -> None:
    together = threading.Barrier(8, timeout=30)

    def function(message: Any) -> Any:
        together.wait()  # all of them run at a time
        return [np.full(2, message.seq, np.float32)]

    host = Host(ring, function)
    for _ in range(5):
        callers = [Caller(ring) for _ in range(8)]
        ends = [caller.end() for caller in callers]
        assert {status for status, *_ in ends} == {native.EMITTED}
        assert len({result[0] for _, result, _ in ends}) == 8
    assert not host.receiver.calls.running
    host.stop()


def test_a_host_function_that_runs_holds_up_no_tap(ring: TestRing) -> None:
    tapped = threading.Event()

    def function(message: Any) -> Any:
        if message.arrays:
            tapped.set()
            return None
        ring.send(b"a tap of the host function")
        assert tapped.wait(30)
        return [np.zeros(2, np.float32)]

    host = Host(ring, function)
    assert Caller(ring).end()[0] == native.EMITTED
    host.stop()


def test_a_call_without_a_consumer_fails_and_is_reported(ring: TestRing) -> None:
    host = Host(ring, lambda message: [np.zeros(2, np.float32)])
    for _ in range(2):  # read by the reader, and by a thread that waits for calls
        status, _, error = Caller(ring, consumer_id=77).end()
        assert status == native.DROPPED
        assert f"{77:#018x}" in error
        assert Caller(ring).end()[0] == native.EMITTED
    taken = host.scope.deferred.take()
    assert taken is not None
    (error,) = taken.exceptions
    assert isinstance(error, UnknownConsumerError)
    host.stop()


CLOSED = """
import sys; sys.path[:0] = sys.argv[1:]
from rings import TestRing
from hostcallback.receiver.sources.ring_batch import RingConfig
from test_calls import Caller
ring = TestRing(RingConfig())
before = Caller(ring)
before.waits()
ring.source.close_calls("the end")
assert before.end()[2] == "the end"
assert Caller(ring).end()[2] == "the end"
assert ring.library.hcb_call_count(ring.device) == 0
"""


def test_closing_fails_the_calls_that_wait_and_those_to_come() -> None:
    here = Path(__file__).parent
    python_output("-c", CLOSED, *map(str, (here, here.parent / "helpers", HELPERS, ROOT)), timeout_sec=60)


@pytest.mark.slow
@needs_compiler
def test_without_futures_the_handler_holds_its_thread_until_the_reply(tmp_path: Path) -> None:
    program = tmp_path / "handler"
    compile_program(
        [build_native.as_one_source(tmp_path), Path(__file__).with_name("call_handler_test.cc")],
        program,
        "-pthread",
    )
    done = subprocess.run([program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr

"""Messages are recorded and spooled soon after emission, however slow the taps are: each once, in order."""

from __future__ import annotations

import random
import signal
import subprocess
import threading
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import hostcallback as hcb
from hostcallback.receiver.cli import main
from hostcallback.receiver.runtime.dispatch.dispatcher import LOOK_SEC
from hostcallback.receiver.taplog.reading.logged_message import LoggedMessage
from hostcallback.receiver.taplog.reading.merge import LostNote
from hostcallback.receiver.taplog.reading.reader import LogReader
from python_process import start_python
from threads import wait_for

PROGRAM = """
import os, sys, threading, time
import jax, jax.numpy as jnp
from jax import lax
import hostcallback as hcb

mode, folder, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
sink = hcb.record(folder) if mode == "record" else hcb.forward("localhost:1", spool=folder, drain_sec=0.0)
slow = threading.Event()

def tap(value):
    slow.wait(0.02)

f = jax.jit(lambda x: lax.scan(lambda c, _: (hcb.id_tap(tap, c, name="slow") + 1, None), x, None, length=steps)[0])
with hcb.outfeed_receiver(sinks=[sink], timeout_sec=600):
    f(jnp.float32(0)).block_until_ready()
    print("committed", flush=True)
    sys.stdin.read()
"""


def recorded(folder: Path) -> list[tuple[int, float]]:
    """Sequence numbers and values of the messages in the log below a folder."""
    messages = LogReader([path.parent for path in folder.rglob("*.hcblog")][:1]).messages()
    return [(logged.message.seq, float(logged.message.arrays[0])) for logged in messages]


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("mode", ["record", "forward"])
def test_emitted_messages_outlive_a_kill_behind_a_slow_tap(
    tmp_path: Path, mode: str, how: signal.Signals
) -> None:
    folder = tmp_path / mode
    process = start_python(
        "-c", PROGRAM, mode, folder, "5000", stdin=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "committed\n"
    if how is signal.SIGKILL:  # promised: after 0.1 s a message is in the file; a busy machine gets more time
        wait_for(lambda: len(recorded(folder)) == 5000, timeout_sec=50)
    process.send_signal(how)
    process.wait(120)
    process.stdout.close()
    assert process.stdin is not None
    process.stdin.close()
    # Delivering them would have taken 100 s.
    assert [value for _, value in recorded(folder)] == [float(k) for k in range(5000)]


@pytest.mark.slow
def test_each_message_is_recorded_once_in_order_whatever_the_taps_do(tmp_path: Path) -> None:
    rng = random.Random(0)
    delivered: list[tuple[str, float]] = []
    moment = threading.Event()

    def take(name: str) -> Any:
        def tap(value: Any) -> None:
            if rng.random() < 0.004:
                moment.wait(rng.choice([2, 8]) * LOOK_SEC)
            delivered.append((name, float(np.ravel(value)[0])))

        return tap

    small, large = take("small"), take("large")
    bulk = jnp.ones(80_000)  # its payload is outside the ring

    def body(carry: Any, step: Any) -> Any:
        hcb.id_tap(small, step, name="small")
        lax.cond(step % 50 == 0, lambda: hcb.id_tap(large, bulk * step, name="large") is None, lambda: False)
        hcb.check(step % 7 != 3, "seven {}", step, name="seven")  # several in a row never, many in all
        return carry, None

    program = hcb.jit(lambda x: lax.scan(body, x, jnp.arange(4000.0))[0])
    folded = hcb.jit(
        lambda x: lax.scan(
            lambda c, s: (hcb.check(s < 0, "again {}", s, name="again"), (c, None))[1], x, jnp.arange(3000.0)
        )[0]
    )
    for number in range(2):
        del delivered[:]
        with hcb.outfeed_receiver(record=tmp_path / str(number), on_error="warn", timeout_sec=120) as rx:
            program(0.0)
            folded(0.0)
            program(0.0)
        messages = list(LogReader(tmp_path / str(number)).messages())
        found = [
            (m.message.consumer.name, float(np.ravel(m.message.arrays[0])[0]))
            for m in messages
            if m.message.consumer.name in ("small", "large")
        ]
        assert found == delivered
        assert len(found) == 2 * (4000 + 80)
        seqs = [m.message.seq for m in messages]
        assert seqs == sorted(set(seqs))
        assert rx.recorder is not None
        counters = rx.recorder.counters
        # Messages of `again` that are left out between the first and the last of a batch are counted, not lost.
        assert counters.lost_messages == 0
        assert counters.messages == sum(row.delivered for row in rx.stats)


@pytest.mark.parametrize("policy", ["drop_newest", "overwrite_oldest", "sample"])
def test_drops_are_accounted_for_once_in_the_log(tmp_path: Path, policy: str) -> None:
    moment = threading.Event()

    def tap(value: Any) -> None:
        if float(value[0]) % 100 == 0:
            moment.wait(3 * LOOK_SEC)

    program = hcb.jit(
        lambda x: lax.scan(lambda c, s: (hcb.id_tap(tap, c + s) * 0, None), x, jnp.arange(3000.0))[0]
    )
    x = jnp.zeros(4000)
    with hcb.outfeed_receiver(record=tmp_path / "log", back_pressure=policy, timeout_sec=120) as rx:
        program(x)
    records = list(LogReader(tmp_path / "log").values())
    lost = sum(record.lost.messages for record in records if isinstance(record, LostNote))
    seqs = [record.message.seq for record in records if isinstance(record, LoggedMessage)]
    assert seqs == sorted(set(seqs))
    assert len(seqs) + lost == 3000
    delivered, dropped = (sum(getattr(row, name) for row in rx.stats) for name in ("delivered", "dropped"))
    assert delivered + dropped == 3000
    assert len(seqs) >= delivered  # of messages that were overwritten some had been recorded


@pytest.mark.slow
def test_a_recorder_that_is_slow_itself_loses_nothing(tmp_path: Path) -> None:
    class Slow:
        def __init__(self) -> None:
            self.seqs: list[int] = []
            self.threads: set[str] = set()

        def record_batch(self, device: str, batch: Any, find: Any, **numbers: int) -> None:
            from hostcallback.receiver.wire.frame import Flags, decode_header

            threading.Event().wait(2 * LOOK_SEC)
            self.threads.add(threading.current_thread().name)
            headers = [decode_header(*frame[:2]) for frame in batch.frames]
            self.seqs += [header.seq for header in headers if not header.flags & Flags.END_OF_STREAM]
            assert not numbers["dropped"]

        def lose(self, device: str, count: int, reason: str) -> None:
            raise AssertionError(reason)

        def write(self) -> None:
            pass

        flush = write

    sink, device, moment = Slow(), jax.devices()[0], threading.Event()
    program = hcb.jit(
        lambda x: lax.scan(
            lambda c, _: (hcb.id_tap(lambda v: moment.wait(LOOK_SEC / 20), c) + 1, None), x, None, length=3000
        )[0]
    )
    with hcb.outfeed_receiver(sinks=[sink], devices=[device], timeout_sec=120):
        program(jnp.float32(0))
    assert sink.seqs == list(range(sink.seqs[0], sink.seqs[0] + 3000))
    assert {"hostcallback-cpu:0", "hostcallback-ahead-cpu:0"} <= sink.threads


def test_messages_are_in_the_file_while_a_tap_function_runs(tmp_path: Path) -> None:
    go, seen = threading.Event(), threading.Event()

    def tap(value: Any) -> None:
        seen.set()
        go.wait(60)

    f = jax.jit(lambda x: hcb.id_tap(tap, x))
    with warnings.catch_warnings():
        with hcb.outfeed_receiver(record=tmp_path / "log", timeout_sec=120):
            f(0.0)
            assert seen.wait(60)
            for number in range(1, 50):
                f(float(number))
            wait_for(lambda: len(recorded(tmp_path / "log")) == 50, timeout_sec=30)
            found = recorded(tmp_path / "log")
            go.set()
    assert [value for _, value in found] == [float(k) for k in range(50)]
    assert recorded(tmp_path / "log") == found


def test_the_log_names_messages_not_delivered_when_a_receiver_gave_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    go = threading.Event()
    f = jax.jit(lambda x: hcb.id_tap(lambda value: go.wait(60), x, name="stuck"))

    def interrupted() -> None:
        with hcb.outfeed_receiver(record=tmp_path / "log", timeout_sec=0.2):
            for number in range(5):
                f(float(number))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    go.set()
    hcb.barrier_wait()
    records = list(LogReader(tmp_path / "log").values())
    (note,) = [record.lost for record in records if isinstance(record, LostNote)]
    assert note.messages == 0
    assert "recorded, but not all are delivered" in note.reason
    assert "tap stuck" in note.reason
    assert main(["cat", str(tmp_path / "log")]) == 0
    printed = capsys.readouterr().out
    assert "messages are recorded, but not all are delivered: " in printed
    assert "device cpu:0: tap stuck" in printed
    assert "message(s) lost" not in printed

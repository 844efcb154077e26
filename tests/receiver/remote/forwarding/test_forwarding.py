"""Forwarding: the collector stores emitted messages once and in order, even if any process is killed meanwhile."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import hostcallback as hcb
from collecting import (
    CHECK,
    LOSS,
    TEXT,
    CollectorProcess,
    Emitter,
    all_stored,
    forwarder,
    only,
    stored,
    wait_for,
)


def test_a_programs_taps_are_printed_and_stored_by_the_collector(tmp_path: Path) -> None:
    @hcb.jit
    def train(x: jnp.ndarray) -> jnp.ndarray:
        def body(carry: jnp.ndarray, step: jnp.ndarray) -> tuple[jnp.ndarray, None]:
            hcb.id_tap(lambda value: None, {"loss": carry, "step": step}, name="loss")
            hcb.print("loss is {}", carry)
            return carry + 1, None

        return lax.scan(body, x, jnp.arange(50))[0]

    with CollectorProcess(tmp_path) as collector:
        with hcb.outfeed_receiver(forward=collector.address, spool=tmp_path / "spool") as rx:
            train(jnp.float32(0)).block_until_ready()
        assert rx.forwarder is not None
        assert rx.forwarder.unsent_bytes == 0
        assert collector.stop() == 0
    found = all_stored(collector.log)
    numbers = only(found)
    assert numbers == list(range(numbers[0], numbers[0] + 100))  # other tests' taps had some before
    assert len(collector.lines) == 50
    assert collector.lines[7].startswith("[p0 d0 step 7 test_forwarding.py:")
    assert collector.lines[7].endswith("] loss is 7.0\n")
    assert not list((tmp_path / "spool").iterdir())


@pytest.mark.slow
def test_processes_without_an_index_are_told_apart(tmp_path: Path) -> None:
    program = """
    import sys, jax, hostcallback as hcb
    with hcb.outfeed_receiver(forward=sys.argv[1], spool=sys.argv[2]):
        jax.jit(lambda x: hcb.print("loss is {}", x))(float(sys.argv[3]))
    """
    pids = []
    with CollectorProcess(tmp_path) as collector:
        for number in range(2):
            arguments = [collector.address, str(tmp_path / "spool"), str(number)]
            with subprocess.Popen(
                [sys.executable, "-c", textwrap.dedent(program), *arguments],
                env={**os.environ, "HOSTCALLBACK_RUN": "sweep"},
            ) as process:
                assert process.wait(60) == 0
            pids.append(process.pid)
        assert collector.stop() == 0
    first, second = collector.lines
    assert first.startswith("[p0 d0 ")  # it was alone
    assert f":{pids[1]} d0 " in second


def test_reports_about_messages(tmp_path: Path) -> None:
    with CollectorProcess(tmp_path, "--print-all") as collector:
        with forwarder(collector.address, tmp_path / "spool", process_index=3) as recorder:
            emitter = Emitter(recorder, "cpu:1")
            emitter.emit(LOSS, np.float32(0.5), np.int32(119))
            emitter.emit(TEXT, np.float32(1.5), np.int32(120))
            emitter.emit(CHECK, np.bool_(False), np.float32(-1.0))
        assert collector.stop() == 0
    assert collector.lines == [
        "[p3 d1 step 119 train.py:12] loss {loss: 0.5, step: 119}\n",
        "[p3 d1 step 120 model.py:42] x = 1.5 at 120\n",
    ]
    report = "".join(collector.errors)
    assert "x is -1.0" in report
    assert "train.py:20" in report
    assert "run p3 cpu:1" in report


@pytest.mark.slow
def test_a_collector_that_is_killed_again_and_again_stores_everything_once(tmp_path: Path) -> None:
    count, turns = 20_000, 5
    chance = random.Random(7)
    with CollectorProcess(tmp_path, "--quiet") as collector:
        recorder = forwarder(collector.address, tmp_path / "spool", window_bytes=1 << 18, drain_sec=60)

        def emit() -> None:
            emitter = Emitter(recorder)
            for _ in range(0, count, 500):
                emitter.losses(500)
                recorder.flush()

        thread = threading.Thread(target=emit)
        thread.start()
        for _ in range(turns):
            threading.Event().wait(chance.uniform(0.05, 0.4))
            collector.kill()
            collector.start()
        thread.join()
        recorder.close()
        assert recorder.unsent_bytes == 0
        collector.kill()
    assert only(all_stored(collector.log)) == list(range(count))


@pytest.mark.slow
def test_without_a_collector_everything_stays_for_the_next_process(tmp_path: Path) -> None:
    spool = tmp_path / "spool"
    with CollectorProcess(tmp_path, "--quiet") as collector:
        collector.kill()
        with forwarder(collector.address, spool, drain_sec=0.0) as recorder:
            Emitter(recorder).losses(1_000)
        assert recorder.unsent_bytes > 1_000 * 64
        assert len(list(spool.iterdir())) == 1
        collector.start()
        with forwarder(collector.address, spool, drain_sec=60.0) as recorder:
            Emitter(recorder).losses(10)
        wait_for(lambda: not list(spool.iterdir()), "an empty spool")
        collector.stop()
    found, _ = stored(collector.log)
    assert sorted(map(len, found.values())) == [10, 1_000]
    assert all(seqs == list(range(len(seqs))) for seqs in found.values())


def test_bad_arguments_are_refused_before_anything_is_made(tmp_path: Path) -> None:
    for bad in ("collector", "host:0", "host:port", ":7070", "host:70700"):
        with pytest.raises(ValueError, match="host:port"):
            hcb.outfeed_receiver(forward=bad)
    with pytest.raises(ValueError, match="run is 'a/b'"):
        hcb.Forward("localhost:7070", run="a/b")
    with pytest.raises(ValueError, match="when_full is 'never'"):
        hcb.Forward("localhost:7070", when_full="never")
    for wrong in (-1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=f"drain_sec is {wrong}, expected a number of seconds"):
            hcb.Forward("localhost:7070", drain_sec=wrong)
    with pytest.raises(ValueError, match="spool is"):
        hcb.outfeed_receiver(spool=tmp_path)
    with pytest.raises(TypeError, match="forward is a int"):
        hcb.outfeed_receiver(forward=7070)  # type: ignore[arg-type]

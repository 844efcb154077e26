"""SIGTERM: the writers of metrics get what the device emitted before it. What an interrupt loses is told once."""

from __future__ import annotations

import csv
import signal
import subprocess
from pathlib import Path

import pytest

from python_process import start_python

pytestmark = pytest.mark.native_only

PROGRAM = """
import sys, time
import jax, jax.numpy as jnp
import hostcallback as hcb

class Stuck:
    def add_scalar(self, tag, value, step):
        print(f"stuck at {step}", flush=True)
        time.sleep(600)

def step(carry, i):
    hcb.metrics({"loss": carry}, step=i)
    return carry + 1, None

run = jax.jit(lambda x, steps: jax.lax.scan(step, x, steps)[0])
COUNT = 20_000
with hcb.outfeed_receiver(writers=[Stuck() if sys.argv[1] == "stuck" else hcb.csv(sys.argv[1])]):
    run(jnp.float32(0), jnp.arange(COUNT)).block_until_ready()
    print("emitted", flush=True)
    time.sleep(600)
"""


def signalled(number: signal.Signals, line: str, *arguments: str | Path) -> tuple[str, int]:
    """What a program says on the standard error, and its status: it gets the signal after it has printed that line."""
    process = start_python(*arguments, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    while line not in process.stdout.readline():
        assert process.poll() is None, process.stderr.read()
    process.send_signal(number)
    status = process.wait(60)
    said = process.stderr.read()
    process.stdout.close()
    process.stderr.close()
    return said, status


def test_what_was_emitted_before_it_is_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "metrics.csv"
    said, status = signalled(signal.SIGTERM, "emitted", "-c", PROGRAM, file)
    with file.open(newline="") as rows:
        assert [int(row["step"]) for row in csv.DictReader(rows)] == list(range(20_000))
    assert (said, status) == ("", -signal.SIGTERM)


@pytest.mark.slow  # the writer has 5 s
def test_what_a_stuck_writer_has_not_taken_is_counted() -> None:
    said, status = signalled(signal.SIGTERM, "emitted", "-c", PROGRAM, "stuck")
    assert said.splitlines()[-1] == (
        "hostcallback: at SIGTERM these were left out: 19,999 record(s) of the metric writer __main__.Stuck"
    )
    assert status == -signal.SIGTERM


SLOW = """
import time
import jax, jax.numpy as jnp
import hostcallback as hcb

class Slow:
    def add_scalar(self, tag, value, step):
        if step == 3:
            print("runs", flush=True)
        time.sleep(0.01)

def step(carry, i):
    hcb.metrics({"loss": carry}, step=i)
    return carry + 1, None

with hcb.outfeed_receiver(writers=[Slow()]):
    out = jax.jit(lambda x: jax.lax.scan(step, x, jnp.arange(200_000))[0])(jnp.float32(0))
    time.sleep(600)
"""


@pytest.mark.slow
def test_an_interrupt_tells_once_what_a_writer_loses_and_gives_no_advice() -> None:
    said, _ = signalled(signal.SIGINT, "runs", "-c", SLOW)
    assert said.count("left out of its records") == 1
    assert said.count("was not done at the end of the receiver") == 1
    assert "nothing writes" not in said
    assert said.endswith("KeyboardInterrupt\n")

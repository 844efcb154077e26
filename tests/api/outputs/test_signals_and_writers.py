"""SIGTERM: the writers of metrics get what the device emitted before it. What an interrupt loses is told once."""

from __future__ import annotations

import csv
import io
import json
import signal
import subprocess
import threading
from pathlib import Path

import jax.numpy as jnp
import pytest
from collecting_writer import CollectingWriter

import hostcallback as hcb
from python_process import start_python
from threads import wait_for

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


class SlowWriter(CollectingWriter):
    """Takes 100 ms for a record."""

    def write_scalars(self, step: int, scalars: dict[str, float]) -> None:
        threading.Event().wait(0.1)
        super().write_scalars(step, scalars)


def test_after_an_exception_a_slow_writer_gets_no_longer_than_taps() -> None:
    writer, error = SlowWriter(), ZeroDivisionError()
    rx = hcb.outfeed_receiver(writers=[writer], timeout_sec=0.05).__enter__()
    for step in range(60):
        hcb.metrics({"loss": 0.5}, step=step)
    with pytest.warns(hcb.MetricsWarning, match=r"SlowWriter: \d+ were left out"):
        rx.__exit__(ZeroDivisionError, error, None)
    assert len(writer.rows) < 60


TORN = [
    ("m.csv", "step,loss\r\n0,1.0\r\n1,2.", "step,loss\n0,1.0\n1,2.\n2,0.5\n", "may be cut short: b'1,2.'"),
    ("m.csv", "step,loss\r\n0,1.0\r", "step,loss\n0,1.0\n2,0.5\n", ""),
    ("m.csv", "step,loss\r\n0,1.0\r\n1", "step,loss\n0,1.0\n2,0.5\n", "which is removed: b'1'"),
    ("m.csv", 'step,said,loss\r\n1,"a\nb', "step,said,loss\n2,,0.5\n", "which is removed: b'1,\"a\\nb'"),
    ("m.csv", 'step,loss\r\n1,"a\nb"', 'step,loss\n1,"a\nb"\n2,0.5\n', "may be cut short: b'1,\"a\\nb\"'"),
    ("m.csv", 'step,loss\r\n1,5" pipe\r\n2,', 'step,loss\n1,5" pipe\n2,\n2,0.5\n', "may be cut short: b'2,'"),
    ("m.csv", "step,loss\r\n1,2\0\0", "step,loss\n2,0.5\n", "which is removed"),
    ("m.csv", "step,loss", "step,loss\n2,0.5\n", "may be cut short: b'step,loss'"),
    ("m.csv", "step,loss\r\n0,1.0\r\n" + 200_000 * "\0", "step,loss\n0,1.0\n2,0.5\n", "200000 zero byte(s)"),
    (
        "m.csv",
        "step,said,loss\r\n1,a\u2028b,2.0",
        "step,said,loss\n1,a\u2028b,2.0\n2,,0.5\n",
        "may be cut short",
    ),
    (
        "m.csv",
        'step,loss\r\n0,"' + 20_000 * "odd quote\r\n" + "1",
        'step,loss\n0,"' + 20_000 * "odd quote\n" + "2,0.5\n",
        "which is removed: b'1'",
    ),
    (
        "m.jsonl",
        '{"step": 0}\n' + 200_000 * "\0",
        '{"step": 0}\n{"step": 2, "loss": 0.5}\n',
        "200000 zero byte(s)",
    ),
    (
        "m.jsonl",
        '{"step": 0}\n{"ste',
        '{"step": 0}\n{"step": 2, "loss": 0.5}\n',
        "which is removed: b'{\"ste'",
    ),
    ("m.jsonl", '{"step": 0}', '{"step": 0}\n{"step": 2, "loss": 0.5}\n', ""),
    ("m.jsonl", '{"step": 0}\n', '{"step": 0}\n{"step": 2, "loss": 0.5}\n', ""),
]


@pytest.mark.parametrize(("name", "found", "then", "told"), TORN)
def test_a_file_that_ends_within_a_line_goes_on_with_a_new_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, found: str, then: str, told: str
) -> None:
    path = tmp_path / name
    path.write_bytes(found.encode())
    make = hcb.csv if name == "m.csv" else hcb.jsonl
    with hcb.outfeed_receiver(writers=[make(path, mode="a")]):
        hcb.metrics({"loss": 0.5}, step=2)
    assert path.read_bytes().decode().replace("\r\n", "\n") == then
    assert [told in message for message in caplog.messages] == [True] * bool(told)


def test_a_further_column_leaves_the_permissions_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "m.csv"
    path.write_text("step\n")
    path.chmod(0o640)
    with hcb.outfeed_receiver(writers=[hcb.csv(path, mode="a")]):
        hcb.metrics({"loss": 0.5}, step=2)
    assert path.read_text().splitlines() == ["step,loss", "2,0.5"]
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_file_can_be_followed_while_no_barrier_flushes_it(tmp_path: Path) -> None:
    lines, table = tmp_path / "m.jsonl", tmp_path / "m.csv"
    with hcb.outfeed_receiver(writers=[hcb.jsonl(lines), hcb.csv(table)]):
        hcb.metrics({"loss": 0.5}, step=0)
        hcb.metrics({"accuracy": 0.25}, step=0)
        wait_for(lambda: len(lines.read_text().splitlines()) == 2, "lines in the file")
        wait_for(
            lambda: table.read_text().splitlines() == ["step,loss,accuracy", "0,0.5,0.25"],
            "a row in the table",
        )


def test_a_file_gets_its_lines_while_more_come(tmp_path: Path) -> None:
    lines = tmp_path / "m.jsonl"

    def emit_until_followed() -> bool:
        hcb.metrics({"loss": 0.5}, step=0)
        return lines.stat().st_size > 0

    with hcb.outfeed_receiver(writers=[hcb.jsonl(lines)]):
        wait_for(emit_until_followed, "lines in the file")
        found = lines.read_text()
    assert found.endswith("\n")
    assert len(found) < io.DEFAULT_BUFFER_SIZE // 2  # a full buffer would have been written all the same


def test_a_line_of_json_has_the_counts_and_edges_of_the_finite_values(tmp_path: Path) -> None:
    floats = jnp.array([0.0, 0.5, 1.0, 4.0, jnp.nan, jnp.inf])
    with hcb.outfeed_receiver(writers=[hcb.jsonl(tmp_path / "m.jsonl")]):
        hcb.metrics({"f": hcb.histogram(floats, bins=4), "i": hcb.histogram(jnp.arange(6), bins=2)}, step=3)
    (row,) = map(json.loads, (tmp_path / "m.jsonl").read_text().splitlines())
    assert row == {
        "step": 3,
        "f": {"counts": [2, 1, 0, 1], "edges": [0, 1, 2, 3, 4]},
        "i": {"counts": [3, 3], "edges": [0, 2.5, 5]},
    }

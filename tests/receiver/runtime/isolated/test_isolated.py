"""An isolated receiver: its deliveries, and its end when either process dies."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import hostcallback as hcb
from checkout import HELPERS
from hostcallback.receiver.runtime.runtime import runtime
from hostcallback.receiver.taplog.reading.reader import LogReader

pytestmark = pytest.mark.native_only

PROGRAM = HELPERS / "isolated_program.py"


def run(scenario: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs the program to its end, and until no process has its output open any more."""
    return subprocess.run(
        [sys.executable, str(PROGRAM), scenario, *arguments],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def lines(done: subprocess.CompletedProcess[str]) -> list[int]:
    """The numbers that were printed."""
    return [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("line ")]


def test_everything_is_delivered_in_order_by_the_other_process() -> None:
    done = run("plain")
    assert done.returncode == 0, done.stderr
    assert lines(done) == list(range(2000))
    assert done.stdout.splitlines()[-1] == "delivered 2000 dropped 0"


@pytest.mark.slow
def test_the_program_waits_for_room_in_a_small_ring() -> None:
    done = run("plain", HOSTCALLBACK_RING_BYTES="16384", COUNT="20000")
    assert done.returncode == 0, done.stderr
    assert lines(done) == list(range(20000))


@pytest.mark.slow
def test_the_program_goes_on_when_the_reader_dies() -> None:
    done = run("reader dies", HOSTCALLBACK_RING_BYTES="65536", COUNT="30000")
    assert done.returncode == 0, done.stderr
    assert "its taps are delivered in this process from now on" in done.stderr
    found = lines(done)
    # The messages that the killed process was delivering are delivered once more.
    counts = Counter(found)
    assert set(counts) == set(range(30000))
    assert max(counts.values()) <= 2
    assert sum(count == 2 for count in counts.values()) <= 1024


@pytest.mark.slow
def test_messages_a_killed_reader_returned_are_in_its_log(tmp_path: Path) -> None:
    done = run("reader dies", str(tmp_path), HOSTCALLBACK_RING_BYTES="65536", COUNT="30000")
    assert done.returncode == 0, done.stderr
    messages = LogReader([tmp_path]).messages()
    counts = Counter(int(message.message.arrays[0]) for message in messages)
    assert set(counts) == set(range(30000))
    assert max(counts.values()) <= 2
    assert sum(count == 2 for count in counts.values()) <= 1024


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["program dies", "program dies emitting"])
def test_the_reader_delivers_the_messages_of_a_killed_program(scenario: str) -> None:
    done = run(scenario, COUNT="20000")
    assert done.returncode == -signal.SIGKILL
    found = lines(done)
    assert found == list(range(len(found)))
    if scenario == "program dies":
        assert "emitted 20000" in done.stderr
        assert len(found) == 20000
    pid = next(line.split()[1] for line in done.stderr.splitlines() if line.startswith("pid "))
    assert not list(Path("/dev/shm").glob(f"hostcallback-rings-{pid}-*/*"))


@pytest.mark.slow
def test_the_reader_outlives_the_terminal() -> None:
    done = run("terminal closes", COUNT="20000")
    assert done.returncode == -signal.SIGHUP
    assert lines(done) == list(range(20000))


@pytest.mark.slow
def test_no_barrier_waits_forever_for_a_reader_with_blocked_output() -> None:
    script = """
import jax, jax.numpy as jnp, hostcallback as hcb
show = hcb.jit(lambda x: hcb.id_print(x))
with hcb.outfeed_receiver(process=True, timeout_sec=2):
    for _ in range(2000):
        show(jnp.arange(200))
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as program:
        assert program.stderr is not None
        said = b""
        while line := program.stderr.readline():  # and nothing of its output
            said += line
            if b"errors.TapTimeoutError" in line:
                break
        assert b"has delivered none for 2" in said
        program.kill()
        program.communicate(timeout=60)


@pytest.mark.slow
def test_a_forked_child_that_leaves_the_block_lets_the_reader_be() -> None:
    done = run("child leaves")
    assert done.returncode == 0, done.stderr
    assert "child 0" in done.stderr
    assert "its taps are delivered in this process" not in done.stderr
    assert lines(done) == [*range(2000)] * 2


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", range(4))
def test_either_process_killed_many_times(number: int) -> None:
    test_the_program_goes_on_when_the_reader_dies()
    test_the_reader_delivers_the_messages_of_a_killed_program("program dies emitting")


@pytest.mark.slow
def test_it_records_too(tmp_path: Path) -> None:
    done = run("plain", str(tmp_path))
    assert done.returncode == 0, done.stderr
    messages = list(LogReader([tmp_path]).messages())
    assert [int(message.message.arrays[0]) for message in messages] == list(range(2000))
    assert {message.message.device for message in messages} == {"cpu:0"}


def tapping(devices: int) -> Any:
    """A program that prints, taps, checks, and sends arrays too large for the other process's ring."""
    mesh = jax.sharding.Mesh(jax.devices()[:devices], ("d",))
    spec = jax.sharding.PartitionSpec("d")

    def on_each(x: Any) -> Any:
        def step(carry: Any, i: Any) -> Any:
            hcb.id_print(carry.sum(), what="sum")
            hcb.id_tap(seen.append, i)
            hcb.check(i < 7, "i is {}", i)
            return carry + 1, None

        return lax.scan(step, x, jnp.arange(10))[0]

    return hcb.jit(jax.shard_map(on_each, mesh=mesh, in_specs=spec, out_specs=spec)), devices


seen: list[Any] = []


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 4])
def test_taps_checks_and_statistics_come_together(devices: int, capfd: pytest.CaptureFixture[str]) -> None:
    program, count = tapping(devices)
    seen.clear()
    x = jnp.zeros((count, 2))
    for _ in range(2):  # a ring is used again
        with (
            pytest.raises(hcb.TapFunctionException) as caught,
            hcb.outfeed_receiver(process=True) as receiver,
        ):
            program(x).block_until_ready()
        (error,) = caught.value.exceptions
        assert isinstance(error, hcb.CheckError)
        assert error.check.count == 3 * count
        assert "i is 7" in str(error)
        assert "hcb.check(i < 7" in str(error)
        rows = [row for row in receiver.stats if row.delivered]
        assert sum(row.delivered for row in rows) == (10 + 10 + 3) * count
        assert sum(row.dropped for row in receiver.stats) == 0
    assert sorted(map(int, seen)) == sorted(2 * count * [*range(10)])
    out = capfd.readouterr().out
    assert out.count("what: sum") == 20 * count
    # Afterwards everything is delivered here again.
    program(x)
    with pytest.raises(hcb.TapFunctionException):
        hcb.barrier_wait()


@pytest.mark.slow
def test_a_barrier_waits_for_the_other_process_and_raises_its_checks(
    capfd: pytest.CaptureFixture[str],
) -> None:
    program, count = tapping(1)
    with hcb.outfeed_receiver(process=True):
        program(jnp.zeros((count, 2)))
        with pytest.raises(hcb.TapFunctionException, match="i is 7"):
            hcb.barrier_wait()
        assert capfd.readouterr().out.count("what: sum") == 10


def test_arrays_too_large_for_their_file_are_delivered_here(capfd: pytest.CaptureFixture[str]) -> None:
    with hcb.outfeed_receiver(process=True):
        for size in (1 << 18, 1 << 23):
            hcb.jit(lambda x: hcb.id_print(x, what="array"))(jnp.full(size, 7, jnp.float32))
    out = capfd.readouterr().out
    assert out.count("what: array\n[7. 7. 7. ... 7. 7. 7.]") == 2


def test_taps_that_need_this_process_stay_here() -> None:
    stream = io.StringIO()
    host_object = object()
    with hcb.outfeed_receiver(process=True):
        before = runtime.isolated.processes[0].rings.emitted("cpu:0")
        hcb.jit(lambda x: hcb.id_print(x, output_stream=stream))(jnp.float32(1))
        hcb.jit(lambda x: hcb.id_print(x, what=host_object, output_stream=stream))(jnp.float32(2))
        assert runtime.isolated.processes[0].rings.emitted("cpu:0") == before
    assert stream.getvalue().splitlines() == ["1.", f"what: {host_object}", "2."]


def test_a_format_that_does_not_fit_is_named_in_the_output_of_the_other_process(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def program(x: Any) -> Any:
        hcb.print("{:d}", x, skip_format_check=True)  # without it, the trace refuses this
        return x

    with hcb.outfeed_receiver(process=True):
        hcb.jit(program)(np.float32(1.5))
    assert "the template '{:d}' is not filled: ValueError: Unknown format code 'd'" in capfd.readouterr().out


def test_misuse(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="path of a folder"):
        hcb.outfeed_receiver(process=True, record=hcb.record(tmp_path))
    with pytest.raises(ValueError, match="overwrite_oldest"):
        hcb.outfeed_receiver(process=True, back_pressure="overwrite_oldest")


@pytest.mark.slow
def test_without_rings_the_taps_stay_here() -> None:
    done = run("plain", HOSTCALLBACK_TRANSPORT="callback", COUNT="20")
    assert done.returncode == 0, done.stderr
    assert lines(done) == list(range(20))
    assert "delivered in this process" in done.stderr


def test_rules_hold_for_the_other_process(capfd: pytest.CaptureFixture[str]) -> None:
    asked: list[float] = []

    def ask(value: Any) -> bool:
        (array,), _ = value
        asked.append(float(array[0]))
        return True

    program = hcb.jit(lambda x: hcb.print("ruled {}", x))
    try:
        with hcb.outfeed_receiver(process=True) as receiver:
            program(jnp.zeros(3))
            hcb.taps["print"].truncate(2)
            program(jnp.ones(3))
            hcb.taps["print"].every(2)
            for number in range(2, 6):
                program(jnp.full(3, number, jnp.float32))
            hcb.barrier_wait()
            assert sum(row.delivered for row in receiver.stats) == 4
            hcb.taps["print"].reset()
            hcb.taps["print"].when(ask)
            program(jnp.full(3, 7, jnp.float32))
            hcb.barrier_wait()
        assert asked == [7]
    finally:
        hcb.taps["*"].reset()
    assert capfd.readouterr().out.splitlines() == [
        "ruled [0. 0. 0.]",
        "ruled first 2 of (3,): [1. 1.]",
        "ruled first 2 of (3,): [2. 2.]",
        "ruled first 2 of (3,): [4. 4.]",
        "ruled [7. 7. 7.]",
    ]

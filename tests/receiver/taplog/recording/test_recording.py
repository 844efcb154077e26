"""A receiver that records: the devices' messages are in the log, and replay delivers them as the receiver did."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P

import hcb_command
import hostcallback as hcb
from hostcallback import receiver
from hostcallback.api.watch import watch
from hostcallback.receiver import environment
from hostcallback.receiver.taplog.reading.logged_message import LoggedMessage
from hostcallback.receiver.taplog.reading.merge import LostNote
from hostcallback.receiver.taplog.reading.reader import LogReader


def logged(path: Path) -> list[LoggedMessage]:
    return list(LogReader(path).messages())


def ignore(*args: Any, **kwargs: Any) -> None:
    pass


def scan(tap: Callable[[Any, Any], Any], steps: int) -> Callable[[Any], Any]:
    def body(carry: Any, step: Any) -> Any:
        tap(carry, step)
        return carry + 1, None

    return hcb.jit(lambda x: lax.scan(body, x, jnp.arange(steps))[0])


def test_every_message_of_a_scan_is_recorded_with_its_tap(tmp_path: Path) -> None:
    seen: list[Any] = []

    def take(value: Any, **kwargs: Any) -> None:
        seen.append((int(value["step"]), float(value["x"])))

    program = scan(
        lambda x, step: hcb.id_tap(take, {"x": x, "step": step}, name="take", run=7, text="a\nb"), 3_000
    )
    with hcb.outfeed_receiver(record=tmp_path / "log") as rx:
        program(jnp.float32(0.5))
    messages = logged(tmp_path / "log")
    assert [(m.step, float(m.value["x"])) for m in messages] == seen
    assert len(seen) == 3_000
    seqs = [m.message.seq for m in messages]
    assert seqs == list(range(seqs[0], seqs[0] + 3_000))
    consumer = messages[0].message.consumer
    assert consumer.name == "take"
    assert consumer.kwargs == {"run": 7, "text": "a\nb"}
    assert f"{__file__}:" in consumer.source_line
    times = [m.message.time_ns for m in messages]
    assert times == sorted(times)
    assert messages[0].message.device == "cpu:0"
    assert rx.recorder is not None
    counters = rx.recorder.counters
    assert (counters.messages, counters.lost_messages) == (3_000, 0)
    assert counters.nbytes == sum(path.stat().st_size for path in (tmp_path / "log").iterdir())


@pytest.mark.parametrize("compress", [False, True])
def test_values_of_all_kinds_come_back_bit_by_bit(tmp_path: Path, compress: bool) -> None:
    given = {
        "large": np.random.default_rng(0).standard_normal((300, 700)).astype(np.float32),  # outside the ring
        "bf16": np.arange(5, dtype=ml_dtypes.bfloat16),
        "int4": np.array([-8, 7, 3], ml_dtypes.int4),
        "nan": np.array([np.nan, -0.0, np.inf], np.float32),
        "none": np.zeros((0, 4), np.int8),
        "complex": np.array(1 - 2j, np.complex64),
        "list": [np.array(True), (np.uint8(3),)],
    }
    program = hcb.jit(lambda x: hcb.id_tap(ignore, x))
    with hcb.record(tmp_path, compress=compress) as recorder, hcb.outfeed_receiver(record=recorder):
        program(given)
        hcb.barrier_wait()
        (message,) = logged(tmp_path)  # a barrier has it written
    found = jax.tree.leaves(message.value)
    for array, expected in zip(found, jax.tree.leaves(given), strict=True):
        expected = np.asarray(expected)
        assert array.dtype == expected.dtype
        assert array.shape == expected.shape
        assert array.tobytes() == expected.tobytes()
    assert isinstance(message.value["list"][1], tuple)


def test_receivers_one_after_the_other_record_their_own_messages(tmp_path: Path) -> None:
    program = hcb.jit(lambda x: hcb.id_tap(ignore, x))
    recorder = hcb.record(tmp_path / "both")
    for number in range(2):
        with hcb.outfeed_receiver(record=recorder):
            program(jnp.int32(number))
        with hcb.outfeed_receiver(record=tmp_path / f"{number}"):
            program(jnp.int32(10 + number))
        program(jnp.int32(20))  # of no receiver
        hcb.barrier_wait()
    recorder.close()
    assert [int(m.value) for m in logged(tmp_path / "both")] == [0, 1]
    assert [int(m.value) for m in logged(tmp_path / "0")] == [10]
    assert [int(m.value) for m in logged(tmp_path / "1")] == [11]
    notes = [r for r in LogReader(tmp_path / "both").records() if not isinstance(r, LoggedMessage)]
    assert notes == []  # messages delivered elsewhere meanwhile are not lost


def test_calls_are_recorded_too(tmp_path: Path) -> None:
    shape = jax.ShapeDtypeStruct((), jnp.float32)

    def double(x: Any) -> Any:
        return 2 * x

    program = jax.jit(lambda x: hcb.call(double, x, result_shape=shape, name="double"))
    with hcb.outfeed_receiver(record=tmp_path):
        assert float(program(jnp.float32(4))) == 8
    (message,) = logged(tmp_path)
    assert (message.message.consumer.name, float(message.value)) == ("double", 4.0)
    got: list[float] = []
    replayed = receiver.replay(tmp_path, bind={"double": lambda x: got.append(float(x))})
    assert got == [4.0]
    assert replayed.messages == 1


def test_failing_checks_are_counted_exactly_however_many_were_folded(tmp_path: Path) -> None:
    program = scan(lambda x, step: hcb.check(x < 10, "x is {x} at {step}", x=x, step=step), 5_000)
    with pytest.raises(hcb.TapFunctionException) as live:
        with hcb.outfeed_receiver(record=tmp_path) as rx:
            program(jnp.float32(0))
    assert rx.recorder is not None
    assert (rx.recorder.counters.messages, rx.recorder.counters.lost_messages) == (4_990, 0)
    found = logged(tmp_path)
    assert len(found) + sum(message.folded for message in found) == 4_990
    with pytest.raises(hcb.TapFunctionException) as replayed:
        receiver.replay(tmp_path)
    (reported,) = live.value.exceptions
    (again,) = replayed.value.exceptions
    assert isinstance(reported, hcb.CheckError)
    assert isinstance(again, hcb.CheckError)
    assert reported.check.count == again.check.count == 4_990
    # With the line, its source, the stack, and the steps. Python 3.13 knows the text of `python -c`, as which the
    # runner of tests starts this process; the log has only lines of files.
    started_by = "\n      import sys;exec(eval(sys.stdin.readline()))"
    # The log may have more of the steps: what came while the receiver was busy was copied ahead.
    texts = (str(reported).replace(started_by, ""), str(again))
    program_text, log_text = (re.sub(r"\n  at steps .*", "", text) for text in texts)
    assert program_text == log_text
    assert (again.check.first.step, again.check.last.step) == (10, 4999)
    assert "x is 10.0 at 10" in str(again)


@pytest.mark.parametrize("how", ["watch_nonfinite", "every", "in a trace", "capsule"])
def test_a_log_tells_the_operation_that_made_nan_as_the_program_did(tmp_path: Path, how: str) -> None:
    def root(x, step):
        hcb.metrics({"x": x}, step=step)
        return jnp.log(x) + 1

    jitted = jax.jit(root)
    step = {
        "watch_nonfinite": lambda: hcb.watch_nonfinite(jitted),
        "every": lambda: hcb.watch_nonfinite(jitted, mode="every"),
        "in a trace": lambda: jax.jit(hcb.watch_nonfinite(root)),
        "capsule": lambda: hcb.capsule(jitted, tmp_path / "capsules", nonfinite=True),
    }[how]()

    through_python = environment.TRANSPORT.read() == "callback"

    def train() -> None:
        with hcb.outfeed_receiver(record=tmp_path):
            for number in range(5):
                result = step(jnp.float32(2.5 - number), number)
                if through_python:  # messages have no launch: those of two calls may have either's step
                    jax.block_until_ready(result)

    with pytest.raises(hcb.TapFunctionException) as live:
        train()
    with pytest.raises(hcb.TapFunctionException) as replayed:
        receiver.replay(tmp_path)
    (reported,), (again,) = live.value.exceptions, replayed.value.exceptions
    assert isinstance(reported, hcb.NonFiniteError)
    assert isinstance(again, hcb.NonFiniteError)
    assert str(again).partition("\n  first at")[0] == str(reported).partition("\n  first at")[0]
    assert (reported.primitive, again.primitive, again.nan_count, again.call) == (
        "log",
        "log",
        1,
        reported.call,
    )
    if how in ("watch_nonfinite", "capsule"):
        # Of the failed calls, and not of the reports, which come later.
        ends = [(one.seq, one.time_ns) for one in (reported.check.first, reported.check.last)]
        assert [(one.seq, one.time_ns) for one in (again.check.first, again.check.last)] == ends
    unknown = [None] if through_python else []  # the step of a finding
    assert again.check.count == 2
    assert again.check.first.step in (3, *unknown)
    assert again.check.last.step in (4, *unknown)
    if how != "in a trace" and not unknown:
        assert reported.call == 3
    shown = hcb_command.hcb(tmp_path, "errors", ".").stdout
    assert "log: 1 NaN and 0 infinite values in float32[]" in shown
    assert f"{__file__}:" in shown.partition("\n")[0]
    assert ", step 3, " in shown or unknown
    assert "2 failures (2 on cpu:0)" in shown
    lines = hcb_command.hcb(tmp_path, "cat", ".").stdout.splitlines()
    first, second = (line.split()[2] for line in lines if "check failed: log: 1 NaN" in line)
    assert first in ("3", *["-" for _ in unknown])
    assert second in ("4", *["-" for _ in unknown])


def test_a_log_of_a_program_that_died_before_it_found_the_operation_tells_the_failed_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "send", lambda *args: None)
    with hcb.outfeed_receiver(record=tmp_path, on_error="warn"):
        hcb.watch_nonfinite(jax.jit(jnp.log))(jnp.float32(-1)).block_until_ready()
    shown = hcb_command.hcb(tmp_path, "errors", ".").stdout
    assert shown.startswith("a result: NaN or infinite values, in log: the process that ran the program")


def test_messages_dropped_by_a_policy_are_noted(tmp_path: Path) -> None:
    gate = threading.Event()

    def wait(x: Any) -> None:
        gate.wait(30)

    program = scan(lambda x, step: hcb.id_tap(wait, jnp.zeros(20_000) + x), 3_000)
    with hcb.outfeed_receiver(record=tmp_path, back_pressure="drop_newest") as rx:
        program(jnp.float32(0)).block_until_ready()
        gate.set()
    (row,) = [row for row in rx.stats if row.delivered]
    assert row.dropped > 0
    records = list(LogReader(tmp_path).records())
    lost = [r.lost for r in records if isinstance(r, LostNote)]
    messages = [r for r in records if isinstance(r, LoggedMessage)]
    assert sum(note.messages for note in lost) == row.dropped
    assert len(messages) + row.dropped == 3_000
    assert {note.device for note in lost} == {"cpu:0"}


def test_printers_print_the_same_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def taps(x: Any, step: Any) -> None:
        hcb.id_print({"x": x, "step": step}, what="a")
        hcb.print("step {} has {x:.2f}", step, x=x)
        jax.vmap(lambda y: hcb.print("  row {}", y))(x + jnp.arange(2))

    with hcb.outfeed_receiver(record=tmp_path):
        scan(taps, 5)(jnp.float32(0.25))
    printed = capsys.readouterr().out
    assert printed.count("step 4 has 4.25") == 1
    receiver.replay(tmp_path)
    assert capsys.readouterr().out == printed


def test_logs_are_logged_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("recorded")
    with caplog.at_level(logging.INFO, "recorded"):
        with hcb.outfeed_receiver(record=tmp_path):
            hcb.jit(lambda x: hcb.log(logger=logger, level=logging.WARNING)("x is {}", x))(jnp.int32(3))
        receiver.replay(tmp_path)
    first, again = [(r.getMessage(), r.levelno, r.lineno, r.pathname) for r in caplog.records]
    assert first == again
    assert first[0] == "x is 3"


def test_devices_are_merged_by_time_each_in_its_order(tmp_path: Path) -> None:
    devices = jax.local_devices()
    program = scan(lambda x, step: hcb.id_tap(ignore, {"step": step, "x": x}, name="on a device"), 500)
    with hcb.outfeed_receiver(record=tmp_path):
        for device in devices:
            program(jax.device_put(jnp.float32(device.id), device))
    messages = logged(tmp_path)
    times = [m.message.time_ns for m in messages]
    assert len(messages) == 500 * len(devices)
    assert times == sorted(times)
    for device in devices:
        own = [m for m in messages if m.message.device == f"cpu:{device.id}"]
        assert [m.step for m in own] == list(range(500))
        assert [float(m.value["x"]) for m in own] == [device.id + k for k in range(500)]


@pytest.mark.parametrize("sharding", ["global", "local"])
def test_values_of_partitioned_arrays_are_put_together_again(tmp_path: Path, sharding: Any) -> None:
    live: list[Any] = []
    again: list[Any] = []

    def take(to: list[Any]) -> Callable[..., None]:
        return lambda x, index: to.append((np.asarray(x).copy(), index))

    mesh = jax.make_mesh((4,), ("i",))
    x = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P("i")))
    program = hcb.jit(
        lambda x: hcb.id_tap(take(live), x * 2, sharding=sharding, name="parts"), out_shardings=x.sharding
    )
    with hcb.outfeed_receiver(record=tmp_path):
        for _ in range(50):
            x = program(x)
    replayed = receiver.replay(tmp_path, bind={"parts": take(again)})
    assert replayed.messages == 200
    key = repr
    assert len(live) == (50 if sharding == "global" else 200)
    assert sorted(map(key, again)) == sorted(map(key, live))
    # Without the program each device's part is seen, with its place.
    first = logged(tmp_path)[0].message
    assert first.shard_index is not None
    assert first.arrays[0].shape == (2,)


@pytest.mark.native_only
def test_exported_programs_are_recorded_by_the_names_of_their_taps(tmp_path: Path) -> None:
    def body(x: Any, step: Any) -> Any:
        hcb.id_tap(ignore, {"x": x, "step": step}, name="exported loss")
        return x + 1, None

    def f(x: Any) -> Any:
        return lax.scan(body, x, jnp.arange(5))[0]

    exported = jax.export.export(jax.jit(f), disabled_checks=hcb.export_checks())(jnp.float32(0))
    hcb.bind("exported loss", ignore)
    try:
        with hcb.outfeed_receiver(record=tmp_path):
            jax.jit(exported.call)(jnp.float32(0)).block_until_ready()
    finally:
        hcb.unbind("exported loss")
    messages = logged(tmp_path)
    assert [(m.message.consumer.name, m.step, float(m.value["x"])) for m in messages] == [
        ("exported loss", k, float(k)) for k in range(5)
    ]
    got: list[float] = []
    receiver.replay(tmp_path, bind={"exported *": lambda value: got.append(float(value["x"]))})
    assert got == [0, 1, 2, 3, 4]


def test_batched_taps_are_recorded_one_message_each(tmp_path: Path) -> None:
    program = scan(lambda x, step: hcb.id_tap(ignore, x, batched=True, name="stacked"), 1_000)
    with hcb.outfeed_receiver(record=tmp_path):
        program(jnp.float32(0))
    assert [float(m.value) for m in logged(tmp_path)] == list(range(1_000))
    parts: list[Any] = []
    receiver.replay(tmp_path, bind={"stacked": parts.append})
    assert np.concatenate(parts).tolist() == list(range(1_000))


def test_a_receiver_that_cannot_record_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match="file"):
        with hcb.outfeed_receiver(record=tmp_path / "file"):
            pass
    with hcb.outfeed_receiver():  # the devices are free
        pass
    empty = r"got an empty path, expected the path of a folder, as in hcb.record\('run/taps'\)"
    with pytest.raises(ValueError, match=empty):
        hcb.record("")
    with pytest.raises(ValueError, match=empty):
        with hcb.outfeed_receiver(record=""):
            pass
    with pytest.raises(TypeError, match="record is of type int, expected the path of a folder"):
        hcb.outfeed_receiver(record=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="segment_bytes is 0, expected more than 0"):
        hcb.record(tmp_path, segment_bytes=0)


def test_a_tap_that_cannot_be_described_is_recorded_all_the_same(tmp_path: Path) -> None:
    value: Any = jnp.float32(3)
    for _ in range(250):  # deeper than descriptions go
        value = [value]
    program = hcb.jit(lambda x: hcb.id_tap(ignore, x, name="deep"))
    with hcb.outfeed_receiver(record=tmp_path):
        program(value)
    (message,) = logged(tmp_path)
    assert message.message.consumer.name == "deep"
    assert float(message.value[0]) == 3

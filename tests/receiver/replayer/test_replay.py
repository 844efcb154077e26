"""Replay: arguments of functions, order and time of calls, selection, and reports of the rest."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkout import HELPERS, ROOT
from hostcallback import receiver
from hostcallback.receiver.errors import LostMessagesError, TapFunctionException
from hostcallback.receiver.failures.check_report import CheckError
from hostcallback.receiver.messages import Message
from hostcallback.receiver.sinks.metric_writers.reduction import NO_STEP
from hostcallback.receiver.sinks.scalars import ScalarsSink, scalars_into
from hostcallback.receiver.taplog.writing.log_writer import LogWriter
from hostcallback.receiver.taplog.writing.recorder import Recorder, record
from hostcallback.receiver.taplog.writing.rotation import LogOptions
from hostcallback.receiver.taplog.writing.segment_writer import SegmentWriter
from hostcallback.receiver.wire.pytree import Node, Opaque
from hostcallback.receiver.wire.tap_descriptor import TapDescriptor
from logged_frames import block_of, consumer_of, frame
from python_process import python_output

BEGIN_NS = 1_700_000_000 * 10**9
LOSS = TapDescriptor(
    name="loss", source_line="train.py:12 (step)", consumer_id=77, kind="tap", params={}, kwargs={"run": 7},
    transforms=(("batch", {"batch_dims": (0, None)}),),
    tree=["dict", [["value", "loss"], ["value", "step"]], [["array"], ["array"]]], shards=None, sharding="global",
)  # fmt: skip
PLAIN = replace(LOSS, name="norm", consumer_id=78, kwargs={}, transforms=(), tree=["array"])
TEXT = replace(
    PLAIN, name="print", consumer_id=79, kind="format",
    tree=["tuple", [["tuple", [["array"]]], ["dict", [["value", "y"]], [["array"]]]]],
    params={"fmt": "x = {} {y}", "has_placeholders": True, "printoptions": np.get_printoptions()},
)  # fmt: skip
CHECK = replace(
    TEXT, name="positive", consumer_id=80, kind="check",
    tree=["tuple", [["array"], ["tuple", [["array"]]], ["dict", [], []]]],
    params={**TEXT.params, "fmt": "x is {}"},
)  # fmt: skip


def emit(
    recorder: Any, described: TapDescriptor, *arrays: Any, seq: int, time_ns: int = 0, device: str = "cpu:0"
) -> None:
    at = time_ns or BEGIN_NS + seq * 10**6
    recorder(Message(consumer_of(described), [np.asarray(a) for a in arrays], seq, at, 5, device, None))


@pytest.fixture
def log(tmp_path: Path) -> Path:
    # Written at the end only, so that the log has the same chunks however slow the machine is.
    with Recorder(LogWriter(tmp_path, LogOptions(flush_sec=1000.0))) as recorder:
        for seq in range(20):
            emit(recorder, LOSS, np.float32(seq / 2), np.int32(seq), seq=seq, device=f"cpu:{seq % 2}")
        for seq in range(20, 24):
            emit(recorder, PLAIN, np.arange(3.0) * seq, seq=seq)
    return tmp_path


def test_functions_are_called_as_the_taps_would_be(log: Path) -> None:
    seen: list[Any] = []

    def take(value: Any, *, run: int, device: Any, transforms: Any) -> None:
        seen.append((float(value["loss"]), int(value["step"]), run, device, transforms))

    replayed = receiver.replay(log, bind={"loss": take})
    assert seen == [(k / 2, k, 7, f"cpu:{k % 2}", LOSS.transforms) for k in range(20)]
    assert replayed.messages == 20
    assert replayed.skipped == {"norm": 4}
    assert replayed.failed_checks == replayed.lost == replayed.damaged == replayed.unmatched == []
    assert {row.device: row.delivered for row in replayed.stats} == {"cpu:0": 14, "cpu:1": 10}
    assert all(row.dropped == row.failed == 0 for row in replayed.stats)


def test_patterns_bind_and_an_exact_name_wins(log: Path) -> None:
    some: list[Any] = []
    exact: list[Any] = []
    receiver.replay(log, bind={"norm": exact.append, "*": lambda value, run=0: some.append(value)})
    assert (len(some), len(exact)) == (20, 4)


def test_a_name_missing_from_the_log_is_reported_with_near_ones(
    log: Path, caplog: pytest.LogCaptureFixture
) -> None:
    replayed = receiver.replay(log, bind={"lost": print})
    assert replayed.unmatched == ["lost"]
    (said,) = [record.getMessage() for record in caplog.records]
    assert "the log has no messages of a tap 'lost', to which a function is bound; it has: 'loss'" in said


def test_sinks_get_every_message(log: Path) -> None:
    messages: list[Message] = []
    replayed = receiver.replay(log, sinks=[messages.append])
    assert [m.seq for m in messages] == list(range(24))
    assert messages[-1].consumer.name == "norm"
    assert messages[-1].consumer.unflatten(messages[-1].arrays).tolist() == [0.0, 23.0, 46.0]
    assert replayed.skipped == {"loss": 20, "norm": 4}


@pytest.mark.parametrize(
    ("chosen", "seqs"),
    [
        ({"steps": (3, 5)}, [3, 4, 5]),
        ({"steps": (None, 1)}, [0, 1]),
        ({"names": "no*"}, [20, 21, 22, 23]),
        ({"names": ["loss"], "devices": "cpu:1", "steps": (15, None)}, [15, 17, 19]),
        ({"since_ns": BEGIN_NS + 22 * 10**6}, [22, 23]),
        ({"until_ns": BEGIN_NS + 2 * 10**6}, [0, 1]),
    ],
)
def test_delivered_messages_can_be_chosen(log: Path, chosen: Any, seqs: list[int]) -> None:
    messages: list[Message] = []
    replayed = receiver.replay(log, sinks=[messages.append], **chosen)
    assert [m.seq for m in messages] == seqs
    assert all(row.dropped == 0 for row in replayed.stats)  # messages that were not chosen are not lost


def test_errors_of_functions_and_sinks_are_gathered(log: Path) -> None:
    def fail(value: Any) -> None:
        raise KeyError(f"sum {value.sum():.0f}")

    with pytest.raises(TapFunctionException) as caught:
        receiver.replay(log, bind={"norm": fail})
    assert [str(failure.exception) for failure in caught.value.failures] == [
        f"'sum {3 * k}'" for k in range(20, 24)
    ]
    assert caught.value.failures[0].source_line == "train.py:12 (step)"


def test_checks_are_gathered_as_by_a_barrier(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with record(tmp_path) as recorder:
        for seq in range(5):
            emit(recorder, CHECK, np.bool_(False), np.float32(-seq - 1), seq=seq)
    with pytest.raises(TapFunctionException) as caught:
        receiver.replay(tmp_path)
    (error,) = caught.value.exceptions
    assert isinstance(error, CheckError)
    assert str(error).startswith("x is -1.0, at train.py:12 (step)")
    assert error.check.count == 5
    caplog.clear()
    replayed = receiver.replay(tmp_path, on_error="warn")
    assert [check.count for check in replayed.failed_checks] == [5]
    assert "check failed: x is -1.0" in caplog.records[0].getMessage()


def test_texts_are_printed_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with record(tmp_path) as recorder:
        for seq in range(3):
            emit(recorder, TEXT, np.float32(seq), np.arange(2), seq=seq)
    receiver.replay(tmp_path)
    assert capsys.readouterr().out == "".join(f"x = {k}.0 [0 1]\n" for k in range(3))
    got: list[Any] = []
    receiver.replay(tmp_path, bind={"print": lambda x, y: got.append(float(x))})
    assert (got, capsys.readouterr().out) == ([0.0, 1.0, 2.0], "")


def test_containers_and_objects_of_the_program_have_stand_ins(tmp_path: Path) -> None:
    described = replace(PLAIN, tree=["node", "m.Model", [["array"], ["object", "<function f>"]]])
    with record(tmp_path) as recorder:
        emit(recorder, described, 1.0, seq=0)
    got: list[Any] = []
    receiver.replay(tmp_path, bind={"norm": got.append})
    assert got == [Node("m.Model", (np.array(1.0), Opaque("<function f>")))]


@pytest.mark.slow
@pytest.mark.parametrize("speed", [1.0, 4.0])
def test_the_original_timing_is_kept(tmp_path: Path, speed: float) -> None:
    gaps = (0.0, 0.3, 0.3, 0.5, 0.9)
    with record(tmp_path) as recorder:
        for seq, at in enumerate(gaps):
            emit(
                recorder,
                PLAIN,
                float(seq),
                seq=seq,
                time_ns=BEGIN_NS + int(at * 10**9),
                device=f"cpu:{seq % 2}",
            )
    arrived: list[float] = []
    how: Any = {"realtime": True} if speed == 1 else {"speed": speed}
    receiver.replay(tmp_path, bind={"norm": lambda value: arrived.append(time.perf_counter())}, **how)
    for found, due in zip(arrived, gaps, strict=True):
        late = found - arrived[0] - due / speed
        assert -0.01 < late < 0.2


def test_wrong_arguments_are_explained(log: Path) -> None:
    with pytest.raises(ValueError, match="speed is 0, expected more than 0"):
        receiver.replay(log, speed=0)
    with pytest.raises(ValueError, match="expected 'defer' or 'warn': a replay has no program to stop"):
        receiver.replay(log, on_error="abort")
    with pytest.raises(FileNotFoundError):
        receiver.replay(log / "missing")


def test_damaged_parts_are_reported_when_the_rest_was_delivered(log: Path) -> None:
    (path,) = log.iterdir()
    data = bytearray(path.read_bytes())
    place = data.index(b"HCB\1")
    data[place + 200] ^= 1
    path.write_bytes(data)
    got: list[Any] = []
    with pytest.raises(TapFunctionException) as caught:
        receiver.replay(log, sinks=[got.append])
    (error,) = caught.value.exceptions
    assert isinstance(error, LostMessagesError)
    assert "checksums do not match" in str(error)
    assert 4 <= len(got) < 24


def test_a_tap_that_is_described_wrongly_is_reported_and_skipped(tmp_path: Path) -> None:
    with record(tmp_path) as recorder:
        emit(recorder, replace(TEXT, params={"fmt": "x"}), 1.0, 2.0, seq=0)
        emit(recorder, PLAIN, 1.0, seq=1)
    got: list[Any] = []
    with pytest.raises(TapFunctionException, match="messages could not be delivered") as caught:
        receiver.replay(tmp_path, bind={"norm": got.append})
    assert "'print' at train.py:12 (step) is described as of the kind 'format' with params" in str(
        caught.value.exceptions[0]
    )
    assert len(got) == 1


def test_a_recorder_is_a_sink_of_a_replay(log: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    with record(copy) as recorder:
        receiver.replay(log, sinks=[recorder], names="norm")
    again: list[Any] = []
    receiver.replay(copy, bind={"norm": lambda value: again.append(value.tolist())})
    assert again == [[0.0, k, 2.0 * k] for k in range(20, 24)]


# Metrics


class Writer:
    def __init__(self) -> None:
        self.written: list[tuple[int, dict[str, float]]] = []

    def write(self, record: Any) -> None:
        self.written.append((record.step, record.scalars))


def test_scalars_of_all_taps_go_to_a_metric_writer_with_their_steps(tmp_path: Path) -> None:
    nested = replace(
        LOSS, name="m", consumer_id=90,
        tree=["dict", [["value", "a"], ["value", "b"], ["value", "step"]],
              [["tuple", [["array"], ["array"]]], ["namedtuple", "N", ["x"], [["value", 2]]], ["array"]]],
    )  # fmt: skip
    with record(tmp_path) as recorder:
        emit(recorder, PLAIN, 0.5, seq=0)
        emit(recorder, nested, np.float32(1.5), np.arange(3.0), np.int32(7), seq=1)
        emit(recorder, PLAIN, np.nan, seq=2)
        emit(recorder, TEXT, np.int32(4), 2.5, seq=3)
        emit(recorder, CHECK, np.bool_(True), 1.0, seq=4)
        emit(recorder, PLAIN, 8.0, seq=5, device="cpu:1")
        emit(recorder, PLAIN, np.array(2 + 1j), seq=6)
    writer = Writer()
    sink = ScalarsSink(writer)  # type: ignore[arg-type]
    receiver.replay(tmp_path, sinks=[sink], on_error="warn")
    assert sink.written == {"norm": 3, "m/a/0": 1, "m/b/x": 1, "print/0": 1, "print/y": 1}
    assert str(writer.written) == str([
        (7, {"norm": 0.5}),
        (7, {"m/a/0": 1.5, "m/b/x": 2.0}),
        (7, {"norm": float("nan")}),
        (7, {"print/0": 4.0, "print/y": 2.5}),
        (NO_STEP, {"norm": 8.0}),
    ])  # fmt: skip
    path = tmp_path / "scalars.jsonl"
    with scalars_into(path) as lines:
        receiver.replay(sorted(tmp_path.glob("*.hcblog")), sinks=[lines], on_error="warn")
    assert path.read_text().splitlines()[1:] == [
        '{"step": 7, "m/a/0": 1.5, "m/b/x": 2.0}', '{"step": 7, "norm": "NaN"}',
        '{"step": 7, "print/0": 4.0, "print/y": 2.5}', '{"step": null, "norm": 8.0}',
    ]  # fmt: skip


def test_scalars_of_processes_with_one_number_on_two_hosts_share_no_row(tmp_path: Path) -> None:
    for number, host in enumerate(("a", "b")):
        info = {"process": f"{number:016d}", "host": host, "pid": 7, "run": "r", "created_ns": number}
        writer = SegmentWriter(tmp_path / f"{host}.hcblog", info=info)
        taps = (LOSS, replace(LOSS, name="other", consumer_id=91)) if number else (LOSS,)
        frames = (frame(tap, np.float32(number), np.int32(5), seq=seq) for seq, tap in enumerate(taps))
        writer.frames("cpu:0", block_of(*frames), {tap.consumer_id: tap for tap in taps})
        writer.close()
    with scalars_into(tmp_path / "scalars.csv", devices=True) as scalars:
        receiver.replay(tmp_path, sinks=[scalars])
    assert (tmp_path / "scalars.csv").read_text().splitlines() == [
        "step,device,loss/loss,other/loss",
        '5,"process a:7, cpu:0",0.0,',
        '5,"process b:7, cpu:0",1.0,1.0',
    ]


# Large logs

LARGE = """
import sys, time
sys.path[:0] = sys.argv[3:]
import numpy as np
from logged_frames import LOSS, NORM, block_of, frame, losses
from hostcallback.receiver.taplog.writing.rotation import LogOptions
from hostcallback.receiver.taplog.writing.log_writer import LogWriter
wanted = int(sys.argv[2])
log = LogWriter(sys.argv[1], LogOptions(segment_bytes=256 << 20))
log.describe(LOSS)
log.describe(NORM)
big = np.random.default_rng(0).random(30_000)
seq = [0, 0]
while log.counters.nbytes < wanted:
    for device in (0, 1):
        log.append(f"cpu:{device}", block_of(*(frame(NORM, big, seq=seq[device] + k) for k in range(40))))
        seq[device] += 40
log.append("cpu:0", losses(seq[0], 100))
log.close()
messages = sum(seq) + 100
from hostcallback import receiver
from hostcallback.receiver.taplog.reading.reader import LogReader
def peak():  # not ru_maxrss, which is at least that of the process that started this one
    status = open("/proc/self/status").read()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])
before = peak()
count = 0
def take(message):
    global count
    count += 1
start = time.perf_counter()
receiver.replay(sys.argv[1], sinks=[take])
took = time.perf_counter() - start
assert count == messages, (count, messages)
assert sum(1 for _ in LogReader(sys.argv[1]).messages()) == messages
grown = (peak() - before) / 1024
print(grown, took)
"""


@pytest.mark.slow
def test_a_large_log_is_read_in_constant_memory(tmp_path: Path) -> None:
    grown = []
    for shift in (28, 30):  # bytes of the log
        folder = tmp_path / str(shift)
        folder.mkdir()
        printed = python_output("-c", LARGE, folder, 1 << shift, ROOT, HELPERS, timeout_sec=110)
        grown.append(float(printed.split()[0]))
    assert abs(grown[1] - grown[0]) < 16, grown  # MiB
    assert grown[1] < 128, grown  # some ten chunks of 9.6 MiB

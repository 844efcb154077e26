"""The log that recovery makes of the files of a process that died."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hostcallback as hcb
from hostcallback.receiver import limits
from hostcallback.receiver.cli import main
from hostcallback.receiver.native import bindings as native
from hostcallback.receiver.sources.ring import RingSource
from hostcallback.receiver.sources.ring_batch import RingConfig
from hostcallback.receiver.taplog.flight.recorder import (
    PROCESS_FILE,
    TAPS_FILE,
    RecoveredFrame,
    RingContents,
    read_ring,
)
from hostcallback.receiver.taplog.flight.recovery import (
    CHUNK_FRAMES,
    Flight,
    NoFlightError,
    find_flights,
    write_log,
)
from hostcallback.receiver.taplog.format.layout import NO_STEP, Kind, Lost
from hostcallback.receiver.taplog.reading.chunk_reader import Chunk
from hostcallback.receiver.taplog.reading.segment_reader import SegmentReader
from hostcallback.receiver.taplog.writing.segment_writer import SegmentWriter
from hostcallback.receiver.wire.frame import MAGIC, Flags, decode_header
from logged_frames import BEGIN_NS, LOSS, NORM, SECOND, frame, read


def flight_of(folder: Path, *frames: bytes) -> Flight:
    """A process that has described its taps, and died with these messages in a ring."""
    folder.mkdir()
    taps = SegmentWriter(folder / TAPS_FILE)
    for tap in (LOSS, NORM):
        taps.describe(tap)
    taps.close()
    kept = [RecoveredFrame(decode_header(one), one, delivered=False) for one in frames]
    return Flight(folder, {}, [RingContents(folder / "cpu_0.hcbring", "cpu:0", 0, kept)])


def test_a_message_before_the_step_of_its_launch_has_that_step(tmp_path: Path) -> None:
    flight = flight_of(
        tmp_path / "flight",
        frame(NORM, np.float32(0.5), seq=0),
        frame(LOSS, np.float32(1), np.int32(7), seq=1),
    )
    write_log(flight, tmp_path / "log")
    messages, _, damaged = read(tmp_path / "log")
    assert [(message.tap.consumer.name, message.step) for message in messages] == [("norm", 7), ("loss", 7)]
    assert not damaged
    assert not flight.problems


def test_messages_of_taps_whose_descriptors_cannot_be_read_are_recovered_and_it_is_said(
    tmp_path: Path,
) -> None:
    flight = flight_of(tmp_path / "flight", frame(LOSS, np.float32(1), np.int32(7), seq=3))
    (flight.folder / TAPS_FILE).write_bytes(b"no log")
    write_log(flight, tmp_path / "log")
    assert [message.message.seq for message in read(tmp_path / "log")[0]] == [3]
    (told,) = flight.problems
    assert told.startswith("the taps' descriptors cannot be read: ")


@pytest.mark.native_only
def test_messages_that_are_unfinished_or_damaged_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "cpu_0.hcbring"
    source = RingSource.open(1_000_000 - 1, RingConfig(capacity_bytes=4096))
    source.keep_in_file(path, "cpu:0", 1 << 20)
    library = native.load()
    assert library.hcb_test_produce(library.hcb_ring_get(source.device), 1, 5, 8) == 5
    whole = read_ring(path)
    starts = [one.header.position for one in whole.frames]
    assert (len(starts), whole.unfinished, whole.damaged) == (5, 0, [])
    data = bytearray(path.read_bytes())
    ring = data.index(whole.frames[0].frame) - starts[0]
    flags = ring + starts[1] + len(MAGIC) + 1
    data[flags : flags + 4] = (whole.frames[1].header.flags | Flags.BUSY).to_bytes(4, "little")
    damaged = ring + starts[3]
    data[damaged : damaged + len(MAGIC)] = b"XYZ"
    copy = tmp_path / "copy.hcbring"  # this process still uses the file itself
    copy.write_bytes(data)
    found = read_ring(copy)
    assert [one.header.position for one in found.frames] == [starts[0], starts[2], starts[4]]
    assert (found.unfinished, found.damaged) == (1, [(starts[3], starts[4])])


def described(process: Any) -> bytes:
    """The file in which a process describes itself."""
    return json.dumps(process).encode()


KILLED = {
    "host": "elsewhere",
    "pid": 4711,
    "started_ns": BEGIN_NS,
    "command": ["train.py", "--lr", 3],
    "run": "exp-7",
}


def ring_file(folder: Path, process: bytes | None = None) -> Path:
    """Adds the folder of a process, with a file called like a ring's."""
    folder.mkdir(parents=True)
    (folder / "cpu-0.hcbring").write_bytes(b"no ring")
    if process is not None:
        (folder / PROCESS_FILE).write_bytes(process)
    return folder


def test_processes_are_found_by_folder_oldest_first(tmp_path: Path) -> None:
    new, old = ({**KILLED, "started_ns": BEGIN_NS - age * SECOND} for age in range(2))
    ring_file(tmp_path / "a", described(new))
    ring_file(tmp_path / "b", described(old))
    (tmp_path / "c").mkdir()  # a process that has just begun
    (tmp_path / "file").write_text("")
    found = find_flights(tmp_path)
    assert [flight.folder.name for flight in found] == ["b", "a"]
    assert [flight.folder.name for flight in find_flights(tmp_path / "a")] == ["a"]
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(BEGIN_NS // SECOND))
    assert found[1].title == f"elsewhere:4711 train.py --lr 3 (started {started}, run exp-7)"
    assert not found[1].is_running
    assert found[1].problems == [
        f"{tmp_path}/a/cpu-0.hcbring starts with b'no ring', expected b'HCBRING\\n': "
        "it is not the file of a ring (*.hcbring)"
    ]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("file", "is a file: give the folder of HOSTCALLBACK_FLIGHT_RECORDER or of flight_recorder="),
        ("gone", "does not exist: give the folder of HOSTCALLBACK_FLIGHT_RECORDER or of flight_recorder="),
        ("empty", r"has no files of a flight recorder \(\*.hcbring, in a folder per process\)"),
    ],
)
def test_a_folder_without_files_of_processes_is_named(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty" / "process").mkdir(parents=True)
    with pytest.raises(NoFlightError, match=f"{tmp_path / name} {said}"):
        find_flights(tmp_path / name)


@pytest.mark.parametrize(
    ("process", "said"),
    [
        (described(KILLED).ljust(limits.FILE_BYTES + 1), f"it is longer than {limits.FILE_BYTES} bytes"),
        (b"[]", "it does not state host, pid and started_ns"),
        (described({**KILLED, "host": 1}), "it does not state host, pid and started_ns"),
        (described({**KILLED, "pid": "1"}), "it does not state host, pid and started_ns"),
        (described({**KILLED, "started_ns": 0.5}), "it does not state host, pid and started_ns"),
        (described({**KILLED, "pid": 0}), f"it states the process 0, begun at {BEGIN_NS}"),
        (described({**KILLED, "pid": 2**31}), f"it states the process {2**31}, begun at {BEGIN_NS}"),
        (described({**KILLED, "started_ns": -1}), "it states the process 4711, begun at -1"),
        (described({**KILLED, "started_ns": 2**63}), f"it states the process 4711, begun at {2**63}"),
        (described({**KILLED, "command": "train"}), "it states the process 4711, begun at"),
        (None, "No such file"),
    ],
)
def test_a_process_that_is_not_described_has_the_name_of_its_folder(
    tmp_path: Path, process: bytes | None, said: str
) -> None:
    ring_file(tmp_path / "of-a-process", process)
    (flight,) = find_flights(tmp_path)
    assert (flight.title, flight.run, flight.is_running) == ("of-a-process", "", False)
    assert flight.problems[0].startswith(
        f"{tmp_path}/of-a-process/process.json does not identify the process: "
    )
    assert said in flight.problems[0]


@pytest.mark.parametrize(
    "process", [{"pid": 1}, {"pid": 2**31 - 1, "started_ns": 0}, {"started_ns": 2**63 - 1}]
)
def test_a_process_at_the_limits_is_described(tmp_path: Path, process: dict[str, Any]) -> None:
    ring_file(tmp_path / "one", described({**KILLED, **process, "run": "no name!"}).ljust(limits.FILE_BYTES))
    (flight,) = find_flights(tmp_path)
    assert flight.process == {**KILLED, "command": ["train.py", "--lr", "3"], **process, "run": ""}


def test_the_words_of_a_command_are_limited(tmp_path: Path) -> None:
    word = "w" * limits.NAME_CHARS
    ring_file(
        tmp_path / "one", described({**KILLED, "host": f"{word}x", "command": [f"{word}x", *"w" * 1000]})
    )
    (flight,) = find_flights(tmp_path)
    assert flight.process["host"] == word
    assert flight.process["command"] == [word, *"w" * 999]


def with_delivered(flight: Flight, count: int) -> Flight:
    """The flight, of whose messages the first ones had been delivered."""
    (ring,) = flight.rings
    ring.frames = [replace(kept, delivered=k < count) for k, kept in enumerate(ring.frames)]
    return flight


def bounds(path: Path) -> list[tuple[int, ...]]:
    """Of each chunk of messages of a segment: its messages, the step before them, and their steps' bounds."""
    reader = SegmentReader(path)
    found = [chunk for chunk in reader.chunks() if isinstance(chunk, Chunk) and chunk.kind is Kind.FRAMES]
    reader.close()
    return [(chunk.messages, chunk.step_before, chunk.min_step, chunk.max_step) for chunk in found]


@pytest.mark.parametrize("delivered", [True, False])
@pytest.mark.parametrize("count", [0, 1, 3, 4])
def test_messages_that_had_been_delivered_can_be_left_out(
    tmp_path: Path, count: int, delivered: bool
) -> None:
    kept = [frame(LOSS, np.float32(1), np.int32(7 + seq), seq=seq, run_id=seq) for seq in range(4)]
    flight = with_delivered(flight_of(tmp_path / "flight", *kept), count)
    path = write_log(flight, tmp_path / "log", delivered=delivered)
    messages, lost, damaged = read(tmp_path / "log")
    first = 0 if delivered else count
    assert [(one.message.seq, one.step) for one in messages] == [(seq, 7 + seq) for seq in range(first, 4)]
    assert not lost
    assert not damaged
    assert bounds(path) == (
        [(4 - first, 6 + first if first else NO_STEP, 7 + first, 10)] if first < 4 else []
    )


@pytest.mark.parametrize("delivered", [True, False])
def test_a_message_without_its_arrays_is_noted_as_lost(tmp_path: Path, delivered: bool) -> None:
    flight = with_delivered(
        flight_of(tmp_path / "flight", *(frame(NORM, np.zeros(9), seq=k) for k in range(4))), 2
    )
    ring = flight.rings[0]
    ring.frames = [replace(kept, frame=b"") if kept.header.seq in (1, 3) else kept for kept in ring.frames]
    write_log(flight, tmp_path / "log", delivered=delivered)
    messages, lost, _ = read(tmp_path / "log")
    assert [message.message.seq for message in messages] == ([0, 2] if delivered else [2])
    assert [note.lost for note in lost] == [
        Lost("cpu:0", seq, seq, 1, 72, BEGIN_NS + seq * SECOND, "its arrays were not in the ring's file")
        for seq in ((1, 3) if delivered else (3,))
    ]


def test_many_messages_are_written_in_parts(tmp_path: Path) -> None:
    count = 2 * CHUNK_FRAMES + 5
    kept = [frame(LOSS, np.float32(1), np.int32(seq), seq=seq, run_id=seq) for seq in range(count)]
    flight = with_delivered(flight_of(tmp_path / "flight", *kept), CHUNK_FRAMES + 9)
    path = write_log(flight, tmp_path / "log", delivered=False)
    assert [message.message.seq for message in read(tmp_path / "log")[0]] == list(
        range(CHUNK_FRAMES + 9, count)
    )
    assert bounds(path) == [
        (CHUNK_FRAMES - 9, CHUNK_FRAMES + 8, CHUNK_FRAMES + 9, 2 * CHUNK_FRAMES - 1),
        (5, 2 * CHUNK_FRAMES - 1, 2 * CHUNK_FRAMES, count - 1),
    ]


def test_a_log_of_a_process_names_it(tmp_path: Path) -> None:
    flight = flight_of(tmp_path / "flight", frame(NORM, np.float32(0.5), seq=0))
    flight.process = {"host": "elsewhere", "pid": 4711, "started_ns": BEGIN_NS, "command": [], "run": "exp-7"}
    reader = SegmentReader(write_log(flight, tmp_path / "new" / "log"))
    writer = reader.writer
    assert (writer.process, writer.host, writer.pid, writer.run) == ("flight", "elsewhere", 4711, "exp-7")
    reader.close()


@pytest.mark.parametrize("damage", ["torn", "damaged"])
def test_descriptors_that_are_damaged_are_named(tmp_path: Path, damage: str) -> None:
    flight = flight_of(tmp_path / "flight", frame(NORM, np.float32(0.5), seq=0))
    path = flight.folder / TAPS_FILE
    data = bytearray(path.read_bytes())
    if damage == "torn":
        path.write_bytes(data[: data.rindex(b"norm")])
    else:
        data[data.index(b"loss")] ^= 255
        path.write_bytes(data)
    write_log(flight, tmp_path / "log")
    assert [problem.startswith(f"{path}: ") for problem in flight.problems] == [True] * (damage == "damaged")
    assert [message.message.seq for message in read(tmp_path / "log")[0]] == [0]


@pytest.mark.native_only
@pytest.mark.slow  # reads all that earlier tests have left in the rings
def test_what_was_not_delivered_has_the_step_that_a_delivered_message_sent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reached, go = threading.Event(), threading.Event()

    def wait(value: Any) -> None:
        reached.set()
        go.wait(60)

    @jax.jit
    def step(i: Any) -> None:
        hcb.metrics({"loss": i * 0.5}, step=i)
        # Its function begins when what was sent before is delivered.
        x = hcb.call(lambda x: x, i, result_shape=jax.ShapeDtypeStruct((), jnp.int32))
        hcb.tap(wait, x, name="state")

    with hcb.outfeed_receiver(flight_recorder=tmp_path):
        step(jnp.int32(7))
        assert reached.wait(60)
        found = []
        for options in ([], ["--undelivered"]):
            assert main(["recover", str(tmp_path), "--json", "--last", "20", *options]) == 0
            found.append([json.loads(line) for line in capsys.readouterr().out.splitlines()])
        go.set()
    everything, undelivered = found
    assert [one["step"] for one in everything[-3:]] == [7, 7, 7]
    assert everything[-3]["delivered"]  # that of the step
    assert undelivered == [one for one in everything if not one["delivered"]]
    assert undelivered[-1]["name"] == "state"

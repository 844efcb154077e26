"""A process's log: when it writes, when it starts a new segment, deleted segments, and write errors."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkout import HELPERS
from hostcallback.receiver import limits
from hostcallback.receiver.taplog.format.layout import segment_name
from hostcallback.receiver.taplog.reading.reader import LogReader
from hostcallback.receiver.taplog.reading.segment_reader import SegmentReader
from hostcallback.receiver.taplog.reading.selection import Selection
from hostcallback.receiver.taplog.writing import log_writer, rotation as log_segments
from hostcallback.receiver.taplog.writing.recorder import record
from hostcallback.receiver.taplog.writing.segment_writer import SegmentWriter
from logged_frames import LOSS, NORM, block_of, frame, log_in, losses, read, seqs
from python_process import files_no_longer_than, python_output
from threads import in_threads, wait_for


def test_few_messages_are_written_soon(tmp_path: Path) -> None:
    with log_in(tmp_path) as log:
        for first in (0, 3):
            began = time.monotonic()
            log.append("cpu:0", losses(first, 3))
            assert len(read(tmp_path)[0]) == first
            wait_for(lambda first=first: len(read(tmp_path)[0]) == first + 3, timeout_sec=20)
            assert time.monotonic() - began >= log_segments.FLUSH_SEC * 0.9


def test_many_messages_and_urgent_ones_are_written_at_once(tmp_path: Path) -> None:
    with log_in(tmp_path, flush_sec=3600.0) as log:
        log.append("cpu:0", losses(0, 5))
        log.append("cpu:1", losses(0, 2), at_once=True)
        assert seqs(read(tmp_path)[0]) == [0, 1]
        log.append("cpu:0", losses(5, log_segments.FLUSH_BYTES // 192))
        assert len(read(tmp_path)[0]) == 2 + 5 + log_segments.FLUSH_BYTES // 192
        log.append("cpu:1", losses(2, 1))
        log.flush()
        assert len(read(tmp_path)[0]) == 3 + 5 + log_segments.FLUSH_BYTES // 192


def test_a_segment_has_no_more_taps_than_readers_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "DESCRIPTIONS", 8)
    with log_in(tmp_path) as log:
        for number in range(20):
            tap = replace(LOSS, name=f"tap_{number}", consumer_id=1000 + number)
            log.describe(tap)
            log.append("cpu:0", block_of(frame(tap, np.float32(1), np.int32(1), seq=number)), at_once=True)
    messages, lost, damaged = read(tmp_path)
    assert (len(list(tmp_path.iterdir())), lost, damaged) == (5, [], [])
    assert [message.tap.described.name for message in messages] == [f"tap_{number}" for number in range(20)]


def test_segments_have_the_wanted_length_and_each_can_be_read_separately(tmp_path: Path) -> None:
    with log_in(tmp_path, segment_bytes=20_000) as log:
        for first in range(0, 1_000, 10):
            log.append("cpu:0", losses(first, 10), at_once=True)
    paths = sorted(tmp_path.iterdir())
    assert len(paths) > 8
    assert all(re.fullmatch(r"\d{8}T\d{6}\.\d{6}-\d+-\d{6}\.hcblog", path.name) for path in paths)
    assert all(path.stat().st_size < 20_000 + 8_000 for path in paths)
    assert seqs(read(tmp_path)[0]) == list(range(1_000))
    every: list[int] = []
    for path in paths:
        messages, _, damaged = read(path)
        assert damaged == []
        assert all(message.tap.described == LOSS for message in messages)
        every += seqs(messages)
    assert every == list(range(1_000))


def test_segments_end_by_age_too(tmp_path: Path) -> None:
    with log_in(tmp_path, segment_sec=1e-6) as log:
        for first in range(3):
            log.append("cpu:0", losses(first, 1), at_once=True)
    assert len(list(tmp_path.iterdir())) == 3
    assert seqs(read(tmp_path)[0]) == [0, 1, 2]


def test_the_oldest_of_its_own_segments_are_deleted(tmp_path: Path) -> None:
    foreign = tmp_path / segment_name(0, 1)
    foreign.write_bytes(b"")
    with log_in(tmp_path, keep_bytes=100_000) as log:
        for first in range(0, 5_000, 50):
            log.append("cpu:0", losses(first, 50), at_once=True)
            own = [path for path in tmp_path.iterdir() if path != foreign]
            assert sum(path.stat().st_size for path in own) <= 100_000
    assert foreign.exists()
    kept = seqs(read(tmp_path)[0])
    assert kept == list(range(kept[0], 5_000))
    assert len(kept) * 192 > 50_000
    assert log.counters.messages == 5_000


def test_the_step_of_a_launch_is_found_over_segments(tmp_path: Path) -> None:
    with log_in(tmp_path, segment_bytes=1) as log:
        for seq in (3, 5, 7):
            norm = frame(NORM, 1.0, seq=seq + 1, run_id=seq + 1)
            loss = frame(LOSS, np.float32(seq), np.int32(seq), seq=seq, run_id=seq - 1)
            log.append("cpu:0", block_of(loss, norm), at_once=True)
        log.append("cpu:1", block_of(frame(NORM, 1.0, seq=0)), at_once=True)
    assert len(list(tmp_path.iterdir())) == 4
    steps = {(m.message.device, m.message.seq): m.step for m in read(tmp_path)[0]}
    found = [steps["cpu:0", seq] for seq in range(3, 9)]
    assert found == [3, 5, 5, 7, 7, None]
    assert steps["cpu:1", 0] is None


def test_a_log_goes_on_after_it_was_closed(tmp_path: Path) -> None:
    with log_in(tmp_path) as log:
        log.append("cpu:0", losses(0, 2))
        log.close()
        log.append("cpu:0", losses(2, 2))
        wait_for(lambda: len(read(tmp_path)[0]) == 4, timeout_sec=20)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_log_without_messages_is_one(tmp_path: Path) -> None:
    with log_in(tmp_path):
        pass
    assert read(tmp_path) == ([], [], [])


@pytest.mark.parametrize("compress", [False, True])
def test_compressed_logs_are_shorter(tmp_path: Path, compress: bool) -> None:
    with log_in(tmp_path, compress=compress) as log:
        log.append("cpu:0", losses(0, 5_000))
    (path,) = tmp_path.iterdir()
    assert seqs(read(path)[0]) == list(range(5_000))
    assert (path.stat().st_size < 5_000 * 192 / 4) is compress


def test_after_a_failure_nothing_is_tried_for_a_while(tmp_path: Path) -> None:
    with log_in(tmp_path) as log:
        size = next(tmp_path.iterdir()).stat().st_size
        with files_no_longer_than(size):
            log.append("cpu:0", losses(0, 5), at_once=True)
        log.append("cpu:0", losses(5, 5), at_once=True)  # the disk would have room
        assert log.counters.lost_messages == 10
        log.append("cpu:0", losses(10, 5))
        log.flush()  # a caller that wants it written now triggers the attempt
        assert log.counters.messages == 5


def test_many_threads_write_one_log(tmp_path: Path) -> None:
    with log_in(tmp_path, segment_bytes=100_000) as log:
        together = threading.Barrier(
            6
        )  # none is a whole segment behind, which a reader's order by time bridges

        def write(device: int) -> None:
            for first in range(0, 2_000, 20):
                together.wait()
                log.append(f"cpu:{device}", losses(first, 20))

        in_threads(write, 6)
    messages, _, damaged = read(tmp_path)
    assert damaged == []
    for k in range(6):
        assert seqs([m for m in messages if m.message.device == f"cpu:{k}"]) == list(range(2_000))
    times = [m.message.time_ns for m in messages]
    assert times == sorted(times)


# Selection of taps


def test_messages_are_selected_and_chunks_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hostcallback.receiver.taplog.reading import merge

    with log_in(tmp_path, segment_bytes=30_000) as log:
        for first in range(0, 1_000, 10):
            log.append("cpu:0", losses(first, 10), at_once=True)
        log.append("cpu:1", block_of(*(frame(NORM, 1.0, seq=k) for k in range(20))), at_once=True)
    looked_at = 0
    read_frames = merge.read_frames

    def counted(*args: Any) -> Any:
        nonlocal looked_at
        looked_at += 1
        return read_frames(*args)

    monkeypatch.setattr(merge, "read_frames", counted)
    reader = LogReader(tmp_path)

    def found(selection: Selection) -> list[tuple[str, int]]:
        return [(m.message.device, m.message.seq) for m in reader.messages(selection)]

    assert found(Selection(first_step=437, last_step=441)) == [("cpu:0", k) for k in range(437, 442)]
    assert looked_at == 3  # the last messages of the chunk before may belong to the first step of these
    assert len(found(Selection(names=("no*",)))) == 20
    assert looked_at == 4
    assert len(found(Selection(devices=("cpu:1",), names=("loss", "norm")))) == 20
    assert looked_at == 5
    begin = 1_700_000_000 * 10**9
    window = Selection(since_ns=begin + 500 * 10**9, until_ns=begin + 503 * 10**9)
    assert found(window) == [("cpu:0", k) for k in (500, 501, 502)]
    assert looked_at == 6
    assert found(Selection(names=("nothing",))) == []
    assert looked_at == 6


def test_more_taps_than_the_mask_has_bits_are_distinguished(tmp_path: Path) -> None:
    taps = [replace(NORM, name=f"tap {k}", consumer_id=1_000 + k) for k in range(200)]
    with log_in(tmp_path) as log:
        for seq, tap in enumerate(taps):
            log.describe(tap)
            log.append("cpu:0", block_of(frame(tap, 1.0, seq=seq)), at_once=True)
    for k in (0, 63, 64, 65, 199):
        assert [m.message.seq for m in LogReader(tmp_path).messages(Selection(names=(f"tap {k}",)))] == [k]


# Where it cannot write


def test_unwritable_messages_are_counted_and_noted_when_there_is_room_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_writer, "RETRY_SEC", 0.0)
    with log_in(tmp_path) as log:
        log.append("cpu:0", losses(0, 10), at_once=True)
        (path,) = tmp_path.iterdir()
        whole = path.read_bytes()
        with files_no_longer_than(len(whole) + 100):
            log.append("cpu:0", losses(10, 30), at_once=True)
            # Nothing half-written is left behind.
            assert path.read_bytes() == whole
        with files_no_longer_than(100):
            log.append("cpu:0", losses(40, 5), at_once=True)
            log.append("cpu:1", losses(0, 5), at_once=True)
            assert list(tmp_path.iterdir()) == [path]
        counters = log.counters
        assert (counters.lost_messages, counters.lost_bytes) == (40, 40 * 192)
        assert counters.lost_by_device == {"cpu:0": 35, "cpu:1": 5}
        assert counters.failure == "File too large"
        log.append("cpu:0", losses(45, 5), at_once=True)
    messages, lost, damaged = read(tmp_path)
    assert damaged == []
    assert seqs(messages) == [*range(10), *range(45, 50)]
    assert len(list(tmp_path.iterdir())) == 2
    notes = {note.lost.device: note.lost for note in lost}
    assert (notes["cpu:0"].first_seq, notes["cpu:0"].last_seq, notes["cpu:0"].messages) == (10, 44, 35)
    assert (notes["cpu:1"].first_seq, notes["cpu:1"].last_seq, notes["cpu:1"].nbytes) == (0, 4, 5 * 192)
    assert "File too large" in notes["cpu:0"].reason
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert "messages cannot be recorded (File too large); the program continues" in said[0]
    assert "recording works again" in said[1]


def test_failures_that_were_folded_into_lost_messages_are_lost_too(tmp_path: Path) -> None:
    with log_in(tmp_path) as log:
        log.append("cpu:0", losses(0, 10), at_once=True)
        (path,) = tmp_path.iterdir()
        with files_no_longer_than(path.stat().st_size + 100):
            log.record("cpu:0", lambda room: (losses(10, 5), [(12, 7), (14, 100)], True))
        assert log.counters.lost_messages == 5 + 107
        assert log.counters.lost_by_device == {"cpu:0": 5 + 107}
    _, lost, _ = read(tmp_path)
    assert [note.lost.messages for note in lost] == [5 + 107]


def test_a_folder_that_is_gone_loses_messages_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_writer, "RETRY_SEC", 0.0)
    folder = tmp_path / "log"
    with log_in(folder, segment_bytes=1) as log:
        log.append("cpu:0", losses(0, 5), at_once=True)
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
        log.append("cpu:0", losses(5, 5), at_once=True)
        assert log.counters.lost_messages == 5
        folder.mkdir()
        log.append("cpu:0", losses(10, 5), at_once=True)
    messages, lost, _ = read(folder)
    assert seqs(messages) == list(range(10, 15))
    assert [note.lost.messages for note in lost] == [5]


def test_an_interrupt_while_it_writes_leaves_whole_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writev = os.writev

    def interrupted(fd: int, buffers: Any) -> int:
        writev(fd, [b"".join(buffers)[:1_000]])
        raise KeyboardInterrupt

    with log_in(tmp_path) as log:
        log.append("cpu:0", losses(0, 10), at_once=True)
        with monkeypatch.context() as patch:
            patch.setattr(os, "writev", interrupted)
            with pytest.raises(KeyboardInterrupt):
                log.append("cpu:0", losses(10, 10), at_once=True)
        monkeypatch.setattr(log, "_retry_at", 0.0)
        log.append("cpu:0", losses(20, 10), at_once=True)
        assert log.counters.lost_messages == 10
    messages, lost, damaged = read(tmp_path)
    assert seqs(messages) == [*range(10), *range(20, 30)]
    assert [(note.lost.first_seq, note.lost.messages) for note in lost] == [(10, 10)]
    assert damaged == []


FULL = """
import sys
sys.path[:0] = sys.argv[2:]
from logged_frames import log_in, LOSS, losses
from hostcallback.receiver.taplog.writing.log_writer import LogWriter
log = LogWriter(sys.argv[1])
log.describe(LOSS)
for first in range(0, 40_000, 1_000):
    log.append("cpu:0", losses(first, 1_000))
log.flush()
print(log.counters.messages, log.counters.lost_messages, log.counters.failure)
log.close()
"""


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_a_file_system_that_is_full_leaves_whole_messages(tmp_path: Path) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(tmp_path)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("no file system may be mounted here")
    try:
        paths = [str(HELPERS), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        printed = python_output("-c", FULL, tmp_path, *paths, timeout_sec=60)
        written, lost, failure = printed.strip().split(" ", 2)
        assert failure == "No space left on device"
        assert int(written) + int(lost) == 40_000
        messages, _, damaged = read(tmp_path)
        assert damaged == []
        assert seqs(messages)[:5_000] == list(range(5_000))
        assert seqs(messages) == sorted(set(seqs(messages)))
        assert len(messages) == int(written)
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_room_for_notes_alone_is_not_reported_as_working_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_args: object, **_kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with log_in(tmp_path) as log:
        with monkeypatch.context() as patch:
            patch.setattr(SegmentWriter, "frames", full)
            for first in range(0, 20, 5):
                log.append("cpu:0", losses(first, 5))
                for _ in range(2):  # as barriers do; the second one writes the note
                    log.flush()
                assert log.counters.unnoted_messages == 0
        assert caplog.text.count("messages cannot be recorded (No space left on device)") == 1
        assert "recording works again" not in caplog.text
        log.append("cpu:0", losses(20, 5), at_once=True)
    assert caplog.text.count("recording works again") == 1
    messages, notes, damaged = read(tmp_path)
    assert (seqs(messages), damaged) == ([20, 21, 22, 23, 24], [])
    assert sum(note.lost.messages for note in notes) == 20


FORK = """
import os, sys
sys.path[:0] = sys.argv[2:]
from logged_frames import log_in, LOSS, losses
from hostcallback.receiver.taplog.writing.log_writer import LogWriter
log = LogWriter(sys.argv[1])
log.describe(LOSS)
log.append("cpu:0", losses(0, 5), at_once=AT_ONCE)
child = os.fork()
if not child:
    log.flush()
    log.append("cpu:0", losses(100, 5))  # its own messages, in a separate segment
    log.close()
    os._exit(0)
os.waitpid(child, 0)
log.append("cpu:0", losses(5, 5))
log.close()
"""


@pytest.mark.parametrize("at_once", [False, True], ids=["with unwritten messages", "with all written"])
def test_a_forked_child_writes_into_a_separate_segment(at_once: bool, tmp_path: Path) -> None:
    paths = [str(HELPERS), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    program = FORK.replace("AT_ONCE", str(at_once))
    python_output("-W", "ignore", "-c", program, tmp_path, *paths, timeout_sec=60)
    messages, lost, damaged = read(tmp_path)
    assert (lost, damaged) == ([], [])
    by_writer: dict[Any, list[int]] = {}
    for message in messages:
        by_writer.setdefault(message.writer, []).append(message.message.seq)
    assert sorted(by_writer.values()) == [list(range(10)), list(range(100, 105))]


# Steps


def test_steps_are_found_in_every_integer_and_every_container(tmp_path: Path) -> None:
    def tap(number: int, tree: Any, **kwargs: Any) -> Any:
        return replace(NORM, consumer_id=number, name=f"t{number}", tree=tree, kwargs=kwargs)

    keyed = ["dict", [["value", "a"], ["value", "step"]], [["array"], ["array"]]]
    nested = ["tuple", [["tuple", [["array"]]], ["namedtuple", "S", ["x", "step"], [["array"], ["array"]]]]]
    static = ["dict", [["value", "step"]], [["value", 41]]]
    cases: list[tuple[Any, list[Any], int | None]] = [
        (tap(1, keyed), [np.zeros(7), np.int8(-3)], -3),
        (tap(2, keyed), [np.zeros(7), np.uint32(2**32 - 1)], 2**32 - 1),
        (tap(3, keyed), [np.zeros(7), np.int64(2**40)], 2**40),
        (tap(4, nested), [1.0, 2.0, np.int16(12)], 12),
        (tap(5, static), [1.0], 41),
        (tap(6, ["array"], step=43), [1.0], 43),
        (tap(7, keyed), [np.zeros(7), np.float32(5)], None),  # no integer
        (tap(8, keyed), [np.zeros(7), np.arange(3)], None),  # no scalar
        (tap(9, ["array"], step="x"), [1.0], None),
        (tap(10, ["array"], step=True), [1.0], None),
    ]
    with log_in(tmp_path) as log:
        frames = []
        for seq, (described, arrays, _) in enumerate(cases):
            log.describe(described)
            frames.append(frame(described, *arrays, seq=seq))
        log.append("cpu:0", block_of(*frames))
    assert [m.step for m in read(tmp_path)[0]] == [step for *_, step in cases]


def test_a_configuration_is_in_the_header_of_each_segment(tmp_path: Path) -> None:
    given = {"lr": np.float32(0.5), "path": Path("data"), 3: (1, None), "big": 1 << 70}
    with record(tmp_path, config=given):
        pass
    (file,) = tmp_path.iterdir()
    kept = {"lr": 0.5, "path": "data", "3": [1, None], "big": str(1 << 70)}
    assert SegmentReader(file).info["config"] == kept
    with pytest.raises(TypeError, match=r"vars\(config\)"):
        record(tmp_path, config=object())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"takes 70,0.. bytes, expected at most 65,536"):
        record(tmp_path, config={"text": "x" * 70_000})


def test_a_configuration_has_the_class_of_objects_without_a_text_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Model:
        pass

    given = {
        "model": {"body": [Model()]},
        "loss": np.mean,
        "kind": Model,
        "folder": Path("data"),
        "dtype": np.dtype("f4"),
    }
    with record(tmp_path, config=given):
        pass
    (file,) = tmp_path.iterdir()
    name = f"{__name__}.{Model.__qualname__}"
    assert SegmentReader(file).info["config"] == {
        "model": {"body": [name]}, "loss": "numpy.mean", "kind": str(Model), "folder": "data", "dtype": "float32",
    }  # fmt: skip
    (told,) = caplog.messages
    assert told.startswith(
        f"config['model']['body'][0] is an object of the class {name}, whose text is only an address"
    )

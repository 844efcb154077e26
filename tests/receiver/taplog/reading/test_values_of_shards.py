"""Values of several devices of one process, as readers put them together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hostcallback.receiver.sinks.batches import MASK
from hostcallback.receiver.sinks.call import SHARDS_ID
from hostcallback.receiver.sinks.sharding.shard_record import ProcessShare, shard_record
from hostcallback.receiver.taplog.format.layout import Damage
from hostcallback.receiver.taplog.reading.logged_message import (
    MAX_INCOMPLETE,
    LoggedMessage,
    LoggedProgramRuns,
    ProcessValues,
)
from hostcallback.receiver.taplog.reading.reader import LogReader
from hostcallback.receiver.taplog.reading.selection import Selection
from logged_frames import BEGIN_NS, NORM, SECOND, block_of, frame, log_in

PARTS = replace(NORM, name="parts", consumer_id=501, shards="some")
DEVICES = 3


def test_a_whole_value_is_a_message_of_the_device_with_its_first_part(tmp_path: Path) -> None:
    share = ProcessShare(DEVICES)
    with log_in(tmp_path) as log:
        log.describe(PARTS)
        for device in reversed(range(DEVICES)):  # whichever comes first
            record = shard_record(
                [((2 * DEVICES,), (2 * device,))], shards=DEVICES, group=0, partition=device, share=share
            )
            part = np.arange(2.0) + 2 * device
            log.append(
                f"cpu:{device}", block_of(frame(PARTS, np.int64(record), part, seq=5 + DEVICES - device))
            )
    (whole,) = LogReader(tmp_path).values()
    assert isinstance(whole, LoggedMessage)
    assert whole.value.tolist() == [*range(2 * DEVICES)]
    message = whole.message
    assert (message.device, message.seq, message.shard_index) == ("cpu:0", 5 + DEVICES, None)
    assert message.time_ns == BEGIN_NS + message.seq * SECOND


def part_of(
    device: int, seq: int, share: ProcessShare | None, *, occurrence: int = 0, group: int = 0
) -> bytes:
    """One device's part of a value."""
    record = shard_record(
        [((2 * DEVICES,), (2 * device,))], shards=DEVICES, group=group, partition=device, share=share
    )
    return frame(PARTS, np.int64([occurrence, *record[1:]]), np.arange(2.0) + 2 * device, seq=seq)


def values_of(folder: Path, parts: list[tuple[int, bytes]], **options: Any) -> list[tuple[int, list[float]]]:
    """The sequence numbers and values that a reader makes of these parts of devices."""
    with log_in(folder, **options) as log:
        log.describe(PARTS)
        for device, one in parts:
            log.append(f"cpu:{device}", block_of(one))
    found = [item for item in LogReader(folder).values() if isinstance(item, LoggedMessage)]
    return [(item.message.seq, item.value.tolist()) for item in found]


def test_parts_of_values_that_a_process_has_not_as_a_whole_come_one_by_one_but_copies(tmp_path: Path) -> None:
    shares = ProcessShare(0), ProcessShare(0, is_copy=True), ProcessShare(0, is_later=True)
    parts = [(device, part_of(device, device, share)) for device, share in enumerate(shares)]
    assert values_of(tmp_path, parts) == [(0, [0, 1]), (2, [4, 5])]


def test_the_parts_of_a_value_that_is_incomplete_come_last_without_copies(tmp_path: Path) -> None:
    share, copy = ProcessShare(DEVICES), ProcessShare(DEVICES, is_copy=True)
    parts = [
        (0, part_of(0, 0, share)),
        (1, part_of(1, 1, copy)),
        *((device, part_of(device, 4 + device, share, occurrence=1)) for device in range(DEVICES)),
        (2, part_of(2, 9, share, occurrence=2)),
        (1, part_of(1, 10, share, group=1)),
    ]
    assert values_of(tmp_path, parts) == [(4, [*range(6)]), (0, [0, 1]), (9, [4, 5]), (10, [2, 3])]


def test_the_parts_of_the_oldest_of_many_incomplete_values_come_early(tmp_path: Path) -> None:
    with log_in(tmp_path) as log:
        log.describe(PARTS)
        log.append("cpu:0", block_of(part_of(0, 0, ProcessShare(DEVICES))))
    (logged,) = LogReader(tmp_path).records()
    assert isinstance(logged, LoggedMessage)
    assert logged.shard is not None
    values, found = ProcessValues(), []
    for launch in range(MAX_INCOMPLETE + 2):
        message = logged.message._replace(seq=launch, run_id=launch)
        taken = values.take(logged._replace(message=message), logged.shard._replace(message=message))
        found.append([one.message.seq for one in taken])
    assert found == [*([[]] * MAX_INCOMPLETE), [0], [1]]
    assert [one.message.seq for one in values.left()] == list(range(2, MAX_INCOMPLETE + 2))
    assert not list(values.left())


def test_elements_that_take_no_part_are_left_out_of_a_whole_value(tmp_path: Path) -> None:
    masked = replace(NORM, name="masked", consumer_id=502, transforms=((MASK, {"batch_dims": ((0, 0),)}),))
    with log_in(tmp_path) as log:
        log.describe(masked)
        some = [np.array(mask, np.bool_) for mask in ([0, 0, 0], [1, 0, 1], [0, 0, 0], [1, 1, 1])]
        log.append(
            "cpu:0", block_of(*(frame(masked, np.arange(3.0), mask, seq=k) for k, mask in enumerate(some)))
        )
    found = [(one.message.seq, one.value.tolist()) for one in LogReader(tmp_path).messages()]
    assert found == [(1, [0, 2]), (3, [0, 1, 2])]


def test_a_value_of_an_exported_program_is_one_message_of_the_tap_that_its_parts_describe(
    tmp_path: Path,
) -> None:
    description, carried = PARTS.pack(), replace(PARTS, consumer_id=SHARDS_ID)
    with log_in(tmp_path, job="job-1", process_index=0) as log:
        for device in range(DEVICES):
            places = [(description.shape, (0,)), ((2 * DEVICES,), (2 * device,))]
            share = ProcessShare(DEVICES)
            record = shard_record(places, shards=DEVICES, group=0, partition=device, share=share)
            part = np.arange(2.0) + 2 * device
            log.append(
                f"cpu:{device}", block_of(frame(carried, np.int64(record), description, part, seq=device))
            )
        log.append("cpu:0", block_of(frame(carried, np.int64([0, 1, 0, 0]), seq=9)))
    values = list(LogReader(tmp_path).values())
    whole, damaged = sorted(values, key=lambda item: isinstance(item, Damage))
    assert isinstance(whole, LoggedMessage)
    assert (whole.message.consumer.name, whole.value.tolist()) == ("parts", [*range(2 * DEVICES)])
    assert isinstance(damaged, Damage)
    assert damaged.reason == (
        "a message cannot be decoded (a message of an exported program has no descriptor of its tap)"
    )
    (shard, *_) = LogReader(tmp_path).messages(Selection(devices=("cpu:1",)))
    assert (shard.value.tolist(), shard.message.shard_index) == ([2, 3], ((slice(2, 4),),))


def test_a_process_without_a_program_run_brings_no_stream_of_shards(tmp_path: Path) -> None:
    for name, job in (("alone", ""), ("together", "job-1")):
        with log_in(tmp_path / name, job=job, process_index=0) as log:
            log.append("cpu:0", block_of(frame(NORM, np.float32(1), seq=0)))
        (writer,) = LogReader(tmp_path / name).writers
        runs = LoggedProgramRuns()
        assert (runs.of(writer) is None, runs.stream(writer) is None) == (not job, not job)
        assert runs.of(writer) is runs.of(writer)

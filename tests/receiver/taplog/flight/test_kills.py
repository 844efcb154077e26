"""Processes killed while they emit into a ring in a file: the messages that the file holds afterwards."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hostcallback.receiver import wire
from hostcallback.receiver.taplog.flight.recorder import RingContents, read_ring
from hostcallback.receiver.wire.frame import decode_header

pytestmark = pytest.mark.native_only

PROGRAM = Path(__file__).with_name("kept_ring.py")
THREADS = 4


def kill_one(
    tmp_path: Path, capacity: int, nbytes: int, reads: bool, seconds: float, number: int
) -> RingContents:
    """Starts the program, kills it after `seconds` of emitting, and reads what it left."""
    file = tmp_path / f"{number}.hcbring"
    process = subprocess.Popen(
        [sys.executable, str(PROGRAM), str(file), str(capacity), str(THREADS), str(nbytes), str(int(reads))],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(wire.__file__).parents[3])},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"started\n"
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
    assert process.wait(30) == -signal.SIGKILL
    process.stdout.close()
    contents = read_ring(file)
    file.unlink()
    return contents


def check(contents: RingContents, capacity: int, nbytes: int) -> None:
    """Every message is whole, none is missing between the first and the last, and the file is used to its end."""
    assert contents.name == "cpu:7"
    assert contents.damaged == []
    assert contents.unfinished <= THREADS
    counters: dict[int, int] = {}
    for message in contents.frames:
        if not message.frame:
            continue
        header = decode_header(message.frame)
        assert header.seq == message.header.seq
        payload = message.frame[header.payload_start :][
            : header.payload_bytes
        ]  # these frames have no metadata
        counter = int.from_bytes(payload[:8], "little")
        assert payload == counter.to_bytes(8, "little") + bytes([counter & 255]) * (nbytes - 8)
        # In the order of the sending thread, whatever message was being written when the process ended.
        assert counter > counters.get(header.consumer_id, -1)
        counters[header.consumer_id] = counter
    numbers = [message.header.seq for message in contents.frames]
    missing = set(range(numbers[0], numbers[-1] + 1)) - set(numbers)
    assert numbers == sorted(numbers)
    assert len(missing) <= contents.unfinished
    first = contents.frames[0].header.position
    largest = max(message.header.frame_bytes for message in contents.frames)
    # Except for a frame that contains the oldest byte, and frames that were still being written.
    assert first - max(0, contents.head - capacity) <= (2 + contents.unfinished) * largest


@pytest.mark.slow_variants
@pytest.mark.parametrize(
    ("capacity", "nbytes", "reads"),
    [
        (1 << 16, 16, True),
        (1 << 16, 16, False),
        (1 << 20, 40, True),
        (1 << 18, 40_000, True),
        (1 << 16, 1000, True),
    ],
)
def test_messages_of_a_killed_process(tmp_path: Path, capacity: int, nbytes: int, reads: bool) -> None:
    contents = kill_one(tmp_path, capacity, nbytes, reads, 0.05, 0)
    check(contents, capacity, nbytes)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kills_at_random_moments(tmp_path: Path) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    random_ = random.Random(seed)
    checked = 0
    for number in range(80):
        capacity = random_.choice([1 << 12, 1 << 16, 1 << 20])
        nbytes = random_.choice([8, 16, 200, 900])
        contents = kill_one(
            tmp_path, capacity, nbytes, random_.random() < 0.7, random_.uniform(0, 0.05), number
        )
        assert contents.frames or contents.unfinished or not contents.head
        if contents.frames:
            check(contents, capacity, nbytes)
            checked += 1
    assert checked > 48

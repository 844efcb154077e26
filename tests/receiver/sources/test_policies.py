"""Back-pressure policies: each has a rule, and the reference carries it out."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import pytest

from checkout import ROOT
from hostcallback.receiver.sources.back_pressure import Admission, BackPressure, Policy, Step, admit
from hostcallback.receiver.sources.queue import QueueSource
from hostcallback.receiver.wire.frame import decode_header, encode_prefix
from threads import WAIT_SEC, wait_for


@dataclass
class Queue:
    """A queue with `room` places, whose reader takes no message."""

    room: int
    overwritable: int = 0
    next_seq: int = 0
    queued: int = 0
    waits: list[float | None] = field(default_factory=list)

    def has_room(self) -> bool:
        return self.queued < self.room

    def is_beyond_half(self) -> bool:
        return 2 * self.queued > self.room

    def overwrite_oldest(self) -> None:
        while not self.has_room() and self.overwritable:
            self.queued -= 1
            self.overwritable -= 1

    def wait_for_room(self, timeout_sec: float | None) -> bool:
        self.waits.append(timeout_sec)
        return timeout_sec is None

    def emit(self, count: int, admission: Admission) -> list[bool]:
        """Emits messages; whether each is queued."""
        found = []
        for _ in range(count):
            found.append(admit(self, admission))
            self.queued += found[-1]
            self.next_seq += 1
        return found


def kept(queue: Queue, count: int, **parameters: object) -> list[int]:
    """The numbers of the messages that are queued."""
    admission = BackPressure(**parameters).admission  # type: ignore[arg-type]
    return [seq for seq, is_queued in enumerate(queue.emit(count, admission)) if is_queued]


def test_block_waits_without_limit_and_drops_nothing() -> None:
    queue = Queue(4)
    assert kept(queue, 6, policy="block") == [*range(6)]
    assert queue.waits == [None, None]


def test_block_then_drop_waits_for_its_timeout() -> None:
    queue = Queue(4)
    assert kept(queue, 6, policy="block_then_drop", timeout_sec=2.5) == [*range(4)]
    assert queue.waits == [2.5, 2.5]


def test_block_then_drop_without_time_does_not_wait() -> None:
    queue = Queue(4)
    assert kept(queue, 6, policy="block_then_drop", timeout_sec=0) == [*range(4)]
    assert queue.waits == []


def test_drop_newest_waits_for_nothing() -> None:
    queue = Queue(4)
    assert kept(queue, 6, policy="drop_newest") == [*range(4)]
    assert queue.waits == []


def test_sample_thins_out_beyond_half() -> None:
    queue = Queue(10)
    assert kept(queue, 40, policy="sample", sample_every=5) == [*range(6), 10, 15, 20, 25]
    assert queue.waits == []


def test_overwrite_oldest_makes_room_and_waits_for_messages_that_must_not_be_dropped() -> None:
    queue = Queue(4, overwritable=3)
    assert kept(queue, 9, policy="overwrite_oldest") == [*range(9)]
    assert queue.waits == [None, None]


@pytest.mark.parametrize("policy", Policy)
def test_every_policy_has_a_rule_and_is_documented(policy: Policy) -> None:
    assert isinstance(BackPressure(policy=policy).admission.steps, Step)
    assert f'"{policy}"' in (BackPressure.__doc__ or "")
    assert f"`{policy}`" in (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")


def test_what_is_left_out_is_dropped_also_where_there_is_room() -> None:
    queue, prefix = QueueSource(0), encode_prefix(1, 0, ())
    queue.emit(prefix, ())
    queue.leave_out(True)
    for _ in range(3):
        queue.emit(prefix, ())
    queue.post(prefix, ())  # of the host
    queue.leave_out(False)
    queue.emit(prefix, ())
    batch = queue.read(0)
    assert batch is not None
    assert [decode_header(*frame[:2]).seq for frame in batch.frames] == [0, 4, 5]
    assert queue.counters().dropped == 3


def test_a_frame_has_its_launch_and_one_of_an_earlier_time_has_none() -> None:
    queue, prefix = QueueSource(3), encode_prefix(1, 0, ())
    queue.emit(prefix, (), run_id=5)
    queue.append(prefix, (), time_ns=7)
    queue.post(prefix, (), run_id=6)
    queue.post(prefix, ())
    batch = queue.read(0)
    assert batch is not None
    headers = [decode_header(*frame[:2]) for frame in batch.frames]
    assert [(header.seq, header.device, header.run_id) for header in headers] == [
        (0, 3, 5), (1, 3, 0), (2, 3, 6), (3, 3, 0),
    ]  # fmt: skip
    assert headers[1].time_ns == 7
    assert headers[0].time_ns <= headers[2].time_ns <= headers[3].time_ns


def test_messages_count_as_queued_until_they_are_delivered() -> None:
    queue, prefix = QueueSource(0), encode_prefix(1, 0, ())
    for _ in range(3):
        queue.emit(prefix, ())
    before = queue.counters()
    assert before.queued_messages == 3
    assert before.queued_bytes == before.emitted_bytes > 0
    batch = queue.read(0)
    assert batch is not None
    assert queue.counters().queued_messages == 3
    batch.release()
    assert (queue.counters().queued_messages, queue.counters().queued_bytes) == (0, 0)


def test_an_emission_that_waits_for_room_follows_a_later_policy() -> None:
    prefix = encode_prefix(1, 0, ())
    queue = QueueSource(0, capacity_bytes=1)
    queue.emit(prefix, ())
    waiting = threading.Thread(target=queue.emit, args=(prefix, ()), daemon=True)
    waiting.start()
    wait_for(lambda: queue.counters().waiting_producers == 1)
    queue.configure(BackPressure(policy="overwrite_oldest"))
    waiting.join(WAIT_SEC)
    assert not waiting.is_alive()
    assert queue.counters().waiting_producers == 0
    batch = queue.read(0)
    assert batch is not None
    assert [decode_header(*frame[:2]).seq for frame in batch.frames] == [1]
    counters = queue.counters()
    assert (counters.emitted, counters.dropped, counters.discarded, counters.queued_messages) == (2, 1, 1, 1)


def test_a_reader_that_was_woken_ends_after_the_frames() -> None:
    queue = QueueSource(0)
    queue.emit(encode_prefix(1, 0, ()), ())
    queue.wake()
    batch = queue.read(None)
    assert batch is not None
    batch.release()
    assert queue.read(None) is None
    assert queue.read(0.01) is None

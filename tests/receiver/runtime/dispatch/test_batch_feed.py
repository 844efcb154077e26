"""The thread that copies messages ahead of a slow delivery."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from hostcallback.receiver.runtime.dispatch import dispatcher
from hostcallback.receiver.runtime.dispatch.dispatcher import BatchFeed
from hostcallback.receiver.sources.queue import QueueSource
from hostcallback.receiver.sources.source import Batch
from hostcallback.receiver.wire.frame import decode_header, encode_prefix
from threads import wait_for

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts wake-ups in /proc")


class Sink:
    """A batch sink that counts frames."""

    frames = 0

    def record_batch(self, device: str, batch: Batch, *args: object, **kwargs: object) -> None:
        """Counts those of a batch."""
        self.frames += batch.count


def test_the_copying_thread_of_an_idle_device_does_not_wake_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "REST_SEC", 0.05)
    feed = BatchFeed("idle", QueueSource(0), lambda consumer_id: None)
    feed.sinks = (Sink(),)
    with feed.while_delivering():
        (thread,) = [one for one in threading.enumerate() if one.name == "hostcallback-ahead-idle"]
    status = Path(f"/proc/self/task/{thread.native_id}/status")

    def wake_ups() -> int:
        (line,) = [line for line in status.read_text().splitlines() if line.startswith("voluntary_ctxt")]
        return int(line.split()[1])

    seen: list[int] = []

    def rests() -> bool:
        seen.append(wake_ups())
        return len(seen) > 20 and seen[-1] == seen[-20]  # a fifth of a second

    try:
        wait_for(rests, "a thread that sleeps", 10)
        with feed.while_delivering():
            wait_for(lambda: wake_ups() > seen[-1], "a thread that looks at the delivery")
    finally:
        feed.stop()
        thread.join(60)
    assert not thread.is_alive()


def test_messages_behind_a_single_slow_one_are_copied_but_none_behind_an_end() -> None:
    source, sink = QueueSource(0), Sink()
    feed = BatchFeed("ahead", source, lambda consumer_id: None)
    feed.sinks = (sink,)
    prefix = encode_prefix(1, 0, ())

    def deliver() -> AbstractContextManager[None]:
        batch = source.read(0)
        assert batch is not None
        assert batch.count == 1
        feed.take(batch, decode_header(batch.frames[0][0]).seq)
        batch.release()
        source.emit(prefix, [])
        return feed.while_delivering()

    try:
        source.emit(prefix, [])
        with deliver():
            wait_for(lambda: sink.frames == 2, "the message behind the one that is delivered")
        batch = source.read(0)  # which has been handed on
        assert batch is not None
        feed.take(batch, 1)
        batch.release()
        source.send_end(7)
        with deliver():
            assert feed._delivering_since is None, "the frames behind an end are for other sinks"
    finally:
        feed.stop()


def test_messages_that_are_missing_behind_the_first_one_are_told_as_dropped() -> None:
    told: list[tuple[int, int, int]] = []

    class Records:
        def record_batch(self, device: str, batch: Batch, *args: object, **told_of: int) -> None:
            told.append((told_of["first_seq"], told_of["last_seq"], told_of["dropped"]))

    source = QueueSource(0)
    feed = BatchFeed("drops", source, lambda consumer_id: None)
    feed.sinks = (Records(),)
    for last in (0, 4):  # so that 1, 2 and 3 were dropped
        source.emit(encode_prefix(1, 0, ()), [])
        batch = source.read(0)
        assert batch is not None
        feed.take(batch, last)
        batch.release()
    assert [dropped for _, _, dropped in told] == [0, 3]

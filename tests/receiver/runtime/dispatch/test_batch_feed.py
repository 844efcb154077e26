"""The thread that copies messages ahead of a slow delivery."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from hostcallback.receiver.runtime.dispatch import dispatcher
from hostcallback.receiver.runtime.dispatch.dispatcher import BatchFeed
from hostcallback.receiver.sources.queue import QueueSource
from threads import wait_for

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts wake-ups in /proc")


class Sink:
    """A batch sink that takes nothing."""

    def record_batch(self, *args: object, **kwargs: object) -> None:
        """No batch comes."""


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

"""The thread of a metric writer whose receiver closes before it is done."""

from __future__ import annotations

import threading

import pytest

from hostcallback.receiver.sinks.metric_writers.reduction import MetricRecord
from hostcallback.receiver.sinks.metric_writers.sink import WriterThread
from threads import wait_for


class Held:
    """A writer whose first call of `write` takes until it is let go; notes its calls."""

    name = "held"

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.entered, self.goes_on = threading.Event(), threading.Event()
        self.thread = threading.current_thread()

    def open(self) -> None:
        pass

    def write(self, record: MetricRecord) -> None:
        self.thread = threading.current_thread()
        self.calls.append(f"write {record.step}")
        self.entered.set()
        assert self.goes_on.wait(60)

    def flush(self) -> None:
        self.calls.append("flush")

    def close(self) -> None:
        self.calls.append("close")


@pytest.mark.parametrize("left", [0, 2])
@pytest.mark.parametrize("limit", ["timeout_sec", "idle_sec"])
def test_a_writer_that_was_given_up_is_not_called_again(limit: str, left: int) -> None:
    writer = Held()
    thread = WriterThread(writer)
    for step in range(1 + left):
        thread.put([MetricRecord(step, 0, {"loss": 1.0})])
    assert writer.entered.wait(60)
    assert not thread.close(**{limit: 0.01})
    assert (thread.queued, thread.stats.dropped) == (0, left)
    assert thread.stats.error == "was not done at the end of the receiver"
    writer.goes_on.set()
    wait_for(lambda: not writer.thread.is_alive())
    assert writer.calls == ["write 0"]
    assert (thread.stats.written, thread.stats.dropped) == (1, left)


def test_a_writer_that_is_done_in_time_is_flushed_and_closed_once() -> None:
    writer = Held()
    writer.goes_on.set()
    thread = WriterThread(writer)
    thread.put([MetricRecord(step, 0, {"loss": 1.0}) for step in range(2)])
    assert thread.close()
    assert thread.close()
    wait_for(lambda: not writer.thread.is_alive())
    assert writer.calls == ["write 0", "write 1", "flush", "close"]
    assert (thread.stats.written, thread.stats.dropped, thread.stats.error) == (2, 0, "")

"""One list of sinks is all that a receiver needs: recorders, forwarders and functions go into it together."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import jax
import pytest

import hostcallback as hcb
from hostcallback.receiver import LogReader
from hostcallback.receiver.runtime.runtime import runtime
from hostcallback.receiver.sources.source import Batch
from hostcallback.receiver.taplog.writing.recorder import Recorder


def emit(count: int) -> None:
    """Sends `count` messages of the tap "loss"."""
    f = jax.jit(lambda x: hcb.id_tap(lambda value: None, x, name="loss"))
    for number in range(count):
        f(float(number))


def recorded(folder: Path) -> list[float]:
    return [float(logged.message.arrays[0]) for logged in LogReader([folder]).messages()]


class Counting:
    """A sink that takes batches; called with a message it would fail the tap."""

    def __init__(self) -> None:
        self.messages = 0
        self.flushed = 0

    def record_batch(self, device: str, batch: Batch, find: Any, **numbers: int) -> None:
        self.messages += batch.count

    def lose(self, device: str, count: int, reason: str) -> None:
        raise AssertionError(reason)

    def write(self) -> None:
        pass

    def flush(self) -> None:
        self.flushed += 1

    def __call__(self, message: hcb.Message) -> None:
        raise AssertionError("a sink that takes batches is not called with messages")


def test_recorders_forwarders_and_functions_in_one_list(tmp_path: Path) -> None:
    seen: list[float] = []
    counting = Counting()
    nowhere = hcb.forward("localhost:1", spool=tmp_path / "spool", drain_sec=0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hcb.ForwardingWarning)
        with hcb.record(tmp_path / "log") as recorder:
            sinks = [recorder, nowhere, counting, lambda message: seen.append(float(message.arrays[0]))]
            with hcb.outfeed_receiver(sinks=sinks) as rx:
                emit(10)
                hcb.barrier_wait()
                assert rx.recorder is recorder
                assert rx.forwarder is not None
                assert rx.forwarder.counters.messages == 10
    assert seen == recorded(tmp_path / "log") == [float(k) for k in range(10)]
    assert counting.messages >= 10
    assert counting.flushed


def test_the_short_forms_go_together_with_the_list(tmp_path: Path) -> None:
    with hcb.record(tmp_path / "b") as second:
        with hcb.outfeed_receiver(record=tmp_path / "a", sinks=[second]) as rx:
            emit(3)
        assert isinstance(rx.recorder, Recorder)
        assert rx.recorder is not second
    assert recorded(tmp_path / "a") == recorded(tmp_path / "b") == [0.0, 1.0, 2.0]


def test_counters_count_the_taps_own_sinks_and_not_those_of_the_scope() -> None:
    runtime.count_taps(True)
    try:
        with hcb.outfeed_receiver(sinks=[lambda message: None]):
            emit(4)
            hcb.barrier_wait()
            counted = [
                counts.messages
                for receiver in runtime.receivers()
                if receiver.dispatcher.tap_counters is not None
                for consumer, counts in receiver.dispatcher.tap_counters.snapshot()
                if consumer.name == "loss"
            ]
        assert sum(counted) == 4
    finally:
        runtime.count_taps(False)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"forward": "a:1", "sinks": [hcb.forward("b:2")]}, ValueError, "a:1 and to b:2"),
        ({"sinks": [hcb.forward("a:1"), hcb.forward("b:2")]}, ValueError, "forwards to one collector"),
        ({"sinks": [3]}, TypeError, "sinks has 3, expected a callable"),
        ({"sinks": "log"}, TypeError, "expected a sequence"),
    ],
)
def test_options_that_exclude_each_other(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        hcb.outfeed_receiver(**options)

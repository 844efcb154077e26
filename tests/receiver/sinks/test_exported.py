"""Sinks for the taps of exported programs: binding, failures, forgotten taps, from any thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from exported_process import FORMAT, PRINT, TAP, Process, Recorder

from hostcallback.receiver.errors import IncompleteValueError, UnboundConsumerError
from hostcallback.receiver.failures.deferred_errors import DeferredErrors, DelegatedFailure
from hostcallback.receiver.messages import Consumer, Message
from hostcallback.receiver.sinks import call
from hostcallback.receiver.sinks.call import WHOLE_ID
from hostcallback.receiver.sinks.factory import Binding
from hostcallback.receiver.wire.tap_descriptor import TapDescriptor

# Functions that take the messages


def test_the_bound_function_is_called_as_the_taps_would_be(process: Process) -> None:
    seen: list[Any] = []

    def func(arg: Any, *, transforms: Any, device: Any, run: int, extra: str) -> None:
        seen.append((arg, transforms, device, run, extra))

    process.taps.bind("loss", Binding(func, {"extra": "more", "run": 8}))
    process.emit(TAP, 1.5, device="cpu:3")
    assert seen == [({"x": 1.5}, TAP.transforms, "cpu:3", 8, "more")]
    assert process.report() is None


def test_the_first_process_delivers_if_the_tap_wants_it(process: Process) -> None:
    recorder = Recorder()
    process.taps.bind("loss", Binding(recorder))
    for is_first in (True, False):
        process.taps.is_first_process = is_first
        for processes in ("first", "all"):
            process.emit(replace(TAP, params={"processes": processes}), 1.5)
    assert len(recorder.calls) == 3


def test_a_callback_is_called_for_each_element_of_a_batch(process: Process) -> None:
    recorder = Recorder()
    tap = replace(TAP, kind="callback", transforms=(("batch", {"batch_dims": (0,)}),), tree=FORMAT.tree)
    process.taps.bind("loss", Binding(recorder, {"extra": 1}))
    process.emit(tap, np.arange(3))
    assert recorder.calls == [(i, {"extra": 1}) for i in range(3)]


@pytest.mark.parametrize("kind", ["tap", "print", "format", "callback"])
def test_a_binding_wins_over_the_local_consumer_and_that_over_the_rest(
    process: Process, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tap = {"print": PRINT, "format": FORMAT}.get(kind, replace(FORMAT, kind=kind))
    local: list[Message] = []
    recorder = Recorder()

    def emitted() -> tuple[int, int, str, bool]:
        local.clear()
        recorder.calls.clear()
        process.emit(tap, 1.0)
        return len(recorder.calls), len(local), capsys.readouterr().out, process.report() is not None

    by_itself = {"print": ("what: x\n{ x=1. }\n", False), "format": ("x = 1.0\n", False)}.get(
        kind, ("", True)
    )
    assert emitted() == (0, 0, *by_itself)
    lease = process.registry.lease(Consumer(77, "loss", "here:1 (f)", local.append))
    assert emitted() == (0, 1, "", False)  # known from now on, without a new description
    assert local[0].consumer is lease.consumer
    process.taps.bind(tap.name, Binding(recorder))
    assert emitted() == (1, 0, "", False)
    process.taps.bind("other", Binding(recorder))
    process.taps.bind(tap.name, None)
    assert emitted() == (0, 1, "", False)
    del lease
    process.registry.forget(process.registry.retired())
    local.clear()
    assert emitted() == (0, 0, *by_itself)


def test_binding_and_unbinding_work_before_the_first_message_and_between_messages(process: Process) -> None:
    first, second = Recorder(), Recorder()
    process.taps.bind("loss", Binding(first))
    process.taps.bind("never seen", None)
    process.emit(TAP, 1.0)
    process.taps.bind("loss", Binding(second))
    process.emit(TAP, 2.0)
    process.emit(replace(TAP, kwargs={}), 3.0)  # another tap of that name
    process.taps.bind("loss", None)
    process.emit(TAP, 4.0)
    assert [arg["x"] for arg, _ in first.calls] == [1.0]
    assert [arg["x"] for arg, _ in second.calls] == [2.0, 3.0]
    report = process.report()
    assert report is not None
    (error,) = report.exceptions
    assert isinstance(error, UnboundConsumerError)


def test_logs_go_to_their_logger_with_the_taps_line(
    process: Process, caplog: pytest.LogCaptureFixture
) -> None:
    params = {**FORMAT.params, "logger": "exported.test", "level": logging.WARNING}
    with caplog.at_level(logging.INFO, "exported.test"):
        process.emit(replace(FORMAT, params=params), 1.0)
    (record,) = caplog.records
    assert (record.getMessage(), record.levelno) == ("x = 1.0", logging.WARNING)
    assert (record.pathname, record.lineno, record.funcName) == ("train.py", 12, "step")


def test_messages_of_a_kind_from_the_future_can_be_bound(process: Process) -> None:
    tap = replace(TAP, kind="telepathy", params={"to": "whom"})
    process.emit(tap, 1.0)
    report = process.report()
    assert report is not None
    recorder = Recorder()
    process.taps.bind("loss", Binding(recorder))
    process.emit(tap, 1.0)
    assert len(recorder.calls) == 1


# Failures


def test_failures_name_their_tap(process: Process) -> None:
    def fail(arg: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt if arg["x"] else KeyError("no")

    process.taps.bind("loss", Binding(fail))
    process.emit(TAP, 0.0)
    process.emit(TAP, 1.0)
    local = process.registry.lease(
        Consumer(5, "local tap", "here:1 (f)", lambda message: fail({"x": 0}), (("jvp", {}),), {"a": 1})
    )
    process.emit(replace(TAP, name="other", consumer_id=5), 0.0)
    report = process.report()
    assert report is not None
    assert [type(f.exception) for f in report.failures] == [KeyError, KeyboardInterrupt, KeyError]
    assert [(f.tap, f.source_line, f.transforms, f.kwargs) for f in report.failures] == [
        ("loss", "train.py:12 (step)", TAP.transforms, {"run": 7}),
        ("loss", "train.py:12 (step)", TAP.transforms, {"run": 7}),
        ("local tap", "here:1 (f)", (("jvp", {}),), {"a": 1}),
    ]
    assert "raised by tap loss at train.py:12 (step)" in report.failures[0].exception.__notes__[0]
    del local


def test_a_failure_names_its_program(process: Process) -> None:
    consumer = process.registry.find(WHOLE_ID)
    assert consumer is not None
    with pytest.raises(DelegatedFailure) as info:
        consumer.sink(Message(consumer, [TAP.pack(), np.ones(())], 0, 0, 0, "cpu:0", None))
    assert info.value.consumer.name == "loss"
    assert isinstance(info.value.error, UnboundConsumerError)


def test_unbound_taps_are_counted_not_kept(process: Process) -> None:
    process.deferred = DeferredErrors(max_kept=1)
    for _ in range(50):
        process.emit(TAP, 1.0)
    for _ in range(20):
        process.emit(replace(TAP, name="other", source_line="a.py:1 (f)"), 1.0)
    report = process.report()
    assert report is not None
    assert [str(error)[:80] for error in report.exceptions] == [
        "50 messages of the exported tap 'loss' (exported from train.py:12 (step)), to whi"[:80],
        "20 messages of the exported tap 'other' (exported from a.py:1 (f)), to which noth"[:80],
    ]
    assert "hostcallback.bind('loss', function)" in str(report.exceptions[0])
    assert not report.failures
    assert not report.suppressed
    assert process.report() is None


# Shards

WHOLE = [1.0, 2.0, 3.0, 4.0]


SHARDED = replace(TAP, shards="all")


def test_shards_are_put_together(process: Process) -> None:
    recorder = Recorder()
    process.taps.bind("loss", Binding(recorder))
    for partition in (1, 0):
        process.emit_shard(SHARDED, WHOLE, partition, 2)
    ((arg, kwargs),) = recorder.calls
    np.testing.assert_array_equal(arg["x"], WHOLE)
    assert kwargs == {"run": 7}
    assert process.report() is None


@pytest.mark.parametrize("tap", [replace(SHARDED, sharding="local"), replace(SHARDED, shards="some")])
def test_shards_come_by_themselves_where_that_was_asked_for_or_the_others_are_elsewhere(
    process: Process, tap: TapDescriptor
) -> None:
    seen: list[Any] = []
    process.taps.bind("loss", Binding(lambda arg, *, run, index: seen.append((arg["x"].tolist(), index))))
    process.emit_shard(tap, WHOLE, 1, 2)
    assert seen == [([3.0, 4.0], ((slice(2, 4),),))]


def test_a_value_goes_to_the_function_bound_when_its_last_shard_comes(process: Process) -> None:
    before, after = Recorder(), Recorder()
    process.taps.bind("loss", Binding(before))
    process.emit_shard(SHARDED, WHOLE, 0, 2)
    process.taps.bind("loss", Binding(after))
    process.emit_shard(SHARDED, WHOLE, 0, 2, occurrence=1)
    process.emit_shard(SHARDED, WHOLE, 1, 2)
    process.taps.bind("loss", None)
    process.emit_shard(SHARDED, WHOLE, 1, 2, occurrence=1)
    assert (len(before.calls), len(after.calls)) == (0, 1)
    np.testing.assert_array_equal(after.calls[0][0]["x"], WHOLE)
    report = process.report()
    assert report is not None
    assert [str(error)[:33] for error in report.exceptions] == ["1 messages of the exported tap 'l"]


def test_values_with_lost_shards_are_reported_under_their_tap(process: Process) -> None:
    process.taps.bind("loss", Binding(Recorder()))
    for occurrence in range(5):
        process.emit_shard(SHARDED, WHOLE, 0, 2, occurrence)
    process.emit_shard(SHARDED, WHOLE, 1, 2, occurrence=3)
    report = process.report()
    assert report is not None
    (error,) = report.exceptions
    assert isinstance(error, IncompleteValueError)
    assert error.count == 3
    assert "3 of the tap loss at train.py:12 (step)" in str(error)


# The table of descriptions


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for few descriptions."""
    monkeypatch.setattr(call, "MAX_TAPS", 8)


@pytest.mark.usefixtures("few")
def test_the_table_of_descriptions_is_bounded_and_forgets_unused_ones(process: Process) -> None:
    recorder = Recorder()
    process.taps.bind("loss", Binding(recorder))
    made = []
    tap_type = call.BoundTap

    def make(described: TapDescriptor, *rest: Any, **how: Any) -> Any:
        made.append(described.kwargs["number"])
        return tap_type(described, *rest, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(call, "BoundTap", make)
        for number in range(100):
            process.emit(replace(TAP, kwargs={"number": number}), 1.0)
            process.emit(replace(TAP, kwargs={"number": 0}), 1.0)
            assert len(process.taps._taps) <= 8
        assert made == list(range(100))
        process.emit(replace(TAP, kwargs={"number": 1}), 1.0)
    assert made == [*range(100), 1]
    assert len(recorder.calls) == 201


@pytest.mark.usefixtures("few")
def test_taps_with_values_that_are_coming_in_are_forgotten_last(process: Process) -> None:
    recorder = Recorder()
    process.taps.bind("loss", Binding(recorder))
    pending = [replace(SHARDED, kwargs={"number": number}) for number in range(4)]
    for tap in pending:
        process.emit_shard(tap, WHOLE, 0, 2)
    for number in range(100, 200):
        process.emit(replace(TAP, kwargs={"number": number}), 1.0)
    recorder.calls.clear()
    for tap in pending:
        process.emit_shard(tap, WHOLE, 1, 2)
    assert [kwargs["number"] for _, kwargs in recorder.calls] == [0, 1, 2, 3]
    # Where all of them are, the table is bounded all the same.
    for number in range(200, 300):
        process.emit_shard(replace(SHARDED, kwargs={"number": number}), WHOLE, 0, 2)
    assert len(process.taps._taps) == 8


def test_malformed_descriptions_are_not_remembered(process: Process) -> None:
    for number in range(100):
        process.bring(WHOLE_ID, [np.frombuffer(b"junk %d" % number, np.uint8)])
        process.emit(replace(FORMAT, params={"number": number}), 1.0)
    assert len(process.taps._taps) == 0


# Any thread


@pytest.mark.slow
@pytest.mark.usefixtures("few", "impatient_threads")
def test_rebinding_while_messages_flow_loses_and_doubles_nothing(process: Process) -> None:
    recorders = [Recorder() for _ in range(3)]
    values = 100
    done = threading.Event()

    def emit(partition: int) -> None:
        for occurrence in range(values):
            process.emit_shard(SHARDED, [float(occurrence)] * 2, partition, 2, occurrence)
            process.emit(replace(TAP, kwargs={"run": partition, "number": occurrence % 20}), occurrence)

    def rebind() -> None:
        number = 0
        while not done.is_set():
            process.taps.bind("loss", Binding(recorders[number % 3]))
            number += 1

    def run(function: Callable[..., None], *args: Any) -> threading.Thread:
        thread = threading.Thread(target=function, args=args)
        thread.start()
        return thread

    process.taps.bind("loss", Binding(recorders[0]))
    rebinder = run(rebind)
    for thread in [run(emit, partition) for partition in range(2)]:
        thread.join()
    done.set()
    rebinder.join()
    assert process.report() is None
    calls = [call for recorder in recorders for call in recorder.calls]
    assembled = sorted(float(arg["x"][0]) for arg, kwargs in calls if "number" not in kwargs)
    assert assembled == [float(number) for number in range(values)]
    for partition in range(2):
        mine = sorted(float(a["x"]) for a, k in calls if "number" in k and k["run"] == partition)
        assert mine == [float(number) for number in range(values)]

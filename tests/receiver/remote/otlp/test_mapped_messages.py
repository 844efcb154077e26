"""What becomes of one message for OpenTelemetry, and what an exporter counts, without a program."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest

from collecting import CHECK, LOSS, TEXT, wait_for
from hostcallback.receiver.messages import Message
from hostcallback.receiver.remote.otlp import exporter
from hostcallback.receiver.remote.otlp.client import OtlpOptions
from hostcallback.receiver.remote.otlp.exporter import OtlpExporter
from hostcallback.receiver.remote.otlp.mapping import Event, MessageMapper, Point
from hostcallback.receiver.remote.sending import sender
from hostcallback.receiver.wire.tap_descriptor import TapDescriptor
from logged_frames import consumer_of
from otlp_collector import OtlpCollector

NORM = replace(LOSS, name="norm", consumer_id=80, tree=["array"])


def message(described: TapDescriptor, *arrays: Any, device: str = "cpu:0", stacked: int = 0) -> Message:
    found = [np.asarray(array) for array in arrays]
    return Message(consumer_of(described), found, 3, 1_000, 5, device, None, stacked)


def made_of(found: Message) -> list[Event | Point]:
    mapper = MessageMapper(found.consumer, len(found.arrays))
    shortened = mapper.shortened(found)
    return [] if shortened is None else list(mapper.made_of(shortened))


def metrics(found: Message) -> dict[str, Any]:
    return {made.metric: made.value for made in made_of(found) if isinstance(made, Point)}


@pytest.mark.parametrize(
    ("device", "about"),
    [
        ("tpu:3", {"hostcallback.device": "tpu:3"}),
        ("process 12, cpu:1", {"hostcallback.device": "cpu:1", "hostcallback.process": 12}),
        ("process 7 (start 2), cpu:1", {"hostcallback.device": "cpu:1", "hostcallback.process": 7}),
        (
            "process 7 of exp42 (start 2), gpu:0",
            {"hostcallback.device": "gpu:0", "hostcallback.process": 7, "hostcallback.run": "exp42"},
        ),
        (
            "exp42 p7 gpu:0",
            {"hostcallback.device": "gpu:0", "hostcallback.process": 7, "hostcallback.run": "exp42"},
        ),
        ("exp 42 p7 gpu:0", {"hostcallback.device": "exp 42 p7 gpu:0"}),
    ],
)
def test_run_process_and_device_are_attributes_of_their_own(device: str, about: dict[str, Any]) -> None:
    (point,) = made_of(message(LOSS, np.float32(0.5), np.int32(8), device=device))
    assert isinstance(point, Point)
    assert point == Point(
        "loss/loss",
        1_000,
        0.5,
        {"hostcallback.tap": "loss", **about, "hostcallback.step": 8, "hostcallback.leaf": "loss"},
    )


@pytest.mark.parametrize(
    ("value", "metric"),
    [(np.True_, 1), (np.False_, 0), (np.int8(-3), -3), (np.float16(0.5), 0.5), (np.complex64(1j), None)],
)
def test_numbers_and_truth_values_are_points(value: Any, metric: Any) -> None:
    found = metrics(message(NORM, value))
    assert found == ({} if metric is None else {"norm": metric})
    assert not any(isinstance(number, bool) for number in found.values())


def test_arrays_have_no_points_and_a_stack_has_one_for_each_message() -> None:
    step = np.int32(1)
    assert metrics(message(LOSS, np.ones(2), step)) == {}
    assert made_of(message(NORM, np.ones(2))) == []
    stack = made_of(message(NORM, np.array([2.0, 3.0]), stacked=2))
    assert [made.value for made in stack if isinstance(made, Point)] == [2.0, 3.0]
    assert made_of(message(NORM, np.ones((2, 2)), stacked=2)) == []


def test_exported_numbers_are_those_of_the_delivery() -> None:
    value = np.array(2.0)
    mapper = MessageMapper(consumer_of(NORM), 1)
    shortened = mapper.shortened(message(NORM, value))
    value[()] = 7.0
    assert shortened is not None
    assert [made.value for made in mapper.made_of(shortened) if isinstance(made, Point)] == [2.0]


@pytest.mark.parametrize("kind", ["progress", "breakpoint", "knob", "time"])
def test_messages_without_metrics_are_left_out(kind: str) -> None:
    assert made_of(message(replace(NORM, kind=kind), 1.0)) == []


def test_arrays_that_do_not_fit_the_description_are_named_by_their_numbers() -> None:
    assert metrics(message(LOSS, 0.5, 1.5, 2.5)) == {"loss/0": 0.5, "loss/1": 1.5, "loss/2": 2.5}


@pytest.mark.parametrize(
    ("level", "severity"),
    [
        (50, ("FATAL", 21)), (49, ("ERROR", 17)), (30, ("WARN", 13)), (29, ("INFO", 9)), (19, ("DEBUG", 5)),
        ("loud", ("INFO", 9)),
    ],
)  # fmt: skip
def test_texts_have_the_severity_of_their_level(level: Any, severity: tuple[str, int]) -> None:
    found = message(replace(TEXT, params={**TEXT.params, "level": level}), np.int32(4), np.int32(8))
    (event,) = made_of(found)
    assert isinstance(event, Event)
    assert (event.severity_text, event.severity) == severity
    assert event.body == "x = 4 at 8"
    assert event.attributes == {
        "hostcallback.tap": "print", "hostcallback.device": "cpu:0", "hostcallback.step": 8, "hostcallback.seq": 3,
        "hostcallback.run_id": "5", "code.file.path": "/home/me/model.py", "code.line.number": 42,
        "code.function.name": "step",
    }  # fmt: skip


def test_a_failed_check_is_an_error_with_its_values() -> None:
    (event,) = made_of(message(CHECK, np.False_, np.float32(-1)))
    assert isinstance(event, Event)
    assert (event.severity_text, event.body) == ("ERROR", "x is -1.0")
    assert event.attributes["exception.type"] == "CheckError"
    assert event.attributes["hostcallback.value.0"] == "-1.0"


@pytest.fixture(scope="module")
def listening() -> Iterator[OtlpCollector]:
    made = OtlpCollector()
    yield made
    made.stop()


@pytest.fixture
def collector(listening: OtlpCollector) -> OtlpCollector:
    """As if it had just started."""
    listening.status = None
    listening.metrics.clear()
    listening.logs.clear()
    return listening


def export_to(collector: OtlpCollector, **options: Any) -> OtlpExporter:
    return OtlpExporter(OtlpOptions(endpoint=collector.address, **options))


def test_an_exporter_counts_what_it_leaves_out(collector: OtlpCollector) -> None:
    with export_to(collector) as otlp:
        otlp(message(NORM, np.ones(3)))
        otlp(message(NORM, np.ones((3, 2)), stacked=3))
        otlp(message(LOSS, np.ones(2), np.int32(1)))
        otlp(message(LOSS, np.array([1j, 2j]), np.array([1, 2]), stacked=2))
        otlp(message(NORM, np.complex64(1j)))
        otlp(message(replace(NORM, kind="progress"), 1.0))
        plain = message(NORM, 1.0)
        otlp(plain._replace(consumer=replace(plain.consumer, describe=None)))
        assert otlp.flush(30)
    assert otlp.counters.left_out == {
        "an array": 5, "a complex number": 3, "its tap sends no metrics": 1
    }  # fmt: skip
    assert otlp.counters.lost == {}
    assert not [metric.name for metric in collector.metrics if metric.name.startswith("norm")]


def test_an_exporter_that_is_closed_counts_what_comes_later(
    collector: OtlpCollector, caplog: pytest.LogCaptureFixture
) -> None:
    otlp = export_to(collector)
    otlp.close()
    otlp(message(NORM, 1.0))
    otlp(message(NORM, np.ones(3), stacked=3))
    otlp.close()
    assert otlp.counters.lost == {"the exporter was closed": 4}
    assert (collector.points("norm"), caplog.messages) == ([], [])


def test_messages_of_many_taps_are_exported(
    collector: OtlpCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporter, "MAX_TAPS", 1)
    norm, loss = consumer_of(NORM), consumer_of(LOSS)
    with export_to(collector) as otlp:
        for value in (1.0, 2.0):
            otlp(message(NORM, value)._replace(consumer=norm))
            otlp(message(LOSS, value, np.int32(1))._replace(consumer=loss))
        otlp(message(NORM, 1.5)._replace(consumer=norm))
        otlp(message(NORM, 3.0, 4.0)._replace(consumer=norm))
    assert [value for value, _ in collector.points("norm")] == [1.0, 2.0, 1.5]
    assert [value for value, _ in collector.points("loss/loss")] == [1.0, 2.0]
    assert [collector.points(f"norm/{index}")[0][0] for index in (0, 1)] == [3.0, 4.0]


def test_a_message_that_cannot_be_exported_loses_no_other(
    collector: OtlpCollector, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = replace(TEXT, consumer_id=81, params={})
    with export_to(collector) as otlp:
        otlp(message(wrong, 1, 2))
        otlp(message(TEXT, 1, 2))
        assert otlp.flush(30)
        assert otlp.counters.failure.startswith("print: KeyError: ")
        otlp(message(NORM, 1.0)._replace(time_ns=-1))
        assert otlp.flush(30)
        assert otlp.counters.failure.startswith("ValueError: ")
        otlp(message(NORM, 2.0))
    assert otlp.counters.lost == {"the message cannot be converted to a record": 1, "the export failed": 1}
    assert [record.body.string_value for record in collector.logs] == ["x = 1 at 2"]
    assert [value for value, _ in collector.points("norm")] == [2.0]
    failed, lost = caplog.messages
    assert failed == f"an export to {collector.address} failed"
    assert lost.startswith(
        f"2 message(s) to {collector.address} were lost: 1 the message cannot be converted to a record, 1 the export "
        "failed (ValueError: "
    )


def test_a_collector_that_is_away_is_reported_once_and_when_it_is_back(
    collector: OtlpCollector, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(sender, "FIRST_BACK_OFF_SEC", 0.02)
    collector.status = grpc.StatusCode.UNAVAILABLE
    with export_to(collector) as otlp:
        asked = collector.asked
        otlp(message(NORM, 1.0))
        assert not otlp.flush(0)
        wait_for(lambda: collector.asked >= asked + 2, "a second request")
        collector.status = None
        assert otlp.flush(30)
        assert otlp.counters.exported == 1
    assert [value for value, _ in collector.points("norm")] == [1.0]
    assert caplog.messages == [
        f"{collector.address} cannot be reached at present: UNAVAILABLE: as the test wants it; the exporter retries",
        f"export to {collector.address} works again",
    ]


def test_messages_for_the_endpoint_of_the_environment_are_lost_if_no_collector_is_there(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", " http://localhost:1 ")
    with exporter.otlp(drain_sec=0.0, batch_messages=1) as otlp:
        for value in range(3):
            otlp(message(NORM, value))
    assert otlp.counters.lost == {"not sent before the exporter was closed": 3}
    assert caplog.messages[-1].startswith(
        "3 message(s) to http://localhost:1 were lost: 3 not sent before the exporter was closed ("
    )

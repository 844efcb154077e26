"""Export to an OpenTelemetry Collector: the requests that a real gRPC server gets, and failures of that server."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import jax.numpy as jnp
import pytest
from jax import lax

import hostcallback as hcb
from collecting import CollectorProcess, Emitter, forwarder
from hostcallback import receiver
from otlp_collector import OtlpCollector, plain

STEPS = 6


@pytest.fixture
def collector() -> Iterator[OtlpCollector]:
    made = OtlpCollector()
    yield made
    made.stop()


def nothing(*args: Any, **kwargs: Any) -> None:
    """A tap function."""


def train(x: Any) -> Any:
    def body(carry: Any, i: Any) -> tuple[Any, None]:
        hcb.id_tap(nothing, {"step": i, "loss": carry, "grads": jnp.ones(3) * carry}, name="train")
        hcb.print("c is {c}", c=carry)
        hcb.log(level=logging.WARNING)("warned of {}", i)
        hcb.check(carry < STEPS - 2, "c is {}", carry)
        return carry + 1, None

    return lax.scan(body, x, jnp.arange(STEPS))[0]


def run_train(**options: Any) -> None:
    with pytest.raises(hcb.TapFunctionException), hcb.outfeed_receiver(**options):
        hcb.jit(train)(jnp.float32(0))


def test_scalars_are_points_of_gauges_with_their_step(collector: OtlpCollector) -> None:
    with hcb.otlp(collector.address) as otlp:
        run_train(sinks=[otlp])
    about = {"hostcallback.tap": "train", "hostcallback.leaf": "loss", "hostcallback.device": "cpu:0"}
    found = collector.points("train/loss")
    assert found == [(float(k), {**about, "hostcallback.step": k}) for k in range(STEPS)]
    assert not collector.points("train/grads")
    assert not collector.points("train/step")
    assert otlp.counters.lost == {}


def test_failures_of_checks_are_errors_with_file_and_line(collector: OtlpCollector) -> None:
    with hcb.otlp(collector.address) as otlp:
        run_train(sinks=[otlp])
    errors = [record for record in collector.logs if record.severity_text == "ERROR"]
    assert errors
    first = errors[0]
    line = next(
        n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "hcb.check(carry" in text
    )
    assert first.severity_number == 17
    assert first.body.string_value == f"c is {STEPS - 2}.0"
    about = plain(first.attributes)
    assert about["code.file.path"] == __file__
    assert about["code.line.number"] == line
    assert about["code.function.name"].endswith("body")
    assert about["exception.type"] == "CheckError"
    assert about["hostcallback.device"] == "cpu:0"
    assert about["hostcallback.value.0"] == f"{STEPS - 2}.0"
    assert first.time_unix_nano > 0


def test_prints_and_logs_are_records_of_their_level(
    collector: OtlpCollector, capsys: pytest.CaptureFixture[str]
) -> None:
    with hcb.otlp(collector.address) as otlp:
        run_train(sinks=[otlp])
    texts = [(r.severity_text, r.body.string_value) for r in collector.logs]
    assert [text for level, text in texts if level == "INFO"] == [f"c is {k}.0" for k in range(STEPS)]
    assert [text for level, text in texts if level == "WARN"] == [f"warned of {k}" for k in range(STEPS)]
    assert capsys.readouterr().out.count("c is") == STEPS


def test_the_runtimes_metrics_come_along_and_the_resource_names_the_process(collector: OtlpCollector) -> None:
    with hcb.otlp(collector.address, service_name="training", resource={"rank": 3}) as otlp:
        run_train(sinks=[otlp])
    points = collector.points("hostcallback.delivered_messages")
    assert any(value >= 3 * STEPS and about == {"device": "cpu:0"} for value, about in points)
    family = next(metric for metric in collector.metrics if metric.name == "hostcallback.delivered_messages")
    assert family.sum.is_monotonic
    resource = collector.resources[0]
    assert resource["service.name"] == "training"
    assert resource["rank"] == 3
    assert resource["process.pid"] == os.getpid()


def test_stacks_of_batched_taps_are_a_point_for_each_message(collector: OtlpCollector) -> None:
    def body(carry: Any, _: None) -> tuple[Any, None]:
        hcb.id_tap(nothing, carry, name="stacked", batched=True)
        return carry + 1, None

    with hcb.otlp(collector.address) as otlp, hcb.outfeed_receiver(sinks=[otlp]):
        hcb.jit(lambda x: lax.scan(body, x, None, length=500)[0])(jnp.int32(0)).block_until_ready()
    assert [value for value, _ in collector.points("stacked")] == list(range(500))


def test_a_replay_exports_as_the_run_would(collector: OtlpCollector, tmp_path: Path) -> None:
    run_train(record=tmp_path)
    with hcb.otlp(collector.address) as otlp, pytest.raises(hcb.TapFunctionException):
        receiver.replay(tmp_path, sinks=[otlp])
    assert [value for value, _ in collector.points("train/loss")] == [float(k) for k in range(STEPS)]
    assert any(record.severity_text == "ERROR" for record in collector.logs)


@pytest.mark.slow
def test_a_collector_exports_forwarded_messages(collector: OtlpCollector, tmp_path: Path) -> None:
    with CollectorProcess(tmp_path, "--otlp", collector.address) as collecting:
        sending = forwarder(collecting.address, tmp_path / "spool", run="mine", process_index=3)
        with sending:
            Emitter(sending).losses(20)
        assert collecting.stop() == 0
    found = collector.points("loss/loss")
    assert [value for value, _ in found] == list(range(20))
    about = found[0][1]
    assert (about["hostcallback.run"], about["hostcallback.process"]) == ("mine", 3)
    assert about["hostcallback.device"] == "cpu:0"


def emit(count: int, sink: Any) -> None:
    program = hcb.jit(lambda x: hcb.id_tap(nothing, x, name="value"))
    with hcb.outfeed_receiver(sinks=[sink]):
        for k in range(count):
            program(float(k))


def test_a_collector_that_stalls_blocks_no_process_and_messages_without_room_are_counted(
    collector: OtlpCollector,
) -> None:
    collector.gate.clear()
    with hcb.otlp(collector.address, queue_messages=10, batch_messages=5, flush_sec=0.01) as otlp:
        emit(5, otlp)
        collector.wait_for(lambda: collector.asked > 0)
        emit(100, otlp)  # would never end if it waited
        lost = otlp.counters.lost["the queue was full"]
        assert lost >= 85
        collector.gate.set()
        assert otlp.flush(60)
    assert otlp.counters.lost == {"the queue was full": lost}
    assert len(collector.points("value")) == 105 - lost


@pytest.mark.slow
def test_messages_a_collector_cannot_take_now_are_sent_again(collector: OtlpCollector) -> None:
    collector.status = grpc.StatusCode.UNAVAILABLE
    with hcb.otlp(collector.address, drain_sec=60, flush_sec=0.01) as otlp:
        emit(3, otlp)
        collector.wait_for(lambda: collector.asked > 2)
        assert collector.points("value") == []
        collector.status = None
        assert otlp.flush(60)
    assert [value for value, _ in collector.points("value")] == [0, 1, 2]
    assert otlp.counters.lost == {}


@pytest.mark.slow
def test_a_collector_that_starts_later_gets_everything() -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    with hcb.otlp(f"localhost:{port}", drain_sec=60) as otlp:
        emit(3, otlp)
        assert not otlp.flush(0.1)
        collector = OtlpCollector(port=port)
        assert otlp.flush(60)
    assert [value for value, _ in collector.points("value")] == [0, 1, 2]
    collector.stop()


def test_messages_a_collector_refuses_are_counted_and_not_sent_again(
    collector: OtlpCollector, caplog: pytest.LogCaptureFixture
) -> None:
    collector.status = grpc.StatusCode.UNAUTHENTICATED
    with hcb.otlp(collector.address) as otlp:
        emit(3, otlp)
        otlp.flush(60)
        assert otlp.counters.lost == {"the collector refused them": 3}
        assert "UNAUTHENTICATED" in otlp.counters.failure
        collector.status = None
        collector.rejects = 2
        emit(3, otlp)
        otlp.flush(60)
    assert otlp.counters.lost["the collector rejected them"] == 2
    assert "does not accept what is exported" in caplog.text


def test_closing_without_a_collector_is_quick_and_reports_the_loss(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with hcb.otlp("localhost:1", drain_sec=0.2) as otlp:
        emit(3, otlp)
    assert otlp.counters.lost.total() == 3
    assert "3 message(s) to localhost:1 were lost" in caplog.text
    assert not any(thread.name == "hostcallback-otlp" for thread in threading.enumerate())


def test_headers_are_sent(collector: OtlpCollector) -> None:
    with hcb.otlp(collector.address, headers={"authorization": "Bearer abc"}) as otlp:
        emit(1, otlp)
    assert collector.headers["authorization"] == "Bearer abc"


@pytest.mark.slow
def test_tls_is_spoken_and_the_certificate_is_checked(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -subj /CN=localhost -days 2"
    options = ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command.split(), *options], check=True, capture_output=True, timeout=60)
    credentials = grpc.ssl_server_credentials([(key.read_bytes(), certificate.read_bytes())])
    collector = OtlpCollector(credentials)
    with hcb.otlp(collector.address, tls_ca=certificate) as otlp:
        emit(1, otlp)
    assert len(collector.points("value")) == 1
    with hcb.otlp(
        f"https://{collector.address}", drain_sec=0.5
    ) as otlp:  # this server trusts none of these certificates
        emit(1, otlp)
    assert otlp.counters.lost.total() == 1
    assert len(collector.points("value")) == 1
    collector.stop()


def test_only_this_machine_is_spoken_to_without_tls_unless_wanted() -> None:
    from hostcallback.receiver.remote.otlp.client import OtlpOptions

    assert not OtlpOptions(endpoint="localhost:4317").is_secure
    assert not OtlpOptions(endpoint="http://collector:4317").is_secure
    assert not OtlpOptions(endpoint="collector:4317", insecure=True).is_secure
    assert OtlpOptions(endpoint="collector:4317").is_secure
    assert OtlpOptions(endpoint="https://localhost:4317/").is_secure


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"endpoint": "localhost"}, "endpoint is 'localhost', expected the host:port"),
        ({"endpoint": "ftp://localhost:1"}, "expected the host:port"),
        ({"tls_key": "key.pem"}, "tls_cert and tls_key belong together"),
        ({"insecure": True, "tls_ca": "ca.pem"}, "insecure=True excludes"),
        ({"queue_messages": 0}, "queue_messages is 0, expected a whole number"),
        ({"flush_sec": -1}, "flush_sec is -1, expected a number of seconds"),
        ({"drain_sec": float("inf")}, "drain_sec is inf"),
        ({"headers": {"Authorization": "x"}}, "names of lower-case letters"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        hcb.otlp(**options)

"""A feature whose package is not installed raises an error that names the extra to install."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkout import ROOT
from python_process import python_output


@pytest.mark.parametrize(
    ("package", "code", "error"),
    [
        (
            "nats",
            "from hostcallback.receiver.remote.options import Forward\n"
            "from hostcallback.receiver.remote.forwarder import Forwarder\n"
            "use = lambda: Forwarder(Forward('nats://localhost:4222', spool=sys.argv[1]))",
            "NATS needs the package nats-py: pip install 'hostcallback[nats]'",
        ),
        (
            "opentelemetry",
            "from hostcallback.receiver.remote.otlp.exporter import otlp as use",
            "OTLP needs the packages opentelemetry-proto and grpcio: pip install 'hostcallback[otlp]'",
        ),
        (
            "prometheus_client",
            "from hostcallback.receiver.runtime.metrics import prometheus_collector as use",
            "metrics for Prometheus need the package prometheus-client: pip install 'hostcallback[prometheus]'",
        ),
    ],
)
def test_without_a_package_the_error_has_the_cure(
    package: str, code: str, error: str, tmp_path: Path
) -> None:
    program = (
        f"import sys; sys.modules[{package!r}] = None\n{code}\n"
        "try: use()\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    printed = python_output("-c", program, tmp_path, cwd=ROOT, timeout_sec=60)
    assert printed == f"HostCallbackError {error}\n"

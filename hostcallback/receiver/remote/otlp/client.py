"""The OTLP client over gRPC, and its options: encodes events, points and metrics, and interprets the answers."""

from __future__ import annotations

import enum
import os
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hostcallback.receiver.errors import HostCallbackError
from hostcallback.receiver.remote.credentials import is_loopback, refuse_clear
from hostcallback.receiver.remote.otlp.mapping import Attributes, Event, Point
from hostcallback.receiver.runtime.metrics import BEGUN_NS, Metric
from hostcallback.receiver.text import foreign, is_credential, is_printable, without_password

DEFAULT_ENDPOINT = "localhost:4317"

_HEADER = re.compile(r"[a-z0-9_.-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class OtlpOptions:
    """The options of `otlp`, which documents them."""

    endpoint: str = DEFAULT_ENDPOINT
    insecure: bool = False
    tls_ca: str | os.PathLike[str] | None = None
    tls_cert: str | os.PathLike[str] | None = None
    tls_key: str | os.PathLike[str] | None = None
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    service_name: str = "hostcallback"
    resource: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    queue_messages: int = 20_000
    queue_bytes: int = 64 << 20
    batch_messages: int = 1_000
    flush_sec: float = 1.0
    timeout_sec: float = 10.0
    health_sec: float = 10.0
    drain_sec: float = 5.0

    def __post_init__(self) -> None:
        """Raises ValueError for an option out of range."""
        scheme, _, rest = self.endpoint.rpartition("://") if isinstance(self.endpoint, str) else ("", "", "")
        host, _, port = rest.rstrip("/").rpartition(":")
        if (
            scheme not in ("", "http", "https")
            or "@" in rest
            or not host
            or not port.isdecimal()
            or not 0 < int(port) < 65536
        ):
            shown = without_password(self.endpoint) if isinstance(self.endpoint, str) else self.endpoint
            raise ValueError(
                f"endpoint is {shown!r}, expected the host:port at which an OpenTelemetry Collector takes OTLP "
                f"over gRPC, such as {DEFAULT_ENDPOINT!r}, perhaps with http:// or https:// before it"
            )
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key belong together: give both, or neither")
        if self.insecure and (self.tls_ca is not None or self.tls_cert is not None or scheme == "https"):
            raise ValueError("insecure=True excludes certificates and https://: give one or the other")
        for name in ("queue_messages", "queue_bytes", "batch_messages"):
            _positive(name, getattr(self, name), int)
        for name in ("flush_sec", "timeout_sec", "health_sec"):
            _positive(name, getattr(self, name), int | float)
        if not isinstance(self.drain_sec, int | float) or not 0 <= self.drain_sec < float("inf"):
            raise ValueError(f"drain_sec is {self.drain_sec!r}, expected a number of seconds, 0 or more")
        for key, value in self.headers.items():
            if not _HEADER.fullmatch(key) or not is_printable(value):
                raise ValueError(
                    f"headers has {key!r}: expected names of lower-case letters, digits, '-', '_' and '.', and texts "
                    "of printable ASCII characters (the text is not shown here)"
                )
        if not self.insecure and not self.is_secure and any(map(is_credential, self.headers)):
            host = self.address.rpartition(":")[0]
            refuse_clear(host, self.address, "token in headers", cure="use https://, or give tls_ca")

    @property
    def address(self) -> str:
        """The address as `host:port`."""
        return self.endpoint.rpartition("://")[2].rstrip("/")

    @property
    def is_secure(self) -> bool:
        """Whether TLS is used: yes, unless the options disable it or the address is this machine."""
        if self.insecure or self.endpoint.startswith("http://"):
            return False
        if self.tls_ca is not None or self.tls_cert is not None or self.endpoint.startswith("https://"):
            return True
        return not is_loopback(self.address.rpartition(":")[0])


def _positive(name: str, value: Any, kind: Any) -> None:
    if not isinstance(value, kind) or isinstance(value, bool) or not 0 < value < float("inf"):
        what = "whole number of at least 1" if kind is int else "number of seconds above 0"
        raise ValueError(f"{name} is {value!r}, expected a {what}")


_LOGS = "/opentelemetry.proto.collector.logs.v1.LogsService/Export"
_METRICS = "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export"

SCOPE = "hostcallback"


class ExportResult(enum.Enum):
    """The result of a request."""

    STORED = "stored"
    REFUSED = "refused"
    LATER = "later"
    """The request failed in a way that a retry may cure."""


class Answer(NamedTuple):
    """The collector's answer to a request.

    Attributes:
        said: the result.
        rejected: number of rejected records, in a request that was stored.
        text: the reason.
    """

    said: ExportResult
    rejected: int = 0
    text: str = ""


class OtlpClient:
    """A channel to an OpenTelemetry Collector. One thread."""

    def __init__(self, options: OtlpOptions) -> None:
        """The channel connects with the first request.

        Raises:
            HostCallbackError: the package opentelemetry-proto, or grpcio, is missing.
            OSError: a file with a certificate or a key cannot be read.
        """
        try:
            import grpc
            from opentelemetry.proto.collector.logs.v1 import logs_service_pb2
            from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2
            from opentelemetry.proto.common.v1 import common_pb2
            from opentelemetry.proto.logs.v1 import logs_pb2
            from opentelemetry.proto.metrics.v1 import metrics_pb2
            from opentelemetry.proto.resource.v1 import resource_pb2
        except ImportError as error:
            raise HostCallbackError(
                "OTLP needs the packages opentelemetry-proto and grpcio: pip install 'hostcallback[otlp]'"
            ) from error
        self._grpc: Any = grpc
        self._logs_service: Any = logs_service_pb2
        self._metrics_service: Any = metrics_service_pb2
        self._common: Any = common_pb2
        self._logs_messages: Any = logs_pb2
        self._metrics_messages: Any = metrics_pb2
        self._timeout_sec = options.timeout_sec
        self._metadata = tuple(options.headers.items())
        self._resource = resource_pb2.Resource(attributes=self._attributes(_resource(options)))
        self._scope = common_pb2.InstrumentationScope(name=SCOPE)
        self._channel = _channel(grpc, options)
        self._logs = self._channel.unary_unary(
            _LOGS,
            request_serializer=logs_service_pb2.ExportLogsServiceRequest.SerializeToString,
            response_deserializer=logs_service_pb2.ExportLogsServiceResponse.FromString,
        )
        self._metrics = self._channel.unary_unary(
            _METRICS,
            request_serializer=metrics_service_pb2.ExportMetricsServiceRequest.SerializeToString,
            response_deserializer=metrics_service_pb2.ExportMetricsServiceResponse.FromString,
        )
        code = grpc.StatusCode
        # https://opentelemetry.io/docs/specs/otlp/#failures
        self._later = (
            code.CANCELLED, code.DEADLINE_EXCEEDED, code.RESOURCE_EXHAUSTED, code.ABORTED, code.OUT_OF_RANGE,
            code.UNAVAILABLE, code.DATA_LOSS,
        )  # fmt: skip

    def events_request(self, events: Sequence[Event], now_ns: int) -> Any:
        """Encodes events as a request."""
        messages = self._logs_messages
        records = [
            messages.LogRecord(
                time_unix_nano=event.time_ns,
                observed_time_unix_nano=now_ns,
                severity_number=event.severity,
                severity_text=event.severity_text,
                body=self._common.AnyValue(string_value=_text(event.body)),
                attributes=self._attributes(event.attributes),
            )
            for event in events
        ]
        scope = messages.ScopeLogs(scope=self._scope, log_records=records)
        found = messages.ResourceLogs(resource=self._resource, scope_logs=[scope])
        return self._logs_service.ExportLogsServiceRequest(resource_logs=[found])

    def points_request(self, points: Iterable[Point]) -> Any:
        """Encodes points of gauges as a request."""
        gauges: dict[str, list[Any]] = {}
        for point in points:
            made = self._point(point.value, point.time_ns, point.attributes)
            gauges.setdefault(point.metric, []).append(made)
        messages = self._metrics_messages
        return self._metrics_request(
            messages.Metric(name=name, gauge=messages.Gauge(data_points=made))
            for name, made in gauges.items()
        )

    def figures_request(self, figures: Iterable[Metric], now_ns: int) -> Any:
        """Encodes the runtime's metrics as a request; None if there are none."""
        messages, metrics = self._metrics_messages, []
        for figure in figures:
            points = [
                self._point(value, now_ns, {figure.label: label}, BEGUN_NS if figure.grows else 0)
                for label, value in figure.values
            ]
            if not points:
                continue
            name = f"hostcallback.{figure.name}"
            if figure.grows:
                total = messages.Sum(
                    data_points=points,
                    aggregation_temporality=messages.AGGREGATION_TEMPORALITY_CUMULATIVE,
                    is_monotonic=True,
                )
                metrics.append(messages.Metric(name=name, description=figure.text, sum=total))
            else:
                gauge = messages.Gauge(data_points=points)
                metrics.append(messages.Metric(name=name, description=figure.text, gauge=gauge))
        return self._metrics_request(metrics) if metrics else None

    def send(self, request: Any) -> Answer:
        """Sends a request and waits for the answer. Network errors and refusals are in the answer, not raised."""
        is_logs = isinstance(request, self._logs_service.ExportLogsServiceRequest)
        method = self._logs if is_logs else self._metrics
        try:
            response = method(request, timeout=self._timeout_sec, metadata=self._metadata)
        except self._grpc.RpcError as error:
            text = f"{error.code().name}: {foreign(error.details()) or 'no reason given'}"
            return Answer(
                ExportResult.LATER if error.code() in self._later else ExportResult.REFUSED, text=text
            )
        except ValueError as error:  # `close` has closed the channel meanwhile
            return Answer(ExportResult.LATER, text=str(error))
        partial = response.partial_success
        rejected = partial.rejected_log_records if is_logs else partial.rejected_data_points
        return Answer(ExportResult.STORED, rejected, foreign(partial.error_message))

    def close(self) -> None:
        """Closes the channel and cancels the request in progress."""
        self._channel.close()

    def _metrics_request(self, metrics: Iterable[Any]) -> Any:
        messages = self._metrics_messages
        scope = messages.ScopeMetrics(scope=self._scope, metrics=metrics)
        found = messages.ResourceMetrics(resource=self._resource, scope_metrics=[scope])
        return self._metrics_service.ExportMetricsServiceRequest(resource_metrics=[found])

    def _point(self, value: float, time_ns: int, attributes: Attributes, begun_ns: int = 0) -> Any:
        # OTLP has 64-bit signed integers only.
        fits = isinstance(value, int) and -(2**63) <= value < 2**63
        number: dict[str, Any] = {"as_int": value} if fits else {"as_double": float(value)}
        return self._metrics_messages.NumberDataPoint(
            time_unix_nano=time_ns,
            start_time_unix_nano=begun_ns,
            attributes=self._attributes(attributes),
            **number,
        )

    def _attributes(self, attributes: Mapping[str, str | int | float | bool]) -> list[Any]:
        key_value, any_value = self._common.KeyValue, self._common.AnyValue
        made = []
        for key, value in attributes.items():
            if isinstance(value, bool):
                kind = "bool_value"
            elif isinstance(value, int) and -(2**63) <= value < 2**63:
                kind = "int_value"
            elif isinstance(value, float):
                kind = "double_value"
            else:
                kind, value = "string_value", _text(str(value))
            made.append(key_value(key=_text(key), value=any_value(**{kind: value})))
        return made


def _text(text: str) -> str:
    # File names may contain bytes that are not UTF-8, which protobuf refuses.
    return text.encode(errors="replace").decode()


def _resource(options: OtlpOptions) -> dict[str, str | int | float | bool]:
    return {
        "service.name": options.service_name,
        "host.name": socket.gethostname(),
        "process.pid": os.getpid(),
        **options.resource,
    }


def _channel(grpc: Any, options: OtlpOptions) -> Any:
    # A collector that restarts is found again within 5 s; gRPC's own pause grows to two minutes.
    settings = (("grpc.max_reconnect_backoff_ms", 5_000), ("grpc.keepalive_time_ms", 60_000))
    if not options.is_secure:
        return grpc.insecure_channel(options.address, options=settings)
    root, key, chain = (
        None if path is None else Path(path).read_bytes()
        for path in (options.tls_ca, options.tls_key, options.tls_cert)
    )
    return grpc.secure_channel(
        options.address, grpc.ssl_channel_credentials(root, key, chain), options=settings
    )

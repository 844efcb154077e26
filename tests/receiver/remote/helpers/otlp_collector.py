"""An OpenTelemetry Collector's gRPC server, as its protocol defines it, that keeps the requests."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent import futures
from typing import Any

import grpc
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2, logs_service_pb2_grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc


def plain(attributes: Any) -> dict[str, Any]:
    """Attributes as a dict."""
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in attributes}


class _Logs(logs_service_pb2_grpc.LogsServiceServicer):
    def __init__(self, collector: OtlpCollector) -> None:
        self.collector = collector

    def Export(self, request: Any, context: Any) -> Any:
        self.collector.answer(context)
        for resource in request.resource_logs:
            self.collector.resources.append(plain(resource.resource.attributes))
            for scope in resource.scope_logs:
                self.collector.keep(self.collector.logs, scope.log_records)
        return logs_service_pb2.ExportLogsServiceResponse()


class _Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
    def __init__(self, collector: OtlpCollector) -> None:
        self.collector = collector

    def Export(self, request: Any, context: Any) -> Any:
        self.collector.answer(context)
        for resource in request.resource_metrics:
            for scope in resource.scope_metrics:
                self.collector.keep(self.collector.metrics, scope.metrics)
        response = metrics_service_pb2.ExportMetricsServiceResponse()
        response.partial_success.rejected_data_points = self.collector.rejects
        return response


class OtlpCollector:
    """Listens on a free port.

    Attributes:
        logs, metrics, resources: the received data.
        headers: of the last request.
        status: the status that answers requests; None to accept them.
        rejects: number of points that it reports as rejected, of each request of metrics.
        gate: requests wait while it is not set.
        asked: number of requests.
    """

    def __init__(self, credentials: grpc.ServerCredentials | None = None, port: int = 0) -> None:
        self.logs: list[Any] = []
        self.metrics: list[Any] = []
        self.resources: list[dict[str, Any]] = []
        self.headers: dict[str, str] = {}
        self.status: grpc.StatusCode | None = None
        self.rejects = 0
        self.gate = threading.Event()
        self.gate.set()
        self.asked = 0
        self._changed = threading.Condition()
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        logs_service_pb2_grpc.add_LogsServiceServicer_to_server(_Logs(self), self._server)
        metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(_Metrics(self), self._server)
        address = f"localhost:{port}"
        if credentials is None:
            self.port = self._server.add_insecure_port(address)
        else:
            self.port = self._server.add_secure_port(address, credentials)
        self._server.start()

    @property
    def address(self) -> str:
        return f"localhost:{self.port}"

    def answer(self, context: Any) -> None:
        with self._changed:
            self.asked += 1
            self.headers = dict(context.invocation_metadata())
            self._changed.notify_all()
        assert self.gate.wait(60)
        if self.status is not None:
            context.abort(self.status, "as the test wants it")

    def keep(self, where: list[Any], records: Any) -> None:
        with self._changed:
            where.extend(records)
            self._changed.notify_all()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, 60)

    def points(self, name: str) -> list[tuple[float, dict[str, Any]]]:
        """The points of the metrics of a name, with their attributes."""
        with self._changed:
            return [
                (getattr(point, point.WhichOneof("value")), plain(point.attributes))
                for metric in self.metrics
                if metric.name == name
                for point in getattr(metric, metric.WhichOneof("data")).data_points
            ]

    def stop(self) -> None:
        self.gate.set()
        self._server.stop(0).wait(60)

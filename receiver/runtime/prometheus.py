"""The runtime's metrics for Prometheus, read when they are scraped. docs/metrics.md names them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hostcallback.receiver.errors import HostCallbackError
from hostcallback.receiver.runtime.metrics import collect_metrics
from hostcallback.receiver.runtime.runtime import Runtime, runtime


class RuntimeCollector:
    """What prometheus_client collects of a process: figures of each device, and what rules suppressed of each tap."""

    def __init__(self, runtime: Runtime) -> None:
        """Of the receivers of `runtime`."""
        self._runtime = runtime

    def describe(self) -> list[Any]:
        """The metrics' names, by which a registry knows that it has them already."""
        return list(self.collect())

    def collect(self) -> Iterator[Any]:
        """The metrics now. On the thread that serves the scrape; takes no lock that delivery holds for long."""
        core = _prometheus_client().core
        for figure in collect_metrics(self._runtime):
            kind = core.CounterMetricFamily if figure.grows else core.GaugeMetricFamily
            family = kind(f"hostcallback_{figure.name}", figure.text, labels=[figure.label])
            for label, value in figure.values:
                family.add_metric([label], value)
            yield family


def register(registry: Any = None) -> RuntimeCollector:
    """Makes this process's metrics part of a registry of prometheus_client, its default one if None is given.

    Raises:
        HostCallbackError: the package prometheus-client is missing.
    """
    client = _prometheus_client()
    collector = RuntimeCollector(runtime)
    (client.REGISTRY if registry is None else registry).register(collector)
    return collector


def _prometheus_client() -> Any:
    try:
        import prometheus_client
        import prometheus_client.core
    except ImportError as error:
        raise HostCallbackError(
            "metrics for Prometheus need the package prometheus-client: pip install 'hostcallback[prometheus]'"
        ) from error
    return prometheus_client

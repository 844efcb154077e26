"""Serves the runtime's metrics to Prometheus; each scrape reads them. docs/metrics.md lists them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hostcallback.receiver.errors import HostCallbackError
from hostcallback.receiver.runtime.metrics import collect_metrics
from hostcallback.receiver.runtime.runtime import Runtime, runtime


class RuntimeCollector:
    """Collector for prometheus_client: counters and gauges per device, and suppressed messages per tap."""

    def __init__(self, runtime: Runtime) -> None:
        """Collects from the receivers of `runtime`."""
        self._runtime = runtime

    def describe(self) -> list[Any]:
        """Returns the metrics, by whose names a registry finds duplicates."""
        return list(self.collect())

    def collect(self) -> Iterator[Any]:
        """Yields the current metrics. The scraping thread calls it; it takes no lock that delivery holds for long."""
        core = _prometheus_client().core
        for figure in collect_metrics(self._runtime):
            kind = core.CounterMetricFamily if figure.grows else core.GaugeMetricFamily
            family = kind(f"hostcallback_{figure.name}", figure.text, labels=[figure.label])
            for label, value in figure.values:
                family.add_metric([label], value)
            yield family


def register(registry: Any = None) -> RuntimeCollector:
    """Adds this process's metrics (docs/metrics.md) to a registry of prometheus_client.

    They are read when the registry is scraped, on the thread of the scrape, which waits for no device.

    Args:
        registry: a `prometheus_client.CollectorRegistry`; None for the default registry.

    Returns:
        The collector, for `registry.unregister(...)`.

    Raises:
        HostCallbackError: the package prometheus-client is missing.
        ValueError: the registry has these metrics already.

    Example:
        hcb.prometheus_collector()
        prometheus_client.start_http_server(9000)
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

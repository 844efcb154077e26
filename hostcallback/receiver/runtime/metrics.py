"""The metrics of a process's receivers, by name, also for Prometheus. docs/metrics.md lists them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from hostcallback.receiver.errors import HostCallbackError
from hostcallback.receiver.runtime.runtime import Runtime, runtime
from hostcallback.receiver.runtime.stats import DeviceStats
from hostcallback.receiver.sources.source import SourceCounters

BEGUN_NS = time.time_ns()
"""Unix time at which counting began."""


class Metric(NamedTuple):
    """One metric with its values.

    Attributes:
        name: name without a prefix.
        text: description, one sentence.
        grows: True for a counter, which only grows; False for a gauge, which is the current state.
        label: name of the label of the values, "device" or "tap".
        values: pairs of a label's value and the number.
    """

    name: str
    text: str
    grows: bool
    label: str
    values: list[tuple[str, float]]


_OF_STATS: tuple[tuple[str, str, Callable[[DeviceStats], float]], ...] = (
    ("delivered_messages", "Messages handed to their tap functions.", lambda row: row.delivered),
    ("delivered_bytes", "Bytes of the tapped arrays in them.", lambda row: row.delivered_bytes),
    ("failed_messages", "Messages whose tap function raised.", lambda row: row.failed),
    ("unknown_messages", "Messages whose consumer was not registered.", lambda row: row.unknown),
    ("unrecorded_messages", "Messages that a recorder could not write.", lambda row: row.unrecorded),
    ("tap_seconds", "Seconds spent in tap functions.", lambda row: row.tap_sec),
)

_OF_SOURCES: tuple[tuple[str, str, bool, Callable[[SourceCounters], float]], ...] = (
    ("emitted_messages", "Messages that devices have put into their queues.", True, lambda c: c.emitted),
    ("emitted_bytes", "Bytes of their frames.", True, lambda c: c.emitted_bytes),
    ("dropped_messages", "Messages that a back-pressure policy has dropped.", True, lambda c: c.dropped),
    ("queued_messages", "Messages in the queues now.", False, lambda c: c.queued_messages),
    ("queued_bytes", "Bytes in the queues now.", False, lambda c: c.queued_bytes),
    (
        "waiting_emissions",
        "Emissions that wait for room in a queue now.",
        False,
        lambda c: c.waiting_producers,
    ),
)


def collect_metrics(runtime: Runtime) -> Iterator[Metric]:
    """Yields the current metrics. Takes no lock that delivery holds for long. Any thread."""
    rows = runtime.totals()
    counters = [(receiver.name, receiver.source.counters()) for receiver in runtime.receivers()]
    for name, text, read in _OF_STATS:
        yield Metric(name, text, True, "device", [(row.device, read(row)) for row in rows])
    for name, text, grows, of_source in _OF_SOURCES:
        values = [(device, of_source(found)) for device, found in counters]
        yield Metric(name, text, grows, "device", values)
    suppressed = [(tap, float(count)) for tap, count in runtime.suppressed().items()]
    yield Metric(
        "suppressed_messages", "Messages that rules of taps kept from being sent.", True, "tap", suppressed
    )


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


def prometheus_collector(registry: Any = None) -> RuntimeCollector:
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

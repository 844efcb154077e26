"""The runtime's metrics for Prometheus, read when they are scraped. docs/metrics.md names them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from receiver.errors import HostCallbackError
from receiver.runtime import Runtime, runtime
from receiver.source import SourceCounters
from receiver.stats import DeviceStats

_OF_STATS: tuple[tuple[str, str, Callable[[DeviceStats], float]], ...] = (
    ("delivered_messages", "Messages handed to their tap functions.", lambda row: row.delivered),
    ("delivered_bytes", "Bytes of the tapped arrays in them.", lambda row: row.delivered_bytes),
    ("failed_messages", "Messages whose tap function raised.", lambda row: row.failed),
    ("unknown_messages", "Messages whose consumer was not registered.", lambda row: row.unknown),
    ("unrecorded_messages", "Messages that a recorder could not write.", lambda row: row.unrecorded),
    ("tap_seconds", "Seconds spent in tap functions.", lambda row: row.tap_sec),
)

_OF_SOURCES: tuple[tuple[str, str, Callable[[SourceCounters], float]], ...] = (
    ("emitted_messages", "Messages that devices have put into their queues.", lambda c: c.emitted),
    ("emitted_bytes", "Bytes of their frames.", lambda c: c.emitted_bytes),
    ("dropped_messages", "Messages that a back-pressure policy has dropped.", lambda c: c.dropped),
)

_QUEUES: tuple[tuple[str, str, Callable[[SourceCounters], float]], ...] = (
    ("queued_messages", "Messages in the queues now.", lambda c: c.queued_messages),
    ("queued_bytes", "Bytes in the queues now.", lambda c: c.queued_bytes),
    ("waiting_emissions", "Emissions that wait for room in a queue now.", lambda c: c.waiting_producers),
)


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
        rows = self._runtime.totals()
        counters = [(receiver.name, receiver.source.counters()) for receiver in self._runtime.receivers()]
        for name, text, read in _OF_STATS:
            family = core.CounterMetricFamily(f"hostcallback_{name}", text, labels=["device"])
            for row in rows:
                family.add_metric([row.device], read(row))
            yield family
        for kind, metrics in ((core.CounterMetricFamily, _OF_SOURCES), (core.GaugeMetricFamily, _QUEUES)):
            for name, text, of_source in metrics:
                family = kind(f"hostcallback_{name}", text, labels=["device"])
                for device, found in counters:
                    family.add_metric([device], of_source(found))
                yield family
        suppressed = core.CounterMetricFamily(
            "hostcallback_suppressed_messages",
            "Messages that rules of taps kept from being sent.",
            labels=["tap"],
        )
        for tap, count in self._runtime.suppressed().items():
            suppressed.add_metric([tap], count)
        yield suppressed


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

"""Reports the runtime's metrics through `jax.monitoring`. docs/metrics.md lists them."""

from __future__ import annotations

from collections.abc import Sequence

import jax.monitoring

from hostcallback.receiver.log import logger
from hostcallback.receiver.runtime.device_stats import DeviceStats

PREFIX = "/hostcallback/receiver/"

SCALARS = {
    "messages": "delivered",
    "bytes": "delivered_bytes",
    "dropped": "dropped",
    "failed": "failed",
    "unknown": "unknown",
    "unrecorded": "unrecorded",
}
"""Fields of `DeviceStats`, by the last part of the metric's name."""


def record_receiver(name: str, rows: Sequence[DeviceStats]) -> None:
    """Reports the statistics of a closed receiver: scalars and a duration per device, and one event."""
    try:
        for row in rows:
            for metric, field in SCALARS.items():
                jax.monitoring.record_scalar(
                    PREFIX + metric, getattr(row, field), device=row.device, receiver=name
                )
            jax.monitoring.record_event_duration_secs(
                PREFIX + "tap_duration", row.tap_sec, device=row.device, receiver=name
            )
        jax.monitoring.record_event(PREFIX + "closed", receiver=name)
    except Exception:  # an error of a listener must not hide the report of the receiver
        logger.exception("a listener of jax.monitoring raised")

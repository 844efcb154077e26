"""The runtime's metrics through `jax.monitoring`, beside those of JAX. docs/metrics.md names them."""

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
"""By the last part of the name, the field of `DeviceStats`."""


def record_receiver(name: str, rows: Sequence[DeviceStats]) -> None:
    """Tells the listeners what a receiver that ends has done: scalars and a duration for each device, one event."""
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
    except Exception:  # a listener's: the receiver has more important things to report
        logger.exception("a listener of jax.monitoring raised")

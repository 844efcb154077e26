"""What a capsule says about the process: versions, devices, environment, and the last messages of its log."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax

from hostcallback.receiver import redaction
from hostcallback.receiver.runtime.runtime import Runtime

PACKAGES = ("hostcallback", "jax", "jaxlib", "numpy", "ml_dtypes", "flax", "equinox", "optax")
"""Packages whose versions a capsule has."""

VARIABLES = ("JAX_", "XLA_", "HOSTCALLBACK_", "CUDA_VISIBLE_DEVICES")
"""Beginnings of the names of the variables that a capsule has. Others may be secret."""

MESSAGES = 1000
"""Number of messages of the log that a capsule has."""


def about_this_process() -> dict[str, Any]:
    """Plain data for the manifest of a capsule."""
    devices = jax.devices()
    return {
        "created_ns": time.time_ns(),
        "versions": {"python": platform.python_version(), **_versions()},
        "platform": devices[0].platform,
        "devices": [{"id": device.id, "kind": device.device_kind} for device in devices],
        "process": {"index": jax.process_index(), "count": jax.process_count()},
        "system": platform.platform(),
        "x64": bool(_setting("jax_enable_x64")),
        "matmul_precision": str(_setting("jax_default_matmul_precision") or ""),
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(VARIABLES) and not redaction.is_credential(name) and "://" not in value
        },
    }


def _setting(name: str) -> Any:
    return getattr(jax.config, name)  # without a type in JAX's annotations


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        if name in sys.modules or name == "jaxlib":
            with contextlib.suppress(PackageNotFoundError):  # on the path, and not installed
                found[name] = version(name)
    return found


def last_messages(runtime: Runtime) -> tuple[str, str]:
    """Returns the last messages of the receivers' logs as lines of JSON, or why there are none."""
    recorders = {receiver.scope.recorder for receiver in runtime.receivers()} - {None}
    if not recorders:
        return "", "no receiver records (outfeed_receiver(record=...))"
    from hostcallback.receiver.taplog.reading.follow import Follower
    from hostcallback.receiver.taplog.reading.logged_message import LoggedMessage
    from hostcallback.receiver.taplog.reading.selection import Selection
    from hostcallback.receiver.taplog.render.json_message import as_dict

    lines: list[str] = []
    for recorder in recorders:
        assert recorder is not None
        recorder.flush()
        for item in Follower([recorder.directory], Selection(), wait=True).last(MESSAGES):
            if isinstance(item, LoggedMessage):
                lines.append(json.dumps(as_dict(item)))
    return "\n".join(lines), "the log has none"

"""Sets the environment of JAX for the program of a capsule."""

from __future__ import annotations

import os

from hostcallback.receiver.capsule.file_format import CapsuleError, shown
from hostcallback.receiver.capsule.reading import Capsule

MOST_DEVICES = 4096
"""A capsule from elsewhere may ask for any number of devices. Each takes memory."""


def prepare_devices(capsule: Capsule, at_least: int = 1) -> None:
    """Sets the variables with which JAX has as many CPU devices as the program had, and its 64-bit types.

    Call it before JAX is imported.

    Args:
        capsule: the capsule.
        at_least: number of devices that are needed besides.

    Raises:
        CapsuleError: the program ran in several processes.
    """
    process = capsule.about.get("process")
    if isinstance(process, dict) and process.get("count", 1) != 1:
        raise CapsuleError(
            f"{capsule.path}: the program ran in {shown(process.get('count'))} processes, and the capsule has the "
            f"shards of process {shown(process.get('index'))}: its inputs can be read (receiver.Capsule), and it "
            "cannot be run here"
        )
    devices = capsule.about.get("devices")
    count = max(at_least, min(len(devices), MOST_DEVICES) if isinstance(devices, list) else 1)
    flags = os.environ.get("XLA_FLAGS", "")
    if count > 1 and "xla_force_host_platform_device_count" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={count}".strip()
    if capsule.about.get("x64") is True:
        os.environ.setdefault("JAX_ENABLE_X64", "1")

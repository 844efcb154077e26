"""The machine and the versions that figures were measured with."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path


def describe_machine() -> str:
    """Processor, cores, memory, versions."""
    model, memory = platform.processor() or platform.machine(), ""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
        memory = f" {os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB,"
    except (OSError, ValueError):
        pass
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    versions = f"Python {platform.python_version()}, JAX {version('jax')}"
    return f"{model}, {cores} cores,{memory} {platform.system()} {platform.release()}, {versions}"


def resident_mib(process: int | str = "self") -> float:
    """Resident memory of a process, by its id, in MiB."""
    pages = int(Path(f"/proc/{process}/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def peak_mib(process: int | str = "self") -> float:
    """Peak of the resident memory of a process, by its id, in MiB. `ru_maxrss` is at least its parent's."""
    status = Path(f"/proc/{process}/status").read_text(encoding="ascii", errors="replace")
    return float(status.partition("VmHWM:")[2].split()[0]) / 1024

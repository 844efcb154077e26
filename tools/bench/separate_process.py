"""Benchmarks in separate processes: `python -m tools.bench.separate_process MODULE FUNCTION ARGUMENTS`, in JSON."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tools.bench.row import Row

ROOT = Path(__file__).resolve().parents[2]


def rows_of_process(module: str, function: str, *arguments: Any, devices: int = 1) -> list[Row]:
    """The rows that `module.function(*arguments)` returns in a new process with the given number of CPU devices."""
    environment = dict(os.environ)
    flags = environment.get("XLA_FLAGS", "")
    environment["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={devices}".strip()
    line = [sys.executable, "-m", "tools.bench.separate_process", module, function, json.dumps(arguments)]
    done = subprocess.run(line, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    if done.returncode:
        raise RuntimeError(f"the benchmark {module}.{function} failed:\n{done.stdout}{done.stderr}")
    return [Row(**fields) for fields in json.loads(done.stdout.splitlines()[-1])]


def main(module: str, function: str, arguments: str) -> None:
    """Prints the rows of one benchmark."""
    rows = getattr(importlib.import_module(module), function)(*json.loads(arguments))
    print(json.dumps([dataclasses.asdict(row) for row in rows]))


if __name__ == "__main__":
    main(*sys.argv[1:])

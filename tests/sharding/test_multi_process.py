"""In a program of several processes each receives the shards of its local devices, with their place in the array."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

PROGRAM = Path(__file__).with_name("multi_process_program.py")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port: int = probe.getsockname()[1]
        return port


def test_each_process_gets_its_own_devices_shards_with_their_place(tmp_path: Path) -> None:
    port = free_port()
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    processes = [
        subprocess.Popen(
            [sys.executable, PROGRAM, str(number), str(port), tmp_path / str(number)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
        )
        for number in range(2)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    whole = np.arange(16.0).reshape(4, 4)
    for number in range(2):
        found: list[Any] = json.loads((tmp_path / str(number)).read_text())
        for device in range(2):
            rows, columns = [2 * number, 2 * number + 2], [2 * device, 2 * device + 2]
            part = whole[slice(*rows), slice(*columns)]
            mine = [entry for entry in found if entry[1] == device]
            automatic = [["automatic", device, [rows, columns], (part + k).tolist()] for k in (1, 2, 3)]
            manual = [["manual", device, None, part.tolist()]]
            assert mine == 2 * (automatic + manual)

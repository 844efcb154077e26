"""Processes of one program that read one value, and stop one loop after the same step."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from typing import Any

import pytest

import hostcallback as hcb
from python_process import run_pythons

PROGRAM = Path(__file__).with_name("agreeing_program.py")

pytestmark = pytest.mark.slow

READ = {
    "float": "3.0 3.0 6.0 6.0",
    "bool": "0.0 0.0 3.0 3.0",
    "array": "45.0 45.0 63.0 63.0",
}
"""What each process prints of three reads on its two devices: of the default, and of what the first process has set."""


def test_all_processes_read_the_value_of_the_first_and_stop_after_the_same_step() -> None:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = str(probe.getsockname()[1])
    two_devices = "--xla_force_host_platform_device_count=2"
    outputs = run_pythons([(PROGRAM, str(n), port) for n in range(2)], 120, XLA_FLAGS=two_devices)
    stops = []
    for printed in outputs:
        for name, values in READ.items():
            for how in ("auto", "manual"):
                assert f"{name} {how} {values}\n" in printed
        if os.environ.get("HOSTCALLBACK_TRANSPORT") != "callback":
            assert "partly 6.0 6.0\npartly 9.0 9.0\n" in printed
        stops.append(re.findall(r"^stopped (\d) (\d+) (.*)$", printed, re.MULTILINE))
    assert stops[0] == stops[1]
    assert [asks for asks, *_ in stops[0]] == ["0", "1"]
    for _, count, values in stops[0]:
        assert values == f"{float(count)} {float(count)}"
        assert 5 <= int(count) < 1_000_000


@pytest.mark.parametrize("given", ["all", True, 1])
def test_other_agreements_are_refused(given: Any) -> None:
    with pytest.raises(
        ValueError, match=r"agree=.*, expected None or 'processes', at .*test_knob_processes\.py"
    ):
        hcb.knob("any", 1.0, agree=given)
    with pytest.raises(ValueError, match=r"agree=.*, expected None or 'processes'"):
        hcb.stop_requested(agree=given)
    if given is not True:
        with pytest.raises(
            ValueError, match=r"stop=.*, expected True or 'processes', at .*test_knob_processes"
        ):
            hcb.fori_loop(0, 3, lambda i, x: x, 0, progress=False, stop=given)

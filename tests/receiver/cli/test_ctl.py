"""`hcb ctl` from another process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from controlled import Controlled, hcb
from threads import wait_for


@pytest.fixture(autouse=True)
def no_rules(process: Controlled) -> Iterator[None]:
    yield
    assert process.hcb("ctl", process.pid, "*", "--reset").returncode == 0


def test_taps_are_listed_with_their_rules(process: Controlled) -> None:
    done = process.hcb("ctl", process.pid, "layer*", "--every", 3, "--rate", 2.5, "--truncate", 8)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["tap          rules", "layer1/grad  every=3 rate=2.5 truncate=8"]
    listed = process.hcb("ctl", process.pid).stdout.splitlines()
    assert listed[0].split() == ["tap", "kind", "rules", "suppressed", "line"]
    assert listed[1].startswith("layer1/grad  tap    every=3 rate=2.5 truncate=8 ")
    assert "controlled_program.py:" in listed[1]
    assert [line.split()[:3] for line in listed[2:]] == [["loss", "tap", "-"], ["sign", "check", "-"]]


@pytest.mark.slow
def test_rules_reach_the_running_program(process: Controlled) -> None:
    process.hcb("ctl", process.pid, "*", "--disable")
    stopped = process.arrived()
    quiet_since = time.monotonic()
    while time.monotonic() < quiet_since + 0.5:  # earlier messages may still be on their way
        if (now := process.arrived()) != stopped:
            stopped, quiet_since = now, time.monotonic()
    process.hcb("ctl", process.pid, "loss", "--enable")
    wait_for(lambda: process.arrived()["loss"] > stopped["loss"] + 20)
    assert process.arrived()["layer1/grad"] == stopped["layer1/grad"]
    assert 5 not in stopped["sizes"]
    process.hcb("ctl", process.pid, "layer*", "--enable", "--truncate", 5)
    wait_for(lambda: 5 in process.arrived()["sizes"])
    done = process.hcb("ctl", process.pid, "layer*", "--reset", "--every", 2)
    assert "every=2" in done.stdout
    assert "truncate" not in done.stdout
    done = process.hcb("ctl", process.pid, "layer*", "--truncate", 4, "--rate", 9)
    done = process.hcb("ctl", process.pid, "layer*", "--truncate", "none", "--rate", "none")
    assert done.stdout.splitlines()[1] == "layer1/grad  every=2"


def test_checks_are_switched_too(process: Controlled) -> None:
    assert process.hcb("ctl", process.pid, "sign", "--disable").returncode == 0
    assert "check  enabled=false" in process.hcb("ctl", process.pid).stdout
    done = process.hcb("ctl", process.pid, "sign", "--every", 2)
    assert done.returncode == 1
    assert done.stderr == "hcb: 'sign' matches checks only, which can be disabled and enabled\n"


def test_processes_are_listed(process: Controlled) -> None:
    done = process.hcb("ctl")
    assert done.returncode == 0
    assert any(line.split()[0] == str(process.pid) for line in done.stdout.splitlines()[1:])


def test_without_processes_a_message_is_printed(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("the superuser sees everybody's processes")
    done = hcb("ctl", environment={**os.environ, "HOSTCALLBACK_CONTROL_DIR": str(tmp_path)})
    assert done.returncode == 0


def test_a_name_that_matches_nothing(process: Controlled) -> None:
    done = process.hcb("ctl", process.pid, "los", "--rate", 2)
    assert done.returncode == 1
    assert done.stderr == "hcb: no tap is called 'los' so far; there are 'loss'\n"
    assert done.stdout == ""


def test_a_stop_that_no_loop_hears_says_so(process: Controlled) -> None:
    done = process.hcb("ctl", process.pid, "stop")
    assert (done.returncode, done.stdout) == (0, "stop requested: hcb ctl\n")
    assert done.stderr == (
        "hcb: no program with a loop with stop=True, or with hcb.stop_requested, was traced yet\n"
    )


def test_the_examples_of_the_help_are_aligned(process: Controlled) -> None:
    shown = process.hcb("ctl", "-h").stdout.partition("examples:\n")[2].splitlines()
    assert {line.index(line.split("  ")[-1].strip()) for line in shown} == {48}
    assert all(line.startswith("  hcb ctl") for line in shown)


def test_a_process_without_taps(process: Controlled) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        done = process.hcb("ctl", other.pid)
    assert done.returncode == 1
    assert done.stderr.startswith(
        f"hcb: process {other.pid} has no control socket: it does not use hostcallback"
    )


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["99999999", "x", "--every", "2"], 1, "hcb: no process 99999999 exists"),
        (["99999999999999999999"], 1, "is not a process id"),
        (["abc"], 2, "is not a process id"),
        (["1", "--every", "3"], 2, "rules are for taps: give their name or a glob"),
        (["1", "x", "--every", "0"], 2, "every is 0, expected a whole number of messages, 1 or more"),
        (["1", "x", "--rate", "fast"], 2, "'fast' is not a number"),
        (["1", "x", "--truncate", "-3"], 2, "truncate is -3"),
        (["1", "x", "--disable", "--enable"], 2, "not allowed with argument"),
    ],
)
def test_impossible_settings_are_reported(
    process: Controlled, tmp_path: Path, arguments: list[str], status: int, message: str
) -> None:
    environment = {**process.environment, "HOSTCALLBACK_CONTROL_DIR": str(tmp_path)}
    done = hcb("ctl", *arguments, environment=environment)
    assert done.returncode == status, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr

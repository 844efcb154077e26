"""The control file: its syntax, and the rules in force when it changes, breaks and is removed."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import hostcallback as hcb
from controlled import ROOT, controlled
from hostcallback.receiver.control.endpoints import endpoints
from hostcallback.receiver.control.protocol import RuleFileError
from hostcallback.receiver.control.rule_file import read_rules
from python_process import python_output
from recorder import Recorder

RULES = """
["layer*/grad"]
every = 100
rate = 10.0
enabled = true

[loss]
truncate = 64
"""


@pytest.fixture(autouse=True)
def no_file() -> Iterator[None]:
    yield
    hcb.control_file(None)


def wait_for(condition: Callable[[], Any]) -> None:
    deadline, moment = time.monotonic() + 30, threading.Event()
    while not condition():
        assert time.monotonic() < deadline, hcb.taps.rules
        moment.wait(0.01)


def test_a_file_is_applied_and_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "rules.toml"
    endpoints.watch(path, poll_sec=0.01)
    assert hcb.taps.rules == {}, "there is none yet"
    path.write_text(RULES)
    wait_for(lambda: hcb.taps.rules == {"layer*/grad": "every=100 rate=10", "loss": "truncate=64"})
    path.write_text('["loss"]\nevery = 3\n')
    wait_for(lambda: hcb.taps.rules == {"loss": "every=3"})
    # As editors and deployment tools write: a new file in place of the old.
    other = tmp_path / "other"
    other.write_text('["loss"]\nevery = 4\n')
    other.replace(path)
    wait_for(lambda: hcb.taps.rules == {"loss": "every=4"})
    with caplog.at_level(logging.ERROR):
        path.write_text('["loss"]\nevery = 5\nrate = -1\n')
        wait_for(lambda: "line 3" in caplog.text)
    assert (
        "rate is -1, expected a number of messages per second above 0; the previous rules stay" in caplog.text
    )
    assert hcb.taps.rules == {"loss": "every=4"}, "a file that makes no sense changes nothing"
    path.write_text('["loss"]\nevery = 6\n')
    wait_for(lambda: hcb.taps.rules == {"loss": "every=6"})
    path.unlink()
    wait_for(lambda: hcb.taps.rules == {})


def test_a_broken_file_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "rules.toml"
    path.write_text("[loss\n")
    with caplog.at_level(logging.ERROR):
        with pytest.raises(RuleFileError, match="is not TOML"):
            hcb.control_file(path)
        for _ in range(5):
            assert endpoints._file is not None
            endpoints._file.look()
    assert caplog.text.count("is not TOML") == 1


def test_calls_and_the_file_take_turns(tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    hcb.taps["loss"].every(2)
    path.write_text("[loss]\nevery = 3\n")
    hcb.control_file(path)
    assert hcb.taps.rules == {"loss": "every=3"}, "it was read later"
    hcb.taps["loss"].every(4)
    assert hcb.taps.rules == {"loss": "every=4"}
    hcb.control_file(None)
    assert hcb.taps.rules == {"loss": "every=4"}


@pytest.mark.slow
def test_a_forked_child_follows_the_file_too(tmp_path: Path) -> None:
    program = """
import os, sys, threading, time
from pathlib import Path
import hostcallback as hcb
from hostcallback.receiver.control.endpoints import endpoints
path = Path(sys.argv[1])
path.write_text("[loss]\\nevery = 3\\n")
hcb.control_file(path)
if os.fork() == 0:
    endpoints.start()
    path.write_text("[loss]\\nevery = 4\\n")
    deadline, moment = time.monotonic() + 30, threading.Event()
    while hcb.taps.rules != {"loss": "every=4"}:
        assert time.monotonic() < deadline, hcb.taps.rules
        moment.wait(0.05)
    os._exit(0)
assert os.wait()[1] == 0
"""
    environment = {"HOSTCALLBACK_CONTROL_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    python_output("-W", "ignore", "-c", program, tmp_path / "rules.toml", timeout_sec=60, **environment)


def test_python_rules_hold_again_when_the_file_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    hcb.taps["loss"].every(2)
    path.write_text("[loss]\nevery = 3\n")
    hcb.control_file(str(path))
    hcb.control_file(None)
    assert hcb.taps.rules == {"loss": "every=2"}


def test_knobs_that_do_not_exist_are_reported_with_the_nearest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hcb.knob("warmth of the file", 1.0)
    path = tmp_path / "rules.toml"
    path.write_text('[knobs]\n"warmth of the fil" = 3.0\n"warmth of the file" = 2.0\n')
    with caplog.at_level(logging.WARNING):
        hcb.control_file(path)
    hcb.control_file(None)
    assert hcb.knobs["warmth of the file"] == 2
    (told,) = [text for text in caplog.messages if "no knob" in text]
    assert "[knobs] no knob is called 'warmth of the fil': there are 'warmth of the file'" in told
    assert told.endswith("; the value is set once it is declared")
    assert hcb.knob("warmth of the fil", 1.0) == 3


def test_globs_that_match_nothing_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, rec: Recorder
) -> None:
    hcb.jit(lambda x: hcb.id_tap(rec, x, name="in the file"))(1.0)
    path = tmp_path / "rules.toml"
    path.write_text('["in the fil"]\nevery = 3\n["in the*"]\nevery = 2\n')
    with caplog.at_level(logging.WARNING):
        hcb.control_file(path)
    assert "no tap is called 'in the fil' so far; there are 'in the file'" in caplog.text
    assert "'in the*'" not in caplog.text
    hcb.barrier_wait()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("every = 3", r"line 1: every = 3 belongs to no glob; expected, for example, \[\"layer\*/grad\"\]"),
        ("[loss]\n\nevery = '3'", "line 3.*every is '3', expected a whole number of messages"),
        ("[loss]\nevrey = 3", "line 2.*there is no rule 'evrey', expected one of enabled, every"),
        ("\n[layer1.grad]\nevery = 3", r"line 2.*quote names that have dots in them, \[\"layer1\.grad\"\]"),
        # Names that are written with escapes are not found in the text: the nearest line before them.
        ('"lo\\u0073s" = 3', "line 1: loss = 3 belongs to no glob"),
        ('\n[loss]\n"r\\u0061te" = -1', "line 2.*rate is -1"),
        ("[loss]\nwhen = 'x > 3'", "line 2.*only Python can set a predicate"),
        ("[loss]\nevery = 3\nevery = 4", "is not TOML"),
        ("\xff[loss]", "is not TOML"),
        ("#" * (1 << 20) + "\n", "is longer than"),
    ],
)
def test_files_that_make_no_sense(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "rules.toml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(RuleFileError, match=message):
        read_rules(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may read everything")
def test_an_unreadable_file_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    path.write_text(RULES)
    path.chmod(0)
    with pytest.raises(RuleFileError, match="Permission denied"):
        hcb.control_file(path)


@pytest.mark.slow
def test_the_environment_names_a_file(tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    path.write_text("[loss]\nenabled = false\n")
    with controlled(tmp_path / "sockets", HOSTCALLBACK_CONTROL_FILE=str(path)) as process:
        assert process.arrived()["loss"] == 0
        assert process.arrived()["layer1/grad"] > 0
        path.unlink()
        wait_for(lambda: process.arrived()["loss"])

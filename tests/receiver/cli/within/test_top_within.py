"""`hcb top` for this process: rates of an interval, once, as JSON and again and again, on a terminal and off it."""

from __future__ import annotations

import io
import json
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from own_server import PID, Served

from hostcallback.receiver.cli.output.tables import bytes_text, live_screen, seconds_text
from hostcallback.receiver.control.protocol import ControlError

PROCESS = {"pid": 4242, "host": "node1", "command": "python " + "x" * 200, "started": 1000.0}
NO_DEVICE = {
    "emitted": 0, "emitted_bytes": 0, "dropped": 0, "queued": 0, "queued_bytes": 0, "waiting": 0, "running": None,
}  # fmt: skip
NO_TAP = {
    "check": False, "enabled": True, "rules": "", "suppressed": 0, "messages": 0, "bytes": 0, "failed": 0,
    "tap_sec": 0.0,
}  # fmt: skip


def figures(second: int, devices: list[dict[str, Any]], taps: list[dict[str, Any]]) -> dict[str, Any]:
    """An answer, some seconds after the start."""
    return {
        "time": 1000.0 + second, "process": PROCESS,
        "devices": [NO_DEVICE | device for device in devices],
        "taps": [NO_TAP | {"source_line": f"{tap['name']}.py:1 (f)"} | tap for tap in taps],
    }  # fmt: skip


BEFORE = figures(
    3600,
    [{"device": "cpu:0", "emitted": 100, "emitted_bytes": 1000}, {"device": "cpu:1"}],
    [{"name": "a", "messages": 10}, {"name": "b", "messages": 10, "bytes": 100, "tap_sec": 1.0}],
)
NOW = figures(
    3602,
    [
        {
            "device": "cpu:0", "emitted": 3100, "emitted_bytes": 1000 + 3 * 1024, "queued": 1234, "queued_bytes": 2048,
            "waiting": 3, "dropped": 4567, "running": ["b", 1.25],
        },
        {"device": "cpu:1", "running": ["a", 0.0009]},
        {"device": "cpu:2", "running": ["a", 0.001]},
        {"device": "cpu:3"},
    ],
    [
        {"name": "a", "messages": 4},
        {"name": "c", "messages": 8, "enabled": False, "rules": "every=2"},
        {
            "name": "b", "messages": 4010, "bytes": 100 + 6 * 1024, "tap_sec": 1.5, "failed": 1234, "suppressed": 5678,
            "rules": "rate=9",
        },
    ],
)  # fmt: skip


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that the command would wait."""
    found: list[float] = []
    monkeypatch.setattr(time, "sleep", found.append)
    return found


@pytest.fixture
def answers(served: Served) -> Iterator[list[dict[str, Any]]]:
    """The figures that the process has one after another; then it refuses."""
    found: list[dict[str, Any]] = []

    def answer(arguments: Any, client: Any) -> dict[str, Any]:
        if not found:
            raise ControlError("that is all")
        return found.pop(0)

    served.handlers["figures"] = answer
    return found


def test_a_line_for_each_device_and_tap_has_the_rates_of_the_interval(
    served: Served, answers: list[dict[str, Any]]
) -> None:
    answers += [BEFORE, NOW, NOW]
    status, out, err = served.hcb("top", PID, "--once")
    assert (status, err, len(answers)) == (0, "", 1)
    assert out.splitlines() == [
        f"process 4242 on node1, up 1:00:02: python {'x' * 93}",
        "",
        "device  messages      bytes  queue   queued  waiting  dropped  running",
        "cpu:0    1,500/s  1.5 KiB/s  1,234  2.0 KiB        3    4,567  b for 1.2 s",
        "cpu:1        0/s      0 B/s      0      0 B        0        0  -",
        "cpu:2        0/s      0 B/s      0      0 B        0        0  a for 0.0 s",
        "cpu:3        0/s      0 B/s      0      0 B        0        0  -",
        "",
        "tap  messages      bytes   time  errors  suppressed  rules          line",
        "b     2,000/s  3.0 KiB/s  25.0%   1,234       5,678  rate=9         b.py:1 (f)",
        "c         4/s      0 B/s   0.0%       0           0  enabled=false  c.py:1 (f)",
        "a         0/s      0 B/s   0.0%       0           0  -              a.py:1 (f)",
    ]


def test_intervals_follow_each_other_with_an_empty_line_between(
    served: Served, answers: list[dict[str, Any]], waits: list[float]
) -> None:
    answers += [figures(second, [{"device": "cpu:0", "emitted": second**2}], []) for second in (1, 3, 4)]
    status, out, err = served.hcb("top", PID, "--interval", "7.5")
    assert (status, err, waits) == (1, "hcb: that is all\n", [7.5] * 3)
    parts = out.split("process 4242 on node1, ")
    assert [part.split(":")[0] for part in parts] == ["", "up 3.0 s", "up 4.0 s"]
    assert ["4/s" in parts[1], "7/s" in parts[2]] == [True, True]
    assert [part[-2:] for part in parts[1:]] == ["\n\n", "\n\n"]


def test_json_has_a_line_for_each_interval(served: Served, answers: list[dict[str, Any]]) -> None:
    answers += [BEFORE, NOW, NOW]
    status, out, _ = served.hcb("top", PID, "--json")
    assert status == 1
    first, second = map(json.loads, out.splitlines())
    assert (first["time"], first["seconds"], first["process"]) == (4602.0, 2.0, PROCESS)
    assert [tap["messages_per_sec"] for tap in first["taps"]] == [2000.0, 4.0, 0.0]
    assert [tap["messages_per_sec"] for tap in second["taps"]] == [0.0, 0.0, 0.0]
    assert [tap["name"] for tap in second["taps"]] == ["a", "b", "c"]
    answers += [BEFORE, NOW]
    _, out, _ = served.hcb("top", PID, "--json", "--once")
    assert json.loads(out) == first


def test_the_taps_of_a_process_without_messages(served: Served) -> None:
    status, out, err = served.hcb("top", PID, "--once")
    assert (status, err) == (0, "")
    head, devices, taps = out.split("\n\n")
    assert head.startswith(f"process {PID} on ")
    assert len(devices.splitlines()) == 1
    assert [row.split()[0] for row in taps.splitlines()] == ["tap", "layer1/grad", "loss", "sign"]


class Screen(io.StringIO):
    """A standard output that is a terminal."""

    def isatty(self) -> bool:
        return True


@contextmanager
def terminal(columns: int, *, has_rich: bool) -> Iterator[Screen]:
    """A terminal of 9 lines is the standard output."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"TERM": "xterm", "COLUMNS": str(columns), "LINES": "9"}.items():
            patch.setenv(name, value)
        for name in ("NO_COLOR", "FORCE_COLOR"):
            patch.delenv(name, raising=False)
        if not has_rich:
            patch.setitem(sys.modules, "rich.console", None)
        found = Screen()
        patch.setattr(sys, "stdout", found)
        yield found


def test_a_terminal_is_overwritten_and_cropped_without_rich(
    served: Served, answers: list[dict[str, Any]], waits: list[float]
) -> None:
    answers += [BEFORE, NOW, NOW]
    with terminal(40, has_rich=False) as screen:
        status, _, err = served.hcb("top", PID, "--interval", "7.5")
    assert answers == []
    hint = "(for a screen without flicker: pip install 'hostcallback[top]')\n"
    assert (status, err, waits) == (1, f"{hint}hcb: that is all\n", [7.5] * 3)
    begin, first, second = screen.getvalue().split("\x1b[H")
    assert begin == "\x1b[2J"
    heads = ["device  messages      bytes  queue   que", "device  messages  bytes  queue   queued "]
    for shown, head in zip((first, second), heads, strict=True):
        assert shown.endswith("\x1b[K\n\x1b[J")
        lines = shown.removesuffix("\x1b[J").split("\x1b[K\n")
        assert lines[0] == "process 4242 on node1, up 1:00:02: pytho"
        assert lines[2] == head
        assert lines[7:] == ["... 5 more lines", ""]


def test_once_is_plain_text_on_a_terminal_too(served: Served, answers: list[dict[str, Any]]) -> None:
    answers += [BEFORE, NOW]
    with terminal(40, has_rich=False) as screen:
        assert served.hcb("top", PID, "--once")[0] == 0
    assert "\x1b[H" not in screen.getvalue()
    assert len(screen.getvalue().splitlines()) == 12


def test_text_that_fits_a_terminal_is_shown_as_it_is() -> None:
    with terminal(40, has_rich=False) as screen, live_screen() as show:
        show([f"line {number}" for number in range(8)])
        show(["an\x1bescape"])
    _, full, short = screen.getvalue().split("\x1b[H")
    assert full == "".join(f"line {number}\x1b[K\n" for number in range(8)) + "\x1b[J"
    assert short == "an\\x1bescape\x1b[K\n\x1b[J"


def test_a_terminal_has_bold_heads_and_is_restored_with_rich(
    served: Served, answers: list[dict[str, Any]]
) -> None:
    pytest.importorskip("rich", reason="needs pip install 'hostcallback[top]'")
    answers += [figures(1, [], []), figures(2, [{"device": "cpu:0"}], [{"name": "a"}])]
    with terminal(100, has_rich=True) as screen:
        status, _, err = served.hcb("top", PID)
    assert (status, err) == (1, "hcb: that is all\n")
    shown = screen.getvalue()
    assert "\x1b[?1049h" in shown
    assert shown.index("cpu:0") < shown.index("\x1b[?1049l")
    assert re.findall("\x1b\\[1m(.*?)\x1b\\[0m", shown) == [
        "device  messages  bytes  queue  queued  waiting  dropped  running",
        "tap  messages  bytes  time  errors  suppressed  rules  line",
    ]  # fmt: skip


def test_a_bold_head_ends_with_its_line_on_a_narrow_terminal() -> None:
    pytest.importorskip("rich", reason="needs pip install 'hostcallback[top]'")
    with terminal(12, has_rich=True) as screen, live_screen() as show:
        show(["tap  messages  bytes", "loss  100"])
    assert re.findall("\x1b\\[1m(.*?)\x1b\\[0m", screen.getvalue(), re.DOTALL) == ["tap  message"]


@pytest.mark.parametrize(("interval", "status"), [("0.049", 2), ("0.05", 0), ("3600", 0), ("3601", 2)])
def test_an_interval_is_from_a_twentieth_of_a_second_to_an_hour(
    served: Served, interval: str, status: int
) -> None:
    found, _, err = served.hcb("top", PID, "--once", "--interval", interval)
    assert found == status
    assert ("expected seconds, 0.05 to 3600" in err) == (status == 2)


@pytest.mark.parametrize("words", [[], [PID, "--via", "host:1"]])
def test_either_a_process_or_a_collector_is_given(served: Served, words: list[str]) -> None:
    status, _, err = served.hcb("top", *words)
    assert (status, "give a PID, or a collector with --via HOST:PORT" in err) == (2, True)


def test_bytes_and_seconds_have_units() -> None:
    sizes = [0, 1023, 1024, 1536, 1024**2 - 1024, 1024**2, 1024**3, 2.5 * 1024**4, 5000 * 1024**4]
    assert [bytes_text(size) for size in sizes] == [
        "0 B", "1023 B", "1.0 KiB", "1.5 KiB", "1023.0 KiB", "1.0 MiB", "1.0 GiB", "2.5 TiB", "5000.0 TiB",
    ]  # fmt: skip
    seconds = [0, 59.94, 60, 61.9, 3599, 3600, 36_000]
    assert [seconds_text(each) for each in seconds] == [
        "0.0 s", "59.9 s", "0:01:00", "0:01:01", "0:59:59", "1:00:00", "10:00:00",
    ]  # fmt: skip

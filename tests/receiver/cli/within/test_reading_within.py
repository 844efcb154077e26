"""Commands on a log, within this process: which steps, times and launches they take, times of places, functions."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hostcallback.receiver.cli import main
from hostcallback.receiver.sinks.times import DEVICE, SECONDS, START
from hostcallback.receiver.taplog.format.layout import Lost, ThinnedTap
from hostcallback.receiver.taplog.writing.segment_writer import SegmentWriter
from logged_frames import BEGIN_NS, DESCRIBED, LOSS, NORM, SECOND, block_of, frame, log_in, losses

TIMED = replace(
    LOSS, name="parts", consumer_id=99, kind="time", params={"axes": {"a": [DEVICE]}}, kwargs={}, transforms=(),
    tree=["dict", [["value", "a"]], [["dict", [["value", SECONDS], ["value", START]], [["array"], ["array"]]]]],
)  # fmt: skip


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Losses of the steps 0 to 9, one in a second, of the launch 00abcd; a norm without a step in the tenth second."""
    with log_in(tmp_path / "log", run="deep") as writer:
        writer.append("cpu:0", losses(0, 10, run_id=0xABCD))
        writer.append("cpu:1", block_of(frame(NORM, np.float32(2), seq=10, run_id=0xABCD)))
    return tmp_path / "log"


class Command:
    """Runs `hcb`."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: str | Path) -> tuple[int, str, str]:
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as ended:
            assert isinstance(ended.code, int)
            status = ended.code
        return status, *self._capsys.readouterr()


@pytest.fixture
def hcb(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


def seqs(found: tuple[int, str, str]) -> list[int]:
    """The numbers of the messages that `hcb cat --json` shows."""
    status, out, err = found
    assert (status, err) == (0, "")
    return [json.loads(line)["seq"] for line in out.splitlines()]


def local(second: float, form: str = "%Y-%m-%dT%H:%M:%S") -> str:
    """A time of the log as a user writes it."""
    return datetime.fromtimestamp(BEGIN_NS // SECOND + second).strftime(form)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--step", "3:5"], [3, 4, 5]),
        (["--step", "8:"], [8, 9]),
        (["--step", ":1"], [0, 1]),
        (["--step", "7"], [7]),
        (["--step", "3:3"], [3]),
        (["--step=-5:1"], [0, 1]),
        (["--since", local(9)], [9, 10]),
        (["--until", local(2)], [0, 1]),
        (["--since", local(8.5, "%Y-%m-%dT%H:%M:%S.%f")], [9, 10]),
        (["--since", "2023-11-14T22:13:30+00:00"], [10]),
        (["--since", "2023-11-15T00:13:30+02:00"], [10]),
        (["--since", "1700000009"], [9, 10]),
        (["--since", "1700000009.000000001"], [10]),
        (["--since", "1700000009.0000000009"], [9, 10]),
        (["--until", "1700000001.5"], [0, 1]),
        (["--until", "1700000001.000000001"], [0, 1]),
        (["--since", "1700000003", "--until", "1700000005", "--name", "loss"], [3, 4]),
        (["--launch", "00ABCD", "--device", "cpu:1"], [10]),
        (["--launch", str(0xABCD), "--name", "norm"], [10]),
    ],
)
def test_messages_are_chosen(log: Path, hcb: Command, options: list[str], expected: list[int]) -> None:
    assert seqs(hcb("cat", "--json", log, *options)) == expected


def test_a_time_without_a_day_is_of_today(tmp_path: Path, hcb: Command) -> None:
    noon = datetime.now().replace(hour=9, minute=30, second=0, microsecond=0)
    with log_in(tmp_path / "log") as writer:
        times = [int(noon.timestamp() * SECOND) + ms * 10**6 for ms in (-500, 0, 500, 5000)]
        writer.append(
            "cpu:0", block_of(*(frame(NORM, np.float32(n), seq=n, time_ns=t) for n, t in enumerate(times)))
        )
    if datetime.now().date() != noon.date():
        pytest.skip("midnight has just passed")
    for option, at, expected in (
        ("--since", "09:30", [1, 2, 3]), ("--since", "9:30", [1, 2, 3]), ("--since", "09:30:01", [3]),
        ("--since", "09:30:00.6", [3]), ("--since", "9:31", []), ("--until", f"{noon.timestamp():.0f}.6", [0, 1, 2]),
    ):  # fmt: skip
        found = hcb("cat", "--json", tmp_path / "log", option, at)
        assert [json.loads(line)["seq"] for line in found[1].splitlines()] == expected


@pytest.mark.parametrize(
    ("option", "text"),
    [
        *(
            (f"--step={step}", f"'{step}', expected steps such as 100:200, 100:, :200 or 100")
            for step in ("", ":", "a", "1:2:3", "1.5")
        ),
        ("--step=5:3", "'5:3', which ends before it begins: 3:5"),
        *(
            (
                f"--since={time}",
                f"got '{time}', expected a time such as 2026-11-21T20:15:00, 20:15:00 or 1795291200.5",
            )
            for time in ("noon", "25:00", "2026-13-01", "1.2.3", "-5")
        ),
        *(
            (
                f"--launch={launch}",
                f"'{launch}', expected a launch as reports show it, such as c2db94 (six hexadecimal digits), or its "
                "run_id",
            )
            for launch in ("c2db9", "1" * 20)
        ),
    ],
)
def test_conditions_that_say_nothing_are_refused(hcb: Command, option: str, text: str) -> None:
    status, out, err = hcb("cat", "log", option)
    assert (status, out) == (2, "")
    said = err.splitlines()[-1]
    assert said.startswith(f"hcb cat: error: argument {option.partition('=')[0]}: got '")
    assert said.endswith(text)


@pytest.mark.parametrize("lines", ["-1", "1.5", "ten"])
def test_a_number_of_messages_is_a_whole_one(hcb: Command, lines: str) -> None:
    status, _, err = hcb("tail", "log", f"--lines={lines}")
    assert status == 2
    assert err.endswith(f"argument -n/--lines: got '{lines}', expected a number of messages, 0 or more\n")


SPAN = f"{local(0)}.000000 to {local(10)}.000000"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--step", "50:"], "these steps: the log has steps 0 to 9"),
        (
            ["--step", "50:", "--name", "loss"],
            "these steps: the log has steps 0 to 9, of these taps and devices",
        ),
        (["--step", "5", "--name", "norm"], "these steps: the log has no steps, of these taps and devices"),
        (
            ["--step", "5", "--device", "cpu:1"],
            "these steps: the log has no steps, of these taps and devices",
        ),
        (["--step", "50", "--launch", "00abcd"], "these steps: the log has steps 0 to 9, of launch 00abcd"),
        (["--since", "2040-01-01"], f"these times: the log has times from {SPAN}"),
        (["--until", "2001-01-01"], f"these times: the log has times from {SPAN}"),
        (
            ["--until", "2001-01-01", "--step", "1"],
            f"these steps and times: the log has steps 0 to 9 and times from {SPAN}",
        ),
        (
            ["--step", "1", "--name", "loss", "--device", "cpu:1"],
            "these steps: the log has no messages, of these taps and devices",
        ),
    ],
)
def test_what_the_log_has_instead_is_said(log: Path, hcb: Command, options: list[str], said: str) -> None:
    assert hcb("cat", log, *options) == (0, "", f"hcb: no message is of {said}\n")


def test_one_step_is_called_so(tmp_path: Path, hcb: Command) -> None:
    with log_in(tmp_path / "log") as writer:
        writer.append("cpu:0", losses(4, 1))
    said = "hcb: no message is of these steps: the log has step 4\n"
    assert hcb("cat", tmp_path / "log", "--step", "5") == (0, "", said)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["--launch", "00abce"],
            "the log has no messages of a launch 00abce; hcb cat --json shows the launch of each",
        ),
        (["--name", "los"], "no tap of the log is called 'los'; there are 'loss'"),
        (["--name", "xyz"], "no tap of the log is called 'xyz'; there are 'loss', 'norm'"),
        (["--device", "tpu:*"], "no device of the log is called 'tpu:*'; there are 'cpu:1', 'cpu:0'"),
        (
            ["--name", "norm", "--device", "CPU:1"],
            "no device of the log is called 'CPU:1'; there are 'cpu:0', 'cpu:1'",
        ),
    ],
)
def test_a_name_that_the_log_does_not_have_is_said_with_the_nearest(
    log: Path, hcb: Command, options: list[str], said: str
) -> None:
    status, out, err = hcb("cat", log, *options)
    assert (status, out, len(err.splitlines())) == (1, "", 1)
    assert err.startswith(f"hcb: {said}")


def test_each_name_that_is_not_there_is_said(log: Path, hcb: Command) -> None:
    status, _, err = hcb(
        "stats", log, "--name", "los", "--name", "nor", "--device", "gpu:0", "--launch", "00abce"
    )
    assert status == 1
    assert [re.findall("'[a-z:0-9]*'|launch 00abce", line)[0] for line in err.splitlines()] == [
        "'los'", "'nor'", "'gpu:0'", "launch 00abce",
    ]  # fmt: skip


def test_cat_shows_where_messages_are_missing_but_in_json(tmp_path: Path, hcb: Command) -> None:
    with log_in(tmp_path / "log") as writer:
        writer.append("cpu:0", losses(0, 2))
        writer.lose("cpu:0", 2, 8, 7, "dropped: no room")
        writer.append("cpu:0", losses(9, 1))
    status, out, err = hcb("cat", tmp_path / "log")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert len(lines) == 4
    (lost,) = [line for line in lines if "lost" in line]
    assert lost.split("  ", 1)[1] == "cpu:0  -  7 message(s) lost: dropped: no room"
    assert seqs(hcb("cat", tmp_path / "log", "--json")) == [0, 1, 9]


# stats


@pytest.fixture
def timed(tmp_path: Path) -> Path:
    """The times of twelve calls, of which number 7 took a second and the others 1 ms; a note of lost messages."""
    with log_in(tmp_path / "log", run="deep", config={"lr": 0.1}) as writer:
        writer.describe(TIMED)
        for call in range(12):
            seconds = np.full((1, 1), 1.0 if call == 7 else 0.001, np.float32)
            times = frame(TIMED, seconds, np.zeros((1, 1, 2), np.uint32), seq=call)
            writer.append("cpu:0", block_of(times))
        writer.lose("cpu:0", 0, 0, 1234, "dropped: no room")
        writer.note_rules([ThinnedTap("parts", "every=2", 5678), ThinnedTap("all", "", 3)])
    return tmp_path / "log"


def test_stats_as_json_has_all_that_the_table_has(timed: Path, hcb: Command) -> None:
    status, out, err = hcb("stats", "--json", timed)
    assert (status, err) == (0, "")
    found: dict[str, list[Any]] = {}
    for line in map(json.loads, out.splitlines()):
        kinds = [kind for kind in ("config", "times", "slowest", "lost", "thinned") if kind in line]
        found.setdefault(kinds[0] if kinds else "tap", []).append(line)
    assert list(found) == ["config", "tap", "times", "slowest", "lost", "thinned"]
    assert found["config"] == [{"run": "deep", "config": {"lr": 0.1}}]
    assert [(tap["name"], tap["messages"]) for tap in found["tap"]] == [("parts", 12)]
    (row,) = [row for row in found["times"] if row["place"] == "a"]
    assert (row["times"], row["count"], row["max"]) == ("parts", 12, 1.0)
    assert [step["slowest"] for step in found["slowest"]] == ["parts"] * 5
    assert (found["slowest"][0]["which"], found["slowest"][0]["seconds"]) == ("call 7", 1.0)
    (slow,) = found["slowest"][0]["places"]
    assert (slow["place"], slow["seconds"], slow["median"]) == ("a", 1.0, pytest.approx(0.001, rel=0.01))
    (lost,) = found["lost"]
    assert re.fullmatch(r"\S+:\d+", lost["process"])
    assert [lost["lost"][key] for key in ("device", "messages", "reason")] == [
        "cpu:0",
        1234,
        "dropped: no room",
    ]
    assert [line["thinned"] for line in found["thinned"]] == [
        {"name": "all", "rules": "", "suppressed": 3}, {"name": "parts", "rules": "every=2", "suppressed": 5678},
    ]  # fmt: skip


def test_stats_shows_the_times_of_places_below_the_table(timed: Path, hcb: Command) -> None:
    status, out, err = hcb("stats", timed)
    assert (status, err) == (0, "")
    head, times, slowest = out.split("\n\n")
    assert head.startswith("run deep: lr=0.1\ntap ")
    title, columns, *rows = times.splitlines()
    assert (title, columns.split()[:3]) == ("parts:", ["place", "count", "mean"])
    assert [row.split()[:2] for row in rows] == [["a", "12"]]
    assert [line.split("  ")[0] for line in slowest.splitlines()][:2] == ["slowest", "call 7"]
    assert out.splitlines()[-3:] == [
        next(
            line
            for line in out.splitlines()
            if line.endswith(", cpu:0: 1,234 message(s) lost: dropped: no room")
        ),
        "rules thinned all: 3 message(s) suppressed",
        "rules thinned parts, every=2: 5,678 message(s) suppressed",
    ]
    assert "thinned all" not in hcb("stats", timed, "--name", "parts")[1]


@pytest.mark.parametrize(("slowest", "lines"), [("0", 0), ("2", 2), ("1000", 12)])
def test_as_many_slowest_calls_as_asked_for(timed: Path, hcb: Command, slowest: str, lines: int) -> None:
    _, out, _ = hcb("stats", timed, "--slowest", slowest, "--json")
    assert out.count('"slowest": "parts"') == lines


def test_a_cut_end_is_said_with_the_messages_in_it(tmp_path: Path, hcb: Command) -> None:
    with log_in(tmp_path / "log") as writer:
        writer.append("cpu:0", losses(0, 5), at_once=True)
        writer.append("cpu:0", losses(5, 3), at_once=True)
    (path,) = (tmp_path / "log").iterdir()
    whole = path.read_bytes()
    frames = [found.start() for found in re.finditer(rb"HCB\x01", whole)]
    chunk = whole.rindex(b"\xb6HLC", 0, frames[5])
    ends = f"{path.name} ends where its process was killed, or is still writing"
    for size, incomplete in ((chunk + 8, 0), (frames[5] + 1, 3), (frames[7] + 1, 1)):
        path.write_bytes(whole[:size])
        status, out, err = hcb("stats", path)
        assert (status, err) == (0, "")
        count = f", {incomplete} message(s) are incomplete" if incomplete else ""
        assert out.splitlines()[-1] == ends + count


# replay

FUNCTIONS = """
def take(value, run):
    print("took", float(value["loss"]), run)

number = 3
"""


@pytest.mark.parametrize("where", ["functions_of_a_test", "functions.py"])
def test_functions_of_modules_and_files_take_messages(
    log: Path, hcb: Command, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(log.parent)
    monkeypatch.setattr("sys.path", [*sys.path])
    Path(f"{where.removesuffix('.py')}.py").write_text(FUNCTIONS)
    status, out, err = hcb("replay", log, "--bind", f"loss={where}:take", "--step", "8:")
    assert (status, out, err) == (0, "took 8.0 7\ntook 9.0 7\n", "replayed 2 message(s)\n")
    status, out, err = hcb("replay", log, "--bind", f"los={where}:take")
    assert (status, out, err) == (2, "", "hcb: no tap of the log is called 'los'; there are 'loss'\n")
    status, out, err = hcb("replay", log, "--bind", f"loss={where}:number")
    assert (status, out) == (1, "")
    assert err == f"hcb: --bind 'loss={where}:number': number is a int, expected a function\n"


@pytest.mark.parametrize(
    ("bind", "text"),
    [
        *(
            (bind, "expected NAME=MODULE:FUNCTION, such as loss=myproject.plots:draw")
            for bind in ("loss", "loss=functions", "=functions:take", "loss=functions:", "functions:take")
        ),
        ("loss=no_such_module:take", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("loss=json:nothing", "AttributeError: module 'json' has no attribute 'nothing'"),
        ("loss=missing.py:take", "FileNotFoundError: "),
        ("loss=functions.py:other", "KeyError: 'other'"),
    ],
)
def test_a_function_that_cannot_be_bound_is_named(
    log: Path, hcb: Command, bind: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(log.parent)
    monkeypatch.setattr("sys.path", [*sys.path])
    Path("functions.py").write_text(FUNCTIONS)
    status, out, err = hcb("replay", log, "--bind", bind)
    assert (status, out) == (1, "")
    assert err.startswith(f"hcb: --bind {bind!r}: {text}")


@pytest.mark.parametrize("speed", ["0", "inf", "nan", "fast"])
def test_a_speed_is_a_positive_number(hcb: Command, speed: str) -> None:
    status, _, err = hcb("replay", "log", f"--speed={speed}")
    assert (status, f"got '{speed}', expected a number above 0, such as 1 or 0.5" in err) == (2, True)


@pytest.mark.parametrize("runs", [("exp-7", "exp-8"), ("exp-7", ""), ("exp-7", "exp-7")])
def test_lines_name_the_run_where_there_are_several(
    runs: tuple[str, str], hcb: Command, tmp_path: Path
) -> None:
    for index, run in enumerate(runs):
        info = {"run": run, "process": f"p{index}", "process_index": index}
        writer = SegmentWriter(tmp_path / f"{index}.taps", info=info)
        writer.frames("cpu:0", losses(2 * index, 1), DESCRIBED)
        writer.lost(Lost("cpu:0", 2 * index + 1, 2 * index + 1, 1, 9, BEGIN_NS, "dropped"))
        writer.close()
    status, out, _ = hcb("cat", tmp_path / "0.taps", tmp_path / "1.taps")
    assert status == 0
    shown = [line.partition("  process ")[0].split("  ")[1:] for line in out.splitlines()]
    first, second = ([run or "-"] if runs[0] != runs[1] else [] for run in runs)
    assert shown == [first, first, second, second]

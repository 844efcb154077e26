"""`hcb cat`, `stats` and `errors`: their output for a log, and their messages for a damaged or missing one."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from hcb_command import environment, hcb
from hostcallback.receiver.cli import main
from hostcallback.receiver.errors import TapFailure
from hostcallback.receiver.messages import Message
from hostcallback.receiver.processes import own_run
from hostcallback.receiver.taplog.columns.log_data import read
from hostcallback.receiver.taplog.writing.recorder import Recorder, record
from hostcallback.receiver.taplog.writing.segment_writer import SegmentWriter
from hostcallback.receiver.wire.frame import Flags
from hostcallback.receiver.wire.tap_descriptor import TapDescriptor
from logged_frames import block_of, consumer_of, frame

BEGIN_NS = 1_700_000_000 * 10**9
LOSS = TapDescriptor(
    name="loss", source_line="train.py:12 (step)", consumer_id=77, kind="tap", params={}, kwargs={"run": 7},
    transforms=(), tree=["dict", [["value", "loss"], ["value", "step"]], [["array"], ["array"]]], shards=None,
    sharding="global",
)  # fmt: skip
TEXT = replace(
    LOSS, name="print", consumer_id=78, kind="format", kwargs={},
    tree=["tuple", [["tuple", [["array"]]], ["dict", [], []]]],
    params={"fmt": "x = {}", "has_placeholders": True, "printoptions": np.get_printoptions()},
)  # fmt: skip
CHECK = replace(
    TEXT, name="positive", consumer_id=79, kind="check", source_line="train.py:20 (step)",
    tree=["tuple", [["array"], ["tuple", [["array"]]], ["dict", [], []]]],
)  # fmt: skip


class Program:
    """Emits into a log."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.seq = 0

    def emit(self, described: TapDescriptor, *arrays: Any, device: str = "cpu:0", **changes: Any) -> None:
        message = Message(
            consumer_of(described), [np.asarray(a) for a in arrays], self.seq,
            BEGIN_NS + self.seq * 10**9, 5, device, None,
        )  # fmt: skip
        self.recorder(message._replace(**changes))
        self.seq += 1


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Twenty losses on two devices, a text, three failures of a check."""
    with record(tmp_path / "log") as recorder:
        program = Program(recorder)
        for step in range(20):
            program.emit(LOSS, np.float32(step / 2), np.int32(step), device=f"cpu:{step % 2}", run_id=step)
        program.emit(TEXT, np.float32(0.5), run_id=18)
        for value in (-1.0, -2.0, -3.0):
            program.emit(CHECK, np.bool_(False), np.float32(value), device="cpu:1", run_id=19)
    return tmp_path / "log"


def lines(result: subprocess.CompletedProcess[str], status: int = 0) -> list[str]:
    assert result.returncode == status, result.stderr
    return result.stdout.splitlines()


def objects(result: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    def refuse(constant: str) -> Any:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in lines(result)]


# cat


def test_cat_shows_a_line_for_each_message(tmp_path: Path, log: Path) -> None:
    shown = lines(hcb(tmp_path, "cat", log))
    assert len(shown) == 24
    assert shown[3] == "2023-11-14T22:13:23.000000  cpu:1  3  loss  {loss: 1.5, step: 3}  train.py:12 (step)"
    assert shown[20] == "2023-11-14T22:13:40.000000  cpu:0  18  print  x = 0.5  train.py:12 (step)"
    assert shown[21] == (
        "2023-11-14T22:13:41.000000  cpu:1  19  positive  check failed: x = -1.0  train.py:20 (step)"
    )


def test_cat_writes_json(tmp_path: Path, log: Path) -> None:
    found = objects(hcb(tmp_path, "cat", "--json", log))
    assert found[3] == {
        "time": "2023-11-14T22:13:23.000000000Z",
        "time_ns": BEGIN_NS + 3 * 10**9,
        "process": f"{os.uname().nodename}:{os.getpid()}",
        "device": "cpu:1",
        "seq": 3,
        "step": 3,
        "name": "loss",
        "kind": "tap",
        "value": {"loss": 1.5, "step": 3},
        "types": ["float32[]", "int32[]"],
        "kwargs": {"run": 7},
        "transforms": [],
        "source_line": "train.py:12 (step)",
        "run_id": 3,
        "launch": "000003",
        "run": own_run(),
    }
    assert len(found) == 24


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--step", "3:5"], [3, 4, 5]),
        (["--step", "18:"], [18, 19, 20, 21, 22, 23]),
        (["--step", ":1"], [0, 1]),
        (["--step", "7"], [7]),
        (["--name", "pos*"], [21, 22, 23]),
        (["--name", "print", "--name", "positive"], [20, 21, 22, 23]),
        (["--device", "cpu:1", "--step", "0:5"], [1, 3, 5]),
        (["--since", "2023-11-14T22:13:41"], [21, 22, 23]),
        (["--since", "2023-11-14T23:13:41+01:00", "--until", "1700000022.5"], [21, 22]),
        (["--launch", "000012"], [18, 20]),
        (["--launch", "19", "--name", "pos*"], [21, 22, 23]),
        (["--limit", "2"], [0, 1]),
        (["--limit", "0"], []),
    ],
)
def test_cat_shows_the_chosen_messages(
    tmp_path: Path, log: Path, arguments: list[str], expected: list[int]
) -> None:
    assert [item["seq"] for item in objects(hcb(tmp_path, "cat", "--json", *arguments, log))] == expected


@pytest.mark.parametrize("command", ["cat", "cat --json", "tail", "stats", "errors", "replay"])
def test_unknown_tap_names_are_reported_with_near_ones(tmp_path: Path, log: Path, command: str) -> None:
    result = hcb(tmp_path, *command.split(), "--name", "los", "--name", "pos*", "--device", "cpu:7", log)
    assert result.returncode == 1
    assert "hcb: no tap of the log is called 'los'; there are 'loss'\n" in result.stderr
    assert "hcb: no device of the log is called 'cpu:7'; there are 'cpu:" in result.stderr
    assert "pos*" not in result.stderr
    # A name that some tap has, but no chosen message, is not a mistake.
    assert hcb(tmp_path, *command.split(), "--name", "loss", "--step", "99", log).returncode == 0


@pytest.mark.parametrize("output", ["/dev/full", "&-"])
def test_output_that_takes_nothing_is_one_line_and_a_status(tmp_path: Path, log: Path, output: str) -> None:
    line = f'exec "$0" -m hostcallback.receiver.cli cat "$1" >{output}'
    result = subprocess.run(
        ["sh", "-c", line, sys.executable, str(log)],
        env=environment(tmp_path),
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("hcb: ")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--step", "a"], "expected steps such as 100:200"),
        (["--step", ":"], "expected steps such as"),
        (["--since", "yesterday"], "expected a time such as"),
        (["--launch", "c2db9"], "got 'c2db9', expected a launch as reports show it, such as c2db94"),
        (["--limit", "-1"], "expected a number of messages"),
        ([], "the following arguments are required: LOG"),
    ],
)
def test_wrong_arguments_are_explained(tmp_path: Path, arguments: list[str], text: str) -> None:
    result = hcb(tmp_path, "cat", *arguments, *(["log"] if arguments else []))
    assert result.returncode == 2
    assert text in result.stderr


VALUES: list[tuple[Any, Any, Any]] = [
    (np.array([1.5, np.nan, np.inf, -np.inf]), ["array"], [1.5, "NaN", "Infinity", "-Infinity"]),
    (np.complex64(1 - 2j), ["array"], {"real": 1.0, "imag": -2.0}),
    (np.array([1, 2], ml_dtypes.bfloat16), ["array"], [1.0, 2.0]),
    (np.array([np.nan], ml_dtypes.float8_e4m3fn), ["array"], ["NaN"]),
    (np.array([-8, 7], ml_dtypes.int4), ["array"], [-8, 7]),
    (np.array(True), ["array"], True),
    (np.zeros((2, 0)), ["array"], [[], []]),
    (np.uint64(2**64 - 1), ["array"], 2**64 - 1),
    (1.0, ["namedtuple", "State", ["x", "y"], [["array"], ["none"]]], {"x": 1.0, "y": None}),
    (1.0, ["node", "m.M", [["array"], ["object", "<f>"]]], {"node": "m.M", "children": [1.0, {"object": "<f>"}]}),
    (1.0, ["dict", [["value", 3], ["object", "k"]], [["array"], ["value", float("nan")]]], {"3": 1.0, "k": "NaN"}),
    (1.0, ["tuple", [["array"], ["value", b"\x00\xff"], ["float0", [2]]]], [1.0, {"bytes": "00ff"}, [0, 0]]),
]  # fmt: skip


def test_every_value_is_valid_json(tmp_path: Path) -> None:
    with record(tmp_path / "log") as recorder:
        program = Program(recorder)
        for number, (array, description, _) in enumerate(VALUES):
            tap = replace(LOSS, consumer_id=number, tree=description, kwargs={"nan": float("nan"), "b": b"1"})
            program.emit(tap, array)
    found = objects(hcb(tmp_path, "cat", "--json", "log"))
    assert [item["value"] for item in found] == [expected for *_, expected in VALUES]
    assert found[0]["kwargs"] == {"nan": "NaN", "b": {"bytes": "31"}}
    assert len(lines(hcb(tmp_path, "cat", "log"))) == len(VALUES)


def test_lines_for_people_are_short_unless_full_is_given(tmp_path: Path) -> None:
    with record(tmp_path / "log") as recorder:
        program = Program(recorder)
        program.emit(replace(LOSS, tree=["array"]), np.arange(1_000.0))
        program.emit(replace(LOSS, consumer_id=1, tree=["list", [["value", "long " * 100], ["array"]]]), 1.0)
    short, long = lines(hcb(tmp_path, "cat", "log"))
    assert "float64[1000] [ 0. 1. 2. ... 997. 998. 999.]" in short
    assert len(long) < 300
    full = lines(hcb(tmp_path, "cat", "--full", "log"))
    assert "500. 501. 502." in full[0]
    assert "long " * 100 in full[1]


def test_texts_cannot_command_the_terminal(tmp_path: Path) -> None:
    bad = "\x1b[2J\r\nname\u202e"
    with record(tmp_path / "log") as recorder:
        program = Program(recorder)
        program.emit(
            replace(LOSS, name=bad, source_line=bad, tree=["list", [["value", bad], ["array"]]]), 1.0
        )
    for arguments in (["cat"], ["cat", "--full"], ["tail"], ["stats"]):
        result = hcb(tmp_path, *arguments, "log")
        assert "\x1b" not in result.stdout
        assert "\r" not in result.stdout
        assert "\u202e" not in result.stdout
        assert "\\x1b[2J" in result.stdout
        assert result.returncode == 0


@pytest.mark.parametrize("command", [["cat"], ["cat", "--json"], ["stats"], ["errors"]])
def test_an_output_that_cannot_hold_a_text_gets_it_escaped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    with record(tmp_path / "log") as recorder:
        program = Program(recorder)
        program.emit(replace(LOSS, name="verlüst"), np.float32(1), np.int32(1))
        program.emit(replace(CHECK, source_line="verlüst.py:20 (step)"), np.bool_(False), np.float32(1))
    output = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, encoding="ascii"))
    status = main([*command, str(tmp_path / "log")])
    sys.stdout.flush()
    assert status == 0
    assert "verl" in output.getvalue().decode()


def test_several_processes_are_distinguished(tmp_path: Path) -> None:
    for index in range(2):
        with record(tmp_path / "log", process_index=index) as recorder:
            program = Program(recorder)
            program.seq = index
            program.emit(LOSS, np.float32(index), np.int32(1))
    # One process wrote both here; their process indices distinguish them.
    shown = lines(hcb(tmp_path, "cat", "log"))
    assert ["process 0  cpu:0" in shown[0], "process 1  cpu:0" in shown[1]] == [True, True]


# stats and errors


def test_stats_counts_by_tap(tmp_path: Path, log: Path) -> None:
    head, *rows = lines(hcb(tmp_path, "stats", log))
    assert head.split() == ["tap", "messages", "bytes", "rate", "steps", "first", "last", "devices", "line"]
    assert rows[0].split()[:5] == ["loss", "20", "3,840", "1.1/s", "0:19"]
    assert "cpu:0,cpu:1" in rows[0]
    found = {item["name"]: item for item in objects(hcb(tmp_path, "stats", "--json", log))}
    assert found["positive"]["messages"] == 3
    assert found["loss"]["devices"] == {"cpu:0": 10, "cpu:1": 10}
    (chosen,) = objects(hcb(tmp_path, "stats", "--json", "--step", "3:5", log))
    assert (chosen["messages"], chosen["first_step"], chosen["last_step"]) == (3, 3, 5)


def test_stats_takes_a_number_of_slowest_steps_up_to_a_thousand(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in ("0", "1000"):
        assert main(["stats", str(log), "--slowest", number]) == 0
        assert "loss" in capsys.readouterr().out
    for number in ("-1", "1001", "2.5", "two"):
        with pytest.raises(SystemExit):
            main(["stats", str(log), "--slowest", number])
        said = capsys.readouterr().err
        assert f"got {number!r}, expected a whole number up to 1,000" in said


def test_stats_tells_of_lost_messages_and_of_a_kill(tmp_path: Path, log: Path) -> None:
    with record(log) as recorder:
        recorder.lose("cpu:0", 9, "dropped: no room")
        recorder.flush()
        recorder.lose("cpu:0", 8, "dropped: no room")
    (path, *_) = sorted(log.iterdir())
    os.truncate(path, path.stat().st_size - 1_500)
    result = hcb(tmp_path, "stats", log)
    assert result.returncode == 0
    assert "cpu:0: 17 message(s) lost: dropped: no room" in result.stdout
    assert f"{path.name} ends where its process was killed, or is still writing" in result.stdout
    assert "9 message(s) lost: dropped: no room" in hcb(tmp_path, "cat", log).stdout


def test_errors_are_grouped_by_line(tmp_path: Path, log: Path) -> None:
    text = hcb(tmp_path, "errors", log).stdout
    assert text.startswith("x = -1.0, at train.py:20 (step)\n")
    assert "3 failures (3 on cpu:1)" in text
    (found,) = objects(hcb(tmp_path, "errors", "--json", log))
    assert (found["name"], found["count"], found["by_device"]) == ("positive", 3, {"cpu:1": 3})
    assert hcb(tmp_path, "errors", "--name", "loss", log).stdout == "no check failed\n"
    by_step = hcb(tmp_path, "errors", "--name", "loss", "--step", "3", log).stdout
    assert by_step == "no check failed in these steps; failures of an unknown step are left out\n"


def test_failures_that_were_only_counted_are_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failures = block_of(
        *(frame(CHECK, np.bool_(False), np.float32(i), seq=i, flags=Flags.CHECK) for i in (0, 1, 9))
    )
    writer = SegmentWriter(tmp_path / "a.hcblog")
    writer.frames("cpu:0", failures, {CHECK.consumer_id: CHECK}, folded=[(9, 7)])
    writer.close()
    told = "positive: 7 more failures, which were only counted: they have no line"
    for command in (["cat"], ["cat", "--json"]):
        shown = hcb(tmp_path, *command, "a.hcblog")
        assert (len(lines(shown)), told in shown.stderr) == (3, True)
    (found,) = objects(hcb(tmp_path, "errors", "--json", "a.hcblog"))
    assert found["count"] == 10
    assert len(read(tmp_path / "a.hcblog")["positive"].to_numpy()["time"]) == 3
    assert "7 more failure(s) of checks have no row: they were only counted" in caplog.text


def test_errors_have_the_exceptions_of_tap_functions(tmp_path: Path) -> None:
    def failure(number: int, tap: str = "f", device: str = "cpu:0") -> TapFailure:
        return TapFailure(ValueError(f"no {number}"), tap, "train.py:8 (step)", device, number, (), {}, 0)

    with record(tmp_path / "log") as recorder:
        Program(recorder).emit(LOSS, np.float32(1), np.int32(1))
        for number in range(3):
            recorder.note_exception(failure(number))
        recorder.note_exception(failure(0, "g", "cpu:1"))
    first, second = hcb(tmp_path, "errors", "log").stdout.split("\n\n")
    assert first.startswith("ValueError: no 0, raised by the tap f at train.py:8 (step)\n")
    assert "  the last: ValueError: no 2\n  3 exceptions (3 on cpu:0), the first at 20" in first
    assert second.startswith("ValueError: no 0, raised by the tap g at train.py:8 (step)\n")
    assert "  1 exception (1 on cpu:1), the first at 20" in second
    of_f, of_g = objects(hcb(tmp_path, "errors", "--json", "log"))
    assert [of_f[key] for key in ("kind", "name", "message", "count")] == [
        "tap exception", "f", "ValueError: no 0", 3,
    ]  # fmt: skip
    assert of_f["first"]["time_ns"] <= of_f["last"]["time_ns"]
    assert objects(hcb(tmp_path, "errors", "--json", "--name", "g", "log")) == [of_g]
    assert objects(hcb(tmp_path, "errors", "--json", "--device", "cpu:1", "log")) == [of_g]
    by_step = hcb(tmp_path, "errors", "--step", "1", "log").stdout
    assert by_step == "no check failed in these steps; failures of an unknown step are left out\n"


# Damaged and missing logs


def test_without_a_command_there_is_help(tmp_path: Path) -> None:
    result = hcb(tmp_path)
    assert result.returncode == 2
    shown = hcb(tmp_path, "--help").stdout
    for name in ("cat", "tail", "stats", "errors", "replay"):
        assert name in shown
        assert hcb(tmp_path, name, "--help").returncode == 0


COMMANDS = [["cat"], ["cat", "--json"], ["tail"], ["stats"], ["errors"], ["replay"]]


@pytest.mark.slow_variants
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_file_that_is_not_a_log_is_reported_in_one_line(
    tmp_path: Path, log: Path, command: list[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "nothing.hcblog").write_bytes(b"")
    (tmp_path / "foreign.txt").write_text("hello, world: this is some other file\n" * 3)
    newer = bytearray(next(log.iterdir()).read_bytes())
    newer[8] = 2
    (tmp_path / "newer.hcblog").write_bytes(newer)
    for name, text in {
        "missing": "missing: no such tap log: give the folder that record= wrote",
        "empty": "this folder has no tap log",
        "nothing.hcblog": "nothing.hcblog: empty or cut off"
        if command != ["tail"]
        else "ends before its header",
        "foreign.txt": "is not a tap log: it starts with b'hello, w'",
        "newer.hcblog": "of version 2, this package reads up to 1; upgrade hostcallback",
    }.items():
        result = hcb(tmp_path, *command, name)
        assert result.returncode == 1, name
        assert result.stdout == ""
        assert text in result.stderr
        assert len(result.stderr.splitlines()) == 1
        assert result.stderr.startswith("hcb: ")


@pytest.mark.slow_variants
@pytest.mark.parametrize(
    "command", [["cat"], ["cat", "--json"], ["tail"], ["stats"], ["replay"]], ids=" ".join
)
def test_steps_and_times_that_the_log_does_not_have(tmp_path: Path, log: Path, command: list[str]) -> None:
    no = "hcb: no message is of these"
    for options, text in (
        (["--step", "500:600"], f"{no} steps: the log has steps 0 to 19\n"),
        (
            ["--step", "500", "--name", "loss"],
            f"{no} steps: the log has steps 0 to 19, of these taps and devices\n",
        ),
        (["--step", "3", "--name", "print"], f"{no} steps: the log has step 18, of these taps and devices\n"),
        (["--until", "2001-01-01"], f"{no} times: the log has times from 2023-11-14T22:13:20"),
        (
            ["--since", "2030-01-01", "--step", "1"],
            f"{no} steps and times: the log has steps 0 to 19 and times from ",
        ),
    ):
        result = hcb(tmp_path, *command, log, *options)
        assert result.returncode == 0
        assert text in result.stderr
    assert "of these" not in hcb(tmp_path, *command, log, "--step", "3").stderr
    # Steps without a failed check are in the log.
    none = hcb(tmp_path, "errors", log, "--step", "3:5")
    assert (none.returncode, none.stderr) == (0, "")


def test_a_mistyped_log_gets_the_nearest_name(tmp_path: Path, log: Path) -> None:
    result = hcb(tmp_path, "cat", f"{log}s")
    assert result.stderr.endswith(f"or files *.hcblog of it; did you mean {log}?\n")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_log_without_read_permission_is_reported(tmp_path: Path, log: Path) -> None:
    path = next(log.iterdir())
    path.chmod(0)
    result = hcb(tmp_path, "cat", log)
    assert (result.returncode, "Permission denied" in result.stderr) == (1, True)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_the_good_part_of_a_damaged_log_is_shown(tmp_path: Path, log: Path, command: list[str]) -> None:
    path = next(log.iterdir())
    data = bytearray(path.read_bytes())
    place = data.rindex(b"HCB\1", 0, data.index(b"\xb6HLC", 200) + 5_000)
    data[place + 130] ^= 1
    path.write_bytes(data)
    result = hcb(tmp_path, *command, *(["-n", "1000"] if command == ["tail"] else []), log)
    assert result.returncode == 1
    assert "checksums do not match: skipped" in result.stderr
    assert all(
        line.startswith(("hcb: ", "replayed ", " ")) or not line for line in result.stderr.splitlines()
    )
    if command[0] in ("cat", "stats"):
        assert result.stdout


def test_a_reader_that_has_seen_enough_ends_the_command_quietly(tmp_path: Path) -> None:
    with record(tmp_path / "log") as recorder:
        program = Program(recorder)
        for step in range(5_000):
            program.emit(LOSS, np.float32(step), np.int32(step))
    for command in ("cat", "cat --json"):
        shell = f"{sys.executable} -m hostcallback.receiver.cli {command} log | head -n 2; echo ${{PIPESTATUS[0]}} >&2"
        result = subprocess.run(
            ["bash", "-c", shell], cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True,
            timeout=60, check=False,
        )  # fmt: skip
        assert len(result.stdout.splitlines()) == 2
        assert result.stderr.split() == ["141"]


def test_json_of_shards_has_their_places(tmp_path: Path) -> None:
    part = replace(LOSS, tree=["array"], shards="some", sharding="local")
    with record(tmp_path / "log") as recorder:
        program = Program(recorder)
        program.emit(part, np.arange(3.0), shard_index=((slice(3, 6),),))
    (found,) = objects(hcb(tmp_path, "cat", "--json", "log"))
    assert (found["value"], found["index"]) == ([0.0, 1.0, 2.0], [[[3, 6]]])
    assert "  [3:6]  train.py" in lines(hcb(tmp_path, "cat", "log"))[0]

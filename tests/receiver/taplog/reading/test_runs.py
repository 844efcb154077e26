"""Several runs in one folder: readers show the last one, and the one they are asked for."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from checkout import python_path
from hostcallback import receiver
from hostcallback.receiver import processes
from hostcallback.receiver.cli import main
from hostcallback.receiver.errors import NoSuchRunError
from hostcallback.receiver.messages import Message
from hostcallback.receiver.processes import is_run, own_run
from hostcallback.receiver.taplog.diff.pairing import ComparedLog, DeviceKey
from hostcallback.receiver.taplog.reading.follow import Follower
from hostcallback.receiver.taplog.reading.logged_message import LoggedMessage
from hostcallback.receiver.taplog.reading.reader import LogReader
from hostcallback.receiver.taplog.reading.selection import Selection
from hostcallback.receiver.taplog.writing import recorder as recording
from hostcallback.receiver.taplog.writing.segment_writer import SegmentWriter
from logged_frames import DESCRIBED, losses
from python_process import python_output


@pytest.fixture(autouse=True)
def a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a program that was just started."""
    monkeypatch.delenv("HOSTCALLBACK_RUN", raising=False)
    monkeypatch.setattr(processes, "_own", "")


def segment(folder: Path, run: str | None, number: int, first: int, **about: Any) -> Path:
    """A segment of a run, with the messages `first` and `first` + 1. `number` is its place in time."""
    folder.mkdir(exist_ok=True)
    path = folder / f"20261122T2015{number:02d}.000000-4711-000001.hcblog"
    info: dict[str, Any] = {"process": f"{number:016d}", "created_ns": number, **about}
    writer = SegmentWriter(path, info=info if run is None else {**info, "run": run})
    writer.frames("cpu:0", losses(first, 2), DESCRIBED)
    writer.close()
    return path


def seqs(log: Path | list[Path], run: str | None = None) -> list[int]:
    return [item.message.seq for item in LogReader(log, run=run).messages()]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Two segments of earlier versions, and then the runs `a`, `b` and again `a`."""
    for number, run in enumerate([None, None, "exp-a", "exp-b", "exp-a"]):
        segment(tmp_path / "log", run, number, 10 * number)
    return tmp_path / "log"


def test_the_last_run_of_a_folder_is_read_and_others_by_name(log: Path) -> None:
    assert seqs(log) == [20, 21, 40, 41]  # `exp-a` has the newest segment
    assert seqs(log, "exp-b") == [30, 31]
    assert seqs(log, "exp-*") == [20, 21, 30, 31, 40, 41]
    assert seqs(log, "all") == [0, 1, 10, 11, 20, 21, 30, 31, 40, 41]
    assert [run.name for run in LogReader(log).runs] == ["", "exp-b", "exp-a"]
    with pytest.raises(NoSuchRunError, match=r"'exp-c': there are exp-"):
        LogReader(log, run="exp-c")
    assert seqs(sorted(log.iterdir())) == seqs(log, "all")  # segments that are named themselves


def test_a_log_of_earlier_versions_is_one_run(tmp_path: Path) -> None:
    for number in range(3):
        segment(tmp_path / "log", None, number, 10 * number)
    reader = LogReader(tmp_path / "log")
    assert len(list(reader.messages())) == 6
    assert [(run.name, run.processes) for run in reader.runs] == [("", 3)]
    segment(tmp_path / "log", "new", 7, 70)
    assert seqs(tmp_path / "log") == [70, 71]


def test_each_folder_has_its_own_last_run(log: Path, tmp_path: Path) -> None:
    segment(tmp_path / "other", "exp-z", 1, 100)
    assert seqs([log, tmp_path / "other"]) == [20, 21, 40, 41, 100, 101]


def test_the_commands_show_the_last_run_and_name_the_others(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: object) -> tuple[int, int, str]:
        status = main([str(argument) for argument in arguments])
        done = capsys.readouterr()
        return status, len(done.out.splitlines()), done.err

    status, lines, err = run("cat", log)
    assert (status, lines) == (0, 4)
    assert "of 3 runs, this is the last, exp-a; --run NAME shows another" in err
    assert "exp-b, (without a name)" in err
    assert run("cat", log, "--run", "exp-b") == (0, 2, "")
    assert run("cat", log, "--run", "all") == (0, 10, "")
    main(["cat", str(log), "--run", "all"])
    runs = [line.split()[1] for line in capsys.readouterr().out.splitlines()]
    assert sorted(runs) == ["-"] * 4 + ["exp-a"] * 4 + ["exp-b"] * 2
    main(["tail", str(log), "--run", "exp*", "-n", "1"])
    assert capsys.readouterr().out.split()[1] == "exp-a"
    main(["cat", str(log), "--run", "exp-b"])
    assert "exp-b" not in capsys.readouterr().out
    status, lines, err = run("tail", log)
    assert (status, lines) == (0, 4)
    assert err.count("of 3 runs, this is the last, exp-a; --run NAME shows another") == 1
    assert run("tail", log, "--name", "nope")[2].count("of 3 runs") == 1
    assert run("tail", log, "--run", "exp-b") == (0, 2, "")
    assert run("stats", log, "--run", "exp-b", "--json")[:2] == (0, 1)
    assert run("diff", log, log, "--run", "exp-a", "--run", "exp-b")[0] == 1
    for both in ((), ("--run", "exp-b")):
        status, lines, err = run("diff", log, log, *both)
        assert (status, lines) == (2, 0)
        assert (
            "both are one run; its folder has (without a name), exp-b, exp-a: --run NAME --run NAME compares"
            in err
        )
    metrics = tmp_path / "metrics.jsonl"
    assert run("replay", log, "--run", "exp-b", "--metrics", metrics)[0] == 0
    assert len(metrics.read_text().splitlines()) == 2
    output = tmp_path / "out.json"
    assert run("convert", log, "--run", "exp-b", "--to", "trace", "-o", output)[0] == 0
    assert output.read_text().count('"ph": "i"') == 2
    assert run("cat", log, "--run", "exp-c")[0] != 0


def test_a_replay_of_processes_that_look_alike_puts_their_scalars_into_rows_apart(tmp_path: Path) -> None:
    log = tmp_path / "log"
    for number, run in enumerate(["exp-a", "exp-b", "exp-b"]):
        segment(log, run, number, 20, host="box", pid=7)
    metrics = tmp_path / "metrics.csv"
    assert main(["replay", str(log), "--run", "all", "--metrics", str(metrics)]) == 0
    with metrics.open(newline="") as file:
        rows = [(row["step"], row["device"]) for row in csv.DictReader(file)]
    names = ["7 of exp-a", "7 of exp-b (start 1)", "7 of exp-b (start 2)"]
    assert sorted(rows) == [(step, f"process {name}, cpu:0") for step in ("20", "21") for name in names]


def test_the_starts_of_a_program_of_several_processes_are_told_apart(tmp_path: Path) -> None:
    log, devices = tmp_path / "log", set()
    for number in range(4):
        segment(log, "exp-a", number, 20, host="box", pid=number, process_index=number % 2)

    def take(message: Message) -> None:
        devices.add(message.device)

    receiver.replay(log, sinks=[take])
    assert devices == {f"process {index} (start {start}), cpu:0" for index in (0, 1) for start in (1, 2)}


def test_replay_takes_a_run(log: Path) -> None:
    got: list[float] = []
    receiver.replay(log, bind={"loss": lambda value, **kwargs: got.append(float(value["loss"]))}, run="exp-b")
    assert got == [30.0, 31.0]


def test_a_follower_shows_the_last_run_and_those_that_begin_later(log: Path) -> None:
    def numbers(found: Any) -> list[int]:
        return [item.message.seq for item in found if isinstance(item, LoggedMessage)]

    last = Follower([log], Selection(), wait=False)
    one = Follower([log], Selection(), wait=True, run="exp-b")
    assert numbers(last.last(99)) == [20, 21, 40, 41]
    assert numbers(one.last(99)) == [30, 31]
    segment(log, "exp-c", 8, 80)
    segment(log, "exp-b", 9, 90)
    assert numbers(last.poll()) == [80, 81, 90, 91]
    assert numbers(one.poll()) == [90, 91]


def test_a_run_is_named_after_program_user_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes.getpass, "getuser", lambda: "alice")
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.setattr(sys, "argv", ["/home/alice/my train~.py"])
    first = own_run()
    assert is_run(first)
    assert first.startswith("my_train-alice-2")
    assert own_run() == first
    monkeypatch.setattr(processes, "_own", "")
    assert own_run() != first
    monkeypatch.setenv("HOSTCALLBACK_RUN", "exp42")
    assert own_run() == "exp42"
    monkeypatch.setenv("HOSTCALLBACK_RUN", "-exp42")
    with pytest.raises(ValueError, match="run is '-exp42', expected up to 64 letters"):
        own_run()


PROGRAM = """
import sys, numpy as np
from hostcallback.receiver.taplog.writing.recorder import record
from hostcallback.receiver.messages import Consumer, Message
with record(sys.argv[1]) as recorder:
    consumer = Consumer(1, sys.argv[2], "train.py:1 (f)", print)
    recorder(Message(consumer, [np.float32(1)], 0, 1, 5, "cpu:0", None))
"""


def test_programs_that_record_into_one_folder_are_separate_runs_unless_they_are_named(tmp_path: Path) -> None:
    def record(name: str, run: str = "") -> None:
        environment = {"PYTHONPATH": python_path(), "HOSTCALLBACK_RUN": run}
        python_output("-c", PROGRAM, tmp_path / "log", name, timeout_sec=60, **environment)

    def names(run: str | None = None) -> list[str]:
        return [item.message.consumer.name for item in LogReader(tmp_path / "log", run=run).messages()]

    for name in ("first", "second"):
        record(name)
    assert names() == ["second"]
    assert sorted(names("all")) == ["first", "second"]
    for name in ("third", "fourth"):
        record(name, "exp42")
    assert sorted(names()) == ["fourth", "third"]


def start(folder: Path, run: str, index: int | None = None, **config: Any) -> None:
    """A start of a run that sends nothing."""
    recording.record(folder, run=run, config=config, process_index=index).close()


def test_a_start_that_continues_a_run_with_another_configuration_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    start(tmp_path, "a", lr=0.1, clip=0.2, model={"width": 64})
    start(tmp_path, "b", lr=0.5)
    start(tmp_path, "a", lr=0.1, clip=0.2, model={"width": 64})
    start(tmp_path, "a", index=1, lr=0.7)
    assert not caplog.records
    start(tmp_path, "a", lr=0.1, clip=0.3, model={"width": 128}, seed=1)
    (told,) = caplog.records
    assert (told.name, told.levelname) == ("hostcallback", "WARNING")
    assert told.getMessage() == (
        "continues run a, whose configuration differs: clip 0.2 -> 0.3, model.width 64 -> 128, seed not set -> 1"
    )
    capsys.readouterr()
    main(["stats", str(tmp_path), "--run", "a"])
    assert capsys.readouterr().out.splitlines()[:3] == [
        "run a: lr=0.1, clip=0.2, model.width=64",
        "run a, continued: lr=0.1, clip=0.3, model.width=128, seed=1",
        "no messages",
    ]
    main(["stats", str(tmp_path), "--run", "a", "--json"])
    configs = [json.loads(line)["config"] for line in capsys.readouterr().out.splitlines()]
    assert [config["clip"] for config in configs] == [0.2, 0.3]


def test_a_run_without_a_name_continues_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    start(tmp_path, "", lr=0.1)
    start(tmp_path, "", lr=0.2)
    assert not caplog.records


def test_a_change_of_many_settings_is_one_short_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for value in ("x" * 200, "y" * 200):
        start(tmp_path, "a", **{f"setting{number}": value for number in range(8)})
    (told,) = caplog.records
    assert told.getMessage().endswith(" and 3 more")
    assert len(told.getMessage()) < 1000
    (tmp_path / "20991122T201500.000000-4711-000001.hcblog").write_text("no log")
    start(tmp_path, "a", **{f"setting{number}": "y" * 200 for number in range(8)})
    assert len(caplog.records) == 1


def test_processes_are_in_the_order_of_their_start_whatever_their_files_are_called(tmp_path: Path) -> None:
    # As a collector names them, by process and random epoch.
    for epoch, number in (("d1", 0), ("a7", 1), ("f3", 2), ("b2", 3)):
        made = segment(tmp_path / "log", "r", number, 10 * number)
        made.rename(made.with_name(f"p000000-{epoch}-000001.hcblog"))
    assert [writer.process for writer in LogReader(tmp_path / "log").writers] == [
        f"{n:016d}" for n in range(4)
    ]
    compared = ComparedLog(tmp_path / "log", ignore_lines=False)
    emitted = compared.emissions(DeviceKey(0, "cpu:0"))
    assert [item.message.seq for item in emitted if isinstance(item, LoggedMessage)] == [
        0, 1, 10, 11, 20, 21, 30, 31,
    ]  # fmt: skip

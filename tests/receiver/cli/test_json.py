"""`--json` of each command that prints results: one JSON value a line, escaped, whatever names contain."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hostcallback
from controlled import Controlled
from hostcallback.receiver.cli import main
from hostcallback.receiver.taplog.flight.recorder import PROCESS_FILE
from hostile_log import write_hostile_flight, write_hostile_log


def fail_a_check(log: Path) -> None:
    with hostcallback.outfeed_receiver(record=log):
        hostcallback.check(np.float32(1.0) < 0, "value is {}", 1.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Logs with a failed check, and with names that would move the cursor of a terminal."""
    folder = tmp_path_factory.mktemp("logs")
    for name, value in (("a", 1.0), ("b", 2.0)):
        with hostcallback.outfeed_receiver(record=folder / name):
            hostcallback.tap(lambda value: None, value, name="lo\x1b[2Jss")
            hostcallback.print("printed {}", value, name="said")
    with pytest.raises(hostcallback.TapFunctionException):
        fail_a_check(folder / "checked_a")
    return folder


def values(text: str) -> list[dict[str, Any]]:
    """The JSON values of the output, each of which is a line that a terminal shows as it is."""
    lines = text.splitlines()
    assert all(line.isascii() and line.isprintable() for line in lines), text
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(
    ("command", "keys", "count", "status"),
    [
        ("cat a", {"name", "value", "step", "device", "time_ns"}, 2, 0),
        ("tail a", {"name", "value"}, 2, 0),
        ("stats a", {"name", "messages"}, 2, 0),
        ("errors checked_a", {"name", "message", "source_line"}, 1, 0),
        ("replay a", {"messages", "skipped", "metrics"}, 1, 0),
        ("diff a b --all --ignore-lines", {"what"}, 3, 1),
        ("convert a --force --to npz -o out.npz", {"output", "messages", "left_out"}, 1, 0),
    ],
)
def test_readers_of_logs(
    folder: Path, command: str, keys: set[str], count: int, status: int,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(folder)
    assert main([*command.split(), "--json"]) == status
    found = values(capsys.readouterr().out)
    assert len(found) == count
    assert all(keys <= set(value) for value in found), found


def test_what_a_replayed_tap_prints_is_no_result(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(folder / "a"), "--json"]) == 0
    shown = capsys.readouterr()
    assert values(shown.out)[0]["messages"] == 1
    assert "printed 1.0" in shown.err


def test_convert_cannot_report_where_it_writes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(folder / "a"), "--to", "trace", "-o", "-", "--json"]) == 1
    assert "give a name to -o" in capsys.readouterr().err


def test_recover(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flight = str(write_hostile_flight(tmp_path / "flight"))
    main(["recover", flight, "--json"])
    assert all("delivered" in value for value in values(capsys.readouterr().out))
    main(["recover", flight, "--json", "--to", str(tmp_path / "log")])
    (written,) = values(capsys.readouterr().out)
    assert {"written", "run", "pid", "rings"} <= set(written)


def test_recover_says_what_there_is_if_nothing_was_selected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flight = str(write_hostile_flight(tmp_path / "flight"))
    for selection, said in ((("--step", "999"), "steps: the flight recorder has "), ((), "")):
        main(["recover", flight, "--json", *selection])
        assert (f"hcb: no message is of these {said}" in capsys.readouterr().err) == bool(said)


def test_recover_shows_the_last_run_and_names_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flights = tmp_path / "flights"
    flights.mkdir()
    for number, run in enumerate(("first", "second")):
        (process_folder,) = write_hostile_flight(tmp_path / run).iterdir()
        file = process_folder.rename(flights / run) / PROCESS_FILE
        described = json.loads(file.read_text()) | {"run": run, "started_ns": number}
        file.write_text(json.dumps(described))
    titles: dict[tuple[str, ...], list[str]] = {}
    for chosen in ((), ("--run", "all"), ("--run", "first")):
        main(["recover", str(flights), *chosen])
        shown = capsys.readouterr()
        titles[chosen] = [run for run in ("first", "second") if f"run {run})" in shown.out]
        assert ("of 2 runs, this is the last, second" in shown.err) == (not chosen)
    assert titles == {(): ["second"], ("--run", "all"): ["first", "second"], ("--run", "first"): ["first"]}
    assert main(["recover", str(flights), "--run", "thrd"]) == 1
    assert "there are first, second" in capsys.readouterr().err


def test_ctl_and_top(process: Controlled) -> None:
    def asked(*arguments: Any) -> list[dict[str, Any]]:
        done = process.hcb(*arguments, "--json")
        assert (done.returncode, done.stderr) == (0, "")
        return values(done.stdout)

    assert process.pid in [found["pid"] for found in asked("ctl")]
    assert [tap["name"] for tap in asked("ctl", process.pid)] == ["layer1/grad", "loss", "sign"]
    ruled = asked("ctl", process.pid, "loss", "--every", 2)
    assert ruled == [{"name": "loss", "rules": "every=2"}]
    (interval,) = asked("top", process.pid, "--once", "--interval", 0.05)
    assert {"process", "devices", "taps"} <= set(interval)


@pytest.mark.parametrize(
    ("command", "error"),
    [
        (
            "convert a --force --to npz -o out2.npz --name sad",
            "no tap of the log is called 'sad'; there are 'said'",
        ),
        ("diff a b --name sad", "no tap of the log is called 'sad'; there are 'said'"),
        ("cat a --run nothing", "no run of the log is called 'nothing': there are "),
    ],
)
def test_mistyped_names_get_the_nearest(
    folder: Path, command: str, error: str,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(folder)
    assert main(command.split()) != 0
    assert error in capsys.readouterr().err


def test_hostile_names_are_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = str(write_hostile_log(tmp_path / "log"))
    for command in (["cat"], ["stats"], ["tail"], ["errors"], ["replay"]):
        main([*command, log, "--json"])
        values(capsys.readouterr().out)

"""`hcb` on a terminal: color, unless it is not wanted, and progress of what takes long; plain text in pipes."""

from __future__ import annotations

import fcntl
import os
import struct
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

import hostcallback
from hostcallback.receiver.cli import main
from hostcallback.receiver.cli.output import messages

ESCAPE = "\x1b"


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two logs of three messages each."""
    folder = tmp_path_factory.mktemp("logs")
    for name in ("a", "b"):
        with hostcallback.outfeed_receiver(record=folder / name):
            for value in range(3):
                hostcallback.tap(lambda value: None, value, name="loss")
    return [str(folder / "a"), str(folder / "b")]


class Terminal:
    """A terminal of the operating system, in place of the standard output or the standard error."""

    def __init__(self) -> None:
        self._master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", 24, 100, 0, 0))  # rows, columns
        self.stream = os.fdopen(slave, "w")

    def shown(self) -> str:
        self.stream.write("\0")  # the end of what the command wrote
        self.stream.flush()
        text = b""
        while not text.endswith(b"\0"):
            text += os.read(self._master, 65_536)
        return text[:-1].decode()

    def close(self) -> None:
        self.stream.close()
        os.close(self._master)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    found = Terminal()
    yield found
    found.close()


@pytest.mark.parametrize("command", ["cat", "stats", "tail"])
def test_a_terminal_has_color_and_a_pipe_plain_text(
    command: str, logs: list[str], terminal: Terminal,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert main([command, logs[0]]) == 0
    plain = capsys.readouterr().out
    assert ESCAPE not in plain
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal.stream)
        assert main([command, logs[0]]) == 0
    colored = terminal.shown().replace("\r\n", "\n")
    assert ESCAPE in colored
    for code in ("0", "1", "2", "36"):
        colored = colored.replace(f"{ESCAPE}[{code}m", "")
    assert colored == plain


@pytest.mark.parametrize(
    ("variables", "colored"),
    [
        ({"NO_COLOR": "1"}, False),
        ({"NO_COLOR": ""}, True),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, False),
        ({"TERM": "dumb"}, False),
        ({"TERM": "dumb", "FORCE_COLOR": "1"}, True),
    ],
)
def test_variables_decide(
    variables: dict[str, str],
    colored: bool,
    logs: list[str],
    terminal: Terminal,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        patch.setattr(sys, "stdout", terminal.stream)
        assert main(["cat", logs[0]]) == 0
    assert (ESCAPE in terminal.shown()) == colored


def test_force_color_colors_a_pipe_but_no_json(
    logs: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    main(["cat", logs[0]])
    assert ESCAPE in capsys.readouterr().out
    main(["cat", logs[0], "--json"])
    assert ESCAPE not in capsys.readouterr().out
    main(["cat", "missing"])
    assert capsys.readouterr().err.startswith(f"{ESCAPE}[1;31mhcb:{ESCAPE}[0m missing: no such tap log")


@pytest.mark.parametrize("command", ["stats", "diff", "convert", "errors", "replay", "cat"])
def test_what_takes_long_shows_progress_on_the_terminal(
    command: str, logs: list[str], terminal: Terminal, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    pytest.importorskip("tqdm", reason="needs pip install 'hostcallback[progress]'")
    monkeypatch.setattr(messages, "DELAY_SEC", 0.0)
    more = ["--to", "npz", "-o", str(tmp_path / "out.npz")] if command == "convert" else []
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", terminal.stream)
        assert main([command, *logs, *more]) == 0
    bar = terminal.shown()
    assert "hcb: " in bar
    assert "/6 " in bar  # of six messages
    assert bar.rstrip("\r\n ").count("\n") <= 2  # it is removed at the end; replay says what it did
    assert "messages/s" not in capsys.readouterr().out


def test_what_takes_no_second_shows_none(
    logs: list[str], terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", terminal.stream)
        assert main(["stats", *logs]) == 0
    assert terminal.shown() == ""


def test_lines_on_the_same_terminal_are_their_own_progress(
    logs: list[str], terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "DELAY_SEC", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", terminal.stream)
        patch.setattr(sys, "stdout", terminal.stream)
        assert main(["cat", *logs]) == 0
    assert "/6 " not in terminal.shown()

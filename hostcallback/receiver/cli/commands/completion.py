"""`hcb completion`: prints the script that completes hcb in a shell, by the package argcomplete."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import time
from collections.abc import Callable, Iterable
from typing import Any

from hostcallback.receiver.cli.parser import COMMANDS, command_parsers, make_parser
from hostcallback.receiver.errors import HostCallbackError

SHELLS = ("bash", "zsh", "fish", "tcsh")
PATIENCE_SEC = 1.0
"""Seconds for which a log is searched for names while the user waits."""

EXAMPLES = """\
Completes commands, options, files, and what a log or a process has: names of taps, runs, devices, process ids.
Needs the package argcomplete: pip install 'hostcallback[completion]'.

  bash   eval "$(hcb completion bash)"            in ~/.bashrc
  zsh    eval "$(hcb completion zsh)"             in ~/.zshrc, after compinit
  fish   hcb completion fish | source             in ~/.config/fish/config.fish
  tcsh   eval `hcb completion tcsh`               in ~/.tcshrc
"""


class NoCompletionError(HostCallbackError):
    """The package argcomplete is missing."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=f"one of {', '.join(SHELLS)}")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    # tcsh takes the text as one line, and has no function: argcomplete has a program for it.
    print(_argcomplete().shellcode(["hcb"], shell=arguments.shell).strip())
    return 0


def answer() -> None:
    """Prints the completions that a shell asks for in environment variables, and ends the process."""
    words = os.environ.get("COMP_LINE", "").split()
    chosen = next((word for word in words[1:] if word in COMMANDS), None)
    parser = make_parser(chosen)
    if chosen is not None:
        _complete_values(command_parsers(parser)[chosen])
    # Options are offered where the word begins with "-": files and names are what most words are.
    _argcomplete().autocomplete(parser, always_complete_options=False)


def _argcomplete() -> Any:
    try:
        return importlib.import_module("argcomplete")
    except ImportError:
        raise NoCompletionError(
            "completion needs the package argcomplete: pip install 'hostcallback[completion]'"
        ) from None


def _complete_values(parser: argparse.ArgumentParser) -> None:
    completers: dict[str, Callable[..., Iterable[str]]] = {
        "name": _taps, "of_run": _runs, "device": _devices, "pid": _pids, "pattern": _taps_of_process,
    }  # fmt: skip
    for action in parser._actions:
        if action.dest in completers:
            action.completer = _quiet(completers[action.dest])  # type: ignore[attr-defined]


def _quiet(completer: Callable[[argparse.Namespace], Iterable[str]]) -> Callable[..., list[str]]:
    def complete(parsed_args: argparse.Namespace, **others: Any) -> list[str]:
        # A log or a process that cannot be read has no names to offer: an error would garble the line being typed.
        with contextlib.suppress(HostCallbackError, OSError, ValueError):
            return sorted({_typed(name) for name in completer(parsed_args)})
        return []

    return complete


def _typed(name: str) -> str:
    # A name may come from anybody's log. A shell splits it at a line end, and a terminal obeys its control characters;
    # in the patterns that are completed, `?` stands for them.
    return "".join(char if char.isprintable() else "?" for char in name)


def _reader(parsed: argparse.Namespace) -> Any:
    from hostcallback.receiver.taplog.reading.reader import LogReader

    paths = getattr(parsed, "log", None) or [getattr(parsed, side, None) for side in "ab"]
    return LogReader([path for path in paths if path], run=getattr(parsed, "of_run", None) or "all")


def _taps(parsed: argparse.Namespace) -> set[str]:
    names: set[str] = set()
    until = time.monotonic() + PATIENCE_SEC
    for _, segment in _reader(parsed).segments():
        for _ in segment.chunks():  # reading the chunks collects the descriptors
            if time.monotonic() > until:
                break
        names |= {described.name for _, described in segment.consumers.values()}
        if time.monotonic() > until:
            break
    return names


def _runs(parsed: argparse.Namespace) -> set[str]:
    return {run.name for run in _reader(argparse.Namespace(**{**vars(parsed), "of_run": None})).runs} | {
        "all"
    }


def _devices(parsed: argparse.Namespace) -> set[str]:
    return {name for _, name in _reader(parsed).devices()}


def _pids(parsed: argparse.Namespace) -> set[str]:
    from hostcallback.receiver.control.client import processes

    return {str(process["pid"]) for process in processes()}


def _taps_of_process(parsed: argparse.Namespace) -> set[str]:
    from hostcallback.receiver.control.client import ControlClient

    if parsed.pid is None:  # the word may be the process or a pattern, so both are completed
        return set()
    with ControlClient(int(parsed.pid)) as client:
        return {tap["name"] for tap in client.ask("taps")}

"""Writes the man page `docs/hcb.1` from the parsers of its commands: `python tools/documents/commands.py`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

from hostcallback.receiver.cli.parser import COMMANDS, DESCRIPTION, command_parsers, make_parser

PAGE = Path(__file__).resolve().parents[2] / "docs" / "hcb.1"

STATUS = """\
0 if all went well, 1 for an error, 2 for wrong arguments, 130 after Ctrl-C, 141 if the reader of the output closed it.
.B hcb diff
returns 1 if the logs differ, and 2 for errors.
.B hcb run
returns what the script returns."""

VARIABLES = """\
.B NO_COLOR
and
.B FORCE_COLOR
turn color off and on. docs/environment.md lists the variables of the package."""


def escaped(text: str) -> str:
    """Text that roff shows as it is."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return re.sub(r"^([.'])", r"\\&\1", text, flags=re.MULTILINE)


def invocations(action: argparse.Action) -> str:
    """An option with its value in bold and italics, or the name of an argument."""
    value = action.metavar or action.dest.upper()
    shown = f"\\fI{escaped(str(value))}\\fR"
    if not action.option_strings:
        return shown
    suffix = "" if action.nargs == 0 else f" {shown}"
    return ", ".join(f"\\fB{escaped(option)}\\fR{suffix}" for option in action.option_strings)


def synopsis(name: str, parser: argparse.ArgumentParser) -> str:
    """The command with its arguments; its options are below."""
    arguments = [action for action in parser._actions if not action.option_strings]
    shown = []
    for action in arguments:
        text = invocations(action)
        text += " ..." if action.nargs in ("*", "+", argparse.REMAINDER) else ""
        shown.append(f"[{text}]" if action.nargs in ("?", "*", argparse.REMAINDER) else text)
    return " ".join([f"\\fBhcb {name}\\fR", "[options]", *shown])


def command(name: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    """The lines of one command."""
    yield f'.SS "hcb {name}"'
    yield synopsis(name, parser)
    yield ".PP"
    yield escaped(f"{parser.description or COMMANDS[name]}")
    for action in parser._actions:
        if action.dest != "help" and action.help != argparse.SUPPRESS:
            yield ".TP"
            yield invocations(action)
            yield escaped((action.help or "").replace("%%", "%"))
    if parser.epilog:
        yield ".PP"
        yield ".nf"
        yield escaped(parser.epilog.rstrip())
        yield ".fi"


def page() -> str:
    """The text of the man page."""
    parser = make_parser(*COMMANDS)
    lines = [
        '.\\" Written by tools/documents/commands.py: change the parsers of the commands instead.',
        '.TH HCB 1 "" hostcallback "User Commands"',
        ".SH NAME",
        "hcb \\- read tap logs, and control taps of running JAX programs",
        ".SH SYNOPSIS",
        ".B hcb",
        "\\fICOMMAND\\fR [options] [arguments]",
        ".SH DESCRIPTION",
        escaped(DESCRIPTION),
        ".SH COMMANDS",
    ]
    for name, of_command in command_parsers(parser).items():
        lines += command(name, of_command)
    lines += [".SH EXIT STATUS", STATUS, ".SH ENVIRONMENT", VARIABLES]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)

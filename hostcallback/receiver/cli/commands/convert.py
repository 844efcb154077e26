"""`hcb convert`: writes a log in the formats of other tools."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from hostcallback.receiver.cli import CommandError
from hostcallback.receiver.cli.arguments import add_log, add_selection, open_log, selection
from hostcallback.receiver.cli.output.messages import make_safe, report_damage, show_progress
from hostcallback.receiver.cli.output.tables import report_unmatched
from hostcallback.receiver.taplog.convert.npz import NpzConversion
from hostcallback.receiver.taplog.convert.output import (
    STDOUT,
    JsonlConversion,
    new_file,
    new_folder,
    new_text,
)
from hostcallback.receiver.taplog.convert.parquet import ParquetConversion
from hostcallback.receiver.taplog.convert.perfetto import JaxProfile, TraceConversion, read_profile
from hostcallback.receiver.taplog.convert.tensorboard import SUFFIX, TensorBoardConversion
from hostcallback.receiver.taplog.format.errors import Damage
from hostcallback.receiver.taplog.reading.logged_message import LoggedMessage
from hostcallback.receiver.taplog.reading.merge import LostRun
from hostcallback.receiver.taplog.reading.reader import LogReader
from hostcallback.receiver.taplog.reading.selection import Selection
from hostcallback.receiver.text import printable

FORMATS = ("jsonl", "npz", "parquet", "tensorboard", "trace")

TEXTS = ("jsonl", "trace")
"""Formats that may be written to the standard output, and compressed by gzip."""


class Conversion(Protocol):
    """Writes the messages of a log in another format."""

    def message(self, logged: LoggedMessage) -> None:
        """Writes a message."""

    def lost(self, run: LostRun) -> None:
        """Writes a note of lost messages."""

    def finish(self) -> None:
        """Writes the rest of the output."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    add_log(parser)
    add = parser.add_argument
    add(
        "--to",
        required=True,
        choices=FORMATS,
        metavar="FORMAT",
        help=f"one of {', '.join(FORMATS)}; docs/convert.md",
    )
    output = "the file to write, or for tensorboard the folder; - is the standard output, for jsonl and trace"
    add(
        "-o",
        "--output",
        required=True,
        metavar="OUT",
        help=f"{output}; a name that ends in .gz compresses these two",
    )
    add("--force", action="store_true", help="replace OUT if it exists")
    beside = "for trace: include the profile that jax.profiler.trace wrote to this folder, and the messages of its time"
    add("--beside", type=Path, metavar="PROFILE", help=beside)
    add("--json", action="store_true", help="then print what was written, as a JSON object; not with -o -")
    add_selection(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    if arguments.beside is not None and arguments.to != "trace":
        raise CommandError(f"--beside is for --to trace, got --to {arguments.to}")
    if arguments.output == STDOUT and arguments.json:
        raise CommandError("--json reports on the standard output, which -o - fills: give a name to -o")
    if arguments.output == STDOUT:
        if arguments.to not in TEXTS:
            raise CommandError(f"{arguments.to} cannot be written to the standard output: give a name to -o")
        make_safe()
    elif arguments.output.endswith(".gz") and arguments.to not in TEXTS:
        raise CommandError(f"gzip is for {' and '.join(TEXTS)}: give {arguments.to} a name without .gz")
    reader = open_log(arguments.log, arguments.of_run)
    show_progress(reader, prints=arguments.output == STDOUT)
    wanted = selection(arguments)
    profile = None if arguments.beside is None else read_profile(arguments.beside)
    if profile is not None:
        wanted = _within(wanted, profile)
    damaged: list[Damage] = []
    messages = 0
    with _conversion(arguments, reader, profile) as conversion:
        for record in reader.records(wanted):
            if isinstance(record, Damage):
                damaged.append(record)
            elif isinstance(record, LoggedMessage):
                conversion.message(record)
                messages += 1
            elif wanted.wants_device(record.lost.device):
                conversion.lost(record)
        conversion.finish()
        if profile is not None and not messages:
            raise CommandError(f"no message of the log is from the time of the profile {arguments.beside}")
    left_out = conversion.left_out if isinstance(conversion, TensorBoardConversion) else {}
    for reason, count in left_out.items():
        print(f"hcb: left out: {count:,} of {printable(reason)}", file=sys.stderr)
    if arguments.json:
        report = {"output": arguments.output, "format": arguments.to, "messages": messages}
        print(json.dumps(report | {"left_out": dict(left_out)}), flush=True)
    return report_damage(damaged) or (0 if messages else report_unmatched(reader, wanted))


def _within(wanted: Selection, profile: JaxProfile) -> Selection:
    since = profile.start_ns if wanted.since_ns is None else wanted.since_ns
    until = profile.stop_ns if wanted.until_ns is None else wanted.until_ns
    return dataclasses.replace(wanted, since_ns=since, until_ns=until)


@contextmanager
def _conversion(
    arguments: argparse.Namespace, reader: LogReader, profile: JaxProfile | None
) -> Iterator[Conversion]:
    output, force = Path(arguments.output), arguments.force
    if arguments.to == "jsonl":
        with new_text(arguments.output, force=force) as file:
            yield JsonlConversion(file)
    elif arguments.to == "trace":
        with new_text(arguments.output, force=force) as file:
            yield TraceConversion(file, profile)
    elif arguments.to == "npz":
        with new_file(output, force=force) as path, tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            yield NpzConversion(path, Path(scratch))
    elif arguments.to == "parquet":
        with new_file(output, force=force) as path:
            yield ParquetConversion(path)
    else:
        with new_folder(output, f"*{SUFFIX}", force=force) as folder:
            yield TensorBoardConversion(folder, several=len(reader.devices(selection(arguments))) > 1)

"""`hcb convert`: writes a log in the formats of other tools."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from hostcallback.receiver.cli import CommandError
from hostcallback.receiver.cli.arguments import SelectedLog, add_log, add_selection
from hostcallback.receiver.cli.output.messages import make_safe
from hostcallback.receiver.taplog.columns.column_batches import AlikeMessages, AlikeReader
from hostcallback.receiver.taplog.columns.log_data import naming
from hostcallback.receiver.taplog.convert import npz, parquet, perfetto, tensorboard
from hostcallback.receiver.taplog.convert.output import STDOUT, new_file, new_folder, new_text
from hostcallback.receiver.taplog.reading import logged_message, merge, selection
from hostcallback.receiver.text import printable

FORMATS = ("npz", "parquet", "tensorboard", "trace")


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    add_log(parser)
    add = parser.add_argument
    formats = f"one of {', '.join(FORMATS)}; docs/convert.md"
    add("--to", required=True, choices=FORMATS, type=_format, metavar="FORMAT", help=formats)
    output = "the file to write, or for tensorboard the folder; for trace, - is the standard output, and a name that "
    add("-o", "--output", required=True, metavar="OUT", help=f"{output}ends in .gz compresses")
    add("--force", action="store_true", help="replace OUT if it exists")
    beside = "for trace: include the profile that jax.profiler.trace wrote to this folder, and the messages of its time"
    add("--beside", type=Path, metavar="PROFILE", help=beside)
    add("--json", action="store_true", help="then print what was written, as a JSON object; not with -o -")
    add_selection(parser)


def _format(text: str) -> str:
    if text == "jsonl":
        raise argparse.ArgumentTypeError("JSON lines are written by `hcb cat --json LOG > OUT`")
    return "trace" if text == "perfetto" else text


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    if arguments.to != "trace":
        if arguments.beside is not None:
            raise CommandError(f"--beside is for --to trace, got --to {arguments.to}")
        if arguments.output == STDOUT:
            raise CommandError(f"{arguments.to} cannot be written to the standard output: give a name to -o")
        if arguments.output.endswith(".gz"):
            raise CommandError(f"gzip is for trace: give {arguments.to} a name without .gz")
    if arguments.output == STDOUT:
        if arguments.json:
            raise CommandError("--json reports on the standard output, which -o - fills: give a name to -o")
        make_safe()
    log = SelectedLog(arguments, prints=arguments.output == STDOUT)
    profile = None if arguments.beside is None else perfetto.read_profile(arguments.beside)
    if profile is not None:
        log.wanted = _within(log.wanted, profile)
    counts = _trace(arguments, log, profile) if arguments.to == "trace" else _convert(arguments, log)
    messages = counts.pop("messages", 0)
    for reason, count in counts.items():
        print(f"hcb: left out: {count:,} of {printable(reason)}", file=sys.stderr)
    if arguments.json:
        report = {"output": arguments.output, "format": arguments.to, "messages": messages}
        print(json.dumps(report | {"left_out": counts}), flush=True)
    return log.status(messages)


def _within(wanted: selection.Selection, profile: perfetto.JaxProfile) -> selection.Selection:
    since = profile.start_ns if wanted.since_ns is None else wanted.since_ns
    until = profile.stop_ns if wanted.until_ns is None else wanted.until_ns
    return dataclasses.replace(wanted, since_ns=since, until_ns=until)


def _trace(
    arguments: argparse.Namespace, log: SelectedLog, profile: perfetto.JaxProfile | None
) -> Counter[str]:
    messages = 0
    with new_text(arguments.output, force=arguments.force) as file:
        trace = perfetto.TraceConversion(file, profile, naming(log.reader))
        records: Iterator[logged_message.LoggedMessage | merge.LostNote] = log.intact(
            log.reader.records(log.wanted)
        )
        for record in records:
            if isinstance(record, logged_message.LoggedMessage):
                trace.message(record)
                messages += 1
            elif log.wanted.wants_device(record.lost.device):
                trace.lost(record)
        trace.finish()
        if profile is not None and not messages:
            raise CommandError(f"no message of the log is from the time of the profile {arguments.beside}")
    return Counter(messages=messages)


def _convert(arguments: argparse.Namespace, log: SelectedLog) -> Counter[str]:
    # Returns the number of messages, and of what was left out, by reason.
    output, force = Path(arguments.output), arguments.force
    counts: Counter[str] = Counter()

    def alike() -> Iterator[AlikeMessages]:
        for messages in log.intact(AlikeReader().read(log.reader, log.wanted)):
            counts["messages"] += messages.messages
            yield messages

    def single() -> Iterator[logged_message.LoggedMessage]:
        for record in log.intact(log.reader.records(log.wanted)):
            if isinstance(record, logged_message.LoggedMessage):
                counts["messages"] += 1
                yield record

    if arguments.to == "npz":
        with new_file(output, force=force) as path, tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            npz.write_npz(alike(), path, Path(scratch), naming(log.reader))
    elif arguments.to == "parquet":
        with new_file(output, force=force) as path:
            parquet.write_parquet(alike(), path, naming(log.reader))
    else:
        several = len(log.reader.devices(log.wanted)) > 1
        with new_folder(output, f"*{tensorboard.SUFFIX}", force=force) as folder:
            name_of = naming(log.reader)
            counts.update(tensorboard.write_tensorboard(single(), folder, name_of, several=several))
    return counts

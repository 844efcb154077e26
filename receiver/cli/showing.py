"""How commands show messages of a log: a line for people, or an object of JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection
from datetime import UTC, datetime
from typing import Any

from receiver import tree
from receiver.deferred import FailureOf, SeveralFailures
from receiver.described import Described
from receiver.described_tap import batchings_of, template_of
from receiver.dtypes import Array
from receiver.failed_checks import CheckFailed
from receiver.message import Message
from receiver.sinks.check import CheckSink
from receiver.sinks.format import FormatSink
from receiver.sinks.nonfinite import NonFiniteSink, Watched
from receiver.taplog.errors import Damage, Lost
from receiver.taplog.logged import LoggedMessage
from receiver.taplog.merge import LostRun
from receiver.taplog.plain_value import plain_value, printable, short_text
from receiver.taplog.segment_reader import Writer

VALUE_CHARS = 160
"""Values that are longer are cut, in lines for people."""


class Show:
    """Writes messages to the standard output."""

    def __init__(self, *, as_json: bool, full: bool = False) -> None:
        """`full`: lines for people are not cut."""
        self._as_json = as_json
        self._limit = None if full else VALUE_CHARS
        make_safe()

    def message(self, logged: LoggedMessage, *, several: bool, delivered: bool | None = None) -> None:
        """Writes one message; `several`: and of which process it is; and whether it was delivered, if that is known."""
        if self._as_json:
            known = {} if delivered is None else {"delivered": delivered}
            print(json.dumps({**as_dict(logged), **known}, allow_nan=False))
            return
        message = logged.message
        step = "-" if logged.step is None else str(logged.step)
        parts = [time_text(message.time_ns), *([process_text(logged.writer)] if several else [])]
        parts += [message.device, step, printable(message.consumer.name), self._value(logged)]
        if message.shard_index is not None:
            parts.append(" ".join(map(_place, message.shard_index)))
        if logged.folded:
            parts.append(f"(and {logged.folded:,} more before it)")
        parts.append(printable(message.consumer.source_line))
        print("  ".join([*parts, *(["not delivered"] if delivered is False else [])]))

    def lost(self, run: LostRun, *, several: bool) -> None:
        """Writes a note of lost messages, for people only."""
        if not self._as_json:
            where = [process_text(run.writer)] if several else []
            print("  ".join([time_text(run.lost.time_ns), *where, run.lost.device, "-", lost_text(run.lost)]))

    def _value(self, logged: LoggedMessage) -> str:
        described = logged.tap.described
        try:
            if described is not None and described.kind == "format":
                text = " | ".join(_formatted(described, logged.message))
            elif described is not None and described.kind == "check":
                text = f"check failed: {_explained(described, logged.message)}"
            elif described is not None and "operations" in described.params:
                text = f"check failed: {_operations(described, logged.message)}"
            else:
                return short_text(logged.value, self._limit)
        except Exception as error:  # whatever is wrong with this one, the others are to be shown
            return f"(cannot be shown: {printable(str(error))})"
        text = printable(text)
        return text if self._limit is None or len(text) <= self._limit else text[: self._limit - 3] + "..."


def _formatted(described: Described, message: Message) -> list[str]:
    texts: list[str] = []
    unflatten = tree.unflatten_with(described.tree)
    FormatSink(template_of(described), unflatten, batchings_of(described), texts.extend)(message)
    return texts


def _explained(described: Described, message: Message) -> str:
    unflatten = tree.unflatten_with(described.tree)
    sink = CheckSink(template_of(described), unflatten, batchings_of(described), ())
    explained = sink.explain(message)
    return f"{explained.text} ({explained.where})" if explained.where else explained.text


def _operations(described: Described, message: Message) -> str:
    watched = [Watched.from_plain(operation) for operation in described.params["operations"]]
    try:
        NonFiniteSink(tree.unflatten_with(described.tree), watched)(message)
    except SeveralFailures as failures:
        made = [error.error for error in failures.exceptions if isinstance(error, FailureOf)]
        return "; ".join(f.sink.explain(message).text for f in made if isinstance(f, CheckFailed))
    return ""


def as_dict(logged: LoggedMessage) -> dict[str, Any]:
    """A message as JSON has it; the keys are in docs/tap-log.md."""
    message = logged.message
    described = logged.tap.described
    try:
        value, problem = plain_value(logged.value), ""
    except ValueError as error:
        value, problem = [plain_value(array) for array in message.arrays], str(error)
    found = {
        "time": datetime.fromtimestamp(message.time_ns // 10**9, UTC).strftime("%Y-%m-%dT%H:%M:%S")
        + f".{message.time_ns % 10**9:09d}Z",
        "time_ns": message.time_ns,
        "process": process_text(logged.writer),
        "device": message.device,
        "seq": message.seq,
        "step": logged.step,
        "name": message.consumer.name,
        "kind": None if described is None else described.kind,
        "value": value,
        "types": [type_text(array) for array in message.arrays],
        "kwargs": plain_value(dict(message.consumer.kwargs)),
        "transforms": [[name, plain_value(params)] for name, params in message.consumer.transforms],
        "source_line": message.consumer.source_line,
        "run_id": message.run_id,
    }
    if message.shard_index is not None:
        found["index"] = [[[part.start, part.stop] for part in place] for place in message.shard_index]
    if logged.folded:
        found["folded"] = logged.folded
    if problem:
        found["problem"] = problem
    return found


def type_text(array: Array) -> str:
    """`float32[3,4]`."""
    return f"{array.dtype.name}[{','.join(map(str, array.shape))}]"


def _place(place: tuple[slice, ...]) -> str:
    return "[" + ", ".join(f"{part.start}:{part.stop}" for part in place) + "]"


def time_text(time_ns: int) -> str:
    """Local time, to the microsecond."""
    seconds, rest = divmod(time_ns, 10**9)
    try:
        return datetime.fromtimestamp(seconds).strftime("%Y-%m-%dT%H:%M:%S") + f".{rest // 1000:06d}"
    except (OverflowError, ValueError, OSError):
        return f"@{time_ns}ns"


def process_text(writer: Writer) -> str:
    """A process: its number in its program, or where it ran."""
    if writer.process_index is not None:
        return f"process {writer.process_index}"
    return printable(f"{writer.host}:{writer.pid}")


def lost_text(lost: Lost) -> str:
    """One phrase."""
    return f"{lost.messages:,} message(s) lost: {printable(lost.reason)}"


def make_safe() -> None:
    """Lets the standard output take any text, whatever its encoding."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")


def report_damage(damaged: Collection[Damage]) -> int:
    """Says on standard error what of a log could not be read; returns the exit status."""
    real = [damage for damage in damaged if not damage.torn]
    for damage in real[:20]:
        print(f"hcb: {damage}", file=sys.stderr)
    if len(real) > 20:
        print(f"hcb: and {len(real) - 20} more damaged parts", file=sys.stderr)
    return 1 if real else 0

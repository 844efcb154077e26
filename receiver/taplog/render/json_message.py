"""Converts logged messages to data that JSON can represent."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from hostcallback.receiver.sinks.lane_mask import shown_transforms
from hostcallback.receiver.taplog.reading.logged_message import LoggedMessage
from hostcallback.receiver.taplog.reading.segment_reader import Writer
from hostcallback.receiver.taplog.render.json_value import plain_value
from hostcallback.receiver.terminal import printable
from hostcallback.receiver.wire.dtypes import Array


def as_dict(logged: LoggedMessage) -> dict[str, Any]:
    """Converts a message to a dict for JSON; docs/tap-log.md lists the keys."""
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
        "transforms": [[name, plain_value(params)] for name, params in shown_transforms(message)],
        "source_line": message.consumer.source_line,
        "run_id": message.run_id,
    }
    if logged.writer.run:
        found["run"] = logged.writer.run
    if message.shard_index is not None:
        found["index"] = [[[part.start, part.stop] for part in place] for place in message.shard_index]
    if logged.folded:
        found["folded"] = logged.folded
    if problem:
        found["problem"] = problem
    return found


def type_text(array: Array) -> str:
    """Describes an array's type, as in `float32[3,4]`."""
    return f"{array.dtype.name}[{','.join(map(str, array.shape))}]"


def process_text(writer: Writer) -> str:
    """Names a process: its index in its program, or host and process id."""
    if writer.process_index is not None:
        return f"process {writer.process_index}"
    return printable(f"{writer.host}:{writer.pid}")

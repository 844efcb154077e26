"""Renders logged messages and their values as JSON, as one short line, or as the text that they print."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any

import numpy as np

from hostcallback.receiver import limits
from hostcallback.receiver.messages import Message, launch_name
from hostcallback.receiver.sinks import batches, described_template, factory
from hostcallback.receiver.taplog.reading.logged_message import LoggedMessage
from hostcallback.receiver.taplog.reading.segment_reader import Writer
from hostcallback.receiver.text import printable
from hostcallback.receiver.wire import array_types, pytree, tap_descriptor, truncation


def plain_value(value: Any) -> Any:
    """Converts a pytree to data that JSON can represent.

    Arrays become nested lists, and arrays without dimensions numbers. Tuples become lists; namedtuples and dicts become
    objects (keys by their text). NaN and infinities become the texts "NaN", "Infinity", "-Infinity"; complex numbers
    `{"real": ..., "imag": ...}`; bytes `{"bytes": hex digits}`; truncated arrays `{"head": [...], "shape": [...]}`;
    containers of the program's own classes `{"node": class, "children": [...]}`; objects that were not sent
    `{"object": repr}`.
    """
    if isinstance(value, truncation.TruncatedArray) and value.whole_shape is not None:
        return {"head": _array(np.asarray(value)), "shape": list(value.whole_shape)}
    if isinstance(value, np.ndarray):
        if _lists(value) > limits.JSON_ELEMENTS:
            return {"head": _array(value.reshape(-1)[: described_template.HEAD]), "shape": list(value.shape)}
        return _array(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else _nonfinite(value)
    if isinstance(value, complex):
        return {"real": plain_value(value.real), "imag": plain_value(value.imag)}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, pytree.Opaque):
        return {"object": value.text}
    if isinstance(value, pytree.Node):
        return {"node": value.type_name, "children": [plain_value(child) for child in value.children]}
    if isinstance(value, dict):
        return {_key(key): plain_value(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {name: plain_value(item) for name, item in zip(value._fields, value, strict=True)}
    if isinstance(value, tuple | list):
        return [plain_value(item) for item in value]
    return value


def _key(key: Any) -> str:
    return key.text if isinstance(key, pytree.Opaque) else str(key)


def _nonfinite(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _lists(array: array_types.Array) -> int:
    # How many elements, or empty lists, an array becomes: one of the shape (10**9, 0) is 10**9 lists.
    count = 1
    for dim in array.shape:
        if not dim:
            break
        count *= dim
    return count


def _array(array: array_types.Array) -> Any:
    if array.dtype == pytree.FLOAT0:
        return np.zeros(array.shape, np.int8).tolist()
    array = plain_array(array)
    if array.dtype.kind == "c" or (array.dtype.kind == "f" and not np.isfinite(array).all()):
        return _each(array.tolist())
    return array.tolist()


def _each(items: Any) -> Any:
    return [_each(item) for item in items] if isinstance(items, list) else plain_value(items)


def plain_array(array: array_types.Array) -> array_types.Array:
    """Converts to a dtype of numpy's own: bfloat16, float8 and float4 become float32, int4 and the like (u)int8.
    The shape stays, and no value changes.
    """
    array = np.asarray(array)
    name = array.dtype.name
    if hasattr(np, name):
        return array
    return array.astype(
        np.uint8 if name.startswith("uint") else np.int8 if name.startswith("int") else np.float32
    )


def short_text(value: Any, limit: int | None = None) -> str:
    """Formats a pytree on one line of at most `limit` characters: `{loss: 0.5, grads: [1. 2. ... 8. 9.]}`."""
    text = printable(_text(value, limit is not None))
    return text if limit is None or len(text) <= limit else text[: limit - 3] + "..."


def _summary(array: array_types.Array) -> int:
    # How many elements numpy shows of an array, three at each end of each dimension.
    return math.prod(min(dim, 7) for dim in array.shape)


def _text(value: Any, short: bool) -> str:
    if isinstance(value, truncation.TruncatedArray) and value.whole_shape is not None:
        return f"first {value.size} of {value.whole_shape}: {_text(np.asarray(value), short)}"
    if isinstance(value, np.ndarray):
        if not value.ndim:
            return str(value)
        if value.size > limits.TEXT_ELEMENTS and (not short or _summary(value) > limits.TEXT_ELEMENTS):
            head = np.asarray(value).reshape(-1)[: described_template.HEAD]
            return f"first {head.size} of {value.shape}: {_text(head, short)}"
        options: Any = {"max_line_width": 2**31, "separator": " "}
        options |= {"threshold": 8, "edgeitems": 3} if short else {"threshold": 2**62}
        text = " ".join(np.array2string(value, **options).split())
        return text if value.size <= 8 or not short else f"{value.dtype}{list(value.shape)} {text}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(key)}: {_text(item, short)}" for key, item in value.items()) + "}"
    if isinstance(value, pytree.Node):
        return f"{value.type_name}({', '.join(_text(child, short) for child in value.children)})"
    if isinstance(value, pytree.Opaque):
        return value.text
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        fields = zip(value._fields, value, strict=True)
        return "(" + ", ".join(f"{name}={_text(item, short)}" for name, item in fields) + ")"
    if isinstance(value, tuple | list):
        opening, closing = "()" if isinstance(value, tuple) else "[]"
        return opening + ", ".join(_text(item, short) for item in value) + closing
    return repr(value)


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
        "transforms": [[name, plain_value(params)] for name, params in batches.shown_transforms(message)],
        "source_line": message.consumer.source_line,
        "run_id": message.run_id,
        "launch": launch_name(message.run_id) or None,
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


def type_text(array: array_types.Array) -> str:
    """Describes an array's type, as in `float32[3,4]`."""
    return f"{array.dtype.name}[{','.join(map(str, array.shape))}]"


def process_text(writer: Writer) -> str:
    """Names a process: its index in its program, or host and process id."""
    if writer.process_index is not None:
        return f"process {writer.process_index}"
    return printable(f"{writer.host}:{writer.pid}")


def message_text(logged: LoggedMessage) -> str | None:
    """Returns the text of a printing tap or a failed check; None for messages that are only values.

    Raises:
        Exception: of any type, if the message does not fit its descriptor.
    """
    described = logged.tap.described
    return None if described is None else text_of(described, logged.message)


def text_of(described: tap_descriptor.TapDescriptor, message: Message) -> str | None:
    """Returns the text of a message of a described tap. See `message_text`.

    Raises:
        Exception: of any type, if the message does not fit its descriptor.
    """
    kind = described.tap_kind
    texts = factory.texts_of(described, message) if kind.is_text else None
    if texts is None:
        return None
    return f"check failed: {'; '.join(texts)}" if kind.is_check else " | ".join(texts)


def joined(name: str, leaf: str) -> str:
    """Joins the names of a tap and a leaf."""
    return f"{name}/{leaf}" if leaf else name

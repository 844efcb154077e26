"""Reads a profile of `jax.profiler.trace`: its events, and the Unix time of their zero.

The events are in `HOST.trace.json.gz`, in microseconds since the profile began. The time of that is only in
`HOST.xplane.pb`: a protobuf XSpace (openxla/xla, third_party/tsl/tsl/profiler/protobuf/xplane.proto), whose plane
"Task Environment" has the stats `profile_start_time` and `profile_stop_time`, Unix nanoseconds.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from hostcallback.receiver.taplog.convert.errors import ConvertError

EVENTS, PLANES = ".trace.json.gz", ".xplane.pb"
ENVIRONMENT = b"Task Environment"


class JaxProfile(NamedTuple):
    """A profile of one host.

    Attributes:
        start_ns: Unix time of its zero.
        stop_ns: Unix time of its end.
        events: trace events, in microseconds since the zero.
    """

    start_ns: int
    stop_ns: int
    events: list[dict[str, Any]]


def read_profile(path: Path) -> JaxProfile:
    """Reads a profile. All its events are in memory then; JAX writes at most a million.

    Args:
        path: the folder that `jax.profiler.trace` wrote to, whose newest profile is read; or the folder of one
            profile; or, with profiles of several hosts, one `HOST.trace.json.gz`.

    Raises:
        ConvertError: there is no profile, there are several hosts', or it is invalid.
        OSError: it cannot be read.
    """
    events = path if path.is_file() else _events_in(path)
    planes = events.with_name(events.name.removesuffix(EVENTS) + PLANES)
    if not events.name.endswith(EVENTS) or not planes.is_file():
        raise ConvertError(
            f"{events}: expected a HOST{EVENTS} of jax.profiler.trace, and a HOST{PLANES} in the same folder"
        )
    with gzip.open(events) as file:
        try:
            found = json.load(file)["traceEvents"]
        except (ValueError, KeyError, TypeError, EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ConvertError(f"{events} has no trace events: {error!r}") from error
    stats = _environment(planes)
    try:
        start_ns, stop_ns = stats["profile_start_time"], stats["profile_stop_time"]
    except KeyError as error:
        raise ConvertError(f"{planes} does not say when the profile began: it has no {error}") from error
    # JAX appends an empty event.
    return JaxProfile(start_ns, stop_ns, [event for event in found if event])


def _events_in(folder: Path) -> Path:
    folder.stat()
    runs = [folder, *sorted((folder / "plugins" / "profile").glob("*"), key=lambda run: run.stat().st_mtime)]
    for run in reversed(runs):
        found = sorted(run.glob(f"*{EVENTS}"))
        if len(found) > 1:
            names = ", ".join(str(path) for path in found)
            raise ConvertError(f"{run} has the profiles of {len(found)} hosts: name one of {names}")
        if found:
            return found[0]
    raise ConvertError(
        f"{folder}: no profile of jax.profiler.trace here, expected plugins/profile/*/*{EVENTS} or *{EVENTS}"
    )


def _environment(path: Path) -> dict[str, int]:
    # The integers among the stats of the plane "Task Environment".
    try:
        for field, plane in _fields(memoryview(path.read_bytes())):
            if field == 1 and any(f == 2 and bytes(v) == ENVIRONMENT for f, v in _fields(plane)):
                return _stats(plane)
    except (ValueError, IndexError, TypeError) as error:
        raise ConvertError(f"{path} is not an XSpace of jax.profiler: {error}") from error
    return {}


def _stats(plane: memoryview) -> dict[str, int]:
    names: dict[int, str] = {}
    values: dict[int, int] = {}
    for field, value in _fields(plane):
        if field == 5:  # stat_metadata: an entry of a map, whose value holds the stat's name
            entry = dict(_fields(value))
            names[entry.get(1, 0)] = bytes(dict(_fields(entry[2])).get(2, b"")).decode(errors="replace")
        elif field == 6:  # stats
            stat = dict(_fields(value))
            values[stat.get(1, 0)] = stat.get(3, stat.get(4, -1))
    return {names[key]: value for key, value in values.items() if key in names and type(value) is int}


def _fields(data: memoryview) -> Iterator[tuple[int, Any]]:
    # Yields field number and value of a protobuf message; a value is an int or memory.
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        nbytes = {1: 8, 5: 4}.get(kind)
        if nbytes is None:
            if kind != 2:
                raise ValueError(f"a field of the kind {kind}")
            nbytes, at = _varint(data, at)
        if at + nbytes > len(data):
            raise ValueError("it is cut off")
        yield key >> 3, data[at : at + nbytes]
        at += nbytes


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number is too long")

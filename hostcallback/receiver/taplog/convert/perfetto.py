"""Converts to trace events of Chrome and Perfetto, alone or over a profile of `jax.profiler.trace`.

The events are in `HOST.trace.json.gz`, in microseconds since the profile began. The time of that is only in
`HOST.xplane.pb`: a protobuf XSpace (openxla/xla, third_party/tsl/tsl/profiler/protobuf/xplane.proto), whose plane
"Task Environment" has the stats `profile_start_time` and `profile_stop_time`, Unix nanoseconds.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from hostcallback.receiver.sinks.times import TimeSink
from hostcallback.receiver.taplog.convert.output import ConvertError
from hostcallback.receiver.taplog.reading import logged_message, merge, segment_reader
from hostcallback.receiver.taplog.render import joined, message_text, plain_array, process_text, short_text
from hostcallback.receiver.text import printable
from hostcallback.receiver.wire.tap_descriptor import TIME, TapDescriptor

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


VALUE_CHARS = 400

FIRST_PID = 1_000_000_000
"""Process ids start above those of a profile, in which devices and hosts count as processes too."""


class TraceConversion:
    """Writes a JSON object with `traceEvents`. Times are microseconds since `otherData.zero_unix_ns`."""

    def __init__(
        self, file: TextIO, profile: JaxProfile | None, name_of: Callable[[logged_message.LoggedTap], str]
    ) -> None:
        """Prepares the conversion.

        Args:
            file: written to, and left open.
            name_of: returns what a tap is called in the trace.
            profile: its events are written first, and its zero is the trace's; None: the first message's second is.
        """
        self._file = file
        self._name_of = name_of
        self._profile = profile
        self._zero_ns: int | None = None
        self._tracks: dict[tuple[segment_reader.Writer, str], tuple[int, int]] = {}
        self._pids: dict[segment_reader.Writer, int] = {}
        self._events = 0

    def message(self, logged: logged_message.LoggedMessage) -> None:
        """Writes the events of a message."""
        message, described = logged.message, logged.tap.described
        pid, tid = self._track(logged.writer, message.device, message.time_ns)
        ts = self._ts(message.time_ns)
        name = printable(self._name_of(logged.tap))
        args = {
            "value": _text(logged),
            "step": logged.step,
            "source_line": message.consumer.source_line,
            "seq": message.seq,
            "run_id": message.run_id,
        } | ({"folded": logged.folded} if logged.folded else {})
        self._event(
            {"ph": "i", "s": "t", "cat": "tap", "name": name, "pid": pid, "tid": tid, "ts": ts, "args": args}
        )
        if described is not None and described.tap_kind is TIME:
            self._spans(logged, described)
        if described is not None and not described.tap_kind.has_metrics:
            return
        for leaf in logged.leaves_but_step:
            array = plain_array(leaf.array)
            if array.ndim or array.dtype.kind == "c":
                continue
            number = float(array)
            if math.isfinite(number):
                counter = printable(f"{joined(name, leaf.name)} {message.device}")
                self._event(
                    {
                        "ph": "C",
                        "cat": "tap",
                        "name": counter,
                        "pid": pid,
                        "ts": ts,
                        "args": {"value": number},
                    }
                )

    def _spans(self, logged: logged_message.LoggedMessage, described: TapDescriptor) -> None:
        # The times of places, on a track of each device. Places in places begin and end within them.
        message = logged.message
        try:
            found = [*TimeSink.of(described).segments(message)]
        except (LookupError, ValueError):  # no message of times, whatever its description says
            return
        for each in found:
            pid, tid = self._track(logged.writer, f"{message.device} time{each.device}", each.start_ns)
            args = {"iterations": list(each.iterations), "seq": message.seq, "run_id": message.run_id}
            times = {"ts": self._ts(each.start_ns), "dur": each.seconds * 1e6}
            event = {"ph": "X", "cat": "time", "name": printable(each.place), "pid": pid, "tid": tid}
            self._event({**event, **times, "args": args})

    def lost(self, run: merge.LostNote) -> None:
        """Writes an instant for a note of lost messages."""
        lost = run.lost
        pid, tid = self._track(run.writer, lost.device, lost.time_ns)
        args = {"messages": lost.messages, "reason": lost.reason, "first_seq": lost.first_seq}
        name, ts = (
            f"{lost.messages} message(s) lost" if lost.messages else lost.reason,
            self._ts(lost.time_ns),
        )
        self._event(
            {"ph": "i", "s": "t", "cat": "lost", "name": name, "pid": pid, "tid": tid, "ts": ts, "args": args}
        )

    def finish(self) -> None:
        """Writes the end of the JSON object."""
        if self._zero_ns is None:
            self._begin(0)
        self._file.write("\n]}\n")

    def _begin(self, first_ns: int) -> None:
        profile = self._profile
        # Relative times, because a double that holds Unix microseconds has no digits left for nanoseconds.
        self._zero_ns = first_ns // 10**9 * 10**9 if profile is None else profile.start_ns
        about = {"zero_unix_ns": str(self._zero_ns), "written_by": "hcb convert --to trace"}
        self._file.write(f'{{"displayTimeUnit": "ns", "otherData": {json.dumps(about)}, "traceEvents": [')
        for event in () if profile is None else profile.events:
            self._event(event)

    def _ts(self, time_ns: int) -> float:
        assert self._zero_ns is not None
        return (time_ns - self._zero_ns) / 1000

    def _track(self, writer: segment_reader.Writer, device: str, time_ns: int) -> tuple[int, int]:
        if self._zero_ns is None:
            self._begin(time_ns)
        track = self._tracks.get((writer, device))
        if track is None:
            pid = self._pids.get(writer)
            if pid is None:
                pid = self._pids[writer] = FIRST_PID + len(self._pids)
                self._name(
                    "process_name", {"name": f"taps of {process_text(writer)} (pid {writer.pid})"}, pid=pid
                )
                self._name("process_sort_index", {"sort_index": pid}, pid=pid)
            track = self._tracks[writer, device] = pid, 1 + len(self._tracks)
            self._name("thread_name", {"name": printable(device)}, pid=pid, tid=track[1])
        return track

    def _name(self, what: str, args: dict[str, Any], **where: int) -> None:
        self._event({"ph": "M", "name": what, **where, "args": args})

    def _event(self, event: dict[str, Any]) -> None:
        self._file.write(",\n" if self._events else "\n")
        self._file.write(json.dumps(event))
        self._events += 1


def _text(logged: logged_message.LoggedMessage) -> str:
    try:
        text = message_text(logged)
        text = short_text(logged.value, VALUE_CHARS) if text is None else printable(text)[:VALUE_CHARS]
    except Exception as error:  # one message that cannot be shown must not end the conversion
        text = f"(cannot be shown: {printable(str(error))})"
    return text

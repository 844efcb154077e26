"""Converts to trace events of Chrome and Perfetto: an instant per message, and a counter per number."""

from __future__ import annotations

import json
import math
from typing import Any, TextIO

from hostcallback.receiver.messages import NAME
from hostcallback.receiver.taplog.convert.jax_profile import JaxProfile
from hostcallback.receiver.taplog.convert.numpy_dtypes import plain_array
from hostcallback.receiver.taplog.reading.logged_message import LoggedMessage
from hostcallback.receiver.taplog.reading.merge import LostRun
from hostcallback.receiver.taplog.reading.segment_reader import Writer
from hostcallback.receiver.taplog.render.json import process_text, short_text
from hostcallback.receiver.taplog.render.text import LoggedLeaves, joined, message_text
from hostcallback.receiver.text import printable

VALUE_CHARS = 400

FIRST_PID = 1_000_000_000
"""Process ids start above those of a profile, in which devices and hosts count as processes too."""


class TraceConversion:
    """Writes a JSON object with `traceEvents`. Times are microseconds since `otherData.zero_unix_ns`."""

    def __init__(self, file: TextIO, profile: JaxProfile | None) -> None:
        """Prepares the conversion.

        Args:
            file: written to, and left open.
            profile: its events are written first, and its zero is the trace's; None: the first message's second is.
        """
        self._file = file
        self._profile = profile
        self._zero_ns: int | None = None
        self._tracks: dict[tuple[Writer, str], tuple[int, int]] = {}
        self._pids: dict[Writer, int] = {}
        self._leaves = LoggedLeaves()
        self._events = 0

    def message(self, logged: LoggedMessage) -> None:
        """Writes the events of a message."""
        message, described = logged.message, logged.tap.described
        pid, tid = self._track(logged.writer, message.device, message.time_ns)
        ts = self._ts(message.time_ns)
        name = printable(message.consumer.name)
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
        if described is not None and not described.tap_kind.has_metrics:
            return
        for leaf in self._leaves.of(logged):
            array = plain_array(leaf.array)
            if array.ndim or array.dtype.kind == "c" or leaf.name == NAME or leaf.name.endswith(f"/{NAME}"):
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

    def lost(self, run: LostRun) -> None:
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

    def _track(self, writer: Writer, device: str, time_ns: int) -> tuple[int, int]:
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


def _text(logged: LoggedMessage) -> str:
    try:
        text = message_text(logged)
        text = short_text(logged.value, VALUE_CHARS) if text is None else printable(text)[:VALUE_CHARS]
    except Exception as error:  # one message that cannot be shown must not end the conversion
        text = f"(cannot be shown: {printable(str(error))})"
    return text

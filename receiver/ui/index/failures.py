"""Failed checks, NaN reports and losses, grouped by source line."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hostcallback.receiver.messages.call_site import DescribedFrame
from hostcallback.receiver.messages.check_report import Explanation
from hostcallback.receiver.sinks.factory import own_sink
from hostcallback.receiver.taplog.format.errors import Damage, Lost
from hostcallback.receiver.taplog.reading.logged_message import LoggedMessage, RunDecoder
from hostcallback.receiver.taplog.reading.merge import MessageRun
from hostcallback.receiver.taplog.reading.segment_reader import Writer
from hostcallback.receiver.taplog.render.json_message import process_text
from hostcallback.receiver.terminal import printable
from hostcallback.receiver.wire.dtypes import Array
from hostcallback.receiver.wire.tap_descriptor import TapDescriptor

MAX_GROUPS = 500
"""Lines with failures that are shown; further ones are counted."""

MAX_PLACES = 256
"""Processes and devices of a group that are counted apart."""

AROUND = 4
"""Lines of the source that are shown before and after the line."""

LINE_CHARS = 300
VALUES_CHARS = 1000


@dataclass(slots=True)
class Occurrence:
    """When something failed: Unix time in seconds and step, where they are known."""

    time: float | None
    step: int | None


@dataclass(slots=True)
class Group:
    """The failures of one kind on one line."""

    number: int
    kind: str
    title: str
    place: str
    values: str = ""
    traceback: str | None = None
    frame: tuple[str, int] | None = None
    count: int = 0
    per: Counter[tuple[str, str]] = field(default_factory=Counter)
    first: Occurrence = field(default_factory=lambda: Occurrence(None, None))
    last: Occurrence = field(default_factory=lambda: Occurrence(None, None))

    def add(self, process: str, device: str, count: int, at: Occurrence) -> bool:
        """Counts failures that came at a time; returns whether they are the earliest so far."""
        self.count += count
        key = process, device
        if key in self.per or len(self.per) < MAX_PLACES:
            self.per[key] += count
        time = at.time or 0.0
        is_first = self.first.time is None or time < self.first.time
        if is_first:
            self.first = at
        if self.last.time is None or time >= self.last.time:
            self.last = at
        return is_first

    def as_dict(self) -> dict[str, Any]:
        """Describes it for the page; reads the lines of the source."""
        return {
            "id": str(self.number),
            "kind": self.kind,
            "title": printable(self.title),
            "place": printable(self.place),
            "source": self._source(),
            "count": self.count,
            "per": [
                {"process": process, "device": printable(device), "count": count}
                for (process, device), count in self.per.most_common()
            ],
            "first": {"time": self.first.time, "step": self.first.step},
            "last": {"time": self.last.time, "step": self.last.step},
            "values": printable(self.values),
            "traceback": self.traceback,
        }

    def _source(self) -> list[list[Any]] | None:
        if self.frame is None:
            return None
        file, line = self.frame
        described = DescribedFrame(file, line, "")
        if line < 1 or not described.source_text(line):
            return None
        lines = range(max(1, line - AROUND), line + AROUND + 1)
        found = [(number, described.source_text(number)) for number in lines]
        return [[number, _code(text)] for number, text in found if text]


class Failures:
    """All groups. Only the thread that fills the index adds to them."""

    def __init__(self) -> None:
        """There are none yet."""
        self._groups: dict[tuple[str, str, str], Group] = {}
        self._decoder = RunDecoder()
        self.count = 0
        self.losses = 0
        self.by_device: Counter[tuple[str, str]] = Counter()

    def as_dicts(self) -> list[dict[str, Any]]:
        """Describes the groups for the page: failures before losses, then those with the latest failure first."""
        order = sorted(self._groups.values(), key=lambda group: -(group.last.time or 0.0))
        return [group.as_dict() for group in sorted(order, key=lambda group: group.kind == "loss")]

    def checked(self, run: MessageRun, described: TapDescriptor, places: Array) -> None:
        """Counts failures of a check. Only the first of a block is decoded, and only if it is the group's first."""
        kind = "nonfinite" if described.kind == "nonfinite" else "check"
        folded = sum(run.folded.pop(seq, 0) for seq in run.block.seqs[places].tolist()) if run.folded else 0
        group = self._of(kind, described.source_line, described.name, lambda: described.name)
        count = len(places) + folded
        self.count += count
        if group is None:
            return
        first, last = self._at(run, int(places[0])), self._at(run, int(places[-1]))
        process = process_text(run.writer)
        if group.add(process, run.device, count - 1, first):
            self._explain(group, run, described, int(places[0]))
        group.add(process, run.device, 1, last)

    def lost(self, writer: Writer, lost: Lost) -> None:
        """Counts lost messages."""
        self.losses += max(1, lost.messages)
        group = self._of("loss", "", lost.reason, lambda: f"messages lost: {lost.reason}")
        if group is not None:
            at = Occurrence(lost.time_ns / 1e9, None)
            group.add(process_text(writer), lost.device, max(1, lost.messages), at)

    def tap_exceptions(self, name: str, place: str, process: str, count: int, time: float) -> None:
        """Sets how often a tap's function has raised in a live process."""
        title = f"the function of the tap {name} raised"
        group = self._of("tap exception", place, name, lambda: title)
        if group is not None:
            more = count - group.per[process, ""]
            if more > 0:
                group.add(process, "", more, Occurrence(time, None))
                self.count += more

    def _of(self, kind: str, place: str, name: str, title: Callable[[], str]) -> Group | None:
        key = kind, place, name
        found = self._groups.get(key)
        if found is None and len(self._groups) < MAX_GROUPS:
            found = self._groups[key] = Group(len(self._groups), kind, title(), place, frame=_frame(place))
        return found

    @staticmethod
    def _at(run: MessageRun, place: int) -> Occurrence:
        step = int(run.steps[place])
        return Occurrence(run.block.times[place] / 1e9, None if step == -(2**63) else step)

    def _explain(self, group: Group, run: MessageRun, described: TapDescriptor, place: int) -> None:
        for logged in self._decoder.messages(run._replace(start=place, stop=place + 1)):
            if not isinstance(logged, Damage):
                explained = _explanation(described, logged)
                if explained is not None:
                    _describe(group, explained)


def _explanation(described: TapDescriptor, logged: LoggedMessage) -> Explanation | None:
    # A message that does not fit its descriptor, which is foreign, leaves the group without values.
    try:
        explain = getattr(own_sink(described), "explain", None)
        return None if explain is None else explain(logged.message)
    except Exception:
        return None


def _describe(group: Group, explained: Explanation) -> None:
    group.title = explained.text[:VALUES_CHARS] or group.title
    values = ", ".join(f"{name} = {text}" for name, text in explained.values.items())
    group.values = "; ".join(filter(None, (explained.where, values, explained.problem)))[:VALUES_CHARS]
    if explained.places and explained.places[0].stack:
        frames = explained.places[0].stack
        group.frame = frames[0].file, frames[0].line
        group.traceback = "\n".join(printable(str(frame).split("\n", 1)[0]) for frame in frames[:50])


def _frame(place: str) -> tuple[str, int] | None:
    found = re.match(r"(.+):(\d{1,9})(?: |$)", place)
    return None if found is None else (found[1], int(found[2]))


def _code(text: str) -> str:
    # Tabs and spaces of the beginning stay.
    return printable(text.rstrip("\r\n").replace("\t", "    "))[:LINE_CHARS]

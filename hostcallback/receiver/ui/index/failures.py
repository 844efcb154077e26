"""Failed checks, exceptions, NaN reports and losses, grouped by source line."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hostcallback.receiver.failures import call_site, deferred_errors, explanation, told_failure
from hostcallback.receiver.failures.steps import merged, ranges_of, told_text
from hostcallback.receiver.sinks.factory import own_sink
from hostcallback.receiver.taplog.format.layout import NO_STEP, Damage, Lost
from hostcallback.receiver.taplog.reading.logged_message import LoggedMessage, MessageDecoder
from hostcallback.receiver.taplog.reading.merge import Stretch
from hostcallback.receiver.taplog.reading.segment_reader import Writer
from hostcallback.receiver.taplog.render import process_text
from hostcallback.receiver.text import printable
from hostcallback.receiver.wire.array_types import Array
from hostcallback.receiver.wire.tap_descriptor import TapDescriptor

MAX_PLACES = 256
"""Processes and devices of a group that are counted apart."""

MAX_STEPS = 1024
"""Steps of a group that are kept."""

SHOWN_RANGES = 12
"""Ranges of steps of a group that are shown, besides the last one."""

LOG_LATE_SEC = 1.0
"""Seconds by which a log may be behind its process."""

AROUND = 4
"""Lines of the source that are shown before and after the line."""

LINE_CHARS = 300


_Call = tuple[int, int]  # the number and the time of its message


@dataclass(slots=True)
class Occurrence:
    """When something failed: Unix time in seconds and step, where they are known."""

    time: float | None
    step: int | None


@dataclass(slots=True)
class Group:
    """The failures of one kind on one line.

    Attributes:
        steps: of failures in logs; the smallest `MAX_STEPS`.
        has_more_steps: whether there are further ones.
        without_step: number of failures in logs whose step is not known.
        awaits: the program of NaN reports that do not say which operation it was; those that do take their place.
    """

    number: int
    kind: str
    title: str
    place: str
    values: str = ""
    traceback: str | None = None
    awaits: str = ""
    frame: tuple[str, int] | None = None
    count: int = 0
    per: Counter[tuple[str, str]] = field(default_factory=Counter)
    live: dict[tuple[str, int], told_failure.ToldFailure] = field(default_factory=dict)
    first: Occurrence = field(default_factory=lambda: Occurrence(None, None))
    last: Occurrence = field(default_factory=lambda: Occurrence(None, None))
    steps: set[int] = field(default_factory=set)
    has_more_steps: bool = False
    without_step: int = 0

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

    def add_steps(self, steps: Array, folded: int = 0) -> None:
        """Adds the steps of failures, int64, and failures that were only counted."""
        known = np.unique(steps[steps != NO_STEP])
        self.without_step += int((steps == NO_STEP).sum()) + folded
        self.steps.update(known[:MAX_STEPS].tolist())
        self.has_more_steps |= len(known) > MAX_STEPS
        if len(self.steps) > 2 * MAX_STEPS:
            self.steps, self.has_more_steps = set(sorted(self.steps)[:MAX_STEPS]), True

    def give_step(self, at: Occurrence, step: int) -> None:
        """Sets the step of a failure that was added without one."""
        at.step = step
        self.steps.add(step)
        self.without_step -= 1

    def take_live(self, process: tuple[str, int], found: told_failure.ToldFailure) -> None:
        """Takes the failures that a running process (host and process id) reports for this group since its start."""
        known = self.live.get(process)
        if (known is None and len(self.live) >= MAX_PLACES) or (
            known is not None and known.last > found.last
        ):
            return
        self.live[process] = found
        if not self.count:
            self.title, self.values, self.traceback = found.title, found.values, found.traceback or None

    def unlogged(self, names: Mapping[tuple[str, int], str]) -> Counter[tuple[str, str]]:
        """Counts the failures that running processes report beyond those in the logs, by process and device.

        `names` has the processes' names in the logs.
        """
        told: Counter[tuple[str, str]] = Counter()
        for process, found in self.live.items():
            name = names.get(process) or printable(f"{process[0]}:{process[1]}")
            told.update({(name, device): count for device, count in found.by_device.items()})
        return told - self.per

    def as_dict(self, names: Mapping[tuple[str, int], str]) -> dict[str, Any]:
        """Describes it for the page; reads the lines of the source."""
        unlogged = self.unlogged(names)
        first, last = self._times()
        return {
            "id": str(self.number),
            "kind": self.kind,
            "title": printable(self.title),
            "place": printable(self.place),
            "source": self._source(),
            "count": self.count + unlogged.total(),
            "per": [
                {"process": process, "device": printable(device), "count": count}
                for (process, device), count in (self.per + unlogged).most_common(MAX_PLACES)
            ],
            "first": {"time": first.time, "step": first.step},
            "last": {"time": last.time, "step": last.step},
            "steps": self._steps_text() if self.count + unlogged.total() > 2 else "",
            "values": printable(self.values),
            "traceback": self.traceback,
        }

    def _steps_text(self) -> str:
        # The log of a process soon has what the process tells.
        if self.count:
            ranges = ranges_of(sorted(self.steps)[:MAX_STEPS])
            has_more = self.has_more_steps or len(self.steps) > MAX_STEPS
            text = told_text(ranges, 0, self.without_step, "failure", SHOWN_RANGES)
            return f"{text}, and more" if has_more else text
        told = self.live.values()
        ranges = merged(sorted(each for found in told for each in found.steps))
        more, without = sum(found.more_steps for found in told), sum(found.without_step for found in told)
        return told_text(ranges, more, without, "failure", SHOWN_RANGES)

    def _times(self) -> tuple[Occurrence, Occurrence]:
        # Of a failure that is also in a log, the log has the step, and comes a little later.
        first, last = self.first, self.last
        for found in self.live.values():
            if first.time is None or found.first < first.time:
                first = Occurrence(found.first, found.first_step)
            if last.time is None or found.last > last.time + LOG_LATE_SEC:
                last = Occurrence(found.last, found.last_step)
        return first, last

    @property
    def last_time(self) -> float:
        """Unix time in seconds of the last failure; 0 if it is not known."""
        return self._times()[1].time or 0.0

    def _source(self) -> list[list[Any]] | None:
        if self.frame is None:
            return None
        file, line = self.frame
        described = call_site.DescribedFrame(file, line, "")
        if line < 1 or not described.source_text(line):
            return None
        lines = range(max(1, line - AROUND), line + AROUND + 1)
        found = [(number, described.source_text(number)) for number in lines]
        return [[number, _code(text)] for number, text in found if text]


def frame_of(place: str) -> tuple[str, int] | None:
    """The file and the line of a place such as `train.py:31 (step)`; None if it names none."""
    found = re.match(r"(.+):(\d{1,9})(?: |$)", place)
    return None if found is None else (found[1], int(found[2]))


def _code(text: str) -> str:
    # Tabs and spaces of the beginning stay.
    return printable(text.rstrip("\r\n").replace("\t", "    "))[:LINE_CHARS]


MAX_GROUPS = 500
"""Lines with failures that are shown; further ones are counted."""

MAX_NAMES = 4096
"""Processes with logs of which the names are known."""

MAX_CALLS = 4096
"""Failed calls of which the steps are known, and reports that wait for one."""

MAX_DECODED = 256
"""NaN reports of one block of messages that are decoded; further ones count for the line of the watched program."""

VALUES_CHARS = 1000


class Failures:
    """All groups. Only the thread that fills the index adds to them."""

    def __init__(self) -> None:
        """There are none yet."""
        self._groups: dict[tuple[str, str, str], Group] = {}
        self._decoder = MessageDecoder()
        self.losses = 0
        self._logged = 0
        self._told: set[str] = set()  # programs of which operations are known that made NaN
        self._calls: dict[tuple[Writer, str, int, int], int] = {}  # steps of those that made NaN
        self._reports: dict[
            tuple[Writer, str, int, int], list[tuple[Group, Occurrence]]
        ] = {}  # without a step
        self._names: dict[tuple[str, int], str] = {}

    @property
    def count(self) -> int:
        """How often checks, tap functions and watched operations have failed."""
        told = (group.unlogged(self._names).total() for group in self._groups.values() if group.live)
        superfluous = (group.count for group in self._groups.values() if group.awaits in self._told)
        return self._logged + sum(told) - sum(superfluous)

    @property
    def kinds(self) -> int:
        """Number of different failures: groups other than losses."""
        return sum(group.kind != "loss" for group in self._shown())

    def as_dicts(self) -> list[dict[str, Any]]:
        """Describes the groups for the page: failures before losses, then those with the latest failure first."""
        order = sorted(self._shown(), key=lambda group: (group.kind == "loss", -group.last_time))
        return [group.as_dict(self._names) for group in order]

    def _shown(self) -> list[Group]:
        return [group for group in self._groups.values() if group.awaits not in self._told]

    def checked(self, run: Stretch, described: TapDescriptor, places: Array) -> None:
        """Counts failures of a check. Only the first of a block is decoded, and only if it is the group's first."""
        if described.kind == "nonfinite":
            self._operations(run, described, places)
            return
        folded = sum(run.folded.pop(seq, 0) for seq in run.block.seqs[places].tolist()) if run.folded else 0
        group = self._of("check", described.source_line, described.name, described.name)
        count = len(places) + folded
        self._logged += count
        if group is None:
            return
        first, last = self._at(run, int(places[0])), self._at(run, int(places[-1]))
        process = self._process(run.writer)
        if group.add(process, run.device, count - 1, first):
            self._explain(group, run, described, int(places[0]))
        group.add(process, run.device, 1, last)
        group.add_steps(run.steps[places], folded)

    def _operations(self, run: Stretch, described: TapDescriptor, places: Array) -> None:
        # Each message tells of the operations of a program that made values that are not finite, each at its line.
        for place in places[:MAX_DECODED].tolist():
            found = self._failed_operations(run, described, place)
            for name, line, explained, call in found:
                self._count_operation(run, place, name, line, explained, call)
            if not found:
                self._count_operation(run, place, described.name, described.source_line, None)
        for place in places[MAX_DECODED:].tolist():
            self._count_operation(run, place, described.name, described.source_line, None)

    def _count_operation(
        self,
        run: Stretch,
        place: int,
        name: str,
        line: str,
        explained: explanation.Explanation | None,
        call: _Call | None = None,
    ) -> None:
        self._logged += 1
        group = self._of("nonfinite", line, name, name)
        if group is not None:
            at = self._at(run, place)
            if explained is not None:
                self._set_step(group, at, run, place, call if explained.is_known else None)
            is_first = group.add(self._process(run.writer), run.device, 1, at)
            group.add_steps(np.array([NO_STEP if at.step is None else at.step]))
            if is_first and explained is not None:
                _describe(group, explained)
                if not explained.is_known:
                    group.awaits = explained.program
                elif explained.program and len(self._told) < MAX_GROUPS:
                    self._told.add(explained.program)

    def _set_step(self, group: Group, at: Occurrence, run: Stretch, place: int, call: _Call | None) -> None:
        # The message of a call that failed has a step. The report of it, for which there is a `call`, comes some time
        # later, and has none. They may be read in any order.
        seq, time_ns = call or (int(run.block.seqs[place]), int(run.block.times_ns[place]))
        key = run.writer, run.device, seq, time_ns
        if call is not None:
            at.time, at.step = time_ns / 1e9, self._calls.get(key, at.step)
            if at.step is None and len(self._reports) < MAX_CALLS:
                self._reports.setdefault(key, []).append((group, at))
        elif at.step is not None:
            if len(self._calls) < MAX_CALLS:
                self._calls[key] = at.step
            for reported, when in self._reports.pop(key, ()):
                reported.give_step(when, at.step)

    def _failed_operations(
        self, run: Stretch, described: TapDescriptor, place: int
    ) -> list[tuple[str, str, explanation.Explanation, _Call]]:
        for logged in self._decoder.messages(run._replace(start=place, stop=place + 1)):
            if not isinstance(logged, Damage):
                return _operations_of(described, logged)
        return []

    def lost(self, writer: Writer, lost: Lost) -> None:
        """Counts lost messages."""
        self.losses += max(1, lost.messages)
        group = self._of("loss", "", lost.reason, f"messages lost: {lost.reason}")
        if group is not None:
            at = Occurrence(lost.time_ns / 1e9, None)
            group.add(process_text(writer), lost.device, max(1, lost.messages), at)

    def raised(self, writer: Writer, told: Any) -> None:
        """Takes the exceptions of tap functions that a log has of its process, since that began."""
        self._process(writer)
        for failure in told_failure.told_failures(told):
            self.take_live((writer.host, writer.pid), failure)

    def take_live(self, process: tuple[str, int], found: told_failure.ToldFailure) -> None:
        """Takes the failures that a process (host and process id) reports for one line since its start."""
        group = self._of(found.kind, found.source_line, found.name, found.title)
        if group is not None:
            group.take_live(process, found)

    def _of(self, kind: str, place: str, name: str, title: str) -> Group | None:
        key = kind, place, name
        found = self._groups.get(key)
        if found is None and len(self._groups) < MAX_GROUPS:
            found = self._groups[key] = Group(len(self._groups), kind, title, place, frame=frame_of(place))
        return found

    def _process(self, writer: Writer) -> str:
        text = process_text(writer)
        if len(self._names) < MAX_NAMES:
            self._names[writer.host, writer.pid] = text
        return text

    @staticmethod
    def _at(run: Stretch, place: int) -> Occurrence:
        step = int(run.steps[place])
        return Occurrence(run.block.times[place] / 1e9, None if step == NO_STEP else step)

    def _explain(self, group: Group, run: Stretch, described: TapDescriptor, place: int) -> None:
        for logged in self._decoder.messages(run._replace(start=place, stop=place + 1)):
            if not isinstance(logged, Damage):
                explained = _explanation(described, logged)
                if explained is not None:
                    _describe(group, explained)


def _explanation(described: TapDescriptor, logged: LoggedMessage) -> explanation.Explanation | None:
    # A message that does not fit its descriptor, which is foreign, leaves the group without values.
    try:
        explain = getattr(own_sink(described), "explain", None)
        return None if explain is None else explain(logged.message)
    except Exception:
        return None


def _operations_of(
    described: TapDescriptor, logged: LoggedMessage
) -> list[tuple[str, str, explanation.Explanation, _Call]]:
    # The name, the source line, the explanation and the call of each; nothing of a message that does not fit its
    # descriptor.
    try:
        sink = own_sink(described)
        if sink is not None:
            sink(logged.message)
    except deferred_errors.MultipleFailures as failures:
        told = [error for error in failures.exceptions if isinstance(error, deferred_errors.DelegatedFailure)]
        return [
            (
                each.consumer.name + (f" {each.error.part}" if each.error.part else ""),
                each.consumer.source_line,
                each.error.sink.explain(logged.message),
                (each.error.message.seq, each.error.message.time_ns),
            )
            for each in told
            if isinstance(each.error, explanation.CheckFailed)
        ]
    except Exception:
        return []
    return []


def _describe(group: Group, explained: explanation.Explanation) -> None:
    group.title = explained.text[:VALUES_CHARS] or group.title
    group.values = explained.summary()[:VALUES_CHARS]
    if explained.places and explained.places[0].stack:
        frames = explained.places[0].stack
        group.frame = frames[0].file, frames[0].line
        group.traceback = "\n".join(printable(str(frame).split("\n", 1)[0]) for frame in frames[:50])

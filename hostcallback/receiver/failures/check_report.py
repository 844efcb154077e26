"""Failed checks: one group per line of the user's code, counted in bounded memory, and the report for the user."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hostcallback.receiver import limits
from hostcallback.receiver.errors import HostCallbackError
from hostcallback.receiver.failures.explanation import CheckFailed, Explanation
from hostcallback.receiver.failures.steps import MAX_STEPS, FailedSteps, Occurrence, ranges_of, ranges_text
from hostcallback.receiver.messages import Consumer, launch_name
from hostcallback.receiver.text import preformatted

OTHERS = "others"

MAX_RANGES = 64
"""Ranges of steps in the report of a program."""


class BoundedCounter(Counter[str]):
    """Counts by name, up to `limits.COUNTED_NAMES` names. Further names count as `OTHERS`. The total is exact."""

    def __setitem__(self, name: str, count: int) -> None:
        """Sets the count of a name; that of a name too many is added to `OTHERS`."""
        if name not in self and len(self) >= limits.COUNTED_NAMES:
            name, count = OTHERS, self[OTHERS] + count
        super().__setitem__(name, count)


@dataclass(slots=True)
class FailedCheck:
    """All failures of the checks on one line. Its `str` is the report.

    Attributes:
        name: the check's name.
        source_line: `file:line (function)`.
        transforms: the transformations of the check that failed first, as tap functions receive them.
        explanation: of the first failure.
        count: number of failure messages.
        by_device: the same per device.
        first: the first failure, over all devices.
        last: the last failure, over all devices.
        part: number of a watched operation among those of its name and line, from 0; 0 for a check.

    Example:
        hcb.check(x > 0, "x is {}", x)
        try:
            hcb.barrier_wait()
        except* hcb.CheckError as group:
            check = group.exceptions[0].check
            print(check.name, check.count, dict(check.by_device))
    """

    name: str
    source_line: str
    transforms: tuple[tuple[str, dict[str, Any]], ...]
    explanation: Explanation
    first: Occurrence
    last: Occurrence
    count: int = 0
    by_device: Counter[str] = field(default_factory=BoundedCounter)
    part: int = 0
    _steps: FailedSteps = field(default_factory=FailedSteps, repr=False)

    def __str__(self) -> str:
        """The report."""
        return self.report()

    @property
    def step(self) -> int | None:
        """The step of the first failure; None if it is not known."""
        return self.first.step

    @property
    def steps(self) -> list[int]:
        """The steps of the failures, in increasing order: the first 4,096 that are known, and that of the last failure.

        A failure has the step that `hcb.check(step=)` gives it, or that which the receiver's log shows. `without_step`
        says how many failures have none here.
        """
        return self._steps.known((self.first, self.last))

    @property
    def without_step(self) -> int:
        """Number of failures whose step is not in `steps`: none was sent, they were only counted, or are too many.

        0 if all are there.
        """
        return self._steps.without((self.first, self.last), self.count)

    def _set_steps(self, found: Mapping[Occurrence, int]) -> None:
        self._steps.set_steps(found, (self.first, self.last))
        self.first, self.last = (
            one._replace(step=found.get(one, one.step)) for one in (self.first, self.last)
        )

    @property
    def is_nonfinite(self) -> bool:
        """Whether a watched operation failed: these report with an ArithmeticError, checks with an AssertionError."""
        return self.explanation.error is not None and issubclass(self.explanation.error, ArithmeticError)

    def as_dict(self) -> dict[str, Any]:
        """Converts the report to plain data for tools: texts, numbers, lists and dictionaries."""
        return {
            "name": self.name,
            "message": self.explanation.text,
            "source_line": self.source_line,
            "source": self.source(),
            "stacks": [[frame._asdict() for frame in place.stack] for place in self.explanation.places],
            "values": dict(self.explanation.values),
            "elements": list(self.explanation.elements),
            "where": self.explanation.where,
            "problem": self.explanation.problem,
            "details": {key: _plain_value(value) for key, value in self.explanation.details.items()},
            "transforms": [[name, _plain(params)] for name, params in self.transforms],
            "count": self.count,
            "by_device": dict(self.by_device),
            "first": {**self.first._asdict(), "launch": launch_name(self.first.run_id) or None},
            "last": {**self.last._asdict(), "launch": launch_name(self.last.run_id) or None},
            "steps": self.steps,
            "without_step": self.without_step,
        }

    def _steps_text(self, most: int | None) -> str:
        steps, without = self.steps, self.without_step
        if not steps:
            what, them = ("steps are", "them") if self.count > 1 else ("step is", "it")
            return f"the {what} not known: hcb.check(..., step=i) tells {them}"
        unknown = 0 if self._steps.is_in_log else min(self._steps.unsent, without)
        text, left_out = ranges_text(ranges_of(steps), most)
        parts = [text]
        if left_out:
            parts.append(f"and {left_out:,} more, not listed here (`check.steps` has them)")
        folded = min(self._steps.folded, without - unknown)
        beyond = (
            "`hcb errors LOG` may have them"
            if self._steps.is_in_log
            else f"beyond {self._steps.max_steps:,} steps"
        )
        for count, why in (without - unknown - folded, beyond), (folded, "they were only counted"):
            if count:
                parts.append(f"and {count:,} more failures, not listed ({why})")
        if unknown:
            parts.append(f"and {unknown:,} more failures, whose steps are not known")
        return ", ".join(parts)

    def source(self) -> list[str]:
        """The lines of the check, with marks below its predicate; empty if they cannot be read."""
        return self.explanation.places[0].source() if self.explanation.places else []

    def _repr_html_(self) -> str:
        return preformatted(self.report())

    def report(self, max_ranges: int | None = MAX_RANGES) -> str:
        """The report as several lines of text, with `max_ranges` ranges of steps at most; None for all of a log."""
        explained = self.explanation
        lines = [f"{explained.text or 'a check failed'}, at {self.source_line}"]
        lines += [f"    {line}" for line in self.source()]
        if explained.where:
            lines.append(f"  {explained.where}")
        if explained.values:
            lines.append("  with " + ", ".join(f"{_called(k)} = {v}" for k, v in explained.values.items()))
        launch = launch_name(self.first.run_id)
        lines.append(f"  first at {self.first}{', launch ' * bool(launch)}{launch}")
        if self.count > 1:
            devices = ", ".join(f"{count:,} on {device}" for device, count in sorted(self.by_device.items()))
            lines.append(f"  {self.count:,} failures ({devices}), the last at {self.last}")
        is_told = self.count > 1 or self.step is None  # else it is in the line above
        if is_told and (self.steps or not self.is_nonfinite):
            lines.append(f"  {self._steps_text(max_ranges)}")
        if self.transforms:
            lines.append("  under " + ", ".join(f"{n} {p}" if p else n for n, p in self.transforms))
        if explained.problem:
            lines.append(f"  {explained.problem}")
        stacks = [place.stack[1:] for place in explained.places if len(place.stack) > 1]
        for number, stack in enumerate(stacks):
            lines.append("  and from:" if number else "  traced from (innermost first):")
            for frame in stack:
                lines += [f"    {line}" for line in str(frame).splitlines()]
        return "\n".join(lines)


class CheckError(HostCallbackError, AssertionError):
    """A check failed on a device. One error stands for all failures of the checks on one line.

    Attributes:
        check: the failures.
        step: the step of the first one: its own, if a value or argument of the check is called `step`, or that which
            the receiver's log shows; None if it is not known.

    Example:
        hcb.check(x > 0, "x is {}", x)
        try:
            hcb.barrier_wait()
        except* hcb.CheckError as group:
            print(group.exceptions[0].check.source_line)
    """

    def __init__(self, check: FailedCheck, also: str = "") -> None:
        """`also` is a line about other failures."""
        super().__init__(check.report() + (f"\n  {also}" if also else ""))
        self.check = check

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle and copy, which would call the class with the text; the text names the code as it is here."""
        return _new, (type(self), *self.args), self.__dict__

    @property
    def step(self) -> int | None:
        """The step of the first failure; None if it is not known."""
        return self.check.first.step

    def _repr_html_(self) -> str:
        return preformatted(str(self))


def _new(kind: type[CheckError], *args: Any) -> CheckError:
    return kind.__new__(kind, *args)


class FailedChecks:
    """The failed checks of one scope, with a limit. Its owner's lock protects it."""

    def __init__(self, max_kept: int, max_steps: int = MAX_STEPS) -> None:
        """`max_kept` limits the groups, `max_steps` the steps of each; failures beyond `max_kept` are only counted."""
        self._max_kept, self._max_steps = max_kept, max_steps
        self._groups: dict[tuple[str, str, int], FailedCheck] = {}
        self._beyond: Counter[str] = BoundedCounter()

    def __bool__(self) -> bool:
        return bool(self._groups)

    def groups(self) -> list[FailedCheck]:
        """Copies of the groups, in the order of their first failures."""
        told = {group.explanation.program for group in self._groups.values() if group.explanation.is_known}
        shown = (
            g for g in self._groups.values() if g.explanation.is_known or g.explanation.program not in told
        )
        return sorted(map(_copy, shown), key=lambda group: group.first.time_ns)

    def add(
        self,
        consumer: Consumer,
        failed: CheckFailed,
        device: str,
        count: int,
        explained: Explanation | None = None,
        step: int | None = None,
    ) -> FailedCheck | None:
        """Counts `count` failures, of which `failed` is the first or the last.

        Args:
            consumer: of the check.
            failed: one of the failures.
            device: where they happened.
            count: their number.
            explained: the explanation of `failed` if there is one already.
            step: of that failure, if it is known.

        Returns:
            The group if it is new, otherwise None.
        """
        message = failed.message
        occurrence = Occurrence(device, message.seq, message.time_ns, message.run_id, step)
        key = (consumer.source_line, consumer.name, failed.part)
        group = self._groups.get(key)
        new = group is None
        if group is None:
            if len(self._groups) >= self._max_kept:
                self._beyond[consumer.source_line] += count
                return None
            explained = explained or failed.sink.explain(message)
            group = self._groups[key] = FailedCheck(
                consumer.name, consumer.source_line, consumer.transforms, explained, occurrence, occurrence,
                part=failed.part, _steps=FailedSteps(self._max_steps),
            )  # fmt: skip
        elif occurrence.time_ns < group.first.time_ns:  # from another device, whose messages are read later
            group.first = occurrence
            group.explanation = failed.sink.explain(message)
            group.transforms = consumer.transforms
        if occurrence.time_ns >= group.last.time_ns:
            group.last = occurrence
        group.count += count
        group.by_device[device] += count
        group._steps.note(occurrence, count)
        return group if new else None

    def unknown_steps(self) -> list[Occurrence]:
        """Failures whose step is not known: the first and the last of each line, then others."""
        groups = self._groups.values()
        ends = [*(group.first for group in groups), *(group.last for group in groups)]
        others = (
            failure for group in groups for failure in group._steps.looked_for((group.first, group.last))
        )
        return [*dict.fromkeys([one for one in ends if one.step is None] + sorted(others, key=_time))]

    def set_steps(self, found: Mapping[Occurrence, int]) -> None:
        """Gives these failures the steps that were found for them."""
        for group in self._groups.values():
            group._set_steps(found)

    def merge(self, earlier: FailedChecks) -> None:
        """Adds the failures of another object, which were collected before this one's."""
        self._beyond += earlier._beyond
        for key, group in earlier._groups.items():
            group, later = _copy(group), self._groups.get(key)
            if later is not None:
                group.count += later.count
                group.by_device += later.by_device
                group.last = max(group.last, later.last, key=_time)
                group._steps.merge(later._steps)
            self._groups[key] = group

    def errors(self) -> list[CheckError]:
        """One error per group, in the order of their first failures."""
        groups = self.groups()
        beyond = ", ".join(f"{count:,} at {line}" for line, count in self._beyond.most_common(8))
        errors = []
        for number, group in enumerate(groups):
            also = []
            if number:
                later = f"{(group.first.time_ns - groups[0].first.time_ns) / 1e6:,.3f} ms"
                also.append(f"{later} after the first failure, of the check at {groups[0].source_line}")
            elif len(groups) > 1:
                also.append(f"this was the first of {len(groups)} checks that failed")
            if beyond and number == 0:
                also.append(
                    f"beyond the limit of {self._max_kept} checks, failures were only counted: {beyond}"
                )
            error = group.explanation.error or CheckError
            errors.append(error(group, "; ".join(also)))
        return errors

    def headline(self) -> str:
        """Summarizes all failures in one line."""
        groups = self.groups()
        total = sum(group.count for group in groups) + self._beyond.total()
        first = f"the first: {groups[0].explanation.text}, at {groups[0].source_line}"
        return f"{len(groups)} check(s) failed, {total:,} time(s) in all; {first}"


def has_only_checks_of(report: BaseExceptionGroup[Any], error: BaseException) -> bool:
    """Whether `error` reports the checks that a report has, and the report has nothing else."""
    known = _checks_in(error)
    return all(isinstance(one, CheckError) for one in report.exceptions) and _checks_in(report) <= known


def _checks_in(error: BaseException) -> set[tuple[str, str, int]]:
    found = error.exceptions if isinstance(error, BaseExceptionGroup) else (error,)
    return {
        (one.check.name, one.check.source_line, one.check.part)
        for one in found
        if isinstance(one, CheckError)
    }


def _time(failure: Occurrence) -> int:
    return failure.time_ns


def _copy(group: FailedCheck) -> FailedCheck:
    return replace(group, by_device=Counter(group.by_device), _steps=group._steps.copy())


def _called(name: str) -> str:
    return f"argument {name}" if name.isdecimal() else name


def _plain_value(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _plain(params: Mapping[str, Any]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in params.items()}

"""Reports of failures: log lines as they happen, the exception at a barrier, and their history."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, NamedTuple

from hostcallback.receiver import errors, processes
from hostcallback.receiver.failures.check_report import BoundedCounter, FailedCheck, FailedChecks
from hostcallback.receiver.failures.explanation import CheckFailed
from hostcallback.receiver.failures.steps import FailedSteps, Occurrence, ranges_of, steps_in
from hostcallback.receiver.log import logger, traceback_text
from hostcallback.receiver.messages import Consumer

EVERY_SEC = 60.0
"""How often, at most, further failures of one tap are logged, in seconds."""

MAX_TAPS = 1024
"""Taps whose failures are told apart; failures of further taps are logged like those of one."""


MAX_LOGGED_CHARACTERS = 500
"""Of the text of an exception."""


def cause_of(error: BaseException) -> str:
    """The type and the text of an exception, on one line."""
    try:
        text = str(error).strip()
    except Exception:  # a user's `__str__`
        text = "(its text could not be made)"
    return f"{type(error).__name__}: {_on_one_line(text)}" if text else type(error).__name__


def _on_one_line(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= MAX_LOGGED_CHARACTERS else text[:MAX_LOGGED_CHARACTERS] + "..."


_LOGGED = "_hostcallback_logged"


def note_logged(error: BaseException) -> None:
    """Makes `FailureLog` skip an exception that its sink has logged already."""
    with contextlib.suppress(AttributeError):  # of a class with slots: it is logged twice
        setattr(error, _LOGGED, True)


class _Seen(NamedTuple):
    total: int
    logged: int
    at: float


class FailureLog:
    """Logs the failures of one scope: the first of a tap or check at once, then a count a minute. Any thread."""

    def __init__(self) -> None:
        """Nothing has failed."""
        self._lock = threading.Lock()  # protects the table
        self._seen: dict[str, _Seen] = {}

    def add(self, failure: errors.TapFailure) -> None:
        """Logs a failure with the tap, its source line and the cause, or counts it for a later line."""
        if hasattr(failure.exception, _LOGGED):
            return
        key, more, total = self._count(f"{failure.tap} at {failure.source_line}", 1)
        if more == total == 1:
            logger.error("tap %s raised on %s: %s", key, failure.device, cause_of(failure.exception))
        elif more:
            logger.error(
                "tap %s raised %d more times, %d in all, the last on %s: %s",
                key, more, total, failure.device, cause_of(failure.exception),
            )  # fmt: skip

    def add_check(
        self, consumer: Consumer, device: str, count: int, group: FailedCheck | None, *, warns: bool = False
    ) -> None:
        """Logs `count` failures of a check, or counts them for a later line.

        Args:
            consumer: of the check.
            device: where it failed.
            count: number of failures.
            group: the check's failures if these are the first that no barrier has raised yet.
            warns: failures are warnings, and the first that no barrier has raised yet is logged by the caller.
        """
        key, more, total = self._count(f"{consumer.name} at {consumer.source_line}", count)
        if warns and group is not None:
            return
        if more == total and group is not None:
            what = "watched operation" if group.is_nonfinite else "check"
            named = key if key.startswith(f"{what} at ") else f"{what} {key}"
            at = device if group.step is None else f"{device}, step {group.step}"
            logger.error("%s failed on %s: %s", named, at, _on_one_line(group.explanation.text))
        elif more:
            level = logging.WARNING if warns else logging.ERROR
            logger.log(level, "%s failed %d more times, %d in all, the last on %s", key, more, total, device)

    def _count(self, key: str, count: int) -> tuple[str, int, int]:
        # What it is logged as, how many failures the line is about (0: no line), and how many there are in all.
        now = time.monotonic()
        with self._lock:
            if key not in self._seen and len(self._seen) >= MAX_TAPS:
                key = "another one"
            seen = self._seen.get(key) or _Seen(0, 0, -EVERY_SEC)
            total = seen.total + count
            if seen.logged and now < seen.at + EVERY_SEC:
                self._seen[key] = _Seen(total, seen.logged, seen.at)
                return key, 0, total
            self._seen[key] = _Seen(total, total, now)
            return key, total - seen.logged, total


MAX_ALIKE = 5
"""Exceptions of one line and type that a report has. Of more, it has those whose texts differ in more than numbers."""


@dataclass(slots=True)
class Deferred:
    """The errors of delivered messages that no thread has raised."""

    checks: FailedChecks
    failures: list[errors.TapFailure] = field(default_factory=list)
    suppressed: Counter[str] = field(default_factory=Counter)
    unknown: Counter[int] = field(default_factory=Counter)
    unbound: Counter[str] = field(default_factory=Counter)
    incomplete: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)
    elsewhere: errors.JobError | None = None

    def unknown_steps(self) -> list[Occurrence]:
        """The failures whose steps are not known, without repetitions: the first and the last ones before others."""
        raised = [occurrence_of(failure) for failure in self.failures if failure.step is None]
        return [*dict.fromkeys([*self.checks.unknown_steps(), *raised[:1], *raised[-1:], *raised])]

    def set_steps(self, found: Mapping[Occurrence, int]) -> None:
        """Gives these failures the steps that were found for them."""
        self.checks.set_steps(found)
        for number, failure in enumerate(self.failures):
            if failure.step is None:
                self.failures[number] = replace(failure, step=found.get(occurrence_of(failure)))


def occurrence_of(failure: errors.TapFailure) -> Occurrence:
    """When and where an exception was raised."""
    return Occurrence(failure.device, failure.seq, failure.time_ns, failure.run_id, failure.step)


def report_of(found: Deferred) -> errors.TapFunctionException | None:
    """Returns the exception that reports these errors; None if there are none."""
    checks: list[Exception] = list(found.checks.errors())
    exceptions = [*checks, *_representatives(found.failures, found.suppressed)]
    if found.unknown:
        exceptions.append(errors.UnknownConsumerError(_describe_unknown(found.unknown)))
    exceptions += [
        errors.UnboundConsumerError(f"{count} {text}") for text, count in found.unbound.most_common()
    ]
    if found.incomplete:
        text = _describe_incomplete(found.incomplete)
        exceptions.append(errors.IncompleteValueError(text, found.incomplete.total()))
    if found.lost:
        lost = (f"{count} message(s) lost: {reason}" for reason, count in found.lost.most_common())
        exceptions.append(errors.LostMessagesError("; ".join(lost)))
    texts = [found.checks.headline()] if checks else []
    if len(exceptions) > len(checks):
        texts.append(headline(found.failures, found.suppressed))
    if found.elsewhere is not None:
        exceptions.insert(0, found.elsewhere)
        texts.insert(0, str(found.elsewhere).partition("\n")[0])
    if not exceptions:
        return None
    return errors.TapFunctionException("; ".join(texts), exceptions, found.failures, found.suppressed)


def _representatives(failures: Sequence[errors.TapFailure], suppressed: Counter[str]) -> Iterator[Exception]:
    # A traceback shows up to fifteen members of a group in full, so of many that are alike one is a member.
    totals = Counter(failure.source_line for failure in failures) + suppressed
    kinds: dict[tuple[str, type[BaseException]], list[BaseException]] = {}
    for failure in failures:
        kinds.setdefault((failure.source_line, type(failure.exception)), []).append(failure.exception)
    chosen: set[int] = set()
    for (line, _), alike in kinds.items():
        chosen.update(map(id, alike if totals[line] <= MAX_ALIKE else _different(alike)))
    for failure in failures:
        if id(failure.exception) in chosen:
            total = totals[failure.source_line]
            yield _with_count(_as_exception(failure.exception), total if total > MAX_ALIKE else 0)


def _different(exceptions: Sequence[BaseException]) -> list[BaseException]:
    # The first of those whose texts have the same words.
    found: dict[str, BaseException] = {}
    for exception in exceptions:
        found.setdefault("".join(filter(str.isalpha, cause_of(exception))), exception)
    return [*found.values()][:MAX_ALIKE]


_COUNT = "exceptions were raised at this line in all"


def _with_count(error: Exception, total: int) -> Exception:
    notes = [note for note in getattr(error, "__notes__", []) if _COUNT not in note]
    if total:
        notes.append(f"{total:,} {_COUNT}; `failures` of the group has the first ones")
    if notes:
        error.__notes__ = notes
    return error


def _as_exception(error: BaseException) -> Exception:
    if isinstance(error, Exception):
        return error
    # A tap that raises SystemExit or KeyboardInterrupt must not end the program from a receiver thread, and an
    # ExceptionGroup holds Exceptions only.
    wrapped = RuntimeError(f"a tap function raised {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    wrapped.__notes__ = list(getattr(error, "__notes__", []))
    return wrapped


def headline(failures: Sequence[errors.TapFailure], suppressed: Counter[str]) -> str:
    """Returns the first line of a report: how many exceptions there are, and what the first one was."""
    kept = len(failures)
    if not kept:
        return "messages could not be delivered"
    first = failures[0]
    calls = sum(failure.is_call for failure in failures)
    then = "the programs that waited for them failed" if calls else "the stream went on without them"
    if 0 < calls < kept:
        then = (
            f"the programs that waited for {calls} of them failed, and the stream went on without the others"
        )
    text = f"{kept + suppressed.total()} tap function call(s) raised; {then}"
    if suppressed:
        lines = ", ".join(f"{count} at {line}" for line, count in suppressed.most_common())
        text += f"; the first {kept} are kept, beyond them: {lines}"
    return f"{text}; the first was {cause_of(first.exception)} (tap {first.tap} at {first.source_line})"


def _describe_unknown(unknown: Counter[int]) -> str:
    ids = ", ".join(f"{consumer_id:#018x} ({count})" for consumer_id, count in unknown.most_common(8))
    more = f" and {len(unknown) - 8} more ids" if len(unknown) > 8 else ""
    return (
        f"{unknown.total()} message(s) for consumer ids that this process has not registered: {ids}{more}. "
        "Their program was compiled elsewhere, or its function was deleted while it still ran: keep the "
        "jitted function alive until barrier_wait(), or trace the program in this process"
    )


def _describe_incomplete(incomplete: Counter[str]) -> str:
    taps = ", ".join(f"{count} of the tap {tap}" for tap, count in incomplete.most_common(8))
    more = f" and of {len(incomplete) - 8} more taps" if len(incomplete) > 8 else ""
    return (
        f"{incomplete.total()} value(s) of arrays that lie on several devices were given up, {taps}{more}: shards of "
        "them were lost, or came much too late. The receiver's stats say how many messages its back_pressure policy "
        "dropped on each device"
    )


BATCHED = (
    "Under vmap the function gets the whole batch; `transforms` says which dimension of each array it adds."
)
"""A note of exceptions of functions that may have expected the values of one element."""


def note_batch(failure: errors.TapFailure) -> None:
    """Notes with an exception that the function got a batch, if it may be one of a function that takes no batch."""
    error = failure.exception
    is_batched = any(name == "batch" for name, _ in failure.transforms)
    of_element = any(note.startswith("element ") for note in getattr(error, "__notes__", ()))
    if is_batched and not of_element and isinstance(error, TypeError | ValueError):
        error.add_note(BATCHED)


def texts_of(error: BaseException | None) -> str:
    """The texts of all that Python prints of an error: also of those it was raised from, and of a group's members."""
    found: dict[int, BaseException] = {}
    left = [error]
    while left:
        one = left.pop()
        if one is not None and id(one) not in found:
            found[id(one)] = one
            left.append(one.__cause__ if one.__suppress_context__ else one.__context__)
            left += one.exceptions if isinstance(one, BaseExceptionGroup) else ()
    return "\n".join(str(text) for one in found.values() for text in one.args if isinstance(text, str))


def warn_of(group: FailedCheck) -> None:
    """Logs the first failure of a check as a warning, at the check's line."""
    stack = group.explanation.places[0].stack if group.explanation.places else ()
    file, line, function = stack[0] if stack else ("(unknown file)", 0, "(unknown function)")
    record = logger.makeRecord(
        logger.name, logging.WARNING, file, line, "check failed: %s", (group.report(),), None, function,
        {"check": group.as_dict()},
    )  # fmt: skip
    if logger.isEnabledFor(logging.WARNING):
        logger.handle(record)


def without_receiver_frames(traceback: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames of these packages at which it starts, so that it shows the user's code."""
    while traceback is not None and traceback.tb_next is not None:
        if not traceback.tb_frame.f_globals.get("__name__", "").startswith("hostcallback."):
            break
        traceback = traceback.tb_next
    return traceback


MAX_LINES = 64
"""Lines of exceptions, and lines of checks, that are told apart; further ones are left out."""

MAX_CHARACTERS = 4000
"""Of the traceback, and of the values, of one line."""

ALL_CHARACTERS = 64 << 10
"""Of all tracebacks and values in one answer."""

MAX_FRAMES = 20
"""Of a traceback."""

MAX_TOLD_RANGES = 32
"""Ranges of steps of one line; further steps are counted."""


@dataclass(slots=True)
class _Raised:
    # The exceptions of one tap, without the exceptions themselves: their frames hold arrays.
    title: str
    traceback: str
    first: float
    first_at: Occurrence
    last_text: str = ""
    last: float = 0.0
    last_at: Occurrence | None = None
    by_device: Counter[str] = field(default_factory=BoundedCounter)
    steps: FailedSteps = field(default_factory=FailedSteps)

    @property
    def ends(self) -> tuple[Occurrence, Occurrence]:
        return self.first_at, self.last_at or self.first_at

    def set_steps(self, found: Mapping[Occurrence, int]) -> bool:
        is_found = self.steps.set_steps(found, self.ends)
        self.first_at, self.last_at = (one._replace(step=found.get(one, one.step)) for one in self.ends)
        return is_found


class FailureHistory:
    """The exceptions of tap functions and the failed checks since the process began, with limits. Any thread.

    Errors are in it also after a barrier has raised them.
    """

    def __init__(self) -> None:
        """Nothing has failed."""
        self.clear()

    def clear(self) -> None:
        """Forgets everything."""
        self._lock = (
            threading.RLock()
        )  # protects everything below; an exception's text may come from user code
        self._raised: dict[tuple[str, str], _Raised] = {}
        self._checks = FailedChecks(MAX_LINES)

    def add_exception(self, failure: errors.TapFailure, count: int = 1) -> None:
        """Counts an exception; the first one of a tap is kept as text with its traceback."""
        key, now, at = (failure.source_line, failure.tap), time.time(), occurrence_of(failure)
        known = self._raised.get(key)
        if known is None and len(self._raised) >= MAX_LINES:
            return
        text = cause_of(failure.exception)
        made = None if known is not None else _traceback(failure.exception)
        with self._lock:
            known = self._raised.get(key) or _Raised(text, made or "", now, at)
            self._raised[key] = known
            known.last, known.last_text, known.last_at = now, text, at
            known.steps.note(at, count)
            known.by_device[failure.device] += count

    def add_check(
        self, consumer: Consumer, failed: CheckFailed, device: str, count: int, step: int | None
    ) -> None:
        """Counts `count` failures of a check; `step` is that of `failed`, if it is known."""
        with self._lock:
            self._checks.add(consumer, failed, device, count, step=step)

    def set_steps(self, found: Mapping[Occurrence, int]) -> bool:
        """Gives failures the steps that were found for them; returns whether any is of an exception."""
        with self._lock:
            self._checks.set_steps(found)
            return sum(raised.set_steps(found) for raised in self._raised.values()) > 0

    def as_dicts(self) -> list[dict[str, Any]]:
        """Describes the failures as plain data, the latest first: of bounded length, and not escaped."""
        with self._lock:
            found = [_raised(*key, each) for key, each in self._raised.items()]
            found += map(_failed, self._checks.groups()[:MAX_LINES])
        found.sort(key=lambda each: -each["last"])
        left = ALL_CHARACTERS
        for each in found:
            for name in ("values", "traceback"):
                each[name] = each[name][: min(MAX_CHARACTERS, max(0, left))]
                left -= len(each[name])
        return found


def _raised(source_line: str, tap: str, known: _Raised) -> dict[str, Any]:
    is_other = known.last_text != known.title
    return {
        "kind": "tap exception",
        "name": tap[:300],
        "source_line": source_line[:1000],
        "title": known.title,
        "values": f"the last: {known.last_text}" if is_other else "",
        "traceback": known.traceback,
        "by_device": dict(known.by_device),
        "first": known.first,
        "last": known.last,
        **_told_steps(known.steps, known.ends, known.by_device.total()),
    }


def _failed(check: FailedCheck) -> dict[str, Any]:
    explained = check.explanation
    stack = explained.places[0].stack if explained.places else ()
    return {
        "kind": "nonfinite" if check.is_nonfinite else "check",
        "name": check.name[:300] + (f" {check.part}" if check.part else ""),
        "source_line": check.source_line[:1000],
        "title": explained.text[:500],
        "values": explained.summary(),
        "traceback": "\n".join(str(frame).split("\n", 1)[0] for frame in stack[:MAX_FRAMES]),
        "by_device": dict(check.by_device),
        "first": check.first.time_ns / 1e9,
        "last": check.last.time_ns / 1e9,
        **_told_steps(check._steps, (check.first, check.last), check.count),
    }


def _told_steps(steps: FailedSteps, ends: tuple[Occurrence, Occurrence], count: int) -> dict[str, Any]:
    ranges = ranges_of(steps.known(ends))
    return {
        "steps": [[*each] for each in ranges[:MAX_TOLD_RANGES]],
        "more_steps": steps_in(ranges[MAX_TOLD_RANGES:]),
        "without_step": steps.without(ends, count),
        "first_step": ends[0].step,
        "last_step": ends[1].step,
    }


def _traceback(error: BaseException) -> str:
    try:
        return traceback_text(error, limit=-MAX_FRAMES)[-MAX_CHARACTERS:].rstrip("\n")
    except Exception:  # of a user's `__str__` or `__repr__`
        return ""


failure_history = FailureHistory()
"""Of this process, over all scopes."""

processes.in_child(processes.Stage.RUNTIME, failure_history.clear)

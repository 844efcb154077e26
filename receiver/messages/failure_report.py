"""Makes the exception that reports collected errors: one for each kind of failure, with a count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hostcallback.receiver.errors import (
    IncompleteValueError,
    LostMessagesError,
    TapFailure,
    TapFunctionException,
    UnboundConsumerError,
    UnknownConsumerError,
)
from hostcallback.receiver.messages.check_report import FailedChecks
from hostcallback.receiver.messages.failure_log import cause_of

MOST_ALIKE = 5
"""Exceptions of one line and type that a report has. Of more, it has those whose texts differ in more than numbers."""


class Deferred(NamedTuple):
    """The content of a `DeferredErrors`, in a form that can be sent to another process."""

    failures: list[TapFailure]
    suppressed: Counter[str]
    unknown: Counter[int]
    unbound: Counter[str]
    incomplete: Counter[str]
    lost: Counter[str]
    checks: FailedChecks | None = None


def report_of(found: Deferred) -> TapFunctionException | None:
    """Returns the exception that reports these errors; None if there are none."""
    checks: list[Exception] = [] if found.checks is None else list(found.checks.errors())
    exceptions = [*checks, *_representatives(found.failures, found.suppressed)]
    if found.unknown:
        exceptions.append(UnknownConsumerError(_describe_unknown(found.unknown)))
    exceptions += [UnboundConsumerError(f"{count} {text}") for text, count in found.unbound.most_common()]
    if found.incomplete:
        exceptions.append(
            IncompleteValueError(_describe_incomplete(found.incomplete), found.incomplete.total())
        )
    if found.lost:
        exceptions.append(LostMessagesError(_describe_lost(found.lost)))
    if not exceptions:
        return None
    texts = [found.checks.headline()] if checks and found.checks is not None else []
    if len(exceptions) > len(checks):
        texts.append(headline(found.failures, found.suppressed))
    return TapFunctionException("; ".join(texts), exceptions, found.failures, found.suppressed)


def _representatives(failures: Sequence[TapFailure], suppressed: Counter[str]) -> Iterator[Exception]:
    # A traceback shows up to fifteen members of a group in full, so of many that are alike one is a member.
    totals = Counter(failure.source_line for failure in failures) + suppressed
    kinds: dict[tuple[str, type[BaseException]], list[BaseException]] = {}
    for failure in failures:
        kinds.setdefault((failure.source_line, type(failure.exception)), []).append(failure.exception)
    chosen: set[int] = set()
    for (line, _), alike in kinds.items():
        chosen.update(map(id, alike if totals[line] <= MOST_ALIKE else _different(alike)))
    for failure in failures:
        if id(failure.exception) in chosen:
            total = totals[failure.source_line]
            yield _with_count(_as_exception(failure.exception), total if total > MOST_ALIKE else 0)


def _different(exceptions: Sequence[BaseException]) -> list[BaseException]:
    # The first of those whose texts have the same words.
    found: dict[str, BaseException] = {}
    for exception in exceptions:
        found.setdefault("".join(filter(str.isalpha, cause_of(exception))), exception)
    return [*found.values()][:MOST_ALIKE]


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


def headline(failures: Sequence[TapFailure], suppressed: Counter[str]) -> str:
    """Returns the first line of a report: how many exceptions there are, and what the first one was."""
    kept = len(failures)
    if not kept:
        return "messages could not be delivered"
    first = failures[0]
    text = f"{kept + suppressed.total()} tap function call(s) raised; the stream went on without them"
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


def _describe_lost(lost: Counter[str]) -> str:
    return "; ".join(f"{count} message(s) lost: {reason}" for reason, count in lost.most_common())

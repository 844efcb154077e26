"""How pytest shows failed checks and taps: by the user's lines, as a failed assert is shown."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest._code.code import ExceptionChainRepr, ReprEntry, ReprFileLocation, ReprTraceback

from hostcallback.receiver.errors import TapFunctionException
from hostcallback.receiver.messages.call_site import Frame
from hostcallback.receiver.messages.check_report import CheckError
from hostcallback.receiver.terminal import printable_lines

ROOT = Path(__file__).resolve().parents[1]
INTERNAL = (str(ROOT), str(ROOT.parent / "receiver"))
MAX_SHOWN = 10
"""Failures of one test that are shown whole; of the others, the number."""

Shown = tuple[ReprTraceback, ReprFileLocation | None, str | None]


def shown(item: pytest.Item, excinfo: pytest.ExceptionInfo[BaseException]) -> ExceptionChainRepr | None:
    """Returns the report of a failure of checks and taps; None for one that pytest shows well itself."""
    group, style = excinfo.value, item.config.getoption("tbstyle", "auto")
    if not isinstance(group, TapFunctionException) or style == "native":
        return None
    errors = [*_flat(group)]
    parts = [_part(item, error) for error in errors[:MAX_SHOWN]]
    after = [f"Failure {number} of {len(errors)}:" for number in range(2, len(parts) + 1)]
    last = f"{len(errors) - MAX_SHOWN} more failures" if len(errors) > MAX_SHOWN else None
    notes = "\n".join(note for note in getattr(group, "__notes__", ()) if "JAX has removed" not in note)
    after.append("\n".join(filter(None, [last, notes])))
    chain = [(*part[:2], text or None) for part, text in zip(parts, after, strict=True)]
    report = ExceptionChainRepr(chain)
    report.reprcrash = chain[0][1]  # the summary names the first failure
    return report


def _flat(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _flat(error)
        else:
            yield error


def _part(item: pytest.Item, error: BaseException) -> Shown:
    if isinstance(error, CheckError):
        return _check(item, error)
    info = pytest.ExceptionInfo.from_exception(error)
    kept = info.traceback.filter(lambda entry: not str(entry.path).startswith(INTERNAL))
    info.traceback = kept or info.traceback
    found = info.getrepr(style="long", tbfilter=False, chain=False)
    assert isinstance(found, ExceptionChainRepr)
    return found.chain[0]


def _check(item: pytest.Item, error: CheckError) -> Shown:
    check = error.check
    explained = check.explanation
    stack = explained.places[0].stack if explained.places else ()
    lines = check.source()
    # As pytest marks a failed assert: ">" before its first line, "E" before the explanation.
    source = [f">       {line}" if not row else f"        {line}" for row, line in enumerate(lines)]
    head, *rest = printable_lines(str(error)).split("\n")
    text = explained.text or "a check failed"
    listed = {f"    {line}" for line in lines}
    told: list[str] = []
    for line in [head.replace(f", at {check.source_line}", "", 1), *rest]:
        if line.startswith("  traced from"):
            break  # the frames are entries of their own
        if line not in listed:
            told.append(f"E       {line}")
    told[0] = f"E       {type(error).__name__}: {told[0][8:]}"
    callers = [*reversed(stack[1:])]
    tests = [place for place, frame in enumerate(callers) if frame.file == str(item.path)]
    # What is outside of the test's file runs the tests.
    entries = [_entry(item, frame) for frame in callers[tests[0] if tests else 0 :]]
    file, number = (stack[0].file, stack[0].line) if stack else (check.source_line, 0)
    place = ReprFileLocation(_path(item, file), number, type(error).__name__)
    entries.append(ReprEntry([*source, *told], None, None, place, "long"))
    crash = ReprFileLocation(file, number, f"{type(error).__name__}: {text}")
    return ReprTraceback(entries, None, style="long"), crash, None


def _entry(item: pytest.Item, frame: Frame) -> ReprEntry:
    text = frame.source_text(frame.line).strip()
    place = ReprFileLocation(_path(item, frame.file), frame.line, f"traced in {frame.function}")
    return ReprEntry([f"    {text}"] if text else [], None, None, place, "short")


def _path(item: pytest.Item, file: str) -> str:
    try:
        return str(Path(file).relative_to(item.config.invocation_params.dir))
    except ValueError:
        return file

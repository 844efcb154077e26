"""Support for tests of programs with taps; the pytest plugin `hostcallback_pytest` loads it when a test uses a tap."""

from __future__ import annotations

import difflib
import threading
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import numpy as np
import pytest
from _pytest._code.code import ExceptionChainRepr, ReprEntry, ReprFileLocation, ReprTraceback

from hostcallback.api.barrier import barrier_wait, wait_for_taps
from hostcallback.receiver import tap_arguments
from hostcallback.receiver.errors import TapFunctionException, TapTimeoutError
from hostcallback.receiver.failures import call_site, check_report, failure_report
from hostcallback.receiver.messages import Message
from hostcallback.receiver.runtime.dispatch.scope import ScopeSinks
from hostcallback.receiver.runtime.runtime import runtime
from hostcallback.receiver.taplog.columns.log_data import UnknownTapError
from hostcallback.receiver.text import printable_lines


class CapturedTaps(Mapping[str, list[Any]]):
    """A mapping of taps' names to the values that they sent, in order of delivery (of a device, in order of emission).

    A value is the tapped pytree, of numpy arrays; of shape () they are numpy scalars. Reading waits for the taps of
    all programs so far and raises their failures, as `hcb.barrier_wait()` does. Tap functions, prints and receivers
    work as without it. Failed checks are no messages.

    Example:
        def test_loss(taps):
            train()
            assert taps["loss"] == [3.0, 2.0, 1.0]
    """

    def __init__(self) -> None:
        """Captures nothing until it is entered."""
        self._lock = threading.Lock()  # protects `_values`
        self._values: dict[str, list[Any]] = {}
        self._observer = ScopeSinks([self._take])

    def __enter__(self) -> Self:
        """Begins to capture. Waits for earlier taps."""
        barrier_wait()
        runtime.observe(self._observer, True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        """Ends capturing. What was captured can still be read."""
        wait_for_taps()
        runtime.observe(self._observer, False)

    def _take(self, message: Message) -> None:
        consumer = message.consumer
        if consumer.is_check:
            return
        # Copies, because a tap function may change its arrays.
        arrays = [np.array(array) for array in message.arrays]
        rows = [[array[row] for array in arrays] for row in range(message.stacked)] or [arrays]
        values = [consumer.unflatten([array[()] for array in row]) for row in rows]
        with self._lock:
            self._values.setdefault(consumer.name, []).extend(values)

    def __getitem__(self, name: str) -> list[Any]:
        """The values of the tap of that name; that of an unnamed tap may be given without its line.

        Raises:
            UnknownTapError: no tap of that name sent anything; the text lists those that did.
            TapFunctionException: taps failed.
        """
        __tracebackhide__ = True
        values: list[Any] = self.values(name)
        return values

    def values(self, name: str | None = None) -> Any:
        """The values of one tap, as `taps[name]`; without a name, the lists of all taps, as a mapping's."""
        __tracebackhide__ = True
        barrier_wait()
        with self._lock:
            if name is None:
                return [list(values) for values in self._values.values()]
            there = [*self._values]
            if name in self._values:
                return list(self._values[name])
            near = [known for known in there if tap_arguments.matches(known, name)]
            if len(near) == 1:
                return list(self._values[near[0]])
        if near:
            raise UnknownTapError(f"{name!r} may be one of {', '.join(map(repr, near))}: give the whole name")
        similar = difflib.get_close_matches(str(name), there, n=1)
        meant = f" Did you mean {similar[0]!r}?" if similar else ""
        listed = ", ".join(map(repr, there)) or "none"
        raise UnknownTapError(f"no tap {name!r} sent a message; those that did are {listed}.{meant}")

    @property
    def names(self) -> list[str]:
        """The names of the taps that sent messages, in order of their first one."""
        barrier_wait()
        with self._lock:
            return [*self._values]

    def clear(self) -> None:
        """Forgets what was captured so far. Waits for it first."""
        barrier_wait()
        with self._lock:
            self._values.clear()

    def assert_close(self, name: str, expected: Any, *, rtol: float = 1e-6, atol: float = 0.0) -> None:
        """Asserts that the values of a tap are close to those expected.

        Args:
            name: of the tap.
            expected: a list with the value of each message; or the values stacked, an array or a pytree of arrays of
                shape (messages, *shape of a value).
            rtol: relative tolerance, of `expected`.
            atol: absolute tolerance.

        Raises:
            AssertionError: they differ in number, structure, shape or value; the text shows where.
            UnknownTapError: no tap of that name sent anything.
        """
        __tracebackhide__ = True
        found = self.values(name)
        if not jax.tree_util.all_leaves(found) or len({np.shape(value) for value in found}) > 1:
            _assert_trees_close(name, found, expected, rtol, atol)
            return
        stacked = np.asarray(found)
        wanted = np.asarray(expected)
        if stacked.shape != wanted.shape:
            raise AssertionError(
                f"tap {name!r} sent values of shape {stacked.shape} (messages first), expected {wanted.shape}:\n"
                f"{stacked}"
            )
        np.testing.assert_allclose(
            stacked, wanted, rtol=rtol, atol=atol, err_msg=f"the values of tap {name!r}"
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        """The names, with the number of values of each."""
        with self._lock:
            counted = ", ".join(f"{name!r}: {len(values)} values" for name, values in self._values.items())
        return f"taps({counted})"


def _assert_trees_close(name: str, found: list[Any], expected: Any, rtol: float, atol: float) -> None:
    """Compares messages one by one, leaf by leaf, for `CapturedTaps.assert_close`."""
    __tracebackhide__ = True
    if isinstance(expected, list):
        wanted = expected
        if len(wanted) != len(found):
            raise AssertionError(
                f"tap {name!r} sent {len(found)} message(s), expected {len(wanted)}:\n{found}"
            )
    else:
        counts = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(expected)}
        if counts != {(len(found),)}:
            told = (
                " and ".join(str(count[0]) if count else "a scalar" for count in sorted(counts)) or "nothing"
            )
            raise AssertionError(
                f"tap {name!r} sent {len(found)} message(s), expected {told} along the first axes of "
                f"{type(expected).__name__}; a list has the value of each message:\n{found}"
            )
        wanted = [jax.tree.map(lambda leaf, i=i: leaf[i], expected) for i in range(len(found))]
    for number, (value, other) in enumerate(zip(found, wanted, strict=True)):
        leaves, structure = jax.tree_util.tree_flatten_with_path(value)
        try:
            others = structure.flatten_up_to(other)  # type: ignore[attr-defined]
        except (ValueError, TypeError):
            raise AssertionError(
                f"message {number} of tap {name!r} has the structure {structure}, expected "
                f"{jax.tree.structure(other)}:\n{value}"
            ) from None
        for (path, leaf), other_leaf in zip(leaves, others, strict=True):
            where, wanted_leaf = (
                f"message {number} of tap {name!r}{jax.tree_util.keystr(path)}",
                np.asarray(other_leaf),
            )
            if wanted_leaf.dtype == object:
                raise AssertionError(f"{where} is an array, expected {type(other_leaf).__name__}:\n{leaf}")
            if np.shape(leaf) != wanted_leaf.shape:
                raise AssertionError(
                    f"{where} has the shape {np.shape(leaf)}, expected {wanted_leaf.shape}:\n{leaf}"
                )
            np.testing.assert_allclose(leaf, wanted_leaf, rtol=rtol, atol=atol, err_msg=where)


def drain_before(item: pytest.Item) -> None:
    """Waits for taps that ran outside of any test.

    Raises:
        TapFunctionException: with a note that another part of the test session tapped.
    """
    try:
        barrier_wait(_limit(item))
    except TapFunctionException as error:
        error.add_note("These taps ran before this test, outside of any test: while modules were imported.")
        raise


def drain(item: pytest.Item, when: str, error: BaseException | None) -> None:
    """Waits for the taps of one phase of a test.

    Args:
        item: the test.
        when: the phase: setup, call or teardown.
        error: the phase's own exception, which stays the reason of its failure.

    Raises:
        TapFunctionException: taps failed, and the phase did not.
        TapTimeoutError: they take longer than the ini option `hostcallback_timeout`.
    """
    try:
        barrier_wait(_limit(item))
    except (TapFunctionException, TapTimeoutError) as failed:
        if error is None or isinstance(error, pytest.skip.Exception):
            raise
        errors = failed.exceptions if isinstance(failed, TapFunctionException) else [failed]
        text = "\n".join("".join(traceback.format_exception(each)) for each in errors)
        item.add_report_section(when, "failed taps", text)


def _limit(item: pytest.Item) -> float | None:
    text = item.config.getini("hostcallback_timeout")
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise pytest.UsageError(
            f"the ini option hostcallback_timeout is {text!r}, expected seconds, 0 or more"
        )
    return seconds or None


INTERNAL = str(Path(__file__).resolve().parent)
MAX_SHOWN = 10
"""Failures of one test that are shown whole; of the others, the number."""

Shown = tuple[ReprTraceback, ReprFileLocation | None, str | None]


def shown(item: pytest.Item, excinfo: pytest.ExceptionInfo[BaseException]) -> ExceptionChainRepr | None:
    """Returns the report of failed checks and taps; None for an exception that pytest shows well itself."""
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
        # A group whose members were only constructed says itself where it was raised.
        if isinstance(error, BaseExceptionGroup) and any(member.__traceback__ for member in error.exceptions):
            yield from _flat(error)
        else:
            yield error


def _part(item: pytest.Item, error: BaseException) -> Shown:
    if isinstance(error, check_report.CheckError):
        return _check(item, error)
    if error.__traceback__ is None:
        cause = error.__cause__
        if cause is None or cause.__traceback__ is None:
            return _untraced(error)
        error = cause  # what ends a process, in the exception that a barrier raises for it
    info = pytest.ExceptionInfo.from_exception(error)
    kept = info.traceback.filter(lambda entry: not str(entry.path).startswith(INTERNAL))
    info.traceback = kept or info.traceback
    found = info.getrepr(style="long", tbfilter=False, chain=False)
    assert isinstance(found, ExceptionChainRepr)
    return found.chain[0]


def _untraced(error: BaseException) -> Shown:
    # One that was constructed only, such as a member of a group.
    texts = [failure_report.cause_of(error), *map(str, getattr(error, "__notes__", ()))]
    told = [f"E       {line}" for text in texts for line in printable_lines(text).split("\n")]
    crash = ReprFileLocation("", 0, texts[0])
    return ReprTraceback([ReprEntry(told, None, None, None, "long")], None, "long"), crash, None


def _check(item: pytest.Item, error: check_report.CheckError) -> Shown:
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
    tests = [number for number, frame in enumerate(callers) if frame.file == str(item.path)]
    # What is outside of the test's file runs the tests.
    entries = [_entry(item, frame) for frame in callers[tests[0] if tests else 0 :]]
    file, number = (stack[0].file, stack[0].line) if stack else (check.source_line, 0)
    location = ReprFileLocation(_path(item, file), number, type(error).__name__)
    entries.append(ReprEntry([*source, *told], None, None, location, "long"))
    crash = ReprFileLocation(file, number, f"{type(error).__name__}: {text}")
    return ReprTraceback(entries, None, style="long"), crash, None


def _entry(item: pytest.Item, frame: call_site.Frame) -> ReprEntry:
    text = frame.source_text(frame.line).strip()
    location = ReprFileLocation(_path(item, frame.file), frame.line, f"traced in {frame.function}")
    return ReprEntry([f"    {text}"] if text else [], None, None, location, "short")


def _path(item: pytest.Item, file: str) -> str:
    try:
        return str(Path(file).relative_to(item.config.invocation_params.dir))
    except ValueError:
        return file

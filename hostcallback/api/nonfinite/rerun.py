"""Runs a step as it is with one test of its results; runs a call that fails the test again, instrumented."""

from __future__ import annotations

import collections
import functools
import threading
from collections.abc import Callable
from time import perf_counter, sleep
from typing import Any, NamedTuple

import jax
import numpy as np

from hostcallback import _jax_compat as compat
from hostcallback.api.nonfinite.instrument import instrumented
from hostcallback.api.nonfinite.kept_calls import Call, KeptCalls, TakenError
from hostcallback.api.nonfinite.operation import Operation
from hostcallback.api.nonfinite.result_tests import failed_groups, groups_of
from hostcallback.api.nonfinite.silence import NotRepeatableError
from hostcallback.api.nonfinite.watcher import Watcher, report
from hostcallback.lifecycle import unsettled
from hostcallback.primitives.effects import CallEffect, TapEffect
from hostcallback.receiver.errors import TapTimeoutError
from hostcallback.receiver.log import logger
from hostcallback.tracing.source_line import user_source_line

ROWS = 2
"""Rows of calls that are kept while their verdicts are not in; another row waits for the first (`kept_calls`)."""

ROWS_BYTES = 1 << 20
"""Up to `MORE_ROWS` rows are kept if they have fewer bytes than this together.

What is kept cannot be written again, so the results of each step go to other memory. More than the caches hold makes
small steps slower: those of 0.3 MiB by a tenth.
"""

MORE_ROWS = 32

LARGE_BYTES = 1 << 26
"""Of copies of donated arguments this large, one is kept."""

_POLL_SEC = 0.001


class _Pending(NamedTuple):
    call: Call
    failed: jax.Array  # bool [group of results]: whether any of its elements is not finite


class _Group(NamedTuple):
    """Results that are tested together."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @staticmethod
    def of(group: list[tuple[Any, Any]]) -> _Group:
        path, leaf = group[0]
        more = f" or {len(group) - 1} others of its shape" if len(group) > 1 else ""
        return _Group(f"result{jax.tree_util.keystr(path)}{more}", leaf.shape, leaf.dtype)


class Rerun:
    """A step that is watched by its results. Any thread may call it; a second run is in the thread that finds it due.

    What it takes to run a call again is kept until its verdict is in. Of donated arguments copies are kept.

    Attributes:
        name: of the step, for reports.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        selects: Callable[[Operation], bool],
        *,
        inputs: bool,
        static: compat.Arguments = ((), ()),
        donated: compat.Arguments = ((), ()),
        found: Callable[[Any, Any], None] | None = None,
    ) -> None:
        """Makes the step.

        Args:
            fun: the step, jitted or not.
            selects: whether to check an operation of a second run.
            inputs: whether to check the arguments of a second run.
            static: numbers and names of the arguments that the step's jit does not trace.
            donated: numbers and names of the arguments whose memory it may take.
            found: called with the arguments of a call before it is run again.
        """
        self._found = found
        self._fun = fun
        self._selects = selects
        self._inputs = inputs
        self.name = str(getattr(fun, "__name__", "the step"))
        self._line = user_source_line()
        self._lock = threading.RLock()  # protects all that follows
        self._pending: collections.deque[_Pending] = collections.deque()
        self._calls = 0
        self._is_failing = False  # whether the last settled call failed the test
        self._always: Any = False  # what was not finite in the first call, such as a mask, is reported once
        self._on_several = False
        self._kept = KeptCalls(*donated)
        self._donates = any(donated)
        self._most_rows = ROWS
        self._has_new_trace = True
        self._is_repeatable = True  # whether calls may run again to make the arguments of a later one
        self._has_effects = False
        self._is_local = False  # whether this process alone may look whether a verdict is in
        self._callbacks: list[str] = []
        self._seconds: dict[bool, Callable[..., Any]] = {}
        self._silent: Callable[..., Any] | None = None
        self._groups: dict[int, list[_Group]] = {}  # by their number, the groups of results of a program
        self._options: dict[str, Any] = dict(zip(("static_argnums", "static_argnames"), static, strict=True))
        donate: dict[str, Any] = dict(zip(("donate_argnums", "donate_argnames"), donated, strict=True))
        self._tested = jax.jit(self._with_test, **self._options, **donate)

    def __call__(self, args: Any, kwargs: Any) -> Any:
        """Runs the step; first settles the calls whose verdict is in."""
        # This is most of what watching costs a small step: it is written for speed.
        pending, kept = self._pending, self._kept
        with self._lock:
            while pending and self._is_local and _is_in(pending[0]):
                self._settle_first()
            goes_on = self._is_repeatable and kept.goes_on(args)
            while not goes_on and len({id(each.call.row) for each in pending}) >= self._most_rows:
                self._settle_first()
            if not self._calls:
                self._on_several = is_on_several((args, kwargs))
            inputs, args, kwargs = kept.begin(args, kwargs, goes_on=goes_on)
            if self._has_new_trace:
                self._look_at_effects(args, kwargs)
            out, failed = self._tested(*args, **kwargs)
            call = kept.end(self._calls, inputs, out, goes_on=goes_on)
            if not self._calls:
                self._look_at_first(failed)
            pending.append(_Pending(call, failed))
            self._calls += 1
        unsettled.add(self.settle)
        return out

    def settle(self, deadline: float | None) -> None:
        """Waits for the verdicts of all calls, and runs again what failed; see `unsettled`."""
        with self._lock:
            while self._pending:
                while deadline is not None and not _is_in(self._pending[0]):
                    if perf_counter() > deadline:
                        raise TapTimeoutError(
                            f"call {self._pending[0].call.number} of {self.name} was still running when the time was "
                            "up: give more time (timeout_sec=)"
                        )
                    sleep(_POLL_SEC)
                self._settle_first()
            self._kept.forget()

    def _look_at_first(self, failed: jax.Array) -> None:
        # The processes of a program over several must run the same call again at the same time.
        self._is_local = failed.is_fully_addressable
        nbytes = max(1, self._kept.first_bytes)
        self._most_rows = max(ROWS, min(MORE_ROWS, ROWS_BYTES // nbytes))
        if self._donates and nbytes >= LARGE_BYTES:
            self._most_rows = 1

    def _look_at_effects(self, args: Any, kwargs: Any) -> None:
        effects = self._tested.trace(*args, **kwargs).jaxpr.effects
        self._has_new_trace = False
        self._has_effects |= bool(effects)
        self._is_repeatable = all(map(can_be_left_out, effects))

    # ---- The test ----------------------------------------------------------------------------------------------------

    def _with_test(self, *args: Any, **kwargs: Any) -> Any:
        results = self._fun(*args, **kwargs)
        self._kept.note_results(results)
        self._has_new_trace = True
        groups = groups_of(results, several=self._on_several)
        self._groups[len(groups)] = [_Group.of(group) for group in groups]
        return results, failed_groups(results, several=self._on_several)

    # ---- The second run ----------------------------------------------------------------------------------------------

    def _settle_first(self) -> None:
        call, verdict = self._pending.popleft()
        try:
            failed = np.asarray(verdict)
        except (
            jax.errors.JaxRuntimeError,
            ValueError,
        ):  # the program failed: the user of its results gets the error
            return
        if not self._is_failing and True not in failed.tolist():
            return
        new = failed & ~self._always if np.shape(self._always) == failed.shape else failed
        was_failing, self._is_failing = self._is_failing, bool(new.any())
        if call.number == 0:
            self._always = failed
        # Later steps only pass on what a step has made, so the first of a row of failed calls is run again.
        if self._is_failing and not was_failing:
            self._run_again(call, new)

    def _run_again(self, call: Call, new: Any) -> None:
        """Runs a call again, and reports what was in the way of a report."""
        try:
            args, kwargs = self._kept.arguments(call, self._run_silently)
        except TakenError:
            note = "the call could not be run again, because another program has taken its arguments (donate_argnums)"
            self._report_results(call, new, note)
            return
        except Exception as error:
            logger.exception("the calls before call %d of %s could not be run again", call.number, self.name)
            self._report_results(call, new, f"the second run of earlier calls failed: {_first_line(error)}")
            return
        if self._found is not None:
            self._found(args, kwargs)
        note = self._run_checked(call.number, args, kwargs, new)
        if note:
            self._report_results(call, new, note)

    def _run_silently(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step once more for its results: as it ran if it has no taps and the like."""
        if not self._has_effects:
            return self._tested(*args, **kwargs)[0]
        if self._silent is None:
            self._silent = jax.jit(self._without_effects, **self._options)
        return self._silent(*args, **kwargs)

    def _without_effects(self, *args: Any, **kwargs: Any) -> Any:
        watcher = Watcher(lambda operation: False, self.name)
        return instrumented(self._fun, args, kwargs, watcher, inputs=False, line=self._line)

    def _run_checked(self, number: int, args: Any, kwargs: Any, new: Any) -> str:
        """Runs a call again with checks; returns what was in the way of a report, or an empty text."""
        again = self._second(checked=True)
        try:
            failed = np.asarray(again(np.int32(number), *args, **kwargs))
        except NotRepeatableError as error:
            return f"the call was not run again, because that would repeat {error}. Use mode='every'"
        except Exception as error:
            logger.exception("the second run of call %d of %s failed", number, self.name)
            return f"the second run of the call failed: {_first_line(error)}"
        if (failed & new).any():
            return ""
        return f"not reproduced: {self._why_not(number, args, kwargs, new)}"

    def _why_not(self, number: int, args: Any, kwargs: Any, new: Any) -> str:
        text = "the same call with the same arguments, run again with checks, made other results"
        if self._callbacks:
            return f"{text}, and it calls {', '.join(dict.fromkeys(self._callbacks))}"
        plain = np.asarray(self._second(checked=False)(np.int32(number), *args, **kwargs))
        if (plain & new).any():
            return (
                f"{text}; without checks it made them again, so the values depend on how XLA fuses operations"
            )
        return f"{text}, and so did it without checks: its operations or its arguments change from run to run"

    def _second(self, *, checked: bool) -> Callable[..., Any]:
        if checked not in self._seconds:
            argnums = [n + 1 if n >= 0 else n for n in self._options["static_argnums"]]
            options = self._options | {"static_argnums": argnums}
            self._seconds[checked] = jax.jit(functools.partial(self._run_second, checked), **options)
        return self._seconds[checked]

    def _run_second(self, checked: bool, number: Any, *args: Any, **kwargs: Any) -> Any:
        selects = self._selects if checked else lambda operation: False
        watcher = Watcher(selects, self.name)
        inputs = self._inputs and checked
        results = instrumented(
            self._fun, args, kwargs, watcher, inputs=inputs, iterations=[number], line=self._line
        )
        self._callbacks += watcher.callbacks
        return failed_groups(results, several=self._on_several)

    def _report_results(self, call: Call, new: Any, note: str) -> None:
        for group, bad in zip(self._groups[len(new)], new, strict=True):
            if bad:
                operation = Operation(group.name, self._line, "", group.shape, group.dtype, False, self.name)
                counts, number = (np.int32(0), np.int32(0)), np.int32(call.number)
                report([operation], [np.bool_(True)], [counts], [number], cotangent=False, note=note)


def can_be_left_out(effect: Any) -> bool:
    """Whether a second run can do without what has this effect: taps, checks, prints."""
    if isinstance(effect, CallEffect):
        return False
    return isinstance(effect, TapEffect) or compat.is_debug_effect(effect)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _is_in(pending: _Pending) -> bool:
    failed: Any = pending.failed  # whose method has no annotation
    return bool(failed.is_ready())


def is_on_several(tree: Any) -> bool:
    """Whether an array is partitioned over devices, or on several."""
    return any(
        len(leaf.sharding.device_set) > 1 for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)
    )

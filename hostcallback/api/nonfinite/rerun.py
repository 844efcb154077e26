"""Runs a step as it is with one test of its results; runs a call that fails the test again, instrumented."""

from __future__ import annotations

import collections
import functools
import threading
from collections.abc import Callable
from time import perf_counter, sleep
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hostcallback import _jax_compat as compat
from hostcallback.api.nonfinite.instrument import instrumented
from hostcallback.api.nonfinite.operation import Operation
from hostcallback.api.nonfinite.result_tests import failed_groups, groups_of
from hostcallback.api.nonfinite.silence import NotRepeatableError
from hostcallback.api.nonfinite.watcher import Watcher, report
from hostcallback.lifecycle import unsettled
from hostcallback.receiver.errors import TapTimeoutError
from hostcallback.receiver.log import logger
from hostcallback.tracing.source_line import user_source_line

KEPT_CALLS = 2
"""The arguments of this many calls are kept while their verdicts are not in; a further call waits for the first."""

KEPT_BYTES = 1 << 20
"""The arguments of up to `MORE_CALLS` calls are kept if they have fewer bytes than this together.

What is kept cannot be written again, so the results of each step go to other memory. More than the caches hold makes
small steps slower: those of 0.3 MiB by a tenth.
"""

MORE_CALLS = 32

_POLL_SEC = 0.001


class _Call(NamedTuple):
    number: int
    args: Any
    kwargs: Any
    failed: jax.Array  # bool [group of results]: whether any of its elements is not finite


class Rerun:
    """A step that is watched by its results. Any thread may call it; a second run is in the thread that finds it due.

    The inputs of a call are kept until its verdict is in, so the step's donated arguments are not donated.

    Attributes:
        name: of the step, for reports.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        selects: Callable[[Operation], bool],
        *,
        inputs: bool,
        static: tuple[tuple[int, ...], tuple[str, ...]],
        found: Callable[[Any, Any], None] | None = None,
    ) -> None:
        """Makes the step.

        Args:
            fun: the step, jitted or not.
            selects: whether to check an operation of a second run.
            inputs: whether to check the arguments of a second run.
            static: numbers and names of the arguments that the step's jit does not trace.
            found: called with the arguments of a call before it is run again.
        """
        self._found = found
        self._fun = fun
        self._selects = selects
        self._inputs = inputs
        self.name = str(getattr(fun, "__name__", "the step"))
        self._line = user_source_line()
        self._lock = threading.RLock()  # protects all that follows
        self._pending: collections.deque[_Call] = collections.deque()
        self._calls = 0
        self._is_failing = False  # whether the last settled call failed the test
        self._always: Any = False  # what was not finite in the first call, such as a mask, is reported once
        self._on_several = False
        self._kept = KEPT_CALLS
        self._is_local = False  # whether this process alone may look whether a verdict is in
        self._last_results: Any = ()
        self._known: set[int] = set()  # the identities of the last results, which are arrays of JAX
        self._callbacks: list[str] = []
        self._seconds: dict[bool, Callable[..., Any]] = {}
        argnums, argnames = static
        self._options: dict[str, Any] = {"static_argnums": argnums, "static_argnames": argnames}
        self._tested = jax.jit(self._with_test, **self._options)

    def __call__(self, args: Any, kwargs: Any) -> Any:
        """Runs the step; first settles the calls whose verdict is in."""
        # This is most of what watching costs a small step: it is written for speed.
        pending = self._pending
        with self._lock:
            if kwargs or not self._known.issuperset(map(id, args)):
                args, kwargs = self._own(args, kwargs)
            while pending and (len(pending) >= self._kept or (self._is_local and _is_in(pending[0]))):
                self._settle(pending.popleft())
            if not self._calls:
                self._on_several = is_on_several((args, kwargs))
                bytes_each = sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves((args, kwargs)))
                self._kept = max(KEPT_CALLS, min(MORE_CALLS, KEPT_BYTES // max(1, bytes_each)))
            out, failed = self._tested(*args, **kwargs)
            if not self._calls:
                # The processes of a program over several must run the same call again at the same time.
                self._is_local = failed.is_fully_addressable
            pending.append(_Call(self._calls, args, kwargs, failed))
            self._calls += 1
            self._last_results = tuple(out) if type(out) in (tuple, list) else (out,)
            self._known = set(map(id, self._last_results))
        unsettled.add(self.settle)
        return out

    def settle(self, deadline: float | None) -> None:
        """Waits for the verdicts of all calls, and runs again what failed; see `unsettled`."""
        with self._lock:
            while self._pending:
                while deadline is not None and not _is_in(self._pending[0]):
                    if perf_counter() > deadline:
                        raise TapTimeoutError(
                            f"call {self._pending[0].number} of {self.name} was still running when the time was up: "
                            "give more time (timeout_sec=)"
                        )
                    sleep(_POLL_SEC)
                self._settle(self._pending.popleft())

    def _own(self, args: Any, kwargs: Any) -> Any:
        # To flatten a model can take longer than the rest of a call.
        args = tuple([arg if id(arg) in self._known else _copied(arg) for arg in args])
        return args, _copied(kwargs) if kwargs else kwargs

    # ---- The test ----------------------------------------------------------------------------------------------------

    def _with_test(self, *args: Any, **kwargs: Any) -> Any:
        results = self._fun(*args, **kwargs)
        return results, failed_groups(results, several=self._on_several)

    # ---- The second run ----------------------------------------------------------------------------------------------

    def _settle(self, call: _Call) -> None:
        try:
            failed = np.asarray(call.failed)
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
            if self._found is not None:
                self._found(call.args, call.kwargs)
            note = self._run_again(call, new)
            if note:
                self._report_results(call, new, note)

    def _run_again(self, call: _Call, new: Any) -> str:
        """Runs a call again; returns what was in the way of a report, or an empty text."""
        leaves = jax.tree.leaves((call.args, call.kwargs))
        if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in leaves):
            return "the call could not be run again, because another program has taken its arguments (donate_argnums)"
        again = self._second(checked=True)
        try:
            failed = np.asarray(again(np.int32(call.number), *call.args, **call.kwargs))
        except NotRepeatableError as error:
            return f"the call was not run again, because that would repeat {error}. Use mode='every'"
        except Exception as error:
            logger.exception("the second run of call %d of %s failed", call.number, self.name)
            return f"the second run of the call failed: {type(error).__name__}: {error}"
        if (failed & new).any():
            return ""
        return f"not reproduced: {self._why_not(call, new)}"

    def _why_not(self, call: _Call, new: Any) -> str:
        text = "the same call with the same arguments, run again with checks, made other results"
        if self._callbacks:
            return f"{text}, and it calls {', '.join(dict.fromkeys(self._callbacks))}"
        plain = np.asarray(self._second(checked=False)(np.int32(call.number), *call.args, **call.kwargs))
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

    def _report_results(self, call: _Call, new: Any, note: str) -> None:
        results, _ = self._tested.eval_shape(*call.args, **call.kwargs)
        for group, bad in zip(groups_of(results, several=self._on_several), new, strict=True):
            if bad:
                path, leaf = group[0]
                more = f" or {len(group) - 1} others of its shape" if len(group) > 1 else ""
                name = f"result{jax.tree_util.keystr(path)}{more}"
                operation = Operation(name, self._line, "", leaf.shape, leaf.dtype, False, self.name)
                counts, number = (np.int32(0), np.int32(0)), np.int32(call.number)
                report([operation], [np.bool_(True)], [counts], [number], cotangent=False, note=note)


def _is_in(call: _Call) -> bool:
    failed: Any = call.failed  # whose method has no annotation
    return bool(failed.is_ready())


def _copied(tree: Any) -> Any:
    """Copies NumPy arrays, which their owner may fill again before the second run."""
    if type(tree) is compat.ArrayImpl:
        return tree
    if any(type(leaf) is np.ndarray for leaf in jax.tree.leaves(tree)):
        return jax.tree.map(lambda leaf: jnp.array(leaf) if type(leaf) is np.ndarray else leaf, tree)
    return tree


def is_on_several(tree: Any) -> bool:
    """Whether an array is partitioned over devices, or on several."""
    return any(
        len(leaf.sharding.device_set) > 1 for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)
    )

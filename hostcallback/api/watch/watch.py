"""`watch_nonfinite`: finds the operation that made a NaN or an infinite value out of finite ones."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, ParamSpec, TypeVar, overload

import jax.numpy as jnp
import numpy as np
from jax import lax

from hostcallback import _jax_compat as compat
from hostcallback.api.barrier import add_after_delivery
from hostcallback.api.watch.diagnosis import Unsound, WatchedProgram, Where, selector
from hostcallback.lowering.device_ops import FINE, FIRST, FURTHER, NOT_COUNTED, forget, verdict
from hostcallback.lowering.inputs import groups_not_finite, is_inexact, run_keeping_inputs, send_inputs_if
from hostcallback.lowering.xray import Context, Program, Xray
from hostcallback.receiver.failures.deferred_errors import MultipleFailures
from hostcallback.receiver.log import logger
from hostcallback.receiver.messages import Message, device_text
from hostcallback.receiver.runtime.host_messages import send
from hostcallback.receiver.runtime.runtime import runtime
from hostcallback.receiver.sinks.nonfinite import Explains
from hostcallback.receiver.wire import tap_descriptor
from hostcallback.tracing.source_line import public, user_source_line
from hostcallback.tracing.tap_spec import TapSpec

P = ParamSpec("P")
R = TypeVar("R")

Mode = Literal["results", "every"]

MAX_PASSED_ON = 1024
"""Number of values of which is known that a reported program made them."""

MAX_NAME_CHARS = 100
"""Characters of a program's name that logs have."""

MAX_WALKS = 8
"""Number of walks of a program for each of its tests that fail; later failed calls are counted."""


@overload
def watch_nonfinite(
    fun: Callable[P, R], *, where: Where = None, inputs: bool = True, mode: Mode = "results"
) -> Callable[P, R]: ...
@overload
def watch_nonfinite(
    *, where: Where = None, inputs: bool = True, mode: Mode = "results", all_threads: bool = False
) -> Context: ...
@public
def watch_nonfinite(
    fun: Callable[P, R] | None = None,
    *,
    where: Where = None,
    inputs: bool = True,
    mode: Mode = "results",
    all_threads: bool = False,
) -> Callable[P, R] | Context:
    """Reports the operation that made a NaN or an infinite value in the programs called by `fun`: `NonFiniteError`.

    `watch_nonfinite(step)` is `step`, called in a context; `with watch_nonfinite(): ...` is that context for all
    programs that the block calls, of any framework's jit. `@watch_nonfinite(mode="every")` decorates a function. The
    watch itself calls and traces no function.

    Each program tests its results. If a call fails the test, it sends its inputs, and a receiver thread walks the
    program on them, operation by operation. The error is a `CheckError`, raised like those of `hcb.check`: by
    `hcb.barrier_wait` or the end of the receiver, in a `TapFunctionException`, or according to the receiver's
    `on_error`. There is one error per operation, the first failure first, which counts the failed calls.
    `disable_checks("watch_nonfinite")` turns the reports off.

    An operation is reported if its operands are finite, or if it makes a NaN of infinite constants. So neither
    operations to which a NaN spreads nor operations that pass a mask of `-inf` on are reported. An input that has such
    a value is, by its path: `input batch['x'][3,5]`. A result of the program must depend on what is reported.

    Within a trace, as in `jax.jit(watch_nonfinite(f))`, the values that leave the equations of `fun` are tested, and
    those of its backward pass under `jax.grad`. In a function that is not jitted, each operation is a program.

    Args:
        fun: a function; None for the context.
        where: the operations to report; None for all. A text is a named scope (`"attention"`,
            `"decoder/attention"`) or, if it ends in `.py`, the end of a file's path (`"model.py"`, `"nets/model.py"`).
            A function gets an `Operation` and returns whether to report it.
        inputs: whether to report values that came in with the inputs.
        mode: `"results"`, or `"every"` to test each operation as it runs too, which costs a pass over each value. It
            reports the same, and operations with finite operands whose values reach no result, such as a NaN behind
            `jnp.where`.
        all_threads: of the context, whether programs that other threads call are meant too, except those that tap
            functions run.

    Returns:
        A function with the signature of `fun`, or the context, which is also a decorator.

    Raises:
        TypeError: `fun` is not callable, a generator function or async, or `where` has another type.
        ValueError: `mode` is another text.

    Example:
        step = hcb.watch_nonfinite(jax.jit(train_step, donate_argnums=0))
    """
    if fun is not None and not callable(fun):
        raise TypeError(
            f"hcb.watch_nonfinite takes a function, got {type(fun).__name__} {fun!r}: watch_nonfinite(f)(x), not "
            f"watch_nonfinite(f(x)), at {user_source_line()}"
        )
    if mode not in ("results", "every"):
        raise ValueError(
            f"watch_nonfinite's mode is {mode!r}, expected 'results' or 'every', at {user_source_line()}"
        )
    selector(where)
    context = Context(Watch(where, inputs, mode == "every"), all_threads=all_threads)
    return context if fun is None else context.wrap(fun)


@dataclass(frozen=True)
class Watch(Xray):
    """Tests the results of programs, and has the calls that fail diagnosed. See `watch_nonfinite` for the options."""

    where: Where = None
    inputs: bool = True
    every: bool = False
    passed_on: _PassedOn = field(default_factory=lambda: _PassedOn(), compare=False)

    made_by = "hcb.watch_nonfinite"
    order = 1  # after the taps of others, whose values are not the program's

    def rewrite(self, program: Program, context: Context) -> compat.ClosedJaxpr | None:
        """Returns the program with the test and what sends its inputs."""
        if not any(is_inexact(aval) for aval in program.closed.out_avals) and not (
            self.every or program.mark
        ):
            return None
        watched = WatchedProgram(
            program.without_values(), program.function, user_source_line(), selector(self.where), self.inputs,
            self.every,
        )  # fmt: skip
        if isinstance(self.where, str):
            context.notes["selected"] = context.notes.get("selected") or watched.has_selected()
        receive, params = _Receive(watched, self.passed_on), {"program": program.function[:MAX_NAME_CHARS]}
        receive.reports_all = self.where is None and self.inputs and not program.mark
        tests = watched.tests()

        def evaluate(values: Sequence[Any]) -> tuple[list[Any], Any]:
            failed: list[Any] = []
            if self.every or program.mark:
                outs, inside = tests.failed(program.tapped, values)
                failed.append(inside[None])
            else:
                outs = compat.eval_jaxpr(program.tapped, *values)
            if not program.mark and any(map(is_inexact, outs)):
                failed.append(groups_not_finite(outs, program.devices))
            return outs, failed[0] if len(failed) == 1 else jnp.concatenate(failed)

        def run(*values: Any) -> list[Any]:
            (outs, failed), kept = run_keeping_inputs(program, values, evaluate)
            what = f"{program.function} {program.closed.in_avals} {program.closed.out_avals}"
            judged = verdict(failed, what)

            def send(kept: list[Any]) -> tuple[()]:
                for kind, inputs in ((FIRST, kept), (FURTHER, [])):
                    send_inputs_if(
                        judged[0] == kind, [failed, judged, *inputs], receive, "watch_nonfinite",
                        tap_descriptor.NONFINITE, params,
                    )  # fmt: skip
                return ()

            lax.cond(judged[0] == FINE, lambda kept: (), send, kept)
            return list(outs)

        return program.run(run)

    def left(self, context: Context, function: str | None) -> None:
        """Warns once if the scope or file that was selected is in none of the programs."""
        if context.notes.get("selected") is False and context.notes.setdefault("tell", True):
            context.notes["tell"] = False
            logger.warning(
                "watch_nonfinite(where=%r) reports nothing of the programs that were compiled in %s: none has such a "
                "named scope or file", self.where, function or "the block",
            )  # fmt: skip


def diagnoser(program: Program, name: str) -> Callable[[Message, Any, Sequence[Any]], None]:
    """Returns the function that reports a call with non-finite results, for callers that have the inputs.

    It takes a message of the failed call, the `verdict` of it, and the constants and inputs of the call. A receiver
    thread calls it. It raises `MultipleFailures` with a failed check per operation.
    """
    receive = _Receive(WatchedProgram(program, name), _PassedOn())

    def report(message: Message, judged: Any, arrays: Sequence[Any]) -> None:
        receive(message._replace(arrays=[np.array(False), np.array([True]), judged, *arrays]))

    return report


def raise_found(message: Message, found: Sequence[Explains]) -> NoReturn:
    """Reports what made the values of a failed call, here and in the log that has the message. Receiver threads.

    Raises:
        MultipleFailures: always; the receiver defers the failed checks that it has.
    """
    device = device_text(message.device)
    if runtime.scope_of(device).batch_sinks or runtime.flight is not None:
        for each in found:
            # As a message of the same launch, so that it gets the step of the call.
            send(
                each.described(message),
                each.arrays_about(message),
                runtime.receivers([device]),
                message.run_id,
            )
        add_after_delivery(_until_recorded)
    raise MultipleFailures(
        "operations made values that are not finite", [each.failure(message) for each in found]
    )


def _until_recorded(deadline: float | None) -> None:
    runtime.wait_delivered(deadline=deadline)


class _PassedOn:
    """The non-finite results of programs that were reported since the last barrier. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: collections.OrderedDict[Unsound, None] = collections.OrderedDict()

    def add(self, results: Sequence[Unsound]) -> None:
        with self._lock:
            self._known.update(dict.fromkeys(results))
            add_after_delivery(self._clear)
            while len(self._known) > MAX_PASSED_ON:
                self._known.popitem(last=False)

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, value: object) -> bool:
        return value in self._known

    def _clear(self, deadline: float | None) -> None:
        with self._lock:
            self._known.clear()


def reports_all(tap: TapSpec) -> bool:
    """Whether it is the tap of a watch that reports each call of a program whose results are not finite."""
    return isinstance(tap.binding.func, _Receive) and tap.binding.func.reports_all


class _Receive:
    """Takes the messages of the failed calls of one program. Receiver threads."""

    reports_all = False

    def __init__(self, watched: WatchedProgram, passed_on: _PassedOn) -> None:
        self._watched = watched
        self._passed_on = passed_on
        self._lock = threading.Lock()  # protects the rest
        self._seen: Any = False  # which groups of results were not finite in a call that is diagnosed
        self._found: list[Explains] = []
        self._results: list[Unsound] = []
        self._walks: Any = 0  # by test: in results that are meant to be infinite the walks find nothing

    def __call__(self, message: Message) -> None:
        """Diagnoses the first failed call; raises its failures for each one, so that they are counted.

        Raises:
            MultipleFailures: has a failed check per operation.
        """
        _, failed, (kind, number), *arrays = message.arrays
        is_counted = number != NOT_COUNTED
        with self._lock:
            is_first = kind == FIRST and (is_counted or np.any(failed & ~np.asarray(self._seen)))
            if is_first and np.any(failed & (np.asarray(self._walks) < MAX_WALKS)):
                self._walks = self._walks + failed
                self._seen = self._seen | failed
                add_after_delivery(self._begin_again)
                call = int(number) if is_counted else None
                diagnosis = self._watched.diagnose(arrays, message.device, call, self._passed_on)
                # A call that only passes on what was reported is one more failure of that.
                self._found = diagnosis.found or self._found
                self._results = diagnosis.results
            self._passed_on.add(self._results)
            found = list(self._found)
        if found:
            raise_found(message, found)

    def _begin_again(self, deadline: float | None) -> None:
        # The program may fail in another way from now on: it sends its inputs again.
        with self._lock:
            self._seen = False
        forget()

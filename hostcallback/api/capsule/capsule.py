"""`capsule`: keeps the inputs of a step's calls until their messages are delivered; writes those of one that failed."""

from __future__ import annotations

import collections
import functools
import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import jax
import numpy as np

from hostcallback import _jax_compat as compat
from hostcallback.api.capsule.program import FlatCall
from hostcallback.api.failures.about import about_this_process
from hostcallback.api.failures.failures import add_report, capsule_path, described, is_nonfinite
from hostcallback.api.nonfinite.instrument import instrumented
from hostcallback.api.nonfinite.rerun import Rerun, is_on_several
from hostcallback.api.nonfinite.watch import RERUN
from hostcallback.api.nonfinite.watcher import Watcher
from hostcallback.api.public import public
from hostcallback.lifecycle import unsettled
from hostcallback.primitives.bind import bind_tap
from hostcallback.receiver.capsule.file_format import (
    PROGRAM,
    PROMOTED,
    WATCHED,
)
from hostcallback.receiver.capsule.writing import CapsuleWriter
from hostcallback.receiver.errors import TapFailure
from hostcallback.receiver.log import logger
from hostcallback.receiver.messages import deferred_errors
from hostcallback.receiver.messages.check_report import FailedCheck
from hostcallback.receiver.messages.message import Message, Sink
from hostcallback.receiver.runtime.runtime import runtime
from hostcallback.receiver.sinks.factory import Binding
from hostcallback.tracing.source_line import user_source_line
from hostcallback.tracing.tap_options import TapOptions

P = ParamSpec("P")
R = TypeVar("R")

MAX_BYTES = 1 << 30
KEEP = 32

BEHIND = 4
"""Number of calls by which a device may be behind another one: their inputs are kept too."""

RUNS = 256
"""Number of launches whose calls are known."""

WAIT_SEC = 10.0
"""Seconds for which a call waits while the inputs of too many calls are kept."""

_POLL_SEC = 0.0005


@dataclass(frozen=True)
class _Call:
    number: int
    args: Any
    kwargs: Any


@public
def capsule(
    step: Callable[P, R],
    directory: str | os.PathLike[str] = "capsules",
    *,
    nonfinite: bool = False,
    keep: int = KEEP,
    max_bytes: int = MAX_BYTES,
    max_capsules: int = 3,
) -> Callable[P, R]:
    """Returns `step` such that a call of it that fails leaves a file with which the failure can be seen again.

    A call fails if a check in it fails (`hcb.check`, `hcb.checked`), if a tap function raises, or, with
    `nonfinite=True`, if its results have a NaN or an infinite value. The file, a *capsule*, has the program with its
    taps and checks, the inputs of that call, the report, versions and devices, and, if the receiver records, the last
    messages. `hcb reproduce FILE` runs it on any machine with JAX; docs/capsules.md describes it.

    The capsule is written by the next call of the step, by `hcb.barrier_wait` or by the receiver's end, whichever is
    first, and is on the disk when its path is logged. It is not written if the process is killed before that.

    The inputs of a call are kept until its messages are delivered, so donated arguments are not donated, and a call
    waits, up to 10 s, if `keep` calls have undelivered messages. Without launch
    numbers (the callback transport), a failure belongs to the last call that the device had begun.

    Args:
        step: a function of pytrees, jitted or not; it is compiled by `jax.jit`.
        directory: folder of the capsules, made when it is needed.
        nonfinite: whether to test the results of each call, as `hcb.watch_nonfinite(mode="rerun")` does.
        keep: number of calls whose inputs are kept, at least 1.
        max_bytes: largest number of bytes of inputs in a capsule; larger inputs are left out, the largest first.
        max_capsules: number of capsules that the step writes.

    Returns:
        A function with the signature of `step`, for calls outside of traces; in a trace it is `step`. Any thread.

    Raises:
        TypeError: `step` is not a function, or is watched by `hcb.watch_nonfinite` already.
        ValueError: a number is out of range.

    Example:
        step = hcb.capsule(jax.jit(train_step), "capsules", nonfinite=True)
    """
    if not callable(step):
        raise TypeError(f"hcb.capsule takes a function, got {type(step).__name__} {step!r}: capsule(step)(x)")
    if hasattr(step, RERUN):
        raise TypeError(
            "hcb.capsule got a step that hcb.watch_nonfinite watches: give it the step itself, and nonfinite=True, at "
            f"{user_source_line()}"
        )
    for name, value in (("keep", keep), ("max_bytes", max_bytes), ("max_capsules", max_capsules)):
        if type(value) is not int or value < 1:
            raise ValueError(f"{name} is {value!r}, expected a whole number of at least 1")
    steps = CapsuleStep(
        step, Path(directory), nonfinite=nonfinite, keep=keep, max_bytes=max_bytes, max_capsules=max_capsules
    )

    @functools.wraps(step)
    def kept(*args: P.args, **kwargs: P.kwargs) -> R:
        if not compat.outside_traces() or runtime.serves(threading.current_thread()):
            return step(*args, **kwargs)
        return cast(R, steps(args, kwargs))

    return kept


class CapsuleStep:
    """A step whose failing calls are written. Any thread may call it; capsules are written in the caller's thread."""

    def __init__(
        self,
        step: Callable[..., Any],
        directory: Path,
        *,
        nonfinite: bool,
        keep: int,
        max_bytes: int,
        max_capsules: int,
    ) -> None:
        """Makes the step; see `capsule`."""
        self._step = step
        self._directory = directory
        self._keep = keep
        self._max_bytes = max_bytes
        self._left = max_capsules
        self._written: set[int] = set()  # numbers of the calls that have capsules
        self._name = str(getattr(step, "__name__", "step"))
        self._line = user_source_line()
        self._static = compat.static_arguments(step) or ((), ())
        self._has_given_up = False
        self._margin = 0  # number of calls by which a device may be behind another
        self._lock = threading.RLock()  # protects the calls, in the callers' threads
        self._calls = 0
        self._kept: collections.deque[_Call] = collections.deque()
        self._rerun_of: _Call | None = None  # the call whose results have a NaN
        # The receivers' threads change these three, each by one operation that needs no lock.
        self._begun: dict[int, int] = {}  # by receiver thread, the number of its last call
        self._runs: dict[int, int] = {}  # by launch, the number of the call
        self._last_begun = -1
        self._noticed: collections.deque[tuple[_Call | int, FailedCheck | TapFailure]] = collections.deque()
        argnums, argnames = self._static
        options: Any = {
            "static_argnums": tuple(n + 1 if n >= 0 else n for n in argnums),
            "static_argnames": argnames,
        }
        self._run: Callable[..., Any] = jax.jit(self._marked, **options)
        if nonfinite:
            static = (options["static_argnums"], argnames)
            rerun = Rerun(
                self._marked, lambda operation: True, inputs=True, static=static, found=self._found_nonfinite
            )
            rerun.name = self._name
            self._run = lambda number, *args, **kwargs: rerun((number, *args), kwargs)
        # The listeners must not keep the step, and with it the user's function.
        method = weakref.WeakMethod(self._notice)

        def notice(failure: FailedCheck | TapFailure) -> bool:
            step = method()
            return step is not None and step(failure)

        deferred_errors.listen(notice)
        weakref.finalize(self, deferred_errors.ignore, notice)

    # ---- Calls -------------------------------------------------------------------------------------------------------

    def __call__(self, args: Any, kwargs: Any) -> Any:
        """Runs the step, once the inputs of an earlier call need not be kept any more."""
        with self._lock:
            self._write_noticed()
            self._forget_delivered()
            args, kwargs = _without_numpy((args, kwargs))
            if not self._calls and is_on_several((args, kwargs)):
                self._margin = BEHIND
            call = _Call(self._calls, args, kwargs)
            self._calls += 1
            self._kept.append(call)
            out = self._run(np.int32(call.number), *args, **kwargs)
        unsettled.add_after_delivery(self._settle)
        return out

    def _marked(self, number: Any, *args: Any, **kwargs: Any) -> Any:
        options = TapOptions(f"capsule:{self._name}", processes="all")
        bind_tap(
            number,
            (),
            {},
            Binding(self._begin, calls=_with_message),
            identity=(self._begin,),
            options=options,
        )
        return self._step(*args, **kwargs)

    def _begin(self, message: Message) -> None:
        number = int(message.arrays[0])
        self._begun[threading.get_ident()] = self._last_begun = number
        if message.run_id:  # on the callback transport there is none
            self._runs[message.run_id] = number
            while len(self._runs) > RUNS:
                self._runs.pop(next(iter(self._runs)), None)

    def _forget_delivered(self) -> None:
        # The messages of a call are delivered once those of a later one are: programs of a device run in order.
        deadline = time.monotonic() + WAIT_SEC
        while self._kept and (self._is_over(self._kept[0]) or len(self._kept) >= self._keep):
            if not self._is_over(self._kept[0]):
                if time.monotonic() < deadline:
                    time.sleep(_POLL_SEC)
                    self._write_noticed()
                    continue
                # A tap function takes long, or the tap of the numbers is switched off: the program must go on.
                if not self._has_given_up:
                    self._has_given_up = True
                    logger.warning(
                        "hcb.capsule(%s): the messages of %d calls are not delivered after %g s, so the inputs of call "
                        "%d are not kept any longer: a failure of such a call leaves no capsule (keep=%d)",
                        self._name, len(self._kept), WAIT_SEC, self._kept[0].number, self._keep,
                    )  # fmt: skip
            self._kept.popleft()

    def _is_over(self, call: _Call) -> bool:
        return call.number < self._last_begun - self._margin

    def _settle(self, deadline: float | None) -> None:
        with self._lock:
            self._write_noticed()
            self._kept = collections.deque(c for c in self._kept if c.number > self._last_begun)

    # ---- Failures ----------------------------------------------------------------------------------------------------

    def _notice(self, failure: FailedCheck | TapFailure) -> bool:
        # Receiver threads. The call is looked up now, while its inputs are kept. Returns whether it is this step's.
        if is_nonfinite(failure):
            call, self._rerun_of = self._rerun_of, None
            if call is not None:
                self._noticed.append((call, failure))
            return call is not None
        run = failure.first.run_id if isinstance(failure, FailedCheck) else failure.run_id
        number = self._runs.get(run) if run else self._begun.get(threading.get_ident(), self._last_begun)
        if number is not None:
            found = [(call, failure) for call in tuple(self._kept) if call.number == number]
            self._noticed.extend(found)
            return bool(found)
        if self._margin:  # another device's thread has not delivered the number of the call yet
            self._noticed.append((run, failure))
        return False

    def _found_nonfinite(self, args: Any, kwargs: Any) -> None:
        number, *rest = args
        self._rerun_of = _Call(int(number), tuple(rest), kwargs)

    def _write_noticed(self) -> None:
        while self._noticed:
            call, failure = self._noticed.popleft()
            if isinstance(call, int):  # a launch; of another program if it is not known by now
                number = self._runs.get(call)
                found = next((kept for kept in self._kept if kept.number == number), None)
                if found is None:
                    continue
                call = found
            if self._left and call.number not in self._written:  # a call may fail in several places
                self._left -= 1
                self._written.add(call.number)
                self._write(call, failure)

    def _write(self, call: _Call, failure: FailedCheck | TapFailure) -> None:
        path = capsule_path(self._directory, self._name, call.number)
        try:
            self._write_to(path, call, failure)
        except Exception:  # the program goes on, and its failure is reported anyhow
            logger.exception(
                "the capsule %s of call %d of %s could not be written", path, call.number, self._name
            )
            return
        logger.error(
            "call %d of %s failed (%s). To see it again: hcb reproduce %s",
            call.number, self._name, described(failure).text, path,
        )  # fmt: skip

    def _write_to(self, path: Path, call: _Call, failure: FailedCheck | TapFailure) -> None:
        flat = FlatCall(self._step, call.args, call.kwargs, self._static)
        failing = flat
        if is_nonfinite(failure):  # the program must show where: it has a check of each operation
            failing = FlatCall(self._watched, call.args, call.kwargs, self._static)
        writer = CapsuleWriter(path, self._max_bytes)
        try:
            for member, what, export in (
                (PROGRAM, "the program", failing.export),
                (WATCHED, "the program for --bisect", flat.export_digests),
                (PROMOTED, "the program for --bisect float64", flat.export_digests_promoted),
            ):
                self._add_program(writer, member, what, export)
            writer.add_inputs(flat.inputs())
            add_report(writer, failure)
            about = {"name": self._name, "call": call.number, "line": str(self._line), **about_this_process()}
            writer.finish(about, described(failure))
        finally:
            writer.discard()

    def _add_program(
        self, writer: CapsuleWriter, member: str, what: str, export: Callable[[], bytes]
    ) -> None:
        try:
            data = export()
        except Exception as error:
            writer.left_out.append(f"{what}: jax.export refuses it: {type(error).__name__}: {error}")
        else:
            writer.add(member, data)

    def _watched(self, *args: Any, **kwargs: Any) -> Any:
        return instrumented(self._step, args, kwargs, Watcher(lambda operation: True), inputs=True)


def _with_message(func: Callable[..., Any], *_: Any, **options: Any) -> Sink:
    return func


def _without_numpy(tree: Any) -> Any:
    # Their owner may fill them again before they are written.
    return jax.tree.map(lambda leaf: np.array(leaf) if type(leaf) is np.ndarray else leaf, tree)

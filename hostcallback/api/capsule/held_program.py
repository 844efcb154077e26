"""Programs whose failing calls become capsules: joins a call's inputs with its failure report, on receiver threads."""

from __future__ import annotations

import collections
import itertools
import math
import reprlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from hostcallback import _jax_compat as compat
from hostcallback.api import barrier, capsule_contents
from hostcallback.api.capsule.programs import data_of, mesh_of, programs, struct_of
from hostcallback.api.watch import watch
from hostcallback.lowering import xray
from hostcallback.receiver.capsule.file_format import CapsuleWriter, Input, Shard
from hostcallback.receiver.errors import TapFailure
from hostcallback.receiver.failures import check_report, deferred_errors
from hostcallback.receiver.log import logger
from hostcallback.receiver.messages import Message
from hostcallback.receiver.runtime.runtime import runtime
from hostcallback.receiver.sinks.nonfinite import Explains, Watched
from hostcallback.receiver.sources.ring_batch import RingConfig
from hostcallback.tracing.tap_spec import TapSpec

Reported = check_report.FailedCheck | TapFailure
Arrays = Sequence[np.ndarray[Any, Any]]

LAUNCHES = 256
"""Number of launches of which it is known that they have a capsule."""

WAITING = 4
"""Number of launches whose inputs wait for a report, of programs on several devices."""

DESCRIPTION_BYTES = 128
"""More than the description of one array has in a message; the descriptions must fit into half of the ring."""

NOT_SENT = (
    "a tap function raises when the inputs of its call are gone; hcb.capsule(..., exceptions=True) has programs with "
    "taps send those of each call"
)
NOT_ARRIVED = (
    "they did not arrive: the program was ended before (on_error='abort'), its taps are off, messages were dropped, or "
    "the failed check is where it is not looked for, such as in a custom_root or in the condition of a while_loop"
)


@dataclass(frozen=True)
class CapsuleOptions(xray.Xray):
    """The options of `capsule`, and the number of capsules so far."""

    folder: Path
    line: str = field(compare=False)
    nonfinite: bool
    exceptions: bool
    max_bytes: int
    max_capsules: int
    written: collections.Counter[str] = field(default_factory=collections.Counter, compare=False)
    """By the function's name, the number of its capsules."""
    seen: set[str] = field(default_factory=set, compare=False)
    """The names of the jitted functions whose programs were lowered."""


class HeldProgram:
    """A program whose failing calls are written. Receiver threads call it with the inputs of calls.

    Attributes:
        options: the options of `capsule`.
        program: the program.
        name: of its function.
        constants: the program's constants, of typed keys their data.
        sent: numbers of the inputs that are sent; constants are not, others are too large.
        donated: for each input, whether it must be copied before the program takes its memory.
    """

    def __init__(self, options: CapsuleOptions, program: xray.Program, *, reports: bool = True) -> None:
        """Keeps what a capsule of the program has, for as long as the compiled program lives.

        `reports`: whether it reports results that are not finite; otherwise a watch in the program does, with the
        capsule.
        """
        self.options = options
        self.program = program.without_values()
        self.name = "pmap" if compat.is_pmap(program.closed) else program.function
        with program.own_work():  # a receiver thread must not wait for the device
            self.constants = [data_of(value) for value in program.constants]
        ring_bytes = RingConfig.from_environment().capacity_bytes
        self.sent = _fitting(program, options.max_bytes, ring_bytes // 2 // DESCRIPTION_BYTES)
        self.donated = tuple(d and i in set(self.sent) for i, d in enumerate(program.donated))
        devices = {device for s in program.shardings if s is not None for device in s.device_set}
        self._waits = options.exceptions or len(devices) > 1
        self._diagnose = watch.diagnoser(replace(self.program, mark=""), self.name)
        self._reports = reports
        self._number = next(_numbers)
        self._specs: dict[int, tuple[TapSpec, TapSpec]] = {}

    def own(self, spec: TapSpec) -> TapSpec:
        """Returns a copy of the tap for this program, so that its messages are known to come from it."""
        return self._specs.setdefault(id(spec), (spec, spec.of(self, self._number)))[1]

    def __call__(self, message: Message) -> None:
        """Takes the inputs of a call; writes the capsule if its failure was reported, or else keeps them for it.

        Raises:
            MultipleFailures: the receiver defers the `NonFiniteError` that it has.
        """
        arrays, (bad, *judged) = message.arrays[: len(self.sent)], message.arrays[len(self.sent) :]
        run, is_bad = message.run_id, bool(np.any(bad))
        with _lock:
            known = _written.get(run) if run else None
            failed = _pending.pop((run, self), None) or (known.lacks_inputs if known else None)
            if failed is None and known is None and (is_bad or self._waits):
                _waiting[run, self] = arrays
                while len(_waiting) > WAITING:
                    _waiting.popitem(last=False)
                barrier.add_after_delivery(_settle)
        if failed is not None and failed.held is self:
            _write(failed, run, arrays)
        if is_bad and self._reports:
            self._report(message, arrays, judged[0])

    def _report(self, message: Message, arrays: Arrays, judged: np.ndarray[Any, Any]) -> None:
        # Raises `MultipleFailures` with a `NonFiniteError`.
        if len(self.constants) + len(self.sent) == len(self.program.paths):
            with self.program.own_work():
                constants = list(map(np.asarray, self.constants))
            self._diagnose(message, judged, [*constants, *arrays])
        line = compat.traced_function(self.program.closed) or self.name
        note = f"in the results of {self.name}"
        explains = Explains(Watched("result", None, "", (), "float", False, note), 0, 0, ())
        watch.raise_found(message._replace(consumer=replace(message.consumer, source_line=line)), [explains])

    def inputs(self, arrays: Arrays | None, why_not: str) -> Iterator[tuple[Input, list[Any]]]:
        """The constants and inputs of the program, and the elements of those that are there.

        Args:
            arrays: those that were sent; None if they are not there.
            why_not: why they are not there.
        """
        program, names = self.program, set[str]()
        first = len(self.constants)
        found = dict(enumerate(self.constants)) | dict(
            zip(self.sent, arrays or (), strict=arrays is not None)
        )
        for number, aval in enumerate(map(struct_of, program.closed.in_avals)):
            path = "/".join(program.paths[number]) or f"input {number - first}"
            path = f"constant {number}" if number < first else path
            path = f"{path} ({number})" if path in names else path
            names.add(path)
            whole = Shard("", 0, (0,) * len(aval.shape), tuple(map(int, aval.shape)))
            left_out = why_not if arrays is None and number >= first else ""
            yield (
                Input(
                    path, np.dtype(aval.dtype).name, whole.shape, (whole,),
                    *mesh_of(program.shardings[number], len(aval.shape)), left_out,
                ),
                [found[number]] if number in found else [],
            )  # fmt: skip


def _fitting(program: xray.Program, max_bytes: int, most: int) -> list[int]:
    """The numbers of the inputs that a message may have: the smallest first, in all `max_bytes`, and `most` arrays."""
    sizes = {
        number: math.prod(array.shape) * np.dtype(array.dtype).itemsize
        for number, array in enumerate(map(struct_of, program.closed.in_avals))
        if number >= len(program.constants)
    }
    order = sorted(sizes, key=sizes.__getitem__)[:most]
    totals = itertools.accumulate(sizes[number] for number in order)
    return sorted(number for number, total in zip(order, totals, strict=True) if total <= max_bytes)


# ---- Failures and their inputs ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Failed:
    """A failure of a call: the program, the report, and the value that the tap got whose function raised."""

    held: HeldProgram
    reported: Reported
    value: str = ""


@dataclass(frozen=True)
class _Written:
    """The capsule of a launch, and the failure if its inputs may still arrive."""

    path: Path
    lacks_inputs: _Failed | None


_lock = threading.Lock()  # protects what follows
_numbers = itertools.count()
_pending: dict[tuple[int, HeldProgram], _Failed] = {}
"""By launch, a failure whose inputs have not arrived. Launches have the number 0 on the callback transport."""
_waiting: collections.OrderedDict[tuple[int, HeldProgram], Arrays] = collections.OrderedDict()
"""By launch, inputs for which no failure has been reported."""
_written: collections.OrderedDict[int, _Written] = collections.OrderedDict()

outside_of_jit: set[str] = set()
"""The source lines of taps that ran outside of jit in a block of `capsule`, and of whose failures nothing was said."""


def _notice(reported: Reported) -> bool:
    # Receiver threads. Returns whether the failure is of a program here.
    message = deferred_errors.failing_message()
    if message is None:
        return False
    run, held = message.run_id, message.consumer.origin
    is_check = isinstance(reported, check_report.FailedCheck)
    with _lock:
        if not isinstance(held, HeldProgram) and capsule_contents.is_nonfinite(reported):
            # The message with the inputs is the report's.
            held = next((each for launch, each in reversed(_waiting) if launch == run), None)
        if not isinstance(held, HeldProgram):
            if reported.source_line in outside_of_jit:
                outside_of_jit.remove(reported.source_line)
                logger.warning(
                    "hcb.capsule keeps nothing of the failed %s at %s, which ran outside of jit, where no program has "
                    "the inputs: jit the function around it", "check" if is_check else "tap", reported.source_line,
                )  # fmt: skip
            return False
        arrays = _waiting.pop((run, held), None)
        if run and run in _written:
            return True
        failed = _Failed(held, reported, "" if is_check else _value_of(message))
        if arrays is None and (is_check or held.options.exceptions):
            _pending.setdefault((run, held), failed)
            barrier.add_after_delivery(_settle)
            return True
        if arrays is None and (run, held) in _pending:
            return True
    _write(failed, run, arrays)
    return True


def _value_of(message: Message) -> str:
    try:
        return reprlib.repr(message.consumer.unflatten(message.arrays))
    except Exception as error:  # of a shard, or of a class whose repr fails
        return f"(not known: {type(error).__name__})"


deferred_errors.listen(_notice)


def _settle(deadline: float | None) -> None:
    # All messages are delivered: what has not arrived does not come.
    with _lock:
        missing = list(_pending.items())
        _pending.clear()
        _waiting.clear()
        for run, written in _written.items():
            _written[run] = replace(written, lacks_inputs=None)
    for (run, _), failed in missing:
        _write(failed, run, None)


def _write(failed: _Failed, run: int, arrays: Arrays | None) -> None:
    held = failed.held
    options, name = held.options, held.name
    with _lock:
        if run in _written and run:
            path = _written[run].path
        else:
            number = options.written[name]
            if number >= options.max_capsules:
                return
            options.written[name] += 1
            path = capsule_contents.capsule_path(options.folder, name, number)
        if run:
            _written[run] = _Written(path, failed if arrays is None else None)
            while len(_written) > LAUNCHES:
                _written.popitem(last=False)
    try:
        with runtime.working(), held.program.own_work():
            _write_to(path, failed, arrays)
    except Exception as error:  # the program goes on, and its failure is reported anyhow
        capsule_contents.log_unwritten(path, name, error)
        return
    how = "To see it again: hcb reproduce"
    if arrays is None and isinstance(failed.reported, TapFailure):
        how = (
            "Its report, without the inputs of the call, which hcb.capsule(..., exceptions=True) keeps: "
            "hcb reproduce --show"
        )
    logger.error("%s failed (%s). %s %s", name, capsule_contents.described(failed.reported).text, how, path)


def _write_to(path: Path, failed: _Failed, arrays: Arrays | None) -> None:
    held, reported = failed.held, failed.reported
    writer = CapsuleWriter(path, held.options.max_bytes)
    try:
        for member, what, export in programs(held.program):
            try:
                data = export()
            except Exception as error:  # callbacks of JAX, for example
                writer.left_out.append(f"{what}: jax.export refuses it: {type(error).__name__}: {error}")
            else:
                writer.add(member, data)
        why_not = NOT_ARRIVED if isinstance(reported, check_report.FailedCheck) else NOT_SENT
        if arrays is None:
            writer.left_out.append(f"the inputs: {why_not}")
        writer.add_inputs(held.inputs(arrays, why_not))
        capsule_contents.add_report(
            writer, reported, f"\n  the tap got: {failed.value}" if failed.value else ""
        )
        about = {"name": held.name, "of": "program", "line": held.options.line}
        writer.finish(about | capsule_contents.about_this_process(), capsule_contents.described(reported))
    finally:
        writer.discard()

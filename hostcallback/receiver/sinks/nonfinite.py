"""What `watch_nonfinite` reports: each operation that made NaN or infinite values, as a failed check."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from hostcallback.receiver import limits
from hostcallback.receiver.failures.call_site import CallSite, DescribedFrame, Frame
from hostcallback.receiver.failures.check_report import CheckError, FailedCheck
from hostcallback.receiver.failures.deferred_errors import DelegatedFailure, MultipleFailures
from hostcallback.receiver.failures.explanation import CheckFailed, Explanation
from hostcallback.receiver.messages import Consumer, Message
from hostcallback.receiver.wire.tap_descriptor import NONFINITE, TapDescriptor


class NonFiniteError(CheckError, ArithmeticError):
    """An operation that `watch_nonfinite` watches made NaN or infinite values out of finite ones.

    Attributes:
        primitive: the name of JAX's primitive, such as `log`; `input x[0]` for an argument of the watched function.
        source_line: the user's line; None if it is not known.
        scope: the named scopes around it, separated by `/`.
        shape: shape of the array; under vmap, of one element.
        dtype: dtype of the array, as text.
        nan_count: number of elements that were NaN the first time; under vmap, in the whole batch.
        inf_count: number of elements that were infinite the first time; under vmap, in the whole batch.
        iteration: iterations of the loops around it the first time, outermost first.
        device: the device on which it happened first, as text, such as `cpu:0`.
        backward: whether the operation belongs to the backward pass.
        call: the number of the call of the watched step, from 0, if the report is of a second run of that call; None
            if the program was watched as it ran.
        compilation: the number of that program among those of its function's name that were compiled, from 1: a
            function that is compiled again for each call has a call 0 in each.
        reproduced: False if the second run did not make what the test of the results had found; None if there was no
            second run.

    Example:
        hcb.watch_nonfinite(jnp.log)(x)
        try:
            hcb.barrier_wait()
        except* hcb.NonFiniteError as group:
            print(group.exceptions[0].primitive, group.exceptions[0].inf_count)
    """

    primitive: str
    source_line: Any
    scope: str
    shape: tuple[int, ...]
    dtype: str
    nan_count: int
    inf_count: int
    iteration: tuple[int, ...]
    backward: bool
    call: int | None
    compilation: int
    reproduced: bool | None

    def __init__(self, check: FailedCheck, also: str = "") -> None:
        """Makes the error; see `CheckError`. Its attributes are the details of the explanation."""
        super().__init__(check, also)
        self.__dict__.update(check.explanation.details)
        self.device = self.__dict__.get("device") or check.first.device


class Line(NamedTuple):
    """A line of another process's code.

    Attributes:
        file: the path in that process.
        line: the 1-based line number.
        function: the enclosing function.
    """

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        """Formats the line as `file:line (function)`."""
        return f"{self.file}:{self.line} ({self.function})"


@dataclass(frozen=True, slots=True)
class Watched:
    """One result of one operation.

    Attributes:
        primitive: the name of JAX's primitive.
        source_line: the user's line, an object with `file`, `line` and `function` whose text names the line; None if
            it is not known.
        scope: the named scopes around it, separated by `/`.
        shape: shape of the result.
        dtype: dtype of the result, as text.
        backward: whether the operation belongs to the backward pass.
        note: what else is known; empty for an operation. With a note, the numbers of values are not known.
        step: name of the program whose recording was walked; empty if it was not.
        compilation: number of that program among those of its name, from 1.
    """

    primitive: str
    source_line: Any
    scope: str
    shape: tuple[int, ...]
    dtype: str
    backward: bool
    note: str = ""
    step: str = ""
    compilation: int = 1

    @property
    def name(self) -> str:
        """Name of the operation in reports."""
        return f"backward pass, {self.primitive}" if self.backward else self.primitive

    def plain(self) -> list[Any]:
        """Returns the fields as plain data, for processes that did not trace the program."""
        line = self.source_line
        place = None if line is None else [line.file, line.line, line.function]
        return [self.primitive, place, self.scope, list(self.shape), self.dtype, self.backward]

    @classmethod
    def from_plain(cls, plain: Sequence[Any]) -> Watched:
        """Reverses `plain`.

        Raises:
            ValueError: the data was not made by `plain`.
            TypeError: as above.
        """
        primitive, place, scope, shape, dtype, backward, *_ = plain  # earlier versions wrote more
        if place is not None and [type(item) for item in place] != [str, int, str]:
            raise ValueError(f"the place of an operation is described as {str(place)[:80]}")
        if not all(type(text) is str for text in (primitive, scope, dtype)):
            raise ValueError(f"an operation is described as {str(plain)[:80]}")
        line = None if place is None else Line(*place)
        return cls(primitive, line, scope, tuple(map(int, shape)), dtype, bool(backward))

    @property
    def places(self) -> Sequence[CallSite]:
        """The user's line as a call site; empty if it is not known."""
        line = self.source_line
        if line is None:
            return ()
        made = DescribedFrame if isinstance(line, Line) else Frame
        return (CallSite((made(line.file, line.line, line.function),)),)


class FoundSink:
    """Takes messages of which is known what they report, in a log or a stream."""

    __slots__ = ("_found", "_text")

    def __init__(self, found: Explains, text: str = "") -> None:
        """`text` says it on a line; by default, that of `found` does."""
        self._found = found
        self._text = text

    @classmethod
    def of_failed_calls(cls, program: str) -> FoundSink:
        """The sink for the inputs of failed calls of a program: what made the values, other messages tell."""
        note = "the process that ran the program reported the operation"
        watched = Watched("a result", None, "", (), "", False, note=note, step=program)
        return cls(Explains(watched, 0, 0, (), is_known=False), f"a result of {program} is NaN or infinite")

    def __call__(self, message: Message) -> None:
        """Takes one message.

        Raises:
            MultipleFailures: has one failed check, with the number and the time of the message of the failed call.
        """
        about = message.arrays[1] if len(message.arrays) == 2 else None  # earlier versions did not send it
        if isinstance(about, np.ndarray) and (about.dtype, about.shape) == (np.int64, (2,)):
            message = message._replace(seq=int(about[0]), time_ns=int(about[1]))
        raise MultipleFailures("a call made values that are not finite", [self._found.failure(message)])

    def texts(self, message: Message) -> list[str]:
        """Returns the text of the failure."""
        return [self._text or self._found.explain(message).text]


@dataclass(frozen=True, slots=True)
class Explains:
    """What is known of one operation that made values that are not finite.

    Attributes:
        operation: the operation.
        nan_count: number of NaN elements of its result.
        inf_count: number of infinite elements.
        iteration: iterations of the loops around it, outermost first.
        where: the first element that is not finite, as a phrase.
        elements: the same as an index.
        values: texts about the operands, by name.
        call: number of the call, if `Watched.step` is known.
        device: of the devices of the program, the one on which it happened; empty for the one that sent the message.
        is_known: False if the operation is not known here, and other messages about the program tell it.
        part: number of the operation among those of its name and line that are reported, from 0.
    """

    operation: Watched
    nan_count: int
    inf_count: int
    iteration: tuple[int, ...]
    where: str = ""
    elements: tuple[int, ...] = ()
    values: Mapping[str, str] = field(default_factory=dict)
    call: int | None = None
    device: str = ""
    is_known: bool = True
    part: int = 0

    def __call__(self, message: Message) -> None:
        """Does nothing: `explain` has the text."""

    def described(self, message: Message) -> TapDescriptor:
        """Describes a message for logs that tells this of a failed call, whose inputs are another message."""
        operation = self.operation
        params = {
            "operation": operation.plain(), "note": operation.note, "step": operation.step,
            "nan_count": self.nan_count, "inf_count": self.inf_count, "iteration": [*map(int, self.iteration)],
            "where": self.where, "elements": [*map(int, self.elements)], "values": dict(self.values),
            "call": self.call, "compilation": operation.compilation, "device": self.device,
            "part": self.part,
        }  # fmt: skip
        line = str(operation.source_line or message.consumer.source_line)
        digest = hashlib.blake2b(repr((line, params)).encode(), digest_size=8).digest()
        return TapDescriptor(
            operation.name[: limits.NAME_CHARS], line[: limits.NAME_CHARS], int.from_bytes(digest, "little") or 1,
            NONFINITE.text, {"found": params}, {}, (), ["list", [["array"], ["array"]]], None, "global",
        )  # fmt: skip

    @staticmethod
    def arrays_about(message: Message) -> list[np.ndarray[Any, Any]]:
        """The arrays of that message: a predicate, and the number and the time of the failed call's message."""
        return [np.array(False), np.array([message.seq, message.time_ns], np.int64)]

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Explains:
        """Reverses `described`, given its parameters.

        Raises:
            LookupError: the data was not made by it.
            ValueError: as above.
            TypeError: as above.
        """
        where, device, note, step = (
            str(plain[name])[: limits.REPORT_CHARS] for name in ("where", "device", "note", "step")
        )
        values = itertools.islice(plain["values"].items(), limits.REPORT_VALUES)
        call = plain["call"]
        return cls(
            replace(
                Watched.from_plain(plain["operation"]), note=note, step=step,
                compilation=int(plain.get("compilation", 1)),  # earlier versions did not write it
            ),
            int(plain["nan_count"]), int(plain["inf_count"]), tuple(map(int, plain["iteration"])), where,
            tuple(map(int, plain["elements"])),
            {str(name): str(text)[: limits.REPORT_CHARS] for name, text in values},
            None if call is None else int(call), device, part=int(plain.get("part", 0)),
        )  # fmt: skip

    def failure(self, message: Message) -> DelegatedFailure:
        """What to raise: a failed check at the operation's line."""
        line = str(self.operation.source_line or message.consumer.source_line)
        consumer = Consumer(0, self.operation.name, line, self, message.consumer.transforms)
        # Without the arrays, because a failure may be kept for long.
        return DelegatedFailure(consumer, CheckFailed(message._replace(arrays=()), self))

    def explain(self, message: Message) -> Explanation:
        """Explains the failure; see `hostcallback.receiver.failures.explanation.Explains`."""
        operation = self.operation
        shape = f"{operation.dtype}[{','.join(map(str, operation.shape))}]"
        counts = "NaN or" if operation.note else f"{self.nan_count} NaN and {self.inf_count}"
        text = f"{operation.name}: {counts} infinite values" + (f" in {shape}" if operation.dtype else "")
        if self.iteration:
            text += f", iteration {', '.join(map(str, self.iteration))}"
        if operation.scope:
            text += f", in scope {operation.scope}"
        if self.call is not None:
            text += f", call {self.call} of {operation.step}"
        elif operation.step:
            text += f", in {operation.step}"
        if operation.compilation > 1:
            text += f" (compilation {operation.compilation})"
        if self.device:
            text += f", on {self.device}"
        if operation.note:
            text += f": {operation.note}"
        return Explanation(
            text, self.values, self.where, self.elements, operation.places, error=NonFiniteError,
            details=self._details(), program=operation.step, is_known=self.is_known,
        )  # fmt: skip

    def _details(self) -> Mapping[str, Any]:
        operation = self.operation
        return {
            "primitive": operation.primitive,
            "source_line": operation.source_line,
            "scope": operation.scope,
            "shape": operation.shape,
            "dtype": operation.dtype,
            "nan_count": self.nan_count,
            "inf_count": self.inf_count,
            "iteration": self.iteration,
            "backward": operation.backward,
            "call": self.call,
            "compilation": operation.compilation,
            "device": self.device,
            "reproduced": None if not operation.step else not operation.note,
        }

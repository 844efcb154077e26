"""What the sink of a check says of a failure: that there is one, and, if a report needs it, why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from hostcallback.receiver.failures.call_site import CallSite
from hostcallback.receiver.messages import Message


class Explanation(NamedTuple):
    """The explanation of one failure from its values.

    Attributes:
        text: the check's message with its values.
        values: the format arguments as short texts, by position ("0") or name.
        where: the failed elements, as a phrase; empty if there is only one element.
        elements: index of the first failed element: in the batches of the vmaps around the check, outermost first, then
            in the predicate itself.
        places: call sites of the check: the same line, reached in different ways.
        problem: error while the text was made; empty if there was none.
        error: type of the error that reports the failure: a `CheckError`.
        details: further fields for that error.
        program: of a NaN report, the program that made the value; empty if it is not known.
        is_known: False for a report that other reports of its program make superfluous, because they say more.
    """

    text: str
    values: Mapping[str, str]
    where: str
    elements: tuple[int, ...]
    places: Sequence[CallSite]
    problem: str = ""
    error: type[Any] | None = None
    details: Mapping[str, Any] = {}
    program: str = ""
    is_known: bool = True

    def summary(self) -> str:
        """What failed besides the text, on one line: the failed elements, the values, the problem."""
        values = ", ".join(f"{name} = {text}" for name, text in self.values.items())
        return "; ".join(filter(None, (self.where, values, self.problem)))


class Explains(Protocol):
    """The sink of a check, which can explain a failure from its message."""

    def __call__(self, message: Message) -> None:
        """Receives a message, as a sink does."""

    def explain(self, message: Message) -> Explanation:
        """Explains a failure. Never raises. Receiver threads."""


class CheckFailed(BaseException):
    """Raised by the sink of a check. It is not an error of the sink: the dispatcher counts a failed check."""

    def __init__(self, message: Message, sink: Explains) -> None:
        """`sink` explains the message if a report needs it."""
        super().__init__()
        self.message = message
        self.sink = sink
        self.part: int = getattr(sink, "part", 0)
        """Number of a watched operation among those of its name and line."""

"""The kinds of taps, and what each implies: what its messages are for, what they hold, and how they are shown."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TapKind:
    """What a tap is for. Descriptors, tap logs and messages of exported programs hold its `text`.

    The defaults are those of a kind that this version does not know: its messages are values.

    Attributes:
        text: the name of the kind in descriptors and files.
        is_check: whether the first array is a predicate, a message is sent only where it does not hold, and messages
            are failures.
        folds: whether of a check's failures in a row only the first and the last need be read.
        prints: whether a message is printed or logged where no function takes it.
        is_text: whether readers of logs and streams show a message as text, in place of its value.
        has_metrics: whether numbers in its messages are metrics.
        has_arguments: whether its value is `(args, kwargs)`, with the predicate of a check before them.
        by_element: whether its sink takes the batches of vmap apart.
        sends_primals: whether a call may be differentiated, since it sends primals and returns nothing.
    """

    text: str
    is_check: bool = False
    folds: bool = False
    prints: bool = False
    is_text: bool = False
    has_metrics: bool = True
    has_arguments: bool = False
    by_element: bool = False
    sends_primals: bool = False

    @classmethod
    def named(cls, text: str) -> TapKind:
        """The kind of that text; one with the defaults if this version does not know it."""
        return _BY_TEXT.get(text) or cls(text)


TAP = TapKind("tap")
PRINT = TapKind("print", prints=True)
FORMAT = TapKind("format", prints=True, is_text=True, has_arguments=True, by_element=True)
CALLBACK = TapKind("callback", has_arguments=True, by_element=True)
CHECK = TapKind("check", is_check=True, folds=True, is_text=True, has_metrics=False, has_arguments=True)
NONFINITE = TapKind("nonfinite", is_check=True, is_text=True, has_metrics=False)
BREAKPOINT = TapKind("breakpoint", has_metrics=False, sends_primals=True)
METRICS = TapKind("metrics")
PROGRESS = TapKind("progress", is_text=True, has_metrics=False)
UNDESCRIBED = TapKind("undescribed")
"""The kind of a tap of which a log knows no more than the name."""

KINDS = (TAP, PRINT, FORMAT, CALLBACK, CHECK, NONFINITE, BREAKPOINT, METRICS, PROGRESS, UNDESCRIBED)
_BY_TEXT = {kind.text: kind for kind in KINDS}

"""The rule of one tap: its fields, the values that they may have, and their texts; globs of the names of taps."""

from __future__ import annotations

import difflib
import fnmatch
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hostcallback.receiver.log import logger
from hostcallback.receiver.messages import Registry
from hostcallback.receiver.tap_arguments import matches


def tap_names(registry: Registry, *, checks: bool = True) -> list[str]:
    """Returns the sorted names of the taps registered in this process, with or without checks."""
    return sorted({c.name for c in registry.consumers() if c.is_switchable and (checks or not c.is_check)})


def matching(pattern: str, names: Sequence[str]) -> list[str]:
    """Returns the names that match a glob; see `tap_arguments.matches`."""
    return [name for name in names if matches(name, pattern)]


def no_such_tap(pattern: str, names: Sequence[str]) -> str:
    """Returns a message with similar names: `no tap is called 'los' so far; there are 'loss'`."""
    near = difflib.get_close_matches(pattern, names, n=3) or list(names[:3])
    others = f"; there are {', '.join(map(repr, near))}" if near else ""
    return f"no tap is called {pattern!r} so far{others if names else ', since none was traced yet'}"


early: dict[str, None] = {}
"""Globs for which rules were set before any tap was traced: that is no mistake yet."""


def tell_early(names: Callable[[], Sequence[str]], *, ends: bool = False) -> None:
    """Warns of such globs that match no name. Without a name it does nothing, unless the process ends."""
    known = names() if early else []
    if known or ends:
        unmatched = [pattern for pattern in early if not matching(pattern, known)]
        early.clear()
        for pattern in unmatched:
            logger.warning("%s: what was set for it has had no effect", no_such_tap(pattern, known))


Predicate = Callable[[Any], bool]


MAX_GLOB = 256
"""Largest number of characters of a glob that comes from outside this process."""


@dataclass(frozen=True, slots=True)
class When:
    """Setting that lets a tap send only while a predicate holds for the last value it sent.

    Attributes:
        predicate: called on the receiver thread with each value that arrives.
        probe_every: while the predicate does not hold, one message in this many is sent, to ask it again; 0: none.
        probe_sec: while the predicate does not hold, one message per this many seconds is sent; 0: none.
    """

    predicate: Predicate
    probe_every: int
    probe_sec: float

    def __post_init__(self) -> None:
        """Checks the arguments, which come from users.

        Raises:
            TypeError: the predicate is not callable.
            ValueError: a number is out of its range, or both are zero.
        """
        if not callable(self.predicate):
            raise TypeError(
                f"when() takes a function of the last value, got {self.predicate!r}: as in when(lambda x: x.max() > 10)"
            )
        if not _is_int(self.probe_every) or self.probe_every < 0:
            raise ValueError(
                f"probe_every is {self.probe_every!r}, expected a whole number of messages, or 0"
            )
        if not _is_number(self.probe_sec) or not 0 <= self.probe_sec < 1e9:
            raise ValueError(f"probe_sec is {self.probe_sec!r}, expected a number of seconds, or 0")
        if not self.probe_every and not self.probe_sec:
            raise ValueError(
                "probe_every and probe_sec are both 0: the tap would stay silent once the predicate does not hold, "
                "expected at least one of them above 0"
            )


@dataclass(frozen=True, slots=True)
class Rule:
    """Limits of the messages of one tap. They apply in this order.

    Attributes:
        enabled: False sends no messages.
        every: sends the first message of a device and each `every`-th after it.
        when: sends only while a predicate holds for the value before; None for no predicate.
        rate: largest number of messages per second and device; None for no limit.
        truncate: number of elements that are sent of each array, from the first on; None for all.
    """

    enabled: bool = True
    every: int = 1
    when: When | None = None
    rate: float | None = None
    truncate: int | None = None

    def __str__(self) -> str:
        """What differs from the default, as in `every=100 rate=10`."""
        return settings_text(
            {field: value for field in FIELDS if (value := getattr(self, field)) != getattr(DEFAULT, field)}
        )

    @property
    def interval_ns(self) -> int:
        """The least time between two messages in ns; 0 for no limit."""
        return 0 if self.rate is None else round(1e9 / self.rate)

    @property
    def probe_ns(self) -> int:
        """The time in ns after which a closed gate lets one message pass; 0: never."""
        return 0 if self.when is None else round(self.when.probe_sec * 1e9)


DEFAULT = Rule()
OFF = Rule(enabled=False)


def checked(field: str, value: Any) -> Any:
    """Checks a user's value for a field of `Rule` and returns it.

    Raises:
        ValueError: no such field exists, or the value is not valid.
    """
    if field not in _CHECKS:
        raise ValueError(f"there is no rule {field!r}, expected one of {', '.join(_CHECKS)}")
    accepts, expected = _CHECKS[field]
    if not accepts(value):
        raise ValueError(f"{field} is {value!r}, expected {expected}")
    return float(value) if field == "rate" and value is not None else value


def checked_glob(pattern: Any) -> str:
    """Checks a glob that comes from outside this process and returns it.

    Raises:
        ValueError: it is not a text, is too long, or is not a valid glob.
    """
    if not isinstance(pattern, str) or not 0 < len(pattern) <= MAX_GLOB:
        raise ValueError(f"{pattern!r:.80} is no glob, expected a text of at most {MAX_GLOB} characters")
    try:
        fnmatch.fnmatchcase("", pattern)
    except (re.error, RecursionError) as error:
        raise ValueError(f"{pattern!r:.80} is no glob: {error}") from None
    return pattern


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "enabled": (lambda v: isinstance(v, bool), "true or false"),
    "every": (lambda v: _is_int(v) and 1 <= v < 1 << 63, "a whole number of messages, 1 or more"),
    "when": (lambda v: v is None or isinstance(v, When), "a predicate"),
    "rate": (
        lambda v: v is None or (_is_number(v) and 1e-9 <= v <= 1e9),
        "a number of messages per second above 0",
    ),
    "truncate": (
        lambda v: v is None or (_is_int(v) and 1 <= v < 1 << 63),
        "a whole number of elements, 1 or more",
    ),
}

FIELDS = tuple(_CHECKS)


def settings_text(settings: Mapping[str, Any]) -> str:
    """Formats settings as text: `every=100 rate=10`."""
    return " ".join(f"{field}={_value_text(value)}" for field, value in settings.items())


def _value_text(value: Any) -> str:
    if isinstance(value, When):
        return getattr(value.predicate, "__qualname__", repr(value.predicate))
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)

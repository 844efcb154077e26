"""Rules of taps: what may be said of those whose names match a glob, and what follows for one name."""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

Predicate = Callable[[Any], bool]

PYTHON, FILE = "", "file"
"""Who says a rule: calls in this process (and `hcb ctl`), or the control file. A collector has a name of its own."""

MAX_KNOWN = 4096
"""For how many names the outcome is remembered."""

MAX_GLOB = 256
"""The longest glob that is taken from elsewhere."""


@dataclass(frozen=True, slots=True)
class When:
    """The rule that a tap sends only while a predicate holds for what it sent last.

    Attributes:
        predicate: called on the receiver thread with each value that arrives.
        probe_every: while it does not hold, of so many messages one is sent, for it to be asked again; 0: none.
        probe_sec: likewise, one in so many seconds; 0: none.
    """

    predicate: Predicate
    probe_every: int = 100
    probe_sec: float = 1.0

    def __post_init__(self) -> None:
        """Checks what comes from users.

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
    """What one tap may send. The rules are asked in this order.

    Attributes:
        enabled: anything at all.
        every: of its messages on a device the first, and each `every`-th after it.
        when: only while a predicate holds for the value before.
        rate: at most so many messages a second on a device; None for no limit.
        truncate: of each array the first so many elements; None for all.
    """

    enabled: bool = True
    every: int = 1
    when: When | None = None
    rate: float | None = None
    truncate: int | None = None


DEFAULT = Rule()
OFF = Rule(enabled=False)


def checked(field: str, value: Any) -> Any:
    """The value of a field of `Rule` as somebody gave it, once it is sure that it makes sense.

    Raises:
        ValueError: there is no such field, or it cannot have that value.
    """
    if field not in _CHECKS:
        raise ValueError(f"there is no rule {field!r}, expected one of {', '.join(_CHECKS)}")
    accepts, expected = _CHECKS[field]
    if not accepts(value):
        raise ValueError(f"{field} is {value!r}, expected {expected}")
    return float(value) if field == "rate" and value is not None else value


def checked_glob(pattern: Any) -> str:
    """A glob of names that came from elsewhere, once it is sure that it is one.

    Raises:
        ValueError: it is no text, or too long.
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


class _Statement(NamedTuple):
    pattern: str
    field: str
    value: Any
    origin: str

    @property
    def place(self) -> tuple[str, str, str]:
        return self.pattern, self.field, self.origin


class Rules:
    """What has been said, in order: of what matches a name the last counts, for each field by itself. Immutable."""

    __slots__ = ("_known", "_statements")

    def __init__(self, statements: tuple[_Statement, ...] = ()) -> None:
        """Nothing was said; or `statements`."""
        self._statements = statements
        self._known: dict[str, Rule] = {}

    def __bool__(self) -> bool:
        """Whether anything was said."""
        return bool(self._statements)

    def with_setting(self, pattern: str, settings: Mapping[str, Any], origin: str = PYTHON) -> Rules:
        """The rules after settings were said of a pattern.

        Raises:
            ValueError: a setting makes no sense; see `checked`.
        """
        statements = list(self._statements)
        for field, value in settings.items():
            said = _Statement(pattern, field, checked(field, value), origin)
            statements = [s for s in statements if not _overrules(said, s)]
            others = any(s.field == field for s in statements)
            if others or value != getattr(DEFAULT, field):
                statements.append(said)
        return Rules(tuple(statements))

    def reset(self, pattern: str, origin: str = PYTHON) -> Rules:
        """The rules after all was said to be as by default for a pattern."""
        return self.with_setting(pattern, {field: getattr(DEFAULT, field) for field in FIELDS}, origin)

    def without(self, origin: str) -> Rules:
        """The rules without what one origin said."""
        return Rules(tuple(s for s in self._statements if s.origin != origin))

    def of(self, name: str) -> Rule:
        """What holds for a tap of that name."""
        rule = self._known.get(name)
        if rule is None:
            fields = {s.field: s.value for s in self._statements if fnmatch.fnmatchcase(name, s.pattern)}
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            rule = self._known[name] = Rule(**fields)
        return rule

    def table(self) -> dict[str, dict[str, Any]]:
        """By pattern, what was said of it last."""
        found: dict[str, dict[str, Any]] = {}
        for statement in self._statements:
            found.setdefault(statement.pattern, {})[statement.field] = statement.value
        return found


def _overrules(said: _Statement, earlier: _Statement) -> bool:
    # What was said of everything leaves nothing of what the same one said before.
    if said.pattern == "*":
        return (said.field, said.origin) == (earlier.field, earlier.origin)
    return said.place == earlier.place


def settings_text(settings: Mapping[str, Any]) -> str:
    """Settings for people: `every=100 rate=10`."""
    return " ".join(f"{field}={_value_text(value)}" for field, value in settings.items())


def rule_settings(rule: Rule) -> dict[str, Any]:
    """The fields of a rule that are not as by default."""
    return {field: value for field in FIELDS if (value := getattr(rule, field)) != getattr(DEFAULT, field)}


def _value_text(value: Any) -> str:
    if isinstance(value, When):
        return getattr(value.predicate, "__qualname__", repr(value.predicate))
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)

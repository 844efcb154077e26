"""Reads and checks what a page asks for: the parameters of requests, and the rules of taps."""

from __future__ import annotations

import json
import math
from typing import Any, NamedTuple

from starlette.datastructures import QueryParams

from hostcallback.receiver.errors import HostCallbackError
from hostcallback.receiver.runtime.rules.rules import checked, checked_glob
from hostcallback.receiver.ui.texts import Cursor

MAX_TEXT = 1000
"""Characters of a text in a query."""


class BadRequestError(HostCallbackError):
    """A request has a parameter that cannot be used; the text says which, and what was expected."""


class NoControlError(HostCallbackError):
    """Rules cannot be set here; the text says why, and how they could."""


class UnknownError(HostCallbackError):
    """A request is for something that does not exist."""


def whole(query: QueryParams, name: str, default: int, low: int, high: int) -> int:
    """A whole number; beyond the bounds, the nearest bound."""
    text = query.get(name)
    if text is None or text == "":
        return default
    try:
        return max(low, min(high, int(text[:20])))
    except ValueError:
        raise BadRequestError(
            f"{name} is {text[:50]!r}, expected a whole number from {low} to {high}"
        ) from None


def number(query: QueryParams, name: str) -> float | None:
    """A finite number; None if it is not given."""
    text = query.get(name)
    if text is None or text == "":
        return None
    try:
        found = float(text[:50])
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise BadRequestError(f"{name} is {text[:50]!r}, expected a finite number")
    return found


def text(query: QueryParams, name: str) -> str:
    """A short text; empty if it is not given."""
    found = query.get(name, "")
    if len(found) > MAX_TEXT:
        raise BadRequestError(f"{name} has {len(found)} characters, expected at most {MAX_TEXT}")
    return found


def choice(query: QueryParams, name: str, choices: tuple[str, ...]) -> str | None:
    """One of some words; None if it is not given."""
    found = query.get(name)
    if not found:
        return None
    if found not in choices:
        raise BadRequestError(f"{name} is {found[:50]!r}, expected one of {', '.join(choices)}")
    return found


def numbers(query: QueryParams, name: str, most: int, *, separator: str = ",") -> list[int]:
    """Whole numbers, from all parameters of that name, each of which may have several.

    Raises:
        BadRequestError: one is no whole number, or there are more than `most`.
    """
    given = [part for item in query.getlist(name) for part in item.split(separator) if part]
    if len(given) > most:
        raise BadRequestError(f"{name} is given {len(given)} times, expected at most {most} times")
    if not all(part.isascii() and part.isdecimal() and len(part) < 16 for part in given):
        raise BadRequestError(f"{name} is {given[0][:50]!r}, expected ids of taps, which are whole numbers")
    return [int(part) for part in given]


def one_tap(query: QueryParams) -> int:
    """The id of the tap that the request is about."""
    found = numbers(query, "tap", 1)
    if not found:
        raise BadRequestError("tap is missing, expected the id of a tap, as in ?tap=0")
    return found[0]


def cursor(query: QueryParams, name: str) -> Cursor | None:
    """The place of a line of text; None if it is not given."""
    found = query.get(name)
    try:
        return Cursor.parse(found) if found else None
    except ValueError as error:
        raise BadRequestError(f"{name}: {error}") from None


MAX_BODY = 64 << 10
"""Bytes of a request."""

FIELDS = "enabled", "every", "rate", "truncate"


class RuleRequest(NamedTuple):
    """Rules for the taps that match a glob.

    Attributes:
        pattern: the glob.
        settings: values by field; None for no limit.
        run: name of the run; empty for all.
        reset: whether all earlier rules of these taps are removed first.
    """

    pattern: str
    settings: dict[str, Any]
    run: str
    reset: bool


def parse_json(body: bytes) -> Any:
    """Reads the body of a request; raises BadRequestError if it is not JSON."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise BadRequestError(
            f"the body has {len(body)} bytes that are no JSON, expected a JSON object"
        ) from None


def parse(body: bytes) -> RuleRequest:
    """Reads the body of a request: null, or a missing field, changes nothing; 0 removes a limit.

    Raises:
        BadRequestError: it is not what docs/design/ui.md says.
    """
    found = parse_json(body)
    if not isinstance(found, dict) or not isinstance(found.get("tap"), str):
        raise BadRequestError(f"the body is {str(found)[:100]}, expected a JSON object with a glob as 'tap'")
    unknown = [name for name in found if name not in (*FIELDS, "tap", "run", "reset")]
    if unknown:
        raise BadRequestError(f"there is no rule {unknown[0][:100]!r}, expected {', '.join(FIELDS)}")
    given = {name: found[name] for name in FIELDS if found.get(name) is not None}
    limits = {
        name: None if name in ("rate", "truncate") and value == 0 and value is not False else value
        for name, value in given.items()
    }
    run = found.get("run") or ""
    try:
        settings = {name: checked(name, value) for name, value in limits.items()}
        pattern = checked_glob(found["tap"])
        run = checked_glob(run) if run else ""
    except ValueError as error:
        raise BadRequestError(str(error)) from None
    reset = found.get("reset") is True
    if not settings and not reset:
        raise BadRequestError(f"the rule changes nothing: give one of {', '.join(FIELDS)}, or reset")
    return RuleRequest(pattern, settings, run, reset)

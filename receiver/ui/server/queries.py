"""Reads and checks the parameters of requests."""

from __future__ import annotations

import math

from starlette.datastructures import QueryParams

from hostcallback.receiver.errors import HostCallbackError
from hostcallback.receiver.ui.texts.stream import Cursor

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

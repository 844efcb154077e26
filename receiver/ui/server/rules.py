"""The rules of taps that a page asks for, checked."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from hostcallback.receiver.runtime.rules.rules import checked, checked_glob
from hostcallback.receiver.ui.server.queries import BadRequestError

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


def parse(body: bytes) -> RuleRequest:
    """Reads the body of a request: null, or a missing field, changes nothing; 0 removes a limit.

    Raises:
        BadRequestError: it is not what docs/design/ui.md says.
    """
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        raise BadRequestError(
            f"the body has {len(body)} bytes that are no JSON, expected a JSON object"
        ) from None
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

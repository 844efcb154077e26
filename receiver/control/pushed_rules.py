"""Rules that another program, such as a collector, keeps for this process and pushes to it as a whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hostcallback.receiver.control.commands import rule_text, ruled
from hostcallback.receiver.control.errors import ControlError
from hostcallback.receiver.control.request import Client
from hostcallback.receiver.log import logger
from hostcallback.receiver.runtime.rules.rules import checked, checked_glob, settings_text
from hostcallback.receiver.runtime.runtime import Runtime

MAX_SHOWN = 8
"""Number of rules that a log line shows."""


class PushedRules:
    """Keeps this process's rules as one origin pushes them. Answers the command `rules` as the socket's handler does.
    The argument `said` lists all rules that apply now, as [glob, settings] pairs in order. If a client waits for an
    answer, `pattern` and `settings` say which taps it asks about; otherwise both are absent.
    """

    def __init__(self, runtime: Runtime, origin: str) -> None:
        """The origin, whose name no other origin has, has pushed no rules yet."""
        self._runtime = runtime
        self._origin = origin
        self._said: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, arguments: dict[str, Any], client: Client) -> dict[str, Any]:
        """Applies the rules if they changed, and returns the taps that match the client's glob with their rules.

        Raises:
            NoSuchTapError: no tap matches; the rules apply to later taps nevertheless.
            ControlError: the arguments are invalid; nothing changes.
            ValueError: a setting is invalid; nothing changes.
        """
        said = _checked(arguments.get("said"))
        if said != self._said:
            self._runtime.rule_table.replace_rules(self._runtime.registry, said, self._origin)
            self._said = said
            logger.warning("%s: %s", self._origin, described_rules(said))
        pattern, settings = arguments.get("pattern"), arguments.get("settings", {})
        if pattern is None:
            return {"names": [], "rules": {}}
        if not isinstance(settings, dict):
            raise ControlError(f"invalid settings {settings!r:.80}: expected an object of fields and values")
        found = ruled(self._runtime, checked_glob(pattern), settings)
        return {"names": found, "rules": {name: rule_text(self._runtime, name) for name in found}}


def described_rules(said: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Describes rules in one line, for logs."""
    if not said:
        return "no rules apply to this process's taps any more"
    texts = [f"{pattern!r} {settings_text(settings)}" for pattern, settings in said[:MAX_SHOWN]]
    more = f" and {len(said) - MAX_SHOWN} more" if len(said) > MAX_SHOWN else ""
    return f"{len(said)} rule(s) apply to this process's taps: {', '.join(texts)}{more}"


def _checked(said: Any) -> list[tuple[str, dict[str, Any]]]:
    if not isinstance(said, list):
        raise ControlError(f"invalid rules {said!r:.80}: expected a list of [glob, settings] pairs")
    found = []
    for item in said:
        if not isinstance(item, list) or len(item) != 2 or not isinstance(item[1], dict):
            raise ControlError(f"invalid rule {item!r:.80}: expected a [glob, settings] pair")
        pattern, settings = item
        if "when" in settings:
            raise ControlError("only Python can set a predicate: hcb.taps[glob].when(function)")
        found.append(
            (checked_glob(pattern), {name: checked(name, value) for name, value in settings.items()})
        )
    return found

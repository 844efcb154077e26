"""Rules that somebody elsewhere keeps for this process, such as a collector: all of them at a time, as in a file."""

from __future__ import annotations

from typing import Any

from receiver.control.commands import rule_text, ruled
from receiver.control.errors import ControlError
from receiver.control.request import Client
from receiver.log import logger
from receiver.runtime.rules.rules import checked, checked_glob
from receiver.runtime.runtime import Runtime


class PushedRules:
    """Keeps this process's rules as one origin has them. Answers the command `rules` in place of the socket's.

    The arguments are `said`, all that holds now, as [glob, settings] in order; and `pattern` with `settings`, what
    the client wants to hear about: both are left away where there is nobody who does.
    """

    def __init__(self, runtime: Runtime, origin: str) -> None:
        """Nothing was said by the origin, whose name no other has."""
        self._runtime = runtime
        self._origin = origin
        self._said: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, arguments: dict[str, Any], client: Client) -> dict[str, Any]:
        """Applies what is said if it is not what was said before, and answers which taps match and what holds for them.

        Raises:
            NoSuchTapError: no tap matches; what is said holds for those to come.
            ControlError: the arguments make no sense; nothing changes.
            ValueError: a setting makes no sense; nothing changes.
        """
        said = _checked(arguments.get("said"))
        if said != self._said:
            self._runtime.rule_table.replace_rules(self._runtime.registry, said, self._origin)
            self._said = said
            logger.info("%s: %d rule(s) of taps hold now", self._origin, len(said))
        pattern, settings = arguments.get("pattern"), arguments.get("settings", {})
        if pattern is None:
            return {"names": [], "rules": {}}
        if not isinstance(settings, dict):
            raise ControlError(f"settings are {settings!r:.80}, expected fields and values")
        found = ruled(self._runtime, checked_glob(pattern), settings)
        return {"names": found, "rules": {name: rule_text(self._runtime, name) for name in found}}


def _checked(said: Any) -> list[tuple[str, dict[str, Any]]]:
    if not isinstance(said, list):
        raise ControlError(f"what is said is {said!r:.80}, expected globs and settings")
    found = []
    for item in said:
        if not isinstance(item, list) or len(item) != 2 or not isinstance(item[1], dict):
            raise ControlError(f"what is said is {item!r:.80}, expected a glob and settings")
        pattern, settings = item
        if "when" in settings:
            raise ControlError("a predicate is Python's to give, hcb.taps[glob].when(function)")
        found.append(
            (checked_glob(pattern), {name: checked(name, value) for name, value in settings.items()})
        )
    return found

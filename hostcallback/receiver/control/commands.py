"""The commands that a process answers: its description, its taps and their rules, and its metrics."""

from __future__ import annotations

import os
import socket
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from hostcallback.receiver.control.protocol import Client, ControlError, Handler, NoSuchTapError
from hostcallback.receiver.failures.failure_report import failure_history
from hostcallback.receiver.log import logger
from hostcallback.receiver.messages import Consumer
from hostcallback.receiver.runtime.device_receiver import DeviceReceiver
from hostcallback.receiver.runtime.rules.rules import (
    checked,
    checked_glob,
    matching,
    no_such_tap,
    settings_text,
    tap_names,
)
from hostcallback.receiver.runtime.runtime import Runtime
from hostcallback.receiver.runtime.stop import stop_request
from hostcallback.receiver.text import command_line

_STARTED = time.time()


def commands(runtime: Runtime) -> dict[str, Handler]:
    """Returns the handlers, by command."""
    accounted = _Accounted(runtime)
    return {
        "process": lambda arguments, client: process() | {"logs": runtime.logs},
        "taps": lambda arguments, client: [_tap(runtime, group) for group in _taps(runtime)],
        "rules": lambda arguments, client: rules(runtime, arguments),
        "figures": accounted.figures,
        "knobs": lambda arguments, client: described_knobs(),
        "set": lambda arguments, client: set_knob(arguments),
        "stop": lambda arguments, client: stop(arguments),
    }


def process() -> dict[str, Any]:
    """Describes this process: id, host, command line, and start in Unix seconds."""
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "command": " ".join(command_line(sys.orig_argv))[:1000],
        "started": _STARTED,
    }


def rules(runtime: Runtime, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Sets the rules of the taps that match a glob, and returns the names of these taps with their rules.

    Raises:
        NoSuchTapError: no tap matches.
        ControlError: the arguments are not a glob with settings.
        ValueError: a setting is invalid.
    """
    pattern, settings = arguments.get("pattern"), arguments.get("settings", {})
    if not isinstance(pattern, str) or not isinstance(settings, dict) or "when" in settings:
        raise ControlError(f"rules are for a glob and have settings, got {dict(arguments)!r:.200}")
    found = ruled(runtime, pattern, settings)
    if arguments.get("reset"):
        runtime.rule_table.reset_rules(runtime.registry, pattern)
    if settings:
        runtime.rule_table.set_rules(runtime.registry, pattern, settings)
    return {"names": found, "rules": {name: rule_text(runtime, name) for name in found}}


def described_knobs() -> list[dict[str, Any]]:
    """Describes the knobs of this process."""
    from hostcallback.receiver.runtime.knobs import knobs  # here, because few processes have any

    return knobs.described()


def set_knob(arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Sets a knob, and describes it. The argument `by` says who sets it, `hcb ctl` by default.

    Raises:
        ControlError: the arguments are not a name and a value, or there is no such knob.
        ValueError: the value is not allowed.
    """
    from hostcallback.receiver.runtime.knobs import UnknownKnobError, knobs

    name = arguments.get("name")
    if not isinstance(name, str) or "value" not in arguments:
        raise ControlError(f"a knob is set by its name and a value, got {dict(arguments)!r:.200}")
    try:
        knobs.change(name, arguments["value"], _by(arguments))
    except (UnknownKnobError, TypeError) as error:
        raise ControlError(str(error)) from error
    return [knob for knob in described_knobs() if knob["name"] == name]


def stop(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Requests a stop, by `by` as in `set_knob`.

    Returns:
        The `reason` of the request that there is now, and `unheard`, why no loop ends by it; empty if one may.
    """
    unheard = stop_request.unheard()
    stop_request.make(_by(arguments))
    return {"reason": stop_request.reason, "unheard": unheard}


def _by(arguments: Mapping[str, Any]) -> str:
    return str(arguments.get("by") or "hcb ctl")[:80]


def ruled(runtime: Runtime, pattern: str, settings: Mapping[str, Any]) -> list[str]:
    """Names of the taps that the `settings` of a glob apply to.

    Raises:
        NoSuchTapError: no tap matches.
    """
    names = tap_names(runtime.registry, checks=not settings or set(settings) == {"enabled"})
    found = matching(pattern, names)
    if not found:
        checks = matching(pattern, tap_names(runtime.registry))
        only = f"{pattern!r} matches checks only, which can be disabled and enabled"
        raise NoSuchTapError(only if checks else no_such_tap(pattern, names))
    return found


def rule_text(runtime: Runtime, name: str) -> str:
    """The rules that apply to taps of one name, as in `every=100 rate=10`."""
    return str(runtime.rule_table.rules.of(name))


def _taps(runtime: Runtime) -> list[list[Consumer]]:
    # Groups the consumers that a user sees as one tap, such as those that transformations made of it.
    found: dict[tuple[str, str], list[Consumer]] = {}
    for consumer in runtime.registry.consumers():
        if consumer.is_switchable:
            found.setdefault((consumer.name, consumer.source_line), []).append(consumer)
    return [found[key] for key in sorted(found)]


def _tap(runtime: Runtime, consumers: list[Consumer]) -> dict[str, Any]:
    first = consumers[0]
    return {
        "name": first.name,
        "source_line": first.source_line,
        "check": first.is_check,
        "enabled": not runtime.rule_table.is_off(first),
        "rules": rule_text(runtime, first.name),
        "suppressed": sum(map(runtime.rule_table.suppressed, consumers)),
    }


class _Accounted:
    # Has each tap counted while a client that asked for metrics is connected. Counting costs time per message.

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._clients: weakref.WeakSet[Client] = weakref.WeakSet()

    def figures(self, arguments: Mapping[str, Any], client: Client) -> dict[str, Any]:
        # Once per client, since `count_taps` counts the clients.
        if client not in self._clients:
            self._clients.add(client)
            self._runtime.count_taps(True)
            client.on_close.append(lambda: self._leave(client))
        found = figures(self._runtime)
        return found | {"failures": failure_history.as_dicts()} if arguments.get("failures") else found

    def _leave(self, client: Client) -> None:
        self._clients.discard(client)
        self._runtime.count_taps(False)


_NOTHING_COUNTED: dict[str, Any] = {"messages": 0, "bytes": 0, "failed": 0, "tap_sec": 0.0}


def figures(runtime: Runtime) -> dict[str, Any]:
    """Current metrics of all devices and taps. Taps are counted from the first request of a connected client."""
    taps: dict[tuple[str, str], dict[str, Any]] = {}
    for consumers in _taps(runtime):
        known = _tap(runtime, consumers)
        taps[known["name"], known["source_line"]] = known | _NOTHING_COUNTED
    receivers = runtime.receivers()
    for receiver in receivers:
        for consumer, counted in (
            receiver.dispatcher.tap_counters.snapshot() if receiver.dispatcher.tap_counters else ()
        ):
            # Includes consumers without rules, such as calls.
            row = taps.setdefault(
                (consumer.name, consumer.source_line),
                {
                    "name": consumer.name, "source_line": consumer.source_line, "check": consumer.is_check,
                    "enabled": True, "rules": "", "suppressed": 0, **_NOTHING_COUNTED,
                },
            )  # fmt: skip
            row["messages"] += counted.messages
            row["bytes"] += counted.nbytes
            row["failed"] += counted.failed
            row["tap_sec"] += counted.tap_sec
    return {
        "time": time.time(),
        "process": process() | {"logs": runtime.logs},
        "devices": [_device(receiver) for receiver in receivers],
        "taps": list(taps.values()),
    }


def _device(receiver: DeviceReceiver) -> dict[str, Any]:
    counters = receiver.source.counters()
    running = receiver.running_tap()
    return {
        "device": receiver.name,
        "emitted": counters.emitted,
        "emitted_bytes": counters.emitted_bytes,
        "dropped": counters.dropped,
        "queued": receiver.queued(),
        "queued_bytes": counters.queued_bytes,
        "waiting": counters.waiting_producers,
        "running": None if running is None else [running[0].name, running[1]],
    }


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
    texts = [f"{pattern!r} {settings_text(settings)}" for pattern, settings in said]
    return f"{len(said)} rule(s) apply to this process's taps: {shortened(texts)}"


def shortened(rules: Sequence[str]) -> str:
    """The first `MAX_SHOWN` rules in one text, and how many more there are."""
    more = f" and {len(rules) - MAX_SHOWN} more" if len(rules) > MAX_SHOWN else ""
    return ", ".join(rules[:MAX_SHOWN]) + more


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

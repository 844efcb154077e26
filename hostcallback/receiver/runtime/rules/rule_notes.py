"""Notes in a log which taps the rules thin out, so that readers know that messages were left out on purpose."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Protocol

from hostcallback.receiver.messages import Registry
from hostcallback.receiver.runtime.rules.rule_table import RuleTable
from hostcallback.receiver.runtime.rules.rules import rule_settings, settings_text
from hostcallback.receiver.taplog.format.errors import ThinnedTap


class TakesRuleNotes(Protocol):
    """A recorder."""

    def note_rules(self, thinned: list[ThinnedTap]) -> None:
        """Writes a note."""


class RuleNotes:
    """Writes the rules of taps, and how many messages they suppressed, to a recorder. Any thread.

    A note is written when rules change, when a tap with rules is traced, and at the end. It has the taps that have
    rules, or had rules before, and the number of messages that were suppressed since the note before.
    """

    def __init__(self, table: RuleTable, registry: Registry, recorder: TakesRuleNotes) -> None:
        """Writes the rules in force, if there are any, and follows the table until `end`."""
        self._table = table
        self._registry = registry
        self._recorder = recorder
        self._lock = threading.Lock()  # protects everything below
        self._before = self._suppressed()
        self._rules: dict[str, str] = {}
        table.on_change.append(self._changed)
        self._changed()

    def end(self) -> None:
        """Writes the final counts, and follows the table no longer."""
        if self._changed in self._table.on_change:
            self._table.on_change.remove(self._changed)
            self._note(at_end=True)

    def _changed(self) -> None:
        self._note(at_end=False)

    def _note(self, *, at_end: bool) -> None:
        with self._lock:
            rules = {
                name: text
                for name in {c.name for c in self._registry.consumers() if c.is_switchable}
                if (text := settings_text(rule_settings(self._table.rules.of(name))))
            }
            now = self._suppressed()
            counts = {name: max(0, count - self._before[name]) for name, count in now.items()}
            if rules == self._rules and not (at_end and any(counts.values())):
                return
            names = {*rules, *self._rules, *(name for name, count in counts.items() if count)}
            self._before, self._rules = now, rules
            self._recorder.note_rules(
                [ThinnedTap(name, rules.get(name, ""), counts.get(name, 0)) for name in sorted(names)]
            )

    def _suppressed(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for consumer in self._registry.consumers():
            if consumer.is_switchable:
                found[consumer.name] += self._table.suppressed(consumer)
        return found

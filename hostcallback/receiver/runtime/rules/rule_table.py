"""The rules of a process's taps by glob, the checks that are off, and the notes of both in logs."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from hostcallback.receiver.messages import Consumer, Registry
from hostcallback.receiver.native import bindings as native_library
from hostcallback.receiver.runtime.rules.admission import EVERY_DEVICE, Admission, install_gate
from hostcallback.receiver.runtime.rules.rules import DEFAULT, FIELDS, OFF, Rule, checked, settings_text
from hostcallback.receiver.tap_arguments import matches

if TYPE_CHECKING:
    from hostcallback.receiver.taplog.format.layout import ThinnedTap

PYTHON, FILE = "", "file"
"""Origin of a setting: a call in this process (also `hcb ctl`), or the control file. A collector uses its own name."""

MAX_ADMISSIONS = 4096
"""Above this number the table drops the admissions of taps that are not registered any more."""


class RuleTable:
    """The rules and switches of one process. Any thread.

    A change applies to running programs and to later ones. The native handlers have a second table, which this class
    keeps equal to its own; other transports ask `is_off` and `admission`.

    Attributes:
        on_change: functions that are called after rules changed, or a tap with rules was registered.
        admissions: by consumer id, what admits the messages of taps that have rules, or had some.
    """

    def __init__(self) -> None:
        """Starts with all taps and checks on."""
        self.on_change: list[Callable[[], None]] = []
        # Reentrant: a rule that is set from a tap function or a signal handler may come while its thread
        # holds it. Comes before the locks of admissions and gates.
        self._lock = threading.RLock()  # protects everything below
        self._library: ctypes.CDLL | None = None
        self._rules = Rules()
        self._native_rules: dict[
            int, Rule
        ] = {}  # rules in the native table that are not the default, by consumer id
        self.admissions: dict[int, Admission] = {}
        self._off = (
            False  # True: all checks but those named in `_except` are off; False: all but those are on
        )
        self._except: set[str] = set()
        self._without: dict[
            tuple[int, int], None
        ] = {}  # (consumer id, device id) of checks that are off on a device
        self._aborting: set[int] = set()
        # Consumers that are off in this process because another one delivers (`processes="first"`): by consumer id,
        # whether that holds in all programs that have the tap.
        self._silent: dict[int, bool] = {}

    def after_fork_in_child(self) -> None:
        """Renews the lock, which a thread of the parent may have held."""
        self._lock = threading.RLock()
        for admission in self.admissions.values():
            admission.after_fork_in_child()

    @property
    def rules(self) -> Rules:
        """The rules of all taps."""
        return self._rules

    def use(self, library: ctypes.CDLL, registry: Registry) -> None:
        """Copies the table into the native library, now and after each change."""
        with self._lock:
            self._library = library
            for consumer_id, device in self._without:
                self._switch(consumer_id, device, True)
            for device in self._aborting:
                self.abort_on_check([device], True)
            self._tell_all(registry)

    def set_all(self, registry: Registry, *, off: bool) -> None:
        """Switches all checks on or off, and clears the switches of single names."""
        with self._lock:
            self._off = off
            self._except.clear()
            self._tell_all(registry)

    def set_named(self, registry: Registry, names: Iterable[str], *, off: bool) -> None:
        """Switches the checks of some names on or off."""
        with self._lock:
            if off == self._off:
                self._except.difference_update(names)
            else:
                self._except.update(names)
            self._tell_all(registry)

    def set_rules(self, registry: Registry, pattern: str, settings: Mapping[str, Any]) -> None:
        """Applies settings to all taps whose names match a glob, registered now or later.

        Raises:
            ValueError: a setting makes no sense.
        """
        self._change(registry, lambda rules: rules.with_setting(pattern, settings))

    def reset_rules(self, registry: Registry, pattern: str) -> None:
        """Restores the default settings of all taps whose names match a glob."""
        self._change(registry, lambda rules: rules.reset(pattern))

    def replace_rules(
        self, registry: Registry, said: Iterable[tuple[str, Mapping[str, Any]]], origin: str = PYTHON
    ) -> None:
        """Replaces all settings of one origin by others, in order. They count as newer than all other settings.

        Raises:
            ValueError: a setting is not valid; nothing changes then.
        """

        def change(rules: Rules) -> Rules:
            rules = rules.without(origin)
            for pattern, settings in said:
                rules = rules.with_setting(pattern, settings, origin)
            return rules

        self._change(registry, change)

    def _change(self, registry: Registry, change: Callable[[Rules], Rules]) -> None:
        with self._lock:
            self._rules = change(self._rules)
            self._tell_all(registry)
        self._report_change()

    def _report_change(self) -> None:
        # Without the lock: a report looks at the table and at the registry. A copy, because a report may
        # remove itself.
        for report in list(self.on_change):
            report()

    def register(self, consumer: Consumer, without: Iterable[int] = (), *, is_silent: bool = False) -> None:
        """Applies the rules to a new consumer.

        Args:
            consumer: the consumer of a tap.
            without: ids of the devices on which the check is off.
            is_silent: whether the tap is off in this process, whatever its rules say.
        """
        with self._lock:
            if is_silent or consumer.consumer_id in self._silent:
                self._silent[consumer.consumer_id] = is_silent and self._silent.get(
                    consumer.consumer_id, True
                )
            for device in without:
                self._without[consumer.consumer_id, device] = None
                self._switch(consumer.consumer_id, device, True)
            self._tell(consumer)
        if self._rules and self.on_change and self.rule_of(consumer) != DEFAULT:
            self._report_change()

    def rule_of(self, consumer: Consumer) -> Rule:
        """Returns the rule of a consumer. A check is only on or off, so that no failure is missing from a report."""
        if self._silent and self._silent.get(consumer.consumer_id):
            return OFF
        rule = self._rules.of(consumer.name) if self._rules and consumer.is_switchable else DEFAULT
        if consumer.own_rate is not None:
            return Rule(rate=consumer.own_rate or None) if rule.enabled else OFF
        if consumer.is_check:
            return OFF if not rule.enabled or self._is_check_off(consumer.name) else DEFAULT
        return rule

    def is_off(self, consumer: Consumer, device: int = EVERY_DEVICE) -> bool:
        """Whether a tap is off, everywhere or on the device with that id."""
        if (self._rules or self._silent) and not self.rule_of(consumer).enabled:
            return True
        if not consumer.is_check:
            return False
        return self._is_check_off(consumer.name) or (consumer.consumer_id, device) in self._without

    def _is_check_off(self, name: str) -> bool:
        return self._off != (name in self._except)

    def admission(self, consumer: Consumer) -> Admission | None:
        """Returns the object that admits messages of a tap without a native handler; None if all are sent."""
        # Without the lock, once per message: one look into a dict.
        admission = self.admissions.get(consumer.consumer_id)
        return None if admission is None or admission.rule == DEFAULT else admission

    def send_latest(self) -> bool:
        """Sends the latest messages that rates left out. Returns whether there were any. Does not wait."""
        native = self._library is not None and self._library.hcb_latest_send()
        return bool(sum([admission.send_kept() for admission in list(self.admissions.values())]) or native)

    def latest_waits(self) -> bool:
        """Whether such messages wait for room in a ring; then they are not among its emitted messages yet."""
        return self._library is not None and bool(self._library.hcb_latest_waiting())

    def suppressed(self, consumer: Consumer) -> int:
        """Returns how many messages of a tap its rules suppressed before sending or withheld after it."""
        admission = self.admissions.get(consumer.consumer_id)
        here = 0 if admission is None else admission.suppressed
        return here + (self._library.hcb_control_suppressed(consumer.consumer_id) if self._library else 0)

    def abort_on_check(self, devices: Iterable[int], on: bool) -> None:
        """Sets whether a check that fails on one of these devices ends its launch."""
        with self._lock:
            for device in devices:
                (self._aborting.add if on else self._aborting.discard)(device)
                if self._library is not None and self._library.hcb_abort_on_check(device, on):
                    raise _full()

    def aborts(self, device: int) -> bool:
        """Whether a failed check ends its launch on this device (see `abort_on_check`)."""
        return device in self._aborting

    def _tell_all(self, registry: Registry) -> None:
        if self._library is not None:
            # With entries in `_except` the native table gets each check's switch from `_tell`.
            self._library.hcb_switch_all_checks(self._off and not self._except)
            # A program that has failed while its check was off is reported when the check is on again.
            self._library.hcb_verdict_forget()
        consumers = registry.consumers()
        for consumer in consumers:
            self._tell(consumer)
        if len(self.admissions) > MAX_ADMISSIONS:
            live = {consumer.consumer_id for consumer in consumers}
            self.admissions = {i: admission for i, admission in self.admissions.items() if i in live}

    def _tell(self, consumer: Consumer) -> None:
        consumer_id, rule = consumer.consumer_id, self.rule_of(consumer)
        admission = self.admissions.get(consumer_id)
        if admission is None and rule != DEFAULT:
            admission = self.admissions[consumer_id] = Admission()
        if admission is not None:
            if rule != admission.rule:
                admission.set(rule)
                # A message that was kept under the old rule must not wait for a rate that no longer applies.
                admission.send_kept()
            install_gate(
                consumer, rule, functools.partial(self._set_gate, consumer_id, admission), admission.count
            )
        if self._library is None or rule == self._native_rules.get(consumer_id, DEFAULT):
            return
        control = native_library.Control(
            every=rule.every,
            probe_every=rule.when.probe_every if rule.when else 0,
            probe_ns=rule.probe_ns,
            interval_ns=rule.interval_ns,
            truncate=rule.truncate or 0,
            off=not rule.enabled,
        )
        if self._library.hcb_control_set(consumer_id, control):
            raise _full()
        if rule == DEFAULT:
            self._native_rules.pop(consumer_id, None)
        else:
            self._native_rules[consumer_id] = rule

    def _set_gate(self, consumer_id: int, admission: Admission, device: int, closed: bool) -> None:
        admission.set_gate(device, closed)
        if self._library is not None:
            self._library.hcb_control_gate(consumer_id, device, closed)

    def _switch(self, consumer_id: int, device: int, off: bool) -> None:
        if self._library is not None and self._library.hcb_switch(consumer_id, device, off):
            raise _full()


def _full() -> MemoryError:
    return MemoryError("the native library's table of switches is full")


class TakesRuleNotes(Protocol):
    """A recorder that accepts notes about rules."""

    @property
    def directory(self) -> os.PathLike[str]:
        """Folder of its log."""

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
        from hostcallback.receiver.taplog.format.layout import ThinnedTap  # few processes record

        with self._lock:
            rules = {
                name: text
                for name in {c.name for c in self._registry.consumers() if c.is_switchable}
                if (text := str(self._table.rules.of(name)))
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


MAX_KNOWN = 4096
"""Number of names whose rules are cached."""


class _Statement(NamedTuple):
    pattern: str
    field: str
    value: Any
    origin: str

    @property
    def place(self) -> tuple[str, str, str]:
        return self.pattern, self.field, self.origin


class Rules:
    """All settings, in the order in which they were made. Immutable.

    For each field, the most recent setting whose glob matches a tap's name applies.
    """

    __slots__ = ("_known", "_statements")

    def __init__(self, statements: tuple[_Statement, ...] = ()) -> None:
        """Holds `statements`; none by default."""
        self._statements = statements
        self._known: dict[str, Rule] = {}

    def __bool__(self) -> bool:
        """Whether there are any settings."""
        return bool(self._statements)

    def with_setting(self, pattern: str, settings: Mapping[str, Any], origin: str = PYTHON) -> Rules:
        """Returns rules with settings of a pattern added.

        Raises:
            ValueError: a setting is not valid; see `checked`.
        """
        statements = list(self._statements)
        for field, value in settings.items():
            said = _Statement(pattern, field, checked(field, value), origin)
            # Replaced settings are dropped, so that a program that changes a rule in a loop does not grow the list.
            statements = [s for s in statements if not _overrules(said, s)]
            # A default is stored only if it overrides another setting.
            others = any(s.field == field for s in statements)
            if others or value != getattr(DEFAULT, field):
                statements.append(said)
        return Rules(tuple(statements))

    def reset(self, pattern: str, origin: str = PYTHON) -> Rules:
        """Returns rules in which a pattern has the default settings."""
        return self.with_setting(pattern, {field: getattr(DEFAULT, field) for field in FIELDS}, origin)

    def without(self, origin: str) -> Rules:
        """Returns rules without the settings of one origin."""
        return Rules(tuple(s for s in self._statements if s.origin != origin))

    def of(self, name: str) -> Rule:
        """Returns the rule of a tap with that name."""
        rule = self._known.get(name)
        if rule is None:
            # Later settings come later, and replace earlier ones of the same field.
            fields = {s.field: s.value for s in self._statements if matches(name, s.pattern)}
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            rule = self._known[name] = Rule(**fields)
        return rule

    def table(self) -> dict[str, str]:
        """Returns, by pattern, its most recent settings, as in `every=100 rate=10`."""
        found: dict[str, dict[str, Any]] = {}
        for statement in self._statements:
            found.setdefault(statement.pattern, {})[statement.field] = statement.value
        return {pattern: settings_text(settings) for pattern, settings in found.items()}


def _overrules(said: _Statement, earlier: _Statement) -> bool:
    # A setting of "*" removes all earlier settings of the same field and origin.
    if said.pattern == "*":
        return (said.field, said.origin) == (earlier.field, earlier.origin)
    return said.place == earlier.place

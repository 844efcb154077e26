"""`taps` and `control_file`: control of taps at run time, without recompilation."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from hostcallback.receiver.control.endpoints import endpoints
from hostcallback.receiver.files import paths_of
from hostcallback.receiver.log import logger
from hostcallback.receiver.runtime.rules.rules import Predicate, When, early, matching, no_such_tap, tap_names
from hostcallback.receiver.runtime.runtime import runtime
from hostcallback.receiver.text import table
from hostcallback.tracing.source_line import hide_frames, public


class TapSelection:
    """The taps whose names match a glob, in running and in later programs. Made by `taps[glob]`.

    Its methods apply to messages emitted from now on; queued messages are delivered. Any thread may call them. For
    each rule, the most recent setting that matches a tap's name applies. The device's handler decides before it copies
    any data; a suppressed message takes no sequence number and is counted (`suppressed`). docs/control.md has the
    order of the rules and their meaning for sharded taps. Calls (`call`) and taps of exported programs have no rules;
    checks can only be switched off and on.

    Each method returns the names that match now. If no name matches, the rule applies to later taps, and similar names
    are logged: at once, or, if no tap was traced yet, at a barrier after that or at the end of the process.

    Example:
        hcb.taps["layer*/grad"].every(100)
    """

    def __init__(self, pattern: str) -> None:
        """Selects by a glob; see `Taps`."""
        self.pattern = pattern

    def __repr__(self) -> str:
        """Returns a text with the glob and the matching names with their rules."""
        described = [f"{name} ({text})" if text else name for name, text in self.rules.items()]
        return f"<taps[{self.pattern!r}]: {', '.join(described) or 'no tap yet'}>"

    def _repr_html_(self) -> str:
        return _table(self)

    @property
    def names(self) -> list[str]:
        """The matching names of taps of programs in this process, sorted."""
        return matching(self.pattern, tap_names(runtime.registry))

    @property
    def rules(self) -> dict[str, str]:
        """By name, its rules, as in `every=100 rate=10`; an empty text for a tap without rules."""
        return {name: str(runtime.rule_table.rules.of(name)) for name in self.names}

    @property
    def suppressed(self) -> dict[str, int]:
        """By name, the number of messages that rules have suppressed since the process began."""
        return {name: count for name, count in runtime.suppressed().items() if matching(self.pattern, [name])}

    @hide_frames
    def disable(self) -> list[str]:
        """Switches the taps off: they send nothing, and their functions are not called.

        A tap that is off costs its program as much as an empty foreign call. Checks are switched off as well (and
        `enable_checks` does not switch them on again).
        """
        return self._say(enabled=False)

    @hide_frames
    def enable(self) -> list[str]:
        """Switches the taps on again. See `disable`."""
        return self._say(enabled=True)

    @hide_frames
    def every(self, count: int) -> list[str]:
        """Sends the first message of each tap on each device, and every `count`-th after it; 1 sends all of them.

        Counting begins when the rule is set and continues over calls of the program.

        Raises:
            ValueError: `count` is not a whole number of at least 1.
        """
        return self._say(every=count)

    @hide_frames
    def rate(self, per_sec: float | None) -> list[str]:
        """Sends at most `per_sec` messages per second of each tap on each device, at least 1/`per_sec` s apart.

        The last value always arrives: when that time is over, or at a barrier (docs/control.md).

        Raises:
            ValueError: `per_sec` is neither a number above 0 nor None, which removes the limit.
        """
        return self._say(rate=per_sec)

    @hide_frames
    def truncate(self, elements: int | None) -> list[str]:
        """Sends only the first `elements` elements of each larger array, in row-major order, as one dimension.

        The tap function gets a `TruncatedArray` then: a one-dimensional array with the attribute `whole_shape`, which
        prints as `first 8 of (128, 64): [...]`.

        Raises:
            ValueError: `elements` is neither a whole number of at least 1 nor None, which sends all elements.
        """
        return self._say(truncate=elements)

    @hide_frames
    def when(
        self, predicate: Predicate | None, *, probe_every: int = 100, probe_sec: float = 1.0
    ) -> list[str]:
        """Delivers a message only if the predicate held for the previous one on its device. Delivers the first one.

        `predicate(value)` is called on the receiver thread with the tap function's argument (for `print` and
        `callback`: the positional and the keyword arguments). If it does not hold, the device stops sending, except
        for probes, for which the predicate is called again. Probes are not delivered, and neither are messages that
        were on their way. If the predicate raises, that is reported as a failure of the tap, and counts as true.

        Args:
            predicate: function of the value; None removes the rule.
            probe_every: while the predicate does not hold, one message in this many is a probe; 0 for none.
            probe_sec: while the predicate does not hold, one probe per this many seconds is sent; 0 for none.

        Raises:
            TypeError: the predicate is not callable.
            ValueError: a number is negative, or both are 0.
        """
        return self._say(when=None if predicate is None else When(predicate, probe_every, probe_sec))

    def reset(self) -> list[str]:
        """Restores the defaults: all messages of these taps are sent."""
        runtime.rule_table.reset_rules(runtime.registry, self.pattern)
        early.pop(self.pattern, None)
        return self._matched(checks=True) if tap_names(runtime.registry, checks=True) else []

    def _say(self, **settings: Any) -> list[str]:
        runtime.rule_table.set_rules(runtime.registry, self.pattern, settings)
        return self._matched(checks="enabled" in settings)

    def _matched(self, *, checks: bool) -> list[str]:
        known = tap_names(runtime.registry, checks=checks)
        names = matching(self.pattern, known)
        if not names:
            if not checks and self.names:
                logger.warning("%r matches checks only, which can be switched off and on", self.pattern)
            elif not known:
                early[self.pattern] = None
            else:
                logger.warning(
                    "%s: what you set applies to taps that get such a name later",
                    no_such_tap(self.pattern, known),
                )
        return names


def _table(selection: TapSelection) -> str:
    # A row per tap, for notebooks.
    lines: dict[str, set[str]] = {}
    for consumer in runtime.registry.consumers():
        lines.setdefault(consumer.name, set()).add(consumer.source_line)
    suppressed = selection.suppressed
    rows = []
    for name in selection.names:
        rule = runtime.rule_table.rules.of(name)
        state = "on" if rule.enabled else "off"
        where = "\n".join(sorted(lines.get(name, ())))
        rows.append((name, where, state, str(replace(rule, enabled=True)), f"{suppressed.get(name, 0):,}"))
    return table(("tap", "line", "state", "rules", "suppressed"), rows)


@public
def control_file(path: str | os.PathLike[str] | None) -> None:
    """Reads the rules of taps from a file, and again whenever the file changes. The file need not exist yet.

        ["layer*/grad"]
        every = 100
        rate = 10.0

    The file is TOML with one table per glob, with `enabled` (true or false), `every` (messages), `rate` (messages per
    second and device) and `truncate` (elements of each array). A thread of this process checks it once per second.
    Its settings count as made when it was read. The environment variable HOSTCALLBACK_CONTROL_FILE names a file too.
    If a later version of the file is not valid, the error is logged with the line, and the earlier rules stay. If the
    file is removed, its rules end.

    Args:
        path: the file, which replaces an earlier one; None for no file.

    Raises:
        TypeError: `path` is not a path.
        RuleFileError: the file is not valid now. It is watched all the same.

    Example:
        hcb.control_file("taps.toml")
    """
    expected = "the path of a file of rules, or None: hcb.control_file('taps.toml')"
    endpoints.watch(None if path is None else Path(*paths_of([path], expected)))


class Taps:
    """The taps of this process by name; `hostcallback.taps` is its only instance.

    A tap's name is its `name=`, or else the name of its tap function. A print, a log or a lambda without a name has
    that of its line, as in `print@train_step:42`; a glob without `@` matches the part before it, so that
    `hcb.taps["print"]` selects all unnamed prints.

    Example:
        hcb.taps["layer*/grad"].every(100)
    """

    @hide_frames
    def __getitem__(self, pattern: str) -> TapSelection:
        """Selects the taps whose names match a glob (`*`, `?`, `[seq]`, as in `fnmatch`, case-sensitive).

        Raises:
            TypeError: the pattern is not a text.
        """
        if not isinstance(pattern, str):
            raise TypeError(f"taps are selected by name, got {pattern!r}: as in hcb.taps['loss*']")
        return TapSelection(pattern)

    def __repr__(self) -> str:
        """Returns a text with the names and the rules."""
        said = "; ".join(f"{pattern!r}: {text}" for pattern, text in self.rules.items())
        return f"<taps: {', '.join(self.names) or 'none yet'}{'; rules: ' + said if said else ''}>"

    def _repr_html_(self) -> str:
        return _table(self["*"])

    @property
    def names(self) -> list[str]:
        """The names of the taps of programs in this process, sorted."""
        return tap_names(runtime.registry)

    @property
    def rules(self) -> dict[str, str]:
        """By glob, its settings that are in effect, as in `every=100 rate=10`."""
        return runtime.rule_table.rules.table()


taps = Taps()

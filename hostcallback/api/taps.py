"""Control of taps at run time, without compiling anew: `taps["layer*/grad"].every(100)`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hostcallback.receiver.control.endpoints import endpoints
from hostcallback.receiver.log import logger
from hostcallback.receiver.runtime.rules.names import matching, no_such_tap, tap_names
from hostcallback.receiver.runtime.rules.rules import Predicate, When, rule_settings, settings_text
from hostcallback.receiver.runtime.runtime import runtime


class TapSelection:
    """The taps whose names match a glob, in programs that run already and in those to come. Made by `taps[glob]`.

    What its methods say applies to messages emitted from now on, from any thread; those that are queued are delivered.
    Of what is said of one name the later counts, for each rule by itself. The handler decides before anything is
    copied; what it refuses spends no sequence number and is counted (`suppressed`). The order in which the rules are
    asked, and what they mean for taps of shards, is in docs/control.md. Calls (`call`) and taps of exported programs
    stay as they are, checks can be switched off and on only.

    Each method returns the names that match now. If there are none, that is logged with names that look alike; the rule
    holds for taps to come.
    """

    def __init__(self, pattern: str) -> None:
        """See `Taps`."""
        self.pattern = pattern

    def __repr__(self) -> str:
        """The selection, and the names it has now with their rules."""
        described = [f"{name} ({text})" if text else name for name, text in self.rules.items()]
        return f"<taps[{self.pattern!r}]: {', '.join(described) or 'no tap yet'}>"

    @property
    def names(self) -> list[str]:
        """The names of the taps that match and that a program in this process has, sorted."""
        return matching(self.pattern, tap_names(runtime.registry))

    @property
    def rules(self) -> dict[str, str]:
        """What holds for each of them, as in `every=100 rate=10`; an empty text for what is sent whole."""
        return {name: settings_text(rule_settings(runtime.rule_table.rules.of(name))) for name in self.names}

    @property
    def suppressed(self) -> dict[str, int]:
        """By name, how many messages rules have kept from being sent, since the process began."""
        return {name: count for name, count in runtime.suppressed().items() if matching(self.pattern, [name])}

    def disable(self) -> list[str]:
        """Switches the taps off: they send nothing, and their functions are not called.

        A tap that is off costs its program what an empty foreign call does. Checks are switched off as well (and
        `enable_checks` does not switch them on again).
        """
        return self._say(enabled=False)

    def enable(self) -> list[str]:
        """Switches the taps on again. See `disable`."""
        return self._say(enabled=True)

    def every(self, count: int) -> list[str]:
        """Sends the first message of each tap on each device, and every `count`-th after it; 1 for all of them.

        Counting begins when the rule is set, and goes on over calls of the program.

        Raises:
            ValueError: `count` is no whole number of at least 1.
        """
        return self._say(every=count)

    def rate(self, per_sec: float | None) -> list[str]:
        """Sends at most so many messages of each tap a second on each device: at least 1/`per_sec` s lie between two.

        Raises:
            ValueError: `per_sec` is neither a number above 0 nor None, which is no limit.
        """
        return self._say(rate=per_sec)

    def truncate(self, elements: int | None) -> list[str]:
        """Sends of each array with more elements the first `elements` only, in row-major order, as one dimension.

        The tap function gets a `Head` then: a one-dimensional array that knows the `whole_shape`, and whose texts say
        `first 8 of (128, 64): [...]`.

        Raises:
            ValueError: `elements` is neither a whole number of at least 1 nor None, which is all of them.
        """
        return self._say(truncate=elements)

    def when(
        self, predicate: Predicate | None, *, probe_every: int = 100, probe_sec: float = 1.0
    ) -> list[str]:
        """Delivers a message only if the predicate held for the one before it (on its device). The first is delivered.

        `predicate(value)` is called on the receiver thread with what the tap function gets (of `print` and `callback`:
        the positional and the keyword arguments). Once it does not hold, the device stops sending, but for probes,
        about which the predicate is asked again; they are not delivered, and neither is what was on its way. A
        predicate that raises is reported as the tap's failure and taken to hold.

        Args:
            predicate: None ends the rule.
            probe_every: while it does not hold, one of so many messages is a probe; 0 for none.
            probe_sec: likewise, one in so many seconds; 0 for none.

        Raises:
            TypeError: the predicate is not callable.
            ValueError: a number is negative, or both are 0.
        """
        return self._say(when=None if predicate is None else When(predicate, probe_every, probe_sec))

    def reset(self) -> list[str]:
        """Everything is sent again, as though nothing had been said of these taps."""
        runtime.rule_table.reset_rules(runtime.registry, self.pattern)
        return self._matched(checks=True)

    def _say(self, **settings: Any) -> list[str]:
        runtime.rule_table.set_rules(runtime.registry, self.pattern, settings)
        return self._matched(checks="enabled" in settings)

    def _matched(self, *, checks: bool) -> list[str]:
        known = tap_names(runtime.registry, checks=checks)
        names = matching(self.pattern, known)
        if not names:
            if not checks and self.names:
                logger.warning("%r matches checks only, which can be switched off and on", self.pattern)
            else:
                logger.warning("%s: it applies to taps to come", no_such_tap(self.pattern, known))
        return names


def control_file(path: str | os.PathLike[str] | None) -> None:
    """Keeps the rules of taps as a file says, which is looked at each second; the file may come, change and go.

        ["layer*/grad"]
        every = 100
        rate = 10.0

    It is TOML: a table for each glob, with `enabled`, `every`, `rate` and `truncate`. What the file says counts as said
    when it was read. The environment variable HOSTCALLBACK_CONTROL_FILE names a file too. A file that makes no sense
    later is logged with the line, and the rules that were there before stay; when it is gone, its rules are.

    Args:
        path: the file, in place of the one before; None for no file any more.

    Raises:
        RuleFileError: the file says what makes no sense now. It is watched all the same.
    """
    endpoints.watch(None if path is None else Path(path))


class Taps:
    """The taps of this process by name; `hostcallback.taps` is the one there is.

        hcb.taps["layer*/grad"].every(100)

    Names are those given with `name=`, else those of the tap functions.
    """

    def __getitem__(self, pattern: str) -> TapSelection:
        """The taps whose names match a glob (`*`, `?`, `[seq]`, as in `fnmatch`, case counts).

        Raises:
            TypeError: the pattern is no text.
        """
        if not isinstance(pattern, str):
            raise TypeError(f"taps are selected by name, got {pattern!r}: as in hcb.taps['loss*']")
        return TapSelection(pattern)

    def __repr__(self) -> str:
        """The names, and what was said."""
        said = "; ".join(f"{pattern!r}: {text}" for pattern, text in self.rules.items())
        return f"<taps: {', '.join(self.names) or 'none yet'}{'; rules: ' + said if said else ''}>"

    @property
    def names(self) -> list[str]:
        """The names of the taps that a program in this process has, sorted."""
        return tap_names(runtime.registry)

    @property
    def rules(self) -> dict[str, str]:
        """By glob, what was said of it and counts still, as in `every=100 rate=10`."""
        return {pattern: settings_text(s) for pattern, s in runtime.rule_table.rules.table().items()}


taps = Taps()

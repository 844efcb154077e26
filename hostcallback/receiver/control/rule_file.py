"""Rules from a file: TOML, one table per glob, applied whenever the file changes."""

from __future__ import annotations

import os
import re
import reprlib
import threading
import tomllib
from pathlib import Path
from typing import Any

from hostcallback.receiver import limits
from hostcallback.receiver.control.protocol import RuleFileError
from hostcallback.receiver.log import logger
from hostcallback.receiver.messages import Registry
from hostcallback.receiver.runtime.knobs import UnknownKnobError, knobs
from hostcallback.receiver.runtime.rules.rule_table import FILE, Rules, RuleTable
from hostcallback.receiver.runtime.rules.rules import matching, no_such_tap, tap_names

POLL_SEC = 1.0
"""Seconds between two looks at the file."""

SETTLE_SEC = 0.1
"""Seconds for which a file must not change before it is read: its writer may not have finished."""

MAX_BYTES = limits.RULE_FILE_BYTES

KNOBS = "knobs"
"""The table of the file that has values of knobs, in place of rules."""

EXAMPLE = '["layer*/grad"] and below it every = 100'

State = tuple[int, int, int]
Table = dict[str, dict[str, Any]]


def read_rules(path: Path) -> Table:
    """Reads the settings of a rule file, by glob.

    Raises:
        RuleFileError: the file is not TOML, or a setting is invalid; the text names the line.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        # One byte more than allowed shows that the file is too long, without reading all of it.
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise RuleFileError(f"{path} is longer than {MAX_BYTES} bytes, expected rules of taps: {EXAMPLE}")
    try:
        text = data.decode()
        _refuse_long_keys(text)
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        problem = f"it is nested too deep ({error})" if isinstance(error, RecursionError) else str(error)
        raise RuleFileError(f"{path} is not TOML: {problem}; expected, for example, {EXAMPLE}") from error
    for pattern, settings in table.items():
        if pattern == KNOBS and isinstance(settings, dict):
            continue
        if not isinstance(settings, dict):
            raise RuleFileError(
                f"{path}, line {_line_of(text, pattern)}: {pattern} = {reprlib.repr(settings)} belongs to no glob; "
                f"expected, for example, {EXAMPLE}"
            )
        for field, value in settings.items():
            problem = _problem_of(pattern, field, value)
            if problem:
                line = _line_of(text, field, after=_line_of(text, pattern))
                raise RuleFileError(f"{path}, line {line}: [{pattern!r}]{problem}")
    return table


def _problem_of(pattern: str, field: str, value: Any) -> str:
    if isinstance(value, dict):
        return f' contains a table {field!r}: quote names that have dots in them, ["{pattern}.{field}"]'
    if field == "when":
        return ": only Python can set a predicate: hcb.taps[glob].when(function)"
    try:
        Rules().with_setting(pattern, {field: value})
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        return f": {error}"
    return ""


_QUOTED = re.compile(r"\"[^\"\n]*\"|'[^'\n]*'")


def _refuse_long_keys(text: str) -> None:
    for number, line in enumerate(text.split("\n"), 1):
        if (
            line.count(".") > limits.RULE_FILE_DOTS
            and _QUOTED.sub("", line).count(".") > limits.RULE_FILE_DOTS
        ):
            raise ValueError(
                f"line {number} has more than {limits.RULE_FILE_DOTS} dots outside of quotes: quote names of taps"
            )


def _line_of(text: str, key: str, after: int = 0) -> int:
    # Finds the line of a key or a table by its text, since tomllib does not report lines.
    for number, line in enumerate(text.splitlines(), 1):
        if number > after and re.match(rf"\s*\[?\s*[\"']?{re.escape(key)}[\"'.\s\]=]", line):
            return number
    return after or 1


class RuleFile:
    """Applies the rules of a file to a process; a thread follows the file's changes.

    Attributes:
        path: of the file.
        problem: the current error of the file; empty if it has none.
    """

    def __init__(
        self, path: Path, switches: RuleTable, registry: Registry, poll_sec: float = POLL_SEC
    ) -> None:
        """`start` applies the file's rules and follows it; until then nothing is read."""
        self.path = path
        self._switches = switches
        self._registry = registry
        self._poll_sec = poll_sec
        self._stopped = threading.Event()
        self._state: State | None = None
        self.problem = ""
        self._unmatched: list[str] = []
        self._unknown: list[str] = []
        self._knobs: dict[str, Any] = {}
        self._thread = threading.Thread(target=self._run, name="hostcallback-control-file", daemon=True)

    def start(self) -> None:
        """Applies the file now, and starts the thread that follows it."""
        self.look()
        if self._state is None and not self.problem:
            logger.warning("control file %s does not exist: its rules apply once it does", self.path)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread and removes the file's rules."""
        self._stopped.set()
        # It does not run if `start` raised, or in a forked child.
        if self._thread.is_alive():
            self._thread.join()
        self._switches.replace_rules(self._registry, (), FILE)

    def _run(self) -> None:
        while not self._stopped.wait(self._poll_sec):
            try:
                if self._has_settled():
                    self.look()
            except Exception:  # the thread must continue: the next version of the file may be valid
                logger.exception("the control file %s could not be applied", self.path)

    def _has_settled(self) -> bool:
        state = _state_of(self.path)
        while state != self._state:
            if self._stopped.wait(SETTLE_SEC):
                return False
            before, state = state, _state_of(self.path)
            if state == before:
                break
        return True

    def look(self) -> None:
        """Applies the file if it has changed since the last call. An error in the file is logged once."""
        try:
            state = _state_of(self.path)
            if state is not None and state != self._state:
                table = read_rules(self.path)
                self._set_knobs(table.pop(KNOBS, {}))
                self._switches.replace_rules(self._registry, table.items(), FILE)
                self._unmatched = list(table)
                logger.info("control file %s: %d rule(s) applied", self.path, len(table))
                self.problem = ""
            elif state is None and self._state is not None:
                self._switches.replace_rules(self._registry, (), FILE)
                self._unmatched = []
                logger.info("control file %s was removed, and its rules with it", self.path)
            self._state = state
        except (RuleFileError, OSError) as error:
            self._say(f"{error}; the previous rules stay")
            self._state = _state_of(self.path) if isinstance(error, RuleFileError) else self._state
        self._say_unmatched()
        self._say_unknown()

    def _set_knobs(self, values: dict[str, Any]) -> None:
        # Only what the file says otherwise than before: another setter may have been later.
        problems = []
        for name, value in values.items():
            if self._knobs.get(name) == value:
                continue
            try:
                knobs.change_later(name, value, f"file {self.path}")
            except (TypeError, ValueError) as error:
                problems.append(f"{self.path}: [{KNOBS}] {name}: {error}")
        self._knobs = values
        self._unknown = list(values)
        if problems:
            raise RuleFileError("; ".join(problems))

    def _say(self, problem: str) -> None:
        if problem != self.problem:
            logger.error("control file: %s", problem)
        self.problem = problem

    def _say_unmatched(self) -> None:
        # As long as the program has traced no tap, nothing can be said about a glob that matches none.
        names = tap_names(self._registry) if self._unmatched else []
        if not names:
            return
        for pattern in self._unmatched:
            if not matching(pattern, names):
                logger.warning("control file %s: %s", self.path, no_such_tap(pattern, names))
        self._unmatched = []

    def _say_unknown(self) -> None:
        # The same for knobs.
        if not self._unknown or not len(knobs):
            return
        for name in self._unknown:
            try:
                knobs.knob(name)
            except UnknownKnobError as error:
                logger.warning(
                    "control file %s: [%s] %s; the value is set once it is declared", self.path, KNOBS, error
                )
        self._unknown = []


def _state_of(path: Path) -> State | None:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino

"""Rules from a file: TOML, a table for each glob, applied whenever the file changes."""

from __future__ import annotations

import os
import re
import threading
import tomllib
from pathlib import Path
from typing import Any

from receiver.control.errors import RuleFileError
from receiver.log import logger
from receiver.messages.registry import Registry
from receiver.runtime.rules.names import matching, no_such_tap, tap_names
from receiver.runtime.rules.rule_table import RuleTable
from receiver.runtime.rules.rules import FILE, Rules

POLL_SEC = 1.0
"""How often the file is looked at."""

SETTLE_SEC = 0.1
"""So long a file must stay as it is before it is read: who writes it may not be through."""

MAX_BYTES = 1 << 20

EXAMPLE = '["layer*/grad"] and below it every = 100'

State = tuple[int, int, int]
Table = dict[str, dict[str, Any]]


def read_rules(path: Path) -> Table:
    """The settings in a control file, by glob.

    Raises:
        RuleFileError: it is no TOML, or says what makes no sense; names the line.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise RuleFileError(f"{path} is longer than {MAX_BYTES} bytes, expected rules of taps: {EXAMPLE}")
    try:
        text = data.decode()
        table = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RuleFileError(f"{path} is no TOML: {error}; expected such as {EXAMPLE}") from error
    for pattern, settings in table.items():
        line = _line_of(text, pattern)
        if not isinstance(settings, dict):
            raise RuleFileError(
                f"{path}, line {line}: {pattern} = {settings!r} belongs to no glob, expected such as {EXAMPLE}"
            )
        for field, value in settings.items():
            where = f"{path}, line {_line_of(text, field, after=line)}: [{pattern!r}]"
            if isinstance(value, dict):
                raise RuleFileError(
                    f'{where} has a table {field!r} in it: quote names with dots in them, ["{pattern}.{field}"]'
                )
            if field == "when":
                raise RuleFileError(
                    f"{where}: a predicate is Python's to give, hcb.taps[glob].when(function)"
                )
            try:
                Rules().with_setting(pattern, {field: value})
            except ValueError as error:
                raise RuleFileError(f"{where}: {error}") from error
    return table


def _line_of(text: str, key: str, after: int = 0) -> int:
    # Where a key or a table's name stands, as far as that can be told without a parser that keeps lines.
    for number, line in enumerate(text.splitlines(), 1):
        if number > after and re.match(rf"\s*\[?\s*[\"']?{re.escape(key)}[\"'.\s\]=]", line):
            return number
    return after or 1


class RuleFile:
    """Keeps the rules of a process as a file says, from a thread of its own that looks at it each second."""

    def __init__(
        self, path: Path, switches: RuleTable, registry: Registry, poll_sec: float = POLL_SEC
    ) -> None:
        """Applies what the file says now, if there is one; `start` goes on from there."""
        self.path = path
        self._switches = switches
        self._registry = registry
        self._poll_sec = poll_sec
        self._stopped = threading.Event()
        self._state: State | None = None
        self._problem = ""
        self._unmatched: list[str] = []
        self._thread = threading.Thread(target=self._run, name="hostcallback-control-file", daemon=True)

    def start(self) -> None:
        """Looks at the file now, and then from the thread."""
        self.look()
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread and takes the file's rules back."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()
        self._switches.replace_rules(self._registry, (), FILE)

    @property
    def problem(self) -> str:
        """What is wrong with the file as it is now; an empty text if nothing is."""
        return self._problem

    def _run(self) -> None:
        while not self._stopped.wait(self._poll_sec):
            try:
                if self._has_settled():
                    self.look()
            except Exception:  # the thread must go on: the next version of the file may be well
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
        """Applies the file if it is another one than the last time. What is wrong with it is logged, once."""
        try:
            state = _state_of(self.path)
            if state is not None and state != self._state:
                table = read_rules(self.path)
                self._switches.replace_rules(self._registry, table.items(), FILE)
                self._unmatched = list(table)
                logger.info("control file %s: %d rule(s) applied", self.path, len(table))
                self._problem = ""
            elif state is None and self._state is not None:
                self._switches.replace_rules(self._registry, (), FILE)
                self._unmatched = []
                logger.info("control file %s is gone, and its rules with it", self.path)
            self._state = state
        except (RuleFileError, OSError) as error:
            self._say(f"{error}; the rules that were there before stay")
            self._state = _state_of(self.path) if isinstance(error, RuleFileError) else self._state
        self._say_unmatched()

    def _say(self, problem: str) -> None:
        if problem != self._problem:
            logger.error("control file: %s", problem)
        self._problem = problem

    def _say_unmatched(self) -> None:
        # At first no tap has been traced: then it is too early to tell.
        names = tap_names(self._registry) if self._unmatched else []
        if not names:
            return
        for pattern in self._unmatched:
            if not matching(pattern, names):
                logger.warning("control file %s: %s", self.path, no_such_tap(pattern, names))
        self._unmatched = []


def _state_of(path: Path) -> State | None:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino

"""What was said of taps by way of a collector, and of which runs: kept in a file, for processes that come later."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from receiver.log import logger
from receiver.runtime.rules.rules import DEFAULT, FIELDS, checked, checked_glob

NAME = ".control.json"
VERSION = 1
MAX_BYTES = 32 << 10
"""So much may be kept: a request has room for all of it."""


class RuleSetting(NamedTuple):
    """That a rule has a value, for the taps that match a glob in runs that match one."""

    run: str
    pattern: str
    field: str
    value: Any


class RuleStore:
    """What was said, in order: of what is for one tap the last counts, for each field by itself. Immutable."""

    def __init__(self, statements: Sequence[RuleSetting] = ()) -> None:
        """Nothing was said; or `statements`."""
        self.statements = tuple(statements)

    def with_setting(self, run: str, pattern: str, settings: Mapping[str, Any]) -> RuleStore:
        """After settings were said. What can never count again is forgotten.

        Raises:
            ValueError: a glob or a setting makes no sense, or it would be too much to keep.
        """
        checked_glob(run)
        checked_glob(pattern)
        statements = list(self.statements)
        for field, value in settings.items():
            said = RuleSetting(run, pattern, field, checked(field, value))
            statements = [s for s in statements if not _overrules(said, s)]
            statements.append(said)
        found = RuleStore(statements)
        if len(found.encoded()) > MAX_BYTES:
            raise ValueError(
                f"the collector keeps rules of {MAX_BYTES >> 10} KiB at most: take some back with --reset"
            )
        return found

    def without(self, run: str, pattern: str) -> RuleStore:
        """After all was taken back for a glob in some runs. Where a wider glob says something, the default is said.

        Raises:
            ValueError: a glob makes no sense, or it would be too much to keep.
        """
        every = [
            RuleSetting(run, pattern, field, getattr(DEFAULT, field)) for field in FIELDS if field != "when"
        ]
        left = [s for s in self.statements if not any(_overrules(said, s) for said in every)]
        contradicted = {
            said.field: said.value for said in every if any(_may_be_about_the_same(said, s) for s in left)
        }
        return RuleStore(left).with_setting(run, pattern, contradicted)

    def about(self, run: str) -> list[tuple[str, dict[str, Any]]]:
        """What is said to the processes of a run: globs and settings, in order."""
        return [(s.pattern, {s.field: s.value}) for s in self.statements if fnmatchcase(run, s.run)]

    def encoded(self) -> bytes:
        """As bytes of JSON."""
        return json.dumps({"version": VERSION, "statements": self.statements}, indent=1).encode()

    @classmethod
    def decoded(cls, data: bytes) -> RuleStore:
        """Reverses `encoded`.

        Raises:
            ValueError: it is none.
        """
        found = json.loads(data) if len(data) <= MAX_BYTES else None
        if not isinstance(found, dict) or found.get("version") != VERSION or "statements" not in found:
            raise ValueError(f"expected JSON with version {VERSION} and statements")
        kept = cls()
        try:
            for run, pattern, field, value in found["statements"]:
                kept = kept.with_setting(run, pattern, {field: value})
        except TypeError as error:
            raise ValueError(
                f"expected statements of a run, a glob, a rule and its value: {error}"
            ) from error
        return kept


class StatementsFile:
    """The file in a collector's folder. One thread at a time."""

    def __init__(self, directory: Path) -> None:
        """Nothing is read yet."""
        self._path = directory / NAME

    def read(self) -> RuleStore:
        """What is in it. A file that makes no sense is logged, and nothing in it."""
        try:
            return RuleStore.decoded(self._path.read_bytes())
        except FileNotFoundError:
            return RuleStore()
        except (OSError, ValueError, RecursionError) as error:
            logger.error("%s cannot be read: %s; no rules of taps are kept from before", self._path, error)
            return RuleStore()

    def write(self, kept: RuleStore) -> None:
        """Replaces it.

        Raises:
            OSError: it cannot be; the old one stays.
        """
        new = self._path.with_suffix(".new")
        with new.open("wb") as file:
            file.write(kept.encoded())
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, self._path)


def _overrules(said: RuleSetting, earlier: RuleSetting) -> bool:
    return (
        said.field == earlier.field
        and covers(said.run, earlier.run)
        and covers(said.pattern, earlier.pattern)
    )


def _may_be_about_the_same(said: RuleSetting, other: RuleSetting) -> bool:
    return said.field == other.field and overlap(said.run, other.run) and overlap(said.pattern, other.pattern)


def _is_name(glob: str) -> bool:
    return not any(character in glob for character in "*?[")


def covers(glob: str, other: str) -> bool:
    """Whether all names that match another glob match a glob, as far as that is easily told."""
    return glob in ("*", other) or (_is_name(other) and fnmatchcase(other, glob))


def overlap(one: str, other: str) -> bool:
    """Whether a name may match both globs."""
    if _is_name(one):
        return fnmatchcase(one, other)
    return not _is_name(other) or fnmatchcase(other, one)

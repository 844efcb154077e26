"""The rules that users set through a collector, by run: stored in a file, for processes that start later."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from hostcallback.receiver.files import write_private
from hostcallback.receiver.log import logger
from hostcallback.receiver.runtime.rules.rules import DEFAULT, FIELDS, checked, checked_glob

NAME = ".control.json"
"""The file of rules in a collector's folder."""

VERSION = 1
MAX_BYTES = 32 << 10
"""Limit of the encoded rules: all of them must fit into one request."""


class RuleSetting(NamedTuple):
    """The value of one rule field, for the taps that match a glob in the runs that match another."""

    run: str
    pattern: str
    field: str
    value: Any


class RuleStore:
    """Rule settings in order; for each tap and field, the last setting that matches applies. Immutable."""

    def __init__(self, statements: Sequence[RuleSetting] = ()) -> None:
        """Holds `statements`."""
        self.statements = tuple(statements)

    def with_setting(self, run: str, pattern: str, settings: Mapping[str, Any]) -> RuleStore:
        """Returns the store with settings added. Earlier settings that can never apply again are removed.

        Raises:
            ValueError: a glob or a setting is invalid, or the rules exceed the limit.
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
                f"the collector stores at most {MAX_BYTES >> 10} KiB of rules: remove some with --reset"
            )
        return found

    def without(self, run: str, pattern: str) -> RuleStore:
        """Returns the store without the settings of a glob in some runs.

        If a setting of a wider glob remains, the default value is set in addition, which overrides it for this glob.

        Raises:
            ValueError: a glob is invalid, or the rules exceed the limit.
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
        """Rules for the processes of a run: globs and settings, in order."""
        return [(s.pattern, {s.field: s.value}) for s in self.statements if fnmatchcase(run, s.run)]

    def encoded(self) -> bytes:
        """Encodes the rules as JSON."""
        return json.dumps({"version": VERSION, "statements": self.statements}, indent=1).encode()

    @classmethod
    def decoded(cls, data: bytes) -> RuleStore:
        """Reverses `encoded`.

        Raises:
            ValueError: the data is not encoded rules.
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

    @classmethod
    def read(cls, path: Path) -> RuleStore:
        """Reads a file of rules. An invalid file is logged and counts as empty."""
        try:
            return cls.decoded(path.read_bytes())
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError, RecursionError) as error:
            logger.error("%s cannot be read: %s; earlier rules of taps are lost", path, error)
            return cls()

    def write(self, path: Path) -> None:
        """Replaces a file of rules.

        Raises:
            OSError: it cannot be written; the old file stays.
        """
        # A new file, synced before the rename: a crash leaves either the old rules or the new ones, never a part.
        new = path.with_suffix(".new")
        write_private(new, self.encoded(), sync=True)
        os.replace(new, path)


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
    """Whether all names that match `other` match `glob`. Only simple cases are recognized; otherwise False."""
    return glob in ("*", other) or (_is_name(other) and fnmatchcase(other, glob))


def overlap(one: str, other: str) -> bool:
    """Whether a name may match both globs. True if that is not easily excluded."""
    if _is_name(one):
        return fnmatchcase(one, other)
    return not _is_name(other) or fnmatchcase(other, one)

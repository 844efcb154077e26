"""Rules that a collector remembers: they mean the same as the requests, in their order; and they outlive kills."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from hostcallback.receiver.control.protocol import ControlError
from hostcallback.receiver.remote.control.relay import ControlService, _Session
from hostcallback.receiver.remote.control.rule_store import (
    MAX_BYTES,
    NAME,
    RuleStore,
    covers,
    overlap,
)
from hostcallback.receiver.runtime.rules.rule_table import Rules
from hostcallback.receiver.runtime.rules.rules import DEFAULT

NAMES = ["loss", "loss/a", "grad", "g"]
globs = st.sampled_from([*NAMES, "*", "loss*", "*a*", "g?", "[lg]*", "none"])
runs = st.sampled_from(["exp1", "exp2", "exp*", "*", "e?p1", "other"])
settings_ = st.dictionaries(st.sampled_from(["every", "truncate"]), st.integers(1, 3), min_size=1).map(
    lambda found: dict(sorted(found.items()))
)
said = st.lists(st.tuples(runs, globs, st.none() | settings_), max_size=8)


def holds(kept: RuleStore, run: str, name: str) -> dict[str, Any]:
    """The resulting rules for one tap of one run, in a process."""
    rules = Rules()
    for pattern, settings in kept.about(run):
        rules = rules.with_setting(pattern, settings)
    found = rules.of(name)
    return {"every": found.every, "truncate": found.truncate}


@given(said)
def test_the_last_rule_for_one_tap_counts(statements: list[Any]) -> None:
    kept = RuleStore()
    for run, pattern, settings in statements:
        kept = kept.without(run, pattern) if settings is None else kept.with_setting(run, pattern, settings)
    assert RuleStore.decoded(kept.encoded()).statements == kept.statements
    for run in ("exp1", "exp2", "other"):
        for name in NAMES:
            expected = {"every": DEFAULT.every, "truncate": DEFAULT.truncate}
            for of_run, pattern, settings in statements:
                if fnmatchcase(run, of_run) and fnmatchcase(name, pattern):
                    expected |= (
                        {"every": DEFAULT.every, "truncate": DEFAULT.truncate}
                        if settings is None
                        else settings
                    )
            assert holds(kept, run, name) == expected


@given(said)
def test_taking_everything_back_leaves_nothing(statements: list[Any]) -> None:
    kept = RuleStore()
    for run, pattern, settings in statements:
        kept = kept.with_setting(run, pattern, settings or {"enabled": False})
    assert not kept.without("*", "*").statements


@given(globs, globs)
def test_which_globs_cover_and_overlap(one: str, other: str) -> None:
    for name in NAMES:
        if covers(one, other) and fnmatchcase(name, other):
            assert fnmatchcase(name, one)
        if fnmatchcase(name, one) and fnmatchcase(name, other):
            assert overlap(one, other)


def test_rules_that_can_never_apply_again_are_forgotten() -> None:
    kept = RuleStore().with_setting("exp1", "loss", {"every": 3}).with_setting("*", "lo*", {"rate": 1})
    assert len(kept.statements) == 2
    assert kept.with_setting("exp*", "loss", {"every": 5}).statements[-1] == ("exp*", "loss", "every", 5)
    assert len(kept.with_setting("exp*", "loss", {"every": 5}).statements) == 2
    assert len(kept.with_setting("*", "*", {"every": 5, "rate": 2}).statements) == 2


@pytest.mark.parametrize(
    ("run", "pattern", "settings"),
    [("*", "", {"every": 2}), ("*", "x" * 257, {"every": 2}), ("", "x", {"every": 2}), ("*", 3, {"every": 2}),
     ("*", "x", {"every": 0}), ("*", "x", {"fly": 1}), ("*", "x", {"rate": float("inf")})],
)  # fmt: skip
def test_nonsense_is_not_kept(run: Any, pattern: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        RuleStore().with_setting(run, pattern, settings)


@pytest.mark.slow
def test_the_number_of_kept_rules_is_bounded() -> None:
    kept = RuleStore()
    with pytest.raises(ValueError, match="remove some with --reset"):  # noqa: PT012
        for number in range(10_000):
            kept = kept.with_setting("*", f"tap {number}", {"every": 2})
    assert len(kept.encoded()) <= MAX_BYTES


plain = st.recursive(st.none() | st.integers() | st.text(), st.lists, max_leaves=5)
files = plain.map(lambda found: json.dumps({"version": 1, "statements": found}).encode())


@given(st.binary() | files)
def test_anything_else_is_refused(data: bytes) -> None:
    try:
        RuleStore.decoded(data)
    except ValueError:
        return
    assert RuleStore.decoded(data).encoded()


def test_the_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert not RuleStore.read(tmp_path / NAME).statements
    kept = RuleStore().with_setting("*", "loss", {"every": 3})
    kept.write(tmp_path / NAME)
    assert RuleStore.read(tmp_path / NAME).statements == kept.statements
    (tmp_path / NAME).with_suffix(".new").write_bytes(b"{")  # of a collector that was killed in the middle
    assert RuleStore.read(tmp_path / NAME).statements == kept.statements
    assert not caplog.text
    for broken in (b"", b"{", b"[]", b'{"version": 2, "statements": []}', b"[" * 100_000, b"\xff"):
        (tmp_path / NAME).write_bytes(broken)
        assert not RuleStore.read(tmp_path / NAME).statements
        assert "cannot be read" in caplog.text
        caplog.clear()
    kept.write(tmp_path / NAME)
    assert RuleStore.read(tmp_path / NAME).statements == kept.statements


def test_a_collector_announces_the_rules_that_it_remembers(tmp_path: Path) -> None:
    assert ControlService(tmp_path).remembered() == ""
    kept = RuleStore().with_setting("*", "loss", {"every": 10}).with_setting("exp*", "*", {"enabled": False})
    kept.write(tmp_path / NAME)
    assert ControlService(tmp_path).remembered() == (
        "2 remembered rule(s) apply to processes that connect: 'loss' every=10, '*' enabled=false in runs 'exp*'; "
        "hcb ctl --via HOST:PORT '*' --reset removes them"
    )


def test_a_client_stores_rules_for_the_runs_that_it_asks_for_and_may_control() -> None:
    assert _Session(1, ("exp*", "a"), "*").runs() == ("exp*", "a")
    assert _Session(1, ("exp*", "a"), "exp42").runs() == ("exp42",)
    with pytest.raises(ControlError, match=r"this token controls exp\*, a, not all of 'b'"):
        _Session(1, ("exp*", "a"), "b").runs()

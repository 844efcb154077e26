"""Rules: precedence for a name, and refused settings."""

from __future__ import annotations

from typing import Any

import pytest

from hostcallback.receiver.runtime.rules.rule_table import FILE, MAX_KNOWN, Rules
from hostcallback.receiver.runtime.rules.rules import DEFAULT, Rule, When, settings_text


def test_the_later_rule_counts_for_each_setting_separately() -> None:
    rules = (
        Rules()
        .with_setting("*", {"every": 10, "rate": 5})
        .with_setting("layer*", {"every": 2})
        .with_setting("*", {"truncate": 8})
    )
    assert rules.of("layer1") == Rule(every=2, rate=5.0, truncate=8)
    assert rules.of("loss") == Rule(every=10, rate=5.0, truncate=8)
    assert rules.with_setting("*", {"every": 3}).of("layer1").every == 3


def test_default_settings_leave_no_trace() -> None:
    rules = Rules().with_setting("a", {"every": 2}).with_setting("a", {"every": 1})
    assert not rules
    assert rules.of("a") == DEFAULT
    assert not Rules().with_setting("a*", {"enabled": False}).with_setting("*", {"enabled": True})
    assert not Rules().with_setting("a", {"every": 2, "rate": 1}).reset("*")


def test_an_exception_from_an_earlier_rule_stays() -> None:
    rules = Rules().with_setting("*", {"enabled": False}).with_setting("loss", {"enabled": True})
    assert rules.of("loss").enabled
    assert not rules.of("grad").enabled
    assert rules.reset("l*").of("loss") == DEFAULT
    assert not rules.reset("l*").of("grad").enabled


def test_the_rules_of_one_origin_can_be_taken_back() -> None:
    rules = (
        Rules()
        .with_setting("a", {"every": 2})
        .with_setting("a", {"every": 7}, FILE)
        .with_setting("b", {"rate": 1}, FILE)
    )
    assert rules.of("a").every == 7
    assert rules.with_setting("*", {"every": 5}).of("a").every == 5
    assert rules.without(FILE).of("a").every == 2
    assert rules.without(FILE).of("b") == DEFAULT


def test_globs_match_whole_names_and_case_counts() -> None:
    rules = Rules().with_setting("layer?/gr[ae]d", {"every": 2})
    names = ("layer1/grad", "layer12/grad", "Layer1/grad", "layer1/grads")
    assert [name for name in names if rules.of(name).every == 2] == ["layer1/grad"]


def test_the_rules_of_many_names_are_not_remembered_without_bound() -> None:
    rules = Rules().with_setting("*7", {"every": 2})
    for number in range(MAX_KNOWN + 8):
        assert rules.of(f"tap{number}").every == (2 if number % 10 == 7 else 1)
    assert len(rules._known) <= MAX_KNOWN


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every": 0}, "every is 0, expected a whole number of messages, 1 or more"),
        ({"every": True}, "every is True, expected a whole number"),
        ({"every": 1.5}, r"every is 1\.5, expected a whole number"),
        ({"rate": 0}, "rate is 0, expected a number of messages per second above 0"),
        ({"rate": float("nan")}, "rate is nan, expected a number"),
        ({"truncate": 0}, "truncate is 0, expected a whole number of elements, 1 or more"),
        ({"enabled": 1}, "enabled is 1, expected true or false"),
        ({"evry": 2}, "there is no rule 'evry', expected one of enabled, every, when, rate, truncate"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Rules().with_setting("*", settings)


def test_a_predicate_needs_a_way_to_be_asked_again() -> None:
    with pytest.raises(ValueError, match="probe_every and probe_sec are both 0"):
        When(bool, probe_every=0, probe_sec=0)
    with pytest.raises(TypeError, match=r"when\(\) takes a function of the last value, got 3"):
        When(3, 100, 1.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="probe_every is -1"):
        When(bool, probe_every=-1, probe_sec=1.0)
    with pytest.raises(ValueError, match="probe_sec is inf"):
        When(bool, probe_every=100, probe_sec=float("inf"))


def test_rules_as_text() -> None:
    assert settings_text({"enabled": False, "every": 3, "rate": 2.5, "when": When(bool, 100, 1.0)}) == (
        "enabled=false every=3 rate=2.5 when=bool"
    )

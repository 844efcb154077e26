"""Rules that a collector pushes: they are logged, and checked first."""

from __future__ import annotations

import re

import pytest

from hostcallback.receiver.control.commands import PushedRules
from hostcallback.receiver.control.protocol import Client, ControlError, NoSuchTapError
from hostcallback.receiver.messages import Consumer
from hostcallback.receiver.runtime.runtime import Runtime


def test_the_rules_in_force_are_logged_when_they_change(caplog: pytest.LogCaptureFixture) -> None:
    pushed = PushedRules(Runtime(), "the collector at host:7070, run exp")

    def logged(*said: object) -> list[str]:
        caplog.clear()
        pushed({"said": list(said)}, Client())
        return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]

    assert logged() == []
    rules = ["loss*", {"every": 10}], ["*", {"truncate": 7, "rate": 2.5}]
    text = "2 rule(s) apply to this process's taps: 'loss*' every=10, '*' truncate=7 rate=2.5"
    assert logged(*rules) == [f"the collector at host:7070, run exp: {text}"]
    assert logged(*rules) == []  # a collector repeats them when a connection is restored
    assert logged() == ["the collector at host:7070, run exp: no rules apply to this process's taps any more"]
    (many,) = logged(*([f"tap{n}", {"every": 2}] for n in range(20)))
    assert many.endswith("'tap7' every=2 and 12 more")


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (None, "invalid rules None: expected a list of [glob, settings] pairs"),
        ({"loss": {}}, "invalid rules {'loss': {}}: expected a list of [glob, settings] pairs"),
        (["loss"], "invalid rule 'loss': expected a [glob, settings] pair"),
        ([["loss"]], "invalid rule ['loss']: expected a [glob, settings] pair"),
        ([["loss", {}, {}]], "invalid rule ['loss', {}, {}]: expected a [glob, settings] pair"),
        ([["loss", 2]], "invalid rule ['loss', 2]: expected a [glob, settings] pair"),
        ([["loss", {"when": "x"}]], "only Python can set a predicate: hcb.taps[glob].when(function)"),
        (
            [["*", {"every": 2}], ["loss", {"every": 0}]],
            "every is 0, expected a whole number of messages, 1 or more",
        ),
    ],
)
def test_invalid_rules_change_nothing(said: object, text: str, caplog: pytest.LogCaptureFixture) -> None:
    runtime = Runtime()
    pushed = PushedRules(runtime, "the collector")
    pushed({"said": [["*", {"rate": 3}]]}, Client())
    caplog.clear()
    with pytest.raises((ControlError, ValueError), match=f"^{re.escape(text)}"):
        pushed({"said": said}, Client())
    assert (runtime.rule_table.rules.table(), caplog.text) == ({"*": "rate=3"}, "")


def test_a_client_that_waits_is_told_the_taps_that_it_asks_about() -> None:
    runtime = Runtime()
    taps = [
        Consumer(n, name, "train.py:1 (f)", print, is_switchable=True)
        for n, name in enumerate(("loss", "norm"))
    ]
    leases = [runtime.registry.lease(tap) for tap in taps]
    pushed = PushedRules(runtime, "the collector")
    said = [["l*", {"every": 2}]]
    assert pushed({"said": said}, Client()) == {"names": [], "rules": {}}
    assert pushed({"said": said, "pattern": "*"}, Client()) == {
        "names": ["loss", "norm"], "rules": {"loss": "every=2", "norm": ""},
    }  # fmt: skip
    with pytest.raises(ControlError, match=r"^invalid settings 3: expected an object of fields and values$"):
        pushed({"said": said, "pattern": "*", "settings": 3}, Client())
    with pytest.raises(NoSuchTapError, match="no tap is called 'los' so far; there are 'loss'"):
        pushed({"said": [["los", {"every": 3}]], "pattern": "los", "settings": {"every": 3}}, Client())
    assert runtime.rule_table.rules.table() == {"los": "every=3"}, "it is for later taps"
    assert len(leases) == 2

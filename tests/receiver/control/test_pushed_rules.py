"""Rules that a collector pushes are in the process's log."""

from __future__ import annotations

import pytest

from hostcallback.receiver.control.commands import PushedRules
from hostcallback.receiver.control.protocol import Client
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

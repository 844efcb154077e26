"""What cannot be delivered or written at SIGTERM is told, and what has been read is written all the same."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import jax
import pytest

import hostcallback as hcb
from hostcallback.receiver.runtime import signals
from hostcallback.receiver.taplog.reading.reader import LogReader


def test_a_tap_function_that_does_not_return_is_told_and_its_message_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(signals, "GRACE_SEC", 0.05)
    entered, ends = threading.Event(), threading.Event()

    def held(value: Any) -> None:
        entered.set()
        assert ends.wait(60)

    with hcb.outfeed_receiver(record=tmp_path / "log"):
        jax.jit(lambda x: hcb.id_tap(held, x, name="held"))(1.0)
        assert entered.wait(60)
        with caplog.at_level(logging.ERROR):
            signals.watch_termination.flush()
        written = LogReader(tmp_path / "log").tap_names()
        ends.set()
    assert written == {"held"}
    (told,) = [text for text in caplog.messages if text.startswith("at SIGTERM: ")]
    assert "held" in told


class Failing:
    """An output that cannot be written."""

    def drain(self, timeout_sec: float) -> bool:
        raise OSError("no space left")


def test_errors_are_told_and_the_other_outputs_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(timeout_sec: float) -> None:
        raise ValueError("cannot wait")

    monkeypatch.setattr(signals.watch_termination, "deliver", fail)
    failing = [Failing() for _ in range(4)]
    for output in failing:
        signals.watch_termination.add(output)
    with hcb.outfeed_receiver(record=tmp_path / "log"):
        jax.jit(lambda x: hcb.id_tap(lambda value: None, x, name="sent"))(1.0)
        hcb.barrier_wait()
        with caplog.at_level(logging.ERROR):
            signals.watch_termination.flush()
        written = LogReader(tmp_path / "log").tap_names()
    for output in failing:
        signals.watch_termination.remove(output)
    assert written == {"sent"}
    told = [record.getMessage() for record in caplog.records if record.exc_info]
    assert told[0] == "at SIGTERM the emitted messages could not be waited for"
    assert told[1:] == ["not all messages could be written or forwarded at SIGTERM"] * 8  # twice each

"""When a collector discards the incomplete values of a program that was started again."""

from __future__ import annotations

import pytest

from hostcallback.receiver.remote.delivery import process_groups
from hostcallback.receiver.remote.delivery.process_groups import ProgramRunStreams
from hostcallback.receiver.remote.forwarding_protocol import StreamKey
from hostcallback.receiver.sinks.sharding.multi_process import ProgramRun

PATIENCE_SEC = 10.0


class Clock:
    """Seconds that tests set."""

    seconds = 0.0

    def monotonic(self) -> float:
        return self.seconds


@pytest.mark.parametrize(
    ("run", "process", "grew", "now", "discarded"),
    [
        pytest.param("a", 0, 5.0, 20.0, True, id="started again"),
        pytest.param("a", 0, 5.0, 9.0, False, id="not quiet for long"),
        pytest.param("b", 0, 5.0, 20.0, False, id="another run"),
        pytest.param("a", 1, 5.0, 20.0, False, id="another process"),
        pytest.param("a", 0, 0.0, 20.0, False, id="not later"),
    ],
)
def test_values_of_a_program_that_was_started_again_are_discarded_once_it_is_quiet(
    monkeypatch: pytest.MonkeyPatch, run: str, process: int, grew: float, now: float, discarded: bool
) -> None:
    clock, found = Clock(), []
    monkeypatch.setattr(process_groups, "time", clock)
    monkeypatch.setattr(ProgramRun, "pending_values", 1)
    monkeypatch.setattr(ProgramRun, "discard", lambda self: found.append(self))
    streams = ProgramRunStreams(PATIENCE_SEC)

    def starts(key: StreamKey, job: str) -> ProgramRun:
        stream = streams.stream(
            key, job, wants=lambda tap: True, devices=lambda: 1, mark=lambda message: None,
            see=lambda message, sink: sink,
        )  # fmt: skip
        assert stream is not None
        return streams._jobs[key.run, job].job

    first = starts(StreamKey("a", 0, "0" * 16), "first")
    second = StreamKey(run, process, "1" * 16)
    starts(second, "second")
    clock.seconds = grew
    streams.grew(second)
    clock.seconds = now
    streams.expire_stalled()
    assert found == ([first] if discarded else [])

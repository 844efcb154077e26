"""What a run left in the spool is sent by that run only; another run says so."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from collecting import CollectorProcess, Emitter, forwarder, only, stored
from hostcallback.receiver import processes
from hostcallback.receiver.taplog.format.layout import ThinnedTap
from hostcallback.receiver.taplog.reading.reader import LogReader
from ports import free_port


def a_program(monkeypatch: pytest.MonkeyPatch) -> str:
    """Starts another program, as far as the name of its run is concerned; returns that name."""
    monkeypatch.delenv("HOSTCALLBACK_RUN", raising=False)
    monkeypatch.setattr(processes, "_own", "")
    return processes.own_run()


@pytest.mark.slow
def test_the_leftovers_of_a_run_are_sent_by_that_run_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spool = tmp_path / "spool"
    first = a_program(monkeypatch)
    with forwarder(f"localhost:{free_port()}", spool, drain_sec=0) as lost_collector:
        Emitter(lost_collector).losses(7)
    with CollectorProcess(tmp_path) as collector:
        second = a_program(monkeypatch)
        assert second != first
        caplog.clear()
        with forwarder(collector.address, spool, control=False) as other:
            Emitter(other).losses(3)
            other.note_rules([ThinnedTap("loss", "every=10", 27)])
        assert f"bytes of the run {first}, which ended before they were sent" in caplog.text
        assert f"HOSTCALLBACK_RUN={first} continues that run" in caplog.text
        assert not (collector.log / first).exists()
        assert only(stored(collector.log, second)[0]) == [0, 1, 2]
        thinned = LogReader(collector.log / second).thinned()  # for `hcb stats`
        assert thinned == {"loss": ThinnedTap("loss", "every=10", 27)}

        caplog.clear()
        monkeypatch.setenv("HOSTCALLBACK_RUN", first)
        with forwarder(collector.address, spool, control=False) as continued:
            Emitter(continued).losses(2)
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert sorted(map(len, stored(collector.log, first)[0].values())) == [2, 7]
    assert not list(spool.iterdir())

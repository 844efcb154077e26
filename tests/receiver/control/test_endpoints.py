"""The endpoints of a process: opened by its first receiver, and once."""

from __future__ import annotations

import tempfile
from contextlib import closing

import pytest

from hostcallback.receiver.control.endpoints import ControlEndpoints
from hostcallback.receiver.runtime.runtime import Runtime


@pytest.fixture
def endpoints(monkeypatch: pytest.MonkeyPatch) -> ControlEndpoints:
    """Of a runtime that has no receiver so far."""
    monkeypatch.delenv("HOSTCALLBACK_CONTROL_SOCKET", raising=False)
    monkeypatch.delenv("HOSTCALLBACK_CONTROL_FILE", raising=False)
    return ControlEndpoints(Runtime())


def test_they_open_at_the_first_start_and_again_after_they_were_closed(
    endpoints: ControlEndpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not below `tmp_path`: the names of sockets are limited to 107 bytes.
    with tempfile.TemporaryDirectory() as short, closing(endpoints):
        monkeypatch.setenv("HOSTCALLBACK_CONTROL_DIR", short)
        for _ in range(2):
            assert endpoints.socket_path is None
            endpoints.start()
            path = endpoints.socket_path
            assert path is not None
            assert path.is_socket()
            endpoints.start()
            assert endpoints.socket_path == path
            endpoints.close()
            assert not path.exists()


@pytest.mark.parametrize(("value", "told"), [("0", False), ("perhaps", True)])
def test_without_a_socket_they_start_all_the_same(
    endpoints: ControlEndpoints,
    value: str,
    told: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("HOSTCALLBACK_CONTROL_SOCKET", value)
    with closing(endpoints):
        for _ in range(2):
            endpoints.start()
        assert endpoints.socket_path is None
    assert [("HOSTCALLBACK_CONTROL_SOCKET" in text) for text in caplog.messages] == [True] * told

"""`hcb.ui` shows the page in a frame of a notebook, served by a child process."""

from __future__ import annotations

import html
import re
import signal
from pathlib import Path
from subprocess import PIPE
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import hostcallback as hcb
from hostcallback.api.outputs import page
from python_process import start_python

pytest.importorskip("starlette", reason="the page needs hostcallback[ui]")
httpx = pytest.importorskip("httpx", reason="these tests need httpx")


def ignore(value: Any) -> None:
    """A tap function."""


@jax.jit
def emit(x: Any) -> Any:
    """Sends a loss."""
    hcb.id_tap(ignore, {"step": x, "loss": x * 2}, name="framed")
    return x


def test_the_page_of_this_process_is_shown_in_a_frame_and_controls_it(tmp_path: Path) -> None:
    with hcb.outfeed_receiver(record=tmp_path), hcb.ui() as page:
        emit(jnp.int32(1)).block_until_ready()
        hcb.barrier_wait()
        (shown,) = re.findall('<iframe src="([^"]*)"', page._repr_html_())
        assert html.unescape(shown) == page.address
        assert page.address in repr(page)
        base, _, token = page.address.partition("/#token=")
        headers = {"Authorization": f"Bearer {token}"}
        opened = httpx.get(page.address)
        assert "set-cookie" not in opened.headers
        assert "frame-ancestors 'self' http://localhost:*" in opened.headers["content-security-policy"]
        with httpx.Client(base_url=base, headers=headers, timeout=20) as client:
            client.get("/api/overview")
            found = client.get("/api/overview").json()
            assert (found["control"], found["sources"][0]["kind"]) == (True, "process")
            assert client.post("/api/rules", json={"tap": "framed", "enabled": False}).json()["applied"] == [
                "framed"
            ]
            client.post("/api/rules", json={"tap": "framed", "enabled": True})
    with pytest.raises(httpx.ConnectError):
        httpx.get(base)


def test_what_cannot_be_shown_is_an_error_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(
        hcb.HostCallbackError, match=r"^hcb\.ui: /.*nowhere: no such tap log: give the folder"
    ):
        hcb.ui(tmp_path / "nowhere")


def test_a_server_that_ends_with_its_input_is_not_killed() -> None:
    server = start_python("-c", "import sys; sys.stdin.read()", stdin=PIPE)
    page.Ui(server, "http://localhost:1/#token=a", 100).close()
    assert server.returncode == 0


def test_a_server_that_does_not_end_with_its_input_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "END_SEC", 0.0)
    server = start_python("-c", "import signal; signal.pause()", stdin=PIPE)
    shown = page.Ui(server, "http://localhost:1/#token=a", 100)
    shown.close()
    assert server.returncode == -signal.SIGKILL

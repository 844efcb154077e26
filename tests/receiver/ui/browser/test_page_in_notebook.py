"""A notebook, which has another origin, shows the page in a frame."""

from __future__ import annotations

import http.server
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import hostcallback as hcb

pytestmark = pytest.mark.slow

NOTEBOOKS = "localhost", "127.0.0.1"
"""Hosts of the notebook. The page is at 127.0.0.1: of the same site as the second, of another site than the first."""


@contextmanager
def notebook(host: str, cell: str) -> Iterator[str]:
    """Serves what a cell shows as a page; yields its address."""
    document = f"<!doctype html><meta charset=utf-8><link rel=icon href='data:,'><title>notebook</title>{cell}".encode()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(document)))
            self.end_headers()
            self.wfile.write(document)

        def log_message(self, *arguments: Any) -> None:
            """Prints nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://{host}:{server.server_address[1]}/"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("host", NOTEBOOKS)
def test_a_notebook_shows_the_page_with_its_charts(
    visit: Callable[..., Any], expect: Any, log: Path, host: str
) -> None:
    with hcb.ui(log) as shown, notebook(host, shown._repr_html_()) as address:
        page = visit(address, frames=shown.address)
        frame = page.frame_locator("iframe")
        frame.get_by_role("tab", name="Charts").click()
        card = frame.get_by_role("article", name="train loss")
        card.locator(".u-over").wait_for()
        expect(card.locator(".legend b")).to_have_text(re.compile(r"\d"))
        (framed,) = [each for each in page.frames if each.parent_frame]
        assert "token" not in framed.url
        # A tab, opened by the link below the frame, has the token, too.
        with page.expect_popup() as opened:
            page.get_by_role("link", name="open this page in a tab").click()
        opened.value.get_by_role("tab", name="Charts").wait_for()
        page.context.close()


def test_a_page_of_another_host_cannot_show_it_in_a_frame(
    visit: Callable[..., Any], expect: Any, log: Path
) -> None:
    policy = "frame-ancestors"
    with hcb.ui(log) as shown, notebook("evil.localhost", shown._repr_html_()) as address:

        def prepare(page: Any) -> None:
            page.on("console", lambda message: refusals.append(message.text))

        refusals: list[str] = []
        page = visit(address, frames=shown.address, refuses=policy, prepare=prepare)
        page.get_by_role("link", name="open this page in a tab").wait_for()
        for _ in range(200):  # Chromium reports it in its own time
            if refusals:
                break
            page.wait_for_timeout(50)
        assert any(policy in text for text in refusals)
        assert page.frame_locator("iframe").get_by_role("tab").count() == 0
        page.context.close()

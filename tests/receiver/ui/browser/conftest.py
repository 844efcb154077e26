"""A real Chromium that opens the page. A console error, or a violation of the content policy, fails the test."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from browser_needs import missing

NAMES = "chromium", "chromium-browser", "google-chrome"
REFUSED = "net::ERR_"
SHARED_BYTES = 1 << 30


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """A failure tells how busy the machine is: a page that does not answer may just not run."""
    report = yield
    if call.when == "call" and report.failed:
        pressure = []
        with contextlib.suppress(OSError):
            pressure = [
                f"{file.name}: {file.read_text()}" for file in sorted(Path("/proc/pressure").glob("*"))
            ]
        report.sections.append(("machine", f"load {os.getloadavg()}\n{''.join(pressure)}"))
    return report


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """The browser, without a window."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing("playwright is not installed (pip install 'hostcallback[browser]')")
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        missing("no Chromium is installed (on Debian: apt-get install chromium)")
    arguments = ["--no-sandbox"]  # CI runs as root, in a container
    if shutil.disk_usage("/dev/shm").free < SHARED_BYTES:
        # It uses files instead, and the page waits for them while the disk is busy.
        arguments.append("--disable-dev-shm-usage")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=arguments)
        yield browser
        browser.close()


@pytest.fixture
def visit(chromium: Any, serve: Any) -> Iterator[Callable[..., Any]]:
    """Opens an address in a new browser context; the page's `problems` are empty at the end of the test.

    With `loses_server`, requests that do not reach the server are no problem. `frames` is the address of a page that
    it shows in a frame. Errors on the console that contain `refuses` are expected. Pages close before servers.
    """
    contexts: list[Any] = []
    problems: list[str] = []

    def open_page(
        address: str,
        tab: str = "",
        loses_server: bool = False,
        prepare: Any = None,
        frames: str = "",
        refuses: str = "",
        **options: Any,
    ) -> Any:
        options = {"viewport": {"width": 1280, "height": 800}, **options}
        context = chromium.new_context(**options)
        context.set_default_timeout(20_000)
        contexts.append(context)

        def on_console(message: Any) -> None:
            if (
                message.type == "error"
                and not (loses_server and REFUSED in message.text)
                and not (refuses and refuses in message.text)
            ):
                problems.append(message.text)

        page = context.new_page()
        page.on("console", on_console)
        page.on("pageerror", lambda error: problems.append(str(error)))
        bases = tuple(each.partition("#")[0] for each in (address, frames) if each)
        page.on("request", lambda request: check_origin(request.url, bases, problems))
        if prepare is not None:
            prepare(page)
        page.goto(address)
        if tab:
            page.get_by_role("tab", name=re.compile(f"^{tab}")).click()
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert problems == []


def check_origin(url: str, bases: tuple[str, ...], problems: list[str]) -> None:
    """The page asks its own server for everything."""
    if not url.startswith((*bases, "data:", "blob:")):
        problems.append(f"a request to {url}")


@pytest.fixture
def expect(chromium: Any) -> Any:
    """Playwright's assertions, which wait. (The page's content policy refuses its `wait_for_function` with a text.)"""
    from playwright.sync_api import expect

    expect.set_options(timeout=20_000)
    return expect


@pytest.fixture
def empty_log(tmp_path: Path) -> Path:
    """A folder in which nothing has been recorded."""
    folder = tmp_path / "empty"
    folder.mkdir()
    return folder

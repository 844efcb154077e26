"""The page in Firefox: every tab, charts, what arrives while it is open, and a page that stays open for long."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_live import hcb_ui, running

from firefox import Firefox, running_firefox

pytestmark = pytest.mark.slow

PROGRAM = next(filter(None, map(shutil.which, ("firefox-esr", "firefox"))), None)
TABS = "Errors", "Charts", "Texts", "Devices", "Compare", "Control"

INK = """[...document.querySelectorAll('article canvas')].map(canvas => {
  const {width, height} = canvas;
  if (!width || !height) return 0;
  const colours = canvas.getContext('2d').getImageData(0, 0, width, height).data;
  return colours.filter((value, place) => place % 4 === 3 && value > 0).length;
})"""
"""How many pixels of each chart are drawn."""


def click(name: str) -> str:
    """An expression that opens a tab, and says whether it is the selected one."""
    return f"""(() => {{
      const tab = [...document.querySelectorAll('[role=tab]')].find(tab => tab.textContent.startsWith('{name}'));
      tab?.click();
      return tab?.getAttribute('aria-selected') === 'true';
    }})()"""


@pytest.fixture
def firefox(tmp_path: Path) -> Iterator[Firefox]:
    """A tab without an error at the end of its test."""
    pytest.importorskip("websockets", reason="driving Firefox needs websockets")
    if PROGRAM is None:
        pytest.skip("no Firefox is installed (on Debian: apt-get install firefox-esr)")
    with running_firefox(str(PROGRAM), tmp_path / "profile") as tab:
        yield tab
        tab.evaluate("1")  # reads what was reported last
        assert tab.problems == []


@pytest.mark.parametrize("width", [1280, 390])
def test_every_tab_of_the_page_works_in_firefox(
    firefox: Firefox, log: Path, serve: Callable[..., Any], width: int
) -> None:
    firefox.open(serve(log).address, width)
    for tab in TABS:
        firefox.wait(click(tab))
        assert firefox.evaluate("document.documentElement.scrollWidth <= innerWidth"), tab
    assert firefox.evaluate("document.querySelector('[role=tabpanel], main').innerText.length > 0")
    firefox.wait(click("Errors"))
    firefox.wait("document.body.innerText.includes('seven came')")
    firefox.wait(click("Texts"))
    firefox.wait("document.body.innerText.includes('at 499.0')")
    firefox.wait(click("Charts"))
    firefox.wait(f"({INK}).some(drawn => drawn > 100)")
    firefox.evaluate("location.reload()")
    firefox.wait(f"({INK}).some(drawn => drawn > 100)")
    assert "token" not in firefox.evaluate("location.href")


def test_firefox_follows_a_running_program(firefox: Firefox, sockets: Path, tmp_path: Path) -> None:
    with (
        running(sockets, tmp_path / "log") as process,
        hcb_ui(process.pid, HOSTCALLBACK_CONTROL_DIR=sockets) as client,
    ):
        firefox.open(f"{client.base_url}/#token={client.headers['Authorization'].partition(' ')[2]}")
        firefox.wait(click("Charts"))
        value = "[...document.querySelectorAll('article .legend b')].map(value => value.textContent).join()"
        before = firefox.wait(value)
        firefox.wait(f"{value} !== {before!r}")
        firefox.open("about:blank")  # before the server ends

"""The first page of the site: one sentence, a short program next to what it prints, and how to install the package."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.documents import costs
from tools.releasing import description
from tools.website import gallery, pages, terminal

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = Path(__file__).with_name("home.md")
STYLE = Path(__file__).with_name("theme") / "site.css"
MARK = ROOT / "hostcallback" / "receiver" / "ui" / "page" / "icon.svg"
"""The mark of the page of `hcb ui` is the mark of the site."""


def program() -> str:
    """The program of the first screen."""
    found = re.search(r"```python[^\n]*\n(.*?)```", TEMPLATE.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    return found[1]


def printed() -> str:
    """Runs the program, and returns what it shows in a terminal before the report at its end."""
    with tempfile.TemporaryDirectory() as name:
        script = Path(name) / "hunt.py"
        script.write_text(program(), encoding="utf-8")
        ended = subprocess.run(
            [sys.executable, script.name],
            cwd=name,
            env=gallery.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=gallery.TIMEOUT_SEC,
            check=False,
        )
        shown = ended.stdout.replace(f"{Path(name).resolve()}/", "")
    return f"$ python hunt.py\n{shown.partition('hostcallback: ')[0]}"


def text(pictures: Path) -> str:
    """The page: the template with measured costs, the install line, and pictures of the gallery in the folder."""
    rows = costs.read_costs(costs.REPORT.read_text(encoding="utf-8"))
    page = costs.MARK.sub(lambda mark: costs.figure(mark[2], rows), TEMPLATE.read_text(encoding="utf-8"))
    address = description.repository()
    page = page.replace(
        "INSTALL", f"pip install git+{address}" if address else "pip install .  # in the checkout"
    )
    # Without a gallery, its cards lead to the guides.
    page = re.sub(
        r"\]\((gallery/[\w-]+\.(?:png|md))\)",
        lambda link: (
            link[0]
            if (pictures / link[1]).exists()
            else f"]({'images/demo.png' if link[1].endswith('png') else 'guides.md'})"
        ),
        page,
    )
    return pages.with_dark_pictures(page, pages.DOCS)


def stage(target: Path) -> None:
    """Writes the page, its picture, and the style and mark of the site; after the gallery."""
    assets = target / "assets"
    assets.mkdir(parents=True, exist_ok=True)
    shutil.copy(STYLE, assets / STYLE.name)
    shutil.copy(MARK, assets / "mark.svg")
    (assets / "home-terminal.svg").write_text(terminal.picture(printed(), columns=62), encoding="utf-8")
    (target / "index.md").write_text(text(target), encoding="utf-8")

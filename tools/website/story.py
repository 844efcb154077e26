"""Writes docs/story.md's outputs and pictures: `python -m tools.website.story [--pictures]`.

Runs examples/story/train.py as it is, and with the lines that the story adds. Pictures need Chromium and the extra
`browser`.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tools.website import gallery

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "examples" / "story" / "train.py"
DATA = ROOT / "examples" / "digits.csv.gz"
PAGE = ROOT / "docs" / "story.md"
IMAGES = ROOT / "docs" / "images"

RECEIVER = 'with hcb.outfeed_receiver(record="runs/first"):'
LOSS = """\
    probabilities = jax.nn.softmax(scores)
    return -jnp.mean(jnp.log(probabilities[jnp.arange(len(labels)), labels]))"""

EDITS = {
    "watched": [(RECEIVER, 'with hcb.outfeed_receiver(record="runs/watched"), hcb.watch_nonfinite():')],
    "kept": [
        (RECEIVER, 'with hcb.outfeed_receiver(record="runs/kept"), hcb.capsule("capsules", nonfinite=True):'),
    ],
    "fixed": [
        (RECEIVER, 'with hcb.outfeed_receiver(record="runs/fixed"), hcb.watch_nonfinite():'),
        (
            LOSS,
            """\
    log_probabilities = jax.nn.log_softmax(scores)
    return -jnp.mean(log_probabilities[jnp.arange(len(labels)), labels])""",
        ),
    ],
}
"""The lines that each act of the story replaces."""

BLOCK = re.compile(r"(<!-- story: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def edited(act: str) -> str:
    """The program with the lines of an act."""
    source = PROGRAM.read_text(encoding="utf-8")
    for old, new in EDITS.get(act, []):
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return source


def diff(act: str) -> str:
    """The lines of an act as a difference."""
    lines: list[str] = []
    for old, new in reversed(EDITS[act]):
        lines += [*(f"-{line}" for line in old.splitlines()), *(f"+{line}" for line in new.splitlines())]
    return "\n".join(lines)


def run(folder: Path, *command: str, name: str = "") -> str:
    """Runs Python with arguments in the folder. Returns what it prints and logs, without the report at its end."""
    ended = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=gallery.environment() | ({"HOSTCALLBACK_RUN": name} if name else {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=gallery.TIMEOUT_SEC,
        check=False,
    )
    shown = re.split(r"^ *\+ Exception Group|^Traceback", ended.stdout, flags=re.MULTILINE)[0]
    return shown.replace(f"{folder.resolve()}/", "").replace("/./", "/").rstrip()


def acts(folder: Path) -> dict[str, str]:
    """Runs all acts in an empty folder; their logs stay in story/runs. Returns what each shows in a terminal."""
    shutil.copy(DATA, folder)
    folder = folder / "story"
    folder.mkdir()
    shown = {}
    for act in ("first", *EDITS):
        (folder / "train.py").write_text(edited(act), encoding="utf-8")
        shown[act] = f"$ python train.py\n{run(folder, 'train.py', name=act)}"
    (capsule,) = (folder / "capsules").iterdir()
    capsule.rename(folder / "failed.hcb")
    reproduced = run(folder, "-m", "hostcallback.receiver.cli", "reproduce", "failed.hcb")
    return {**shown, "reproduced": f"$ hcb reproduce failed.hcb\n{reproduced}"}


def filled(page: str, shown: dict[str, str]) -> str:
    """Returns the page with the program, the differences and the outputs of this run."""
    blocks = {name: f"```text\n{text}\n```\n" for name, text in shown.items()}
    blocks |= {f"{act}_lines": f"```diff\n{diff(act)}\n```\n" for act in EDITS}
    return BLOCK.sub(lambda block: f"{block[1]}{blocks[block[2]]}{block[3]}", page)


PICTURES = (
    # name, tab, height, runs
    ("story-charts", "Charts", 520, ("first", "fixed")),
    ("story-errors", "Errors", 870, ("watched",)),
)


def take_pictures(folder: Path) -> None:
    """Takes the pictures of the page with the logs in the folder, light and dark."""
    from playwright.sync_api import sync_playwright

    from hostcallback.receiver.ui.server.serving import Listening, serve_logs

    with sync_playwright() as playwright:
        program = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for name, tab, height, runs in PICTURES:
            shown = folder / name / "runs"
            for act in runs:
                shutil.copytree(folder / "story" / "runs" / act, shown / act)
            # The page reads source lines from the program: from that of the run, and not from the fixed one.
            (folder / "story" / "train.py").write_text(edited(runs[0]), encoding="utf-8")
            os.chdir(shown.parent)  # the page shows the folder as it is named
            server = serve_logs(["runs"], Listening())
            try:
                for scheme, suffix in (("light", ""), ("dark", "-dark")):
                    take(browser, server.address, IMAGES / f"{name}{suffix}.png", tab, scheme, height)
            finally:
                server.close()
        browser.close()


def take(browser: Any, address: str, file: Path, tab: str, scheme: str, height: int) -> None:
    """Writes one picture."""
    page = browser.new_context(viewport={"width": 1100, "height": height}, color_scheme=scheme).new_page()
    page.goto(address)
    page.get_by_role("tab", name=tab).click()
    page.locator("section:not([hidden]) :is(canvas, .source)").first.wait_for()
    page.wait_for_timeout(2500)  # the slower cards
    page.screenshot(path=file)
    page.close()


def main() -> int:
    """Runs the acts, and writes the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pictures", action="store_true", help="take the pictures, too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        shown = acts(Path(name))
        PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), shown), encoding="utf-8")
        if options.pictures:
            take_pictures(Path(name))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Executes the examples of the gallery, and writes a page for each: its text, code, output and pictures."""

from __future__ import annotations

import ast
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tools.website import terminal

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "gallery"
TIMEOUT_SEC = 300


class ExampleError(Exception):
    """Examples of the gallery failed; the text has the name and the output of each."""


class Result(NamedTuple):
    """What an example printed, the pictures that it wrote, and whether it took too long and was ended."""

    output: str
    pictures: list[Path]
    is_slow: bool = False


def examples() -> list[Path]:
    """Returns the scripts of the gallery, in order."""
    return sorted(EXAMPLES.rglob("[a-z0-9]*.py"), key=lambda script: script.stem)


def environment() -> dict[str, str]:
    """The variables under which examples run: on one CPU, without a display, and without the builder's settings."""
    kept = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "HOSTCALLBACK_TRANSPORT")}
    return kept | {"MPLBACKEND": "agg", "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1", "NO_COLOR": "1"}


def execute(script: Path, folder: Path, timeout_sec: float = TIMEOUT_SEC) -> Result:
    """Runs an example in an empty folder, without a terminal or a display. One that takes too long is ended.

    Raises:
        ExampleError: it ended with another status than 0.
    """
    # The examples are next to each other: a copy in the folder gives the same lines in reports on every machine.
    copy = Path(shutil.copy(script, folder / script.name))
    printed, errors = folder / ".stdout", folder / ".stderr"
    with printed.open("w") as out, errors.open("w") as err:
        process = subprocess.Popen(
            [sys.executable, copy.name],
            cwd=folder,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        try:
            status = process.wait(timeout_sec)
        except subprocess.TimeoutExpired:
            status = None
            os.killpg(process.pid, signal.SIGKILL)  # its own processes, too
            process.wait()
    output = printed.read_text(encoding="utf-8").replace(f"{folder}/", "").replace(str(folder), "")
    if status:
        raise ExampleError(f"{script} ended with status {status}:\n{output}{errors.read_text()}")
    return Result(output, sorted([*folder.glob("*.png"), *folder.glob("*.svg")]), is_slow=status is None)


def stage(target: Path, scripts: Sequence[Path] | None = None, timeout_sec: float = TIMEOUT_SEC) -> list[Any]:
    """Executes examples, by default all, and writes their pages to a folder. Returns the navigation.

    Raises:
        ExampleError: some failed. All of them have been run.
    """
    target.mkdir(parents=True)
    nav: list[Any] = [{"Overview": "gallery/index.md"}]
    cards = [
        "---\nhide: [toc]\n---\n# Gallery\n",
        "The site's build executes each example. Output and pictures are of that run.\n",
    ]
    cards.append('<div class="grid cards" markdown>\n')
    failed: list[str] = []
    for script in examples() if scripts is None else scripts:
        since = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            try:
                result = execute(script, Path(folder), timeout_sec)
            except ExampleError as error:
                failed.append(str(error))
                continue
            pictures = [
                Path(shutil.copy(picture, target / f"{script.stem}-{picture.name}")).name
                for picture in result.pictures
            ]
        title, text = page(script, result, pictures)
        (target / f"{script.stem}.md").write_text(text, encoding="utf-8")
        shown = pictures[0] if pictures else f"{script.stem}-terminal.svg"
        if not pictures:
            printed = terminal.picture(result.output or "(nothing yet)", columns=64, rows=11)
            (target / shown).write_text(printed, encoding="utf-8")
        cards.append(f"-   **[{title}]({script.stem}.md)**\n\n    [![{title}]({shown})]({script.stem}.md)\n")
        nav.append({title: f"gallery/{script.stem}.md"})
        took = f"{time.monotonic() - since:.0f} s"
        late = ": TOO SLOW, its page has the output so far" if result.is_slow else ""
        print(f"gallery: {script.name} ({took}){late}", flush=True)
    (target / "index.md").write_text("\n".join([*cards, "</div>\n"]), encoding="utf-8")
    if failed:
        raise ExampleError("\n\n".join(failed))
    return nav


def page(script: Path, result: Result, pictures: list[str]) -> tuple[str, str]:
    """Returns the title and the text of an example's page."""
    source = script.read_text(encoding="utf-8")
    docstring = ast.get_docstring(ast.parse(source)) or ""
    title, _, description = docstring.partition("\n")
    title = title.rstrip(".")
    code = source.partition('"""\n')[2].lstrip("\n")
    parts = [f"# {title}", description.strip(), *(f"![{title}]({picture})" for picture in pictures)]
    shown = script.relative_to(ROOT).as_posix() if script.is_relative_to(ROOT) else script.name
    parts.append(f'```python title="{shown}"\n{code.rstrip()}\n```')
    if result.output:
        parts.append(f"It prints:\n\n```text\n{result.output.rstrip()}\n```")
    if result.is_slow:
        parts.append("It was ended before its end: the machine that built this page was too slow.")
    return title, "\n\n".join(part for part in parts if part) + "\n"

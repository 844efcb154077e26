"""Executes the examples of the gallery, and writes a page for each: its text, code, output and pictures."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "gallery"
TIMEOUT_SEC = 120


class ExampleError(Exception):
    """An example of the gallery failed."""


class Result(NamedTuple):
    """What an example printed, and the pictures that it wrote."""

    output: str
    pictures: list[Path]


def examples() -> list[Path]:
    """Returns the scripts of the gallery, in order."""
    return sorted(EXAMPLES.glob("[a-z0-9]*.py"))


def execute(script: Path, folder: Path) -> Result:
    """Runs an example in an empty folder, without a terminal or a display.

    Raises:
        ExampleError: it ended with another status than 0, or took longer than two minutes.
    """
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "HOSTCALLBACK_TRANSPORT")}
    environment |= {"MPLBACKEND": "agg", "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1", "NO_COLOR": "1"}
    # The examples are next to each other: a copy in the folder gives the same lines in reports on every machine.
    copy = Path(shutil.copy(script, folder / script.name))
    try:
        ended = subprocess.run(
            [sys.executable, copy.name],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SEC,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ExampleError(f"{script} did not end in {TIMEOUT_SEC} s: {error.stderr!r}") from error
    if ended.returncode != 0:
        raise ExampleError(f"{script} ended with status {ended.returncode}:\n{ended.stdout}{ended.stderr}")
    output = ended.stdout.replace(f"{folder}/", "").replace(str(folder), "")
    return Result(output, sorted([*folder.glob("*.png"), *folder.glob("*.svg")]))


def stage(target: Path) -> list[Any]:
    """Executes all examples and writes their pages to a folder. Returns the navigation."""
    target.mkdir(parents=True)
    nav: list[Any] = [{"Overview": "gallery/index.md"}]
    cards = ["# Gallery\n", "The site's build executes each example. Output and pictures are of that run.\n"]
    cards.append('<div class="grid cards" markdown>\n')
    for script in examples():
        since = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            result = execute(script, Path(folder))
            pictures = [
                Path(shutil.copy(picture, target / f"{script.stem}-{picture.name}")).name
                for picture in result.pictures
            ]
        title, text = page(script, result.output, pictures)
        (target / f"{script.stem}.md").write_text(text, encoding="utf-8")
        shown = f"\n\n    [![{title}]({pictures[0]})]({script.stem}.md)" if pictures else ""
        cards.append(f"-   **[{title}]({script.stem}.md)**{shown}\n")
        nav.append({title: f"gallery/{script.stem}.md"})
        print(f"gallery: {script.name} ({time.monotonic() - since:.0f} s)", flush=True)
    (target / "index.md").write_text("\n".join([*cards, "</div>\n"]), encoding="utf-8")
    return nav


def page(script: Path, output: str, pictures: list[str]) -> tuple[str, str]:
    """Returns the title and the text of an example's page."""
    source = script.read_text(encoding="utf-8")
    docstring = ast.get_docstring(ast.parse(source)) or ""
    title, _, description = docstring.partition("\n")
    title = title.rstrip(".")
    code = source.partition('"""\n')[2].lstrip("\n")
    parts = [f"# {title}", description.strip(), *(f"![{title}]({picture})" for picture in pictures)]
    parts.append(f'```python title="examples/gallery/{script.name}"\n{code.rstrip()}\n```')
    if output:
        parts.append(f"It prints:\n\n```text\n{output.rstrip()}\n```")
    return title, "\n\n".join(part for part in parts if part) + "\n"

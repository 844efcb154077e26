"""Writes the pages of the API reference: one entry for each public name, from its docstring."""

from __future__ import annotations

import ast
import re
import shutil
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

SECTIONS = {
    "Taps": ["tap", "id_tap", "id_print", "print", "log", "callback", "call", "bind", "unbind", "export_checks"],
    "Receivers": ["outfeed_receiver", "OutfeedReceiver", "barrier_wait", "error_collector"],
    "Progress": ["progress", "Progress", "scan", "fori_loop", "while_loop"],
    "Stopping": ["request_stop", "stop_requested", "clear_stop", "stop_on_signals"],
    "Metrics and data": [
        "metrics", "histogram", "image", "text", "csv", "jsonl", "tensorboard", "live_plot", "capture", "read",
        "record", "ui",
    ],
    "Checks and debugging": [
        "check", "checked", "enable_checks", "disable_checks", "watch_nonfinite", "observe", "span", "capsule",
        "breakpoint",
    ],
    "Control": ["taps", "control_file", "knob", "knobs", "accelerate", "jit"],
    "Many processes and monitoring": ["forward", "otlp", "prometheus_collector"],
}  # fmt: skip
"""The names of each page in order. A name that is in none of them is on the last page."""

OTHERS = "Types and errors"

_EXAMPLE = re.compile(r"^(( *)Examples?:\n)((?:\2 {4}.*\n|\n(?=\2 {4}))+)", re.MULTILINE)


def public_names(package: Path) -> list[str]:
    """Returns the names in the stub of a package, without importing it."""
    stub = ast.parse((package / "__init__.pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom) and node.module != package.name]
    return [alias.name for node in imports for alias in node.names]


def with_fenced_examples(source: str) -> str:
    """Returns a module with the code after `Example:` in its docstrings fenced, so that the site shows it as code."""
    return _EXAMPLE.sub(
        lambda found: f"{found[1]}{found[2]}    ```python\n{found[3]}{found[2]}    ```\n", source
    )


def stage(target: Path, packages: Path) -> list[Any]:
    """Writes the pages, and copies the packages as they are installed. Returns the navigation."""
    ignored = shutil.ignore_patterns("__pycache__", "native", "*.so")
    shutil.copytree(ROOT / "hostcallback", packages / "hostcallback", ignore=ignored)
    for path in packages.rglob("*.py"):
        path.write_text(with_fenced_examples(path.read_text(encoding="utf-8")), encoding="utf-8")
    names = public_names(ROOT / "hostcallback")
    placed = {name for section in SECTIONS.values() for name in section}
    sections = {**SECTIONS, OTHERS: sorted(set(names) - placed)}
    target.mkdir(parents=True)
    nav, index = [], ["# API reference\n", "All names are attributes of `hostcallback`, imported as `hcb`.\n"]
    for section, members in sections.items():
        file = section.lower().replace(" ", "-") + ".md"
        entries = [f"::: hostcallback.{name}" for name in members]
        (target / file).write_text(f"# {section}\n\n" + "\n\n".join(entries) + "\n", encoding="utf-8")
        links = ", ".join(f"[`{name}`][hostcallback.{name}]" for name in members)
        index.append(f"**[{section}]({file})**: {links}.\n")
        nav.append({section: f"reference/{file}"})
    own = [name for name in public_names(ROOT / "receiver") if name not in names]
    entries = [f"::: hostcallback.receiver.{name}" for name in sorted(own)]
    text = "# hostcallback.receiver\n\nThis package needs no JAX.\n\n" + "\n\n".join(entries) + "\n"
    (target / "receiver.md").write_text(text, encoding="utf-8")
    nav.append({"hostcallback.receiver": "reference/receiver.md"})
    (target / "index.md").write_text("\n".join(index), encoding="utf-8")
    return [{"Overview": "reference/index.md"}, *nav]

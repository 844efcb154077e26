"""Runs pytest in a process that finds our plugin as an installed one: by the entry point of setup.cfg."""

from __future__ import annotations

import configparser
from pathlib import Path

from checkout import ROOT, python_path
from python_process import run_python


def run_pytest(folder: Path, *arguments: str, plugin: bool = True) -> str:
    """Returns the output of pytest in `folder`, with the plugin or without."""
    installed = folder / "installed" / "hostcallback_entry-1.dist-info"
    installed.mkdir(parents=True, exist_ok=True)
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: hostcallback-entry\nVersion: 1\n")
    line = settings["options.entry_points"]["pytest11"].strip()
    (installed / "entry_points.txt").write_text(f"[pytest11]\n{line}\n")
    off = [] if plugin else ["-p", "no:hostcallback"]
    options = ["-p", "no:cacheprovider", "-p", "no:jaxtyping", "--color=no", *off, *arguments]
    done = run_python("-m", "pytest", *options, cwd=folder, PYTHONPATH=python_path(installed.parent))
    return done.stdout + done.stderr

"""The man page says what the parsers say, and man shows it without complaint."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from checkout import ROOT
from hostcallback.receiver.cli.parser import COMMANDS
from python_process import python_output


def test_the_page_is_what_the_parsers_say() -> None:
    script = (
        "import sys; sys.path.insert(0, 'tools/documents'); import commands as d; sys.stdout.write(d.page())"
    )
    printed = python_output("-c", script, cwd=ROOT, timeout_sec=60)
    assert printed == (ROOT / "docs" / "hcb.1").read_text("utf-8"), "run python tools/documents/commands.py"


@pytest.mark.skipif(shutil.which("man") is None, reason="needs man")
def test_man_shows_each_command_and_its_options() -> None:
    done = subprocess.run(
        ["man", "--warnings", "-E", "UTF-8", "-l", "docs/hcb.1"],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "MANWIDTH": "100", "TERM": "dumb"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stderr == ""
    for name in COMMANDS:
        assert f"hcb {name} [options]" in done.stdout
    assert "--metrics FILE" in done.stdout
    assert "hcb ctl 4242 'layer*/grad' --every 100" in done.stdout

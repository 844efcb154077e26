"""`make release` sets the version, cuts the changelog, commits and tags; what would go wrong is refused before."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from checkout import ROOT

FILES = ("hostcallback/__init__.py", "CHANGELOG.md", "CITATION.cff", "tools/releasing/release.py")
IDENTITY = {
    f"GIT_{who}_{what}": value
    for who in ("AUTHOR", "COMMITTER")
    for what, value in {"NAME": "A maintainer", "EMAIL": "maintainer@example.org"}.items()
}
pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


def run(folder: Path, *line: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return subprocess.run(
        line,
        cwd=folder,
        env={**clean, **IDENTITY, "HOME": str(folder), "GIT_CONFIG_NOSYSTEM": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def git(folder: Path, *arguments: str) -> str:
    done = run(folder, "git", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def release(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run(folder, sys.executable, "tools/releasing/release.py", *arguments)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository with the files that a release changes."""
    folder = tmp_path / "clone"
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    source = folder / "hostcallback" / "__init__.py"
    text = re.sub(r'(?m)^__version__ = ".*"', '__version__ = "7.3.0.dev0"', source.read_text())
    source.write_text(text)
    changes = (folder / "CHANGELOG.md").read_text()
    (folder / "CHANGELOG.md").write_text(changes.replace("[Unreleased]", "[Unreleased]\n\n- Test it.", 1))
    shutil.copytree(
        ROOT / "tools", folder / "tools", dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.pyc")
    )
    (folder / ".gitignore").write_text("__pycache__/\n")
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "All")
    return folder


def test_a_release_is_a_tagged_commit_and_the_next_version_begins(clone: Path) -> None:
    done = release(clone, "7.3.0")
    assert done.returncode == 0, done.stderr
    assert "git push origin HEAD v7.3.0" in done.stdout
    assert git(clone, "log", "--format=%s", "-2").splitlines() == [
        "Begin version 7.4.0.dev0",
        "Version 7.3.0",
    ]
    assert git(clone, "describe", "HEAD~1") == "v7.3.0"
    assert git(clone, "status", "--porcelain") == ""
    assert '\n__version__ = "7.3.0"\n' in git(clone, "show", "v7.3.0:hostcallback/__init__.py")
    assert '\n__version__ = "7.4.0.dev0"\n' in (clone / "hostcallback" / "__init__.py").read_text()
    changelog = (clone / "CHANGELOG.md").read_text()
    assert re.search(r"## \[Unreleased\]\n\n## \[7\.3\.0\] - \d{4}-\d\d-\d\d\n\n- Test it\.", changelog)
    citation = yaml.safe_load((clone / "CITATION.cff").read_text())
    assert citation["version"] == "7.3.0"
    assert f"[7.3.0] - {citation['date-released']}" in changelog

    again = release(clone, "7.3.0")
    assert again.returncode == 1
    assert "expected one after 7.4.0.dev0" in again.stderr
    empty = release(clone, "7.4.0")
    assert "nothing to release" in empty.stderr


def test_a_dry_run_shows_the_changes_and_makes_none(clone: Path) -> None:
    head = git(clone, "rev-parse", "HEAD")
    done = release(clone, "7.3.0", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert '+__version__ = "7.3.0"' in done.stdout
    assert "+version: 7.3.0" in done.stdout
    assert git(clone, "rev-parse", "HEAD") == head
    assert git(clone, "tag") == git(clone, "status", "--porcelain") == ""


@pytest.mark.parametrize(
    ("version", "dirty", "error"),
    [
        ("7.3", False, "got version '7.3', expected three numbers"),
        ("7.2.9", False, "got version 7.2.9, expected one after 7.3.0.dev0"),
        ("7.3.0", True, "the tree has changes; commit or stash them first:\n?? new.txt"),
    ],
)
def test_what_would_go_wrong_is_refused(clone: Path, version: str, dirty: bool, error: str) -> None:
    if dirty:
        (clone / "new.txt").touch()
    done = release(clone, version)
    assert done.returncode == 1
    assert done.stderr.startswith(f"release: {error}")
    assert git(clone, "tag") == ""


def test_the_citation_names_the_last_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    released = re.findall(r"^## \[(\d[^\]]*)\] - (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert (citation["version"], str(citation["date-released"])) == released[0]
    assert {"cff-version", "message", "title", "authors", "license"} <= set(citation)

"""Makes a release: `python tools/releasing/release.py 1.2.3` sets the version, cuts the changelog, commits and tags.

The commit "Version 1.2.3" has the tag v1.2.3; a second commit begins the next version. Nothing is pushed: the last line
printed is the command for it. `--dry-run` prints the changes and makes none.
"""

from __future__ import annotations

import argparse
import difflib
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VERSION_FILE, CHANGELOG, CITATION = "hostcallback/__init__.py", "CHANGELOG.md", "CITATION.cff"
HEADING = "## [Unreleased]"


class ReleaseError(RuntimeError):
    """The release cannot be made; the text says why and what to do."""


def git(*arguments: str) -> str:
    """Runs git in the checkout and returns its output.

    Raises:
        ReleaseError: git failed.
    """
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ReleaseError(f"git {' '.join(arguments)}: {(done.stderr or done.stdout).strip()}")
    return done.stdout.strip()


def numbers(version: str) -> tuple[int, ...]:
    """The numbers of a version, to compare."""
    return tuple(map(int, version.partition(".dev")[0].split(".")))


def with_version(text: str, version: str) -> str:
    """The package's source with another version."""
    return _replaced(r'^__version__ = "[^"]*"', f'__version__ = "{version}"', text, VERSION_FILE)


def with_section(text: str, version: str, day: date) -> str:
    """The changelog, in which what was unreleased is the section of the version.

    Raises:
        ReleaseError: nothing is unreleased, or the version has a section.
    """
    if f"## [{version}]" in text:
        raise ReleaseError(f"{CHANGELOG} has a section {version} already")
    changes = text.partition(HEADING)[2].partition("\n## [")[0]
    if not re.search(r"^- ", changes, re.MULTILINE):
        raise ReleaseError(f"{CHANGELOG} has nothing under {HEADING}: there is nothing to release")
    return text.replace(HEADING, f"{HEADING}\n\n## [{version}] - {day.isoformat()}", 1)


def with_citation(text: str, version: str, day: date) -> str:
    """The citation of the version."""
    text = _replaced(r"^version: .*", f"version: {version}", text, CITATION)
    return _replaced(r"^date-released: .*", f'date-released: "{day.isoformat()}"', text, CITATION)


def _replaced(pattern: str, new: str, text: str, file: str) -> str:
    changed, count = re.subn(pattern, new, text, flags=re.MULTILINE)
    if count != 1:
        raise ReleaseError(f"{file}: expected one line like {pattern}, found {count}")
    return changed


def next_version(version: str) -> str:
    """The development version after a release: that of the next minor version."""
    major, minor, *_ = numbers(version)
    return f"{major}.{minor + 1}.0.dev0"


def check(version: str) -> None:
    """Checks that the release can be made here.

    Raises:
        ReleaseError: the version is malformed, no newer than the last, or tagged; or the tree has changes.
    """
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise ReleaseError(f"got version {version!r}, expected three numbers, such as 0.4.0")
    if changed := git("status", "--porcelain"):
        raise ReleaseError(f"the tree has changes; commit or stash them first:\n{changed}")
    current = re.findall(r'^__version__ = "(.*)"', (ROOT / VERSION_FILE).read_text("utf-8"), re.MULTILINE)[0]
    too_old = numbers(version) <= numbers(current) if ".dev" not in current else False
    if too_old or numbers(version) < numbers(current):
        raise ReleaseError(f"got version {version}, expected one after {current}, the current one")
    if git("tag", "--list", f"v{version}"):
        raise ReleaseError(f"the tag v{version} exists: choose the next version")


def edits(version: str, day: date) -> dict[str, Callable[[str], str]]:
    """What the release does to each file."""
    return {
        VERSION_FILE: lambda text: with_version(text, version),
        CHANGELOG: lambda text: with_section(text, version, day),
        CITATION: lambda text: with_citation(text, version, day),
    }


def release(version: str, day: date, *, dry_run: bool) -> None:
    """Makes the release, or prints what it would change.

    Raises:
        ReleaseError: it cannot be made; nothing was changed.
    """
    check(version)
    # All texts first: an error in the last one leaves no file changed.
    before = {name: (ROOT / name).read_text("utf-8") for name in edits(version, day)}
    after = {name: edit(before[name]) for name, edit in edits(version, day).items()}
    if dry_run:
        for name, text in after.items():
            lines = difflib.unified_diff(
                before[name].splitlines(), text.splitlines(), name, name, "", "", 1, ""
            )
            print("\n".join(lines))
        print(f"would commit this, tag it v{version}, and begin {next_version(version)}; nothing was changed")
        return
    _commit(after, f"Version {version}")
    git("tag", "--annotate", f"v{version}", "--message", f"hostcallback {version}")
    _commit(
        {VERSION_FILE: with_version(after[VERSION_FILE], next_version(version))},
        f"Begin version {next_version(version)}",
    )
    print(f"tagged v{version}. Build it with: git checkout v{version} && make wheel")
    print(f"Publish it with: git push origin HEAD v{version} && python -m twine upload dist/*")


def _commit(texts: dict[str, str], subject: str) -> None:
    for name, text in texts.items():
        (ROOT / name).write_text(text, "utf-8")
    git("commit", "--quiet", "--message", subject, "--", *texts)


def main(argv: Sequence[str] | None = None) -> int:
    """Makes the release and returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("version", help="three numbers, such as 0.4.0")
    parser.add_argument("--dry-run", action="store_true", help="print the changes, and make none")
    args = parser.parse_args(argv)
    try:
        release(args.version, datetime.now(UTC).date(), dry_run=args.dry_run)
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""The project's address and what the package's page says: the README, whose links lead to files of the repository."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

VARIABLE = "REPOSITORY_URL"
"""Names the address, such as https://github.com/OWNER/NAME. GitHub's workflows and the remote `origin` name it, too."""

_LINK = re.compile(r"(!?)\[((?:[^\[\]]|!\[[^\]]*\]\([^)]*\))*)\]\((?!\w+:|#)([^)\s]+)\)")
_PICTURE = re.compile(r"^!\[[^\]]*\]\((?!\w+:)[^)]*\)\n*", re.MULTILINE)


def repository() -> str | None:
    """The address of the repository without a slash at its end, or None if nothing names it."""
    given = os.environ.get(VARIABLE)
    if given:
        return given.rstrip("/")
    if os.environ.get("GITHUB_REPOSITORY"):
        server = os.environ.get("GITHUB_SERVER_URL", "https://github.com")
        return f"{server}/{os.environ['GITHUB_REPOSITORY']}"
    if not (ROOT / ".git").exists():
        return None
    line = ["git", "-C", str(ROOT), "config", "--get", "remote.origin.url"]
    try:
        found = subprocess.run(line, capture_output=True, text=True, check=False)
    except OSError:  # no git
        return None
    return web_address(found.stdout.strip())


def web_address(remote: str) -> str | None:
    """The page of a remote: https://github.com/OWNER/NAME for git@github.com:OWNER/NAME.git. None for a folder."""
    found = re.fullmatch(
        r"(?:(?:https|ssh|git)://)?(?:[^@/]+@)?([\w.-]+\.\w+)[:/](?:\d+/)?(.+?)(?:\.git)?/?", remote
    )
    return f"https://{found[1]}/{found[2]}" if found else None


def ref(version: str) -> str:
    """Where the files of a version are: its tag, or the newest for one that is not released."""
    return "HEAD" if "dev" in version else f"v{version}"


def project_urls(address: str | None, version: str) -> dict[str, str]:
    """The links next to the package's page."""
    if address is None:
        return {}
    files = f"{address}/blob/{ref(version)}"
    return {
        "Source": address,
        "Documentation": f"{files}/docs/tutorial.md",
        "Changelog": f"{files}/CHANGELOG.md",
        "Issues": f"{address}/issues",
    }


def long_description(readme: str, address: str | None, version: str) -> str:
    """The README with absolute links. Without an address it has neither links to files nor pictures."""
    if address is None:
        return _LINK.sub(lambda link: link[2], _PICTURE.sub("", readme))

    def absolute(link: re.Match[str]) -> str:
        kind = "raw" if link[1] else "blob"
        text = _LINK.sub(absolute, link[2])
        return f"{link[1]}[{text}]({address}/{kind}/{ref(version)}/{link[3]})"

    return _LINK.sub(absolute, readme)

"""Builds the documentation site into build/site: `python -m tools.website [--no-gallery]`.

The site is made of a staged copy of the pages in build/website. MkDocs runs with `--strict`: a page outside the
navigation, a link without a target, and a docstring that cannot be read fail the build; so does an example that fails.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from tools.releasing import description
from tools.website import gallery, home, pages, reference, tables

ROOT = Path(__file__).resolve().parents[2]
STAGED = ROOT / "build" / "website"
SITE = ROOT / "build" / "site"
SHIM = Path(__file__).with_name("iframe-worker-shim.js")
"""iframe-worker 1.0.4 of Martin Donath, MIT license. Browsers start no worker in a page opened from the disk."""


def stage(with_gallery: bool) -> None:
    """Writes the pages and the configuration with the navigation."""
    shutil.rmtree(STAGED, ignore_errors=True)
    folder = STAGED / "pages"
    folder.mkdir(parents=True)
    nav = pages.stage(folder)
    replace(nav, "reference/index.md", reference.stage(folder / "reference", STAGED / "packages"))
    if with_gallery:
        examples = gallery.stage(folder / "gallery")
        nav = [{"Gallery": examples} if "Gallery" in section else section for section in nav]
    else:
        (folder / "gallery").mkdir()
        (folder / "gallery" / "index.md").write_text("# Gallery\n\nLeft out of this build.\n")
    home.stage(folder)
    # JSON is YAML. Values of the inherited file that are not here hold.
    configuration = {
        "INHERIT": "../../mkdocs.yml",
        "docs_dir": "pages",
        "site_dir": str(SITE),
        "nav": nav,
    }
    address = description.repository()
    if address is not None:
        configuration |= {"repo_url": address, "repo_name": "Source", "edit_uri": "blob/HEAD/docs/"}
    (STAGED / "mkdocs.yml").write_text(json.dumps(configuration, indent=2), encoding="utf-8")


def replace(nav: list[Any], page: str, entries: list[Any]) -> None:
    """Puts pages below the entry of one page in the navigation."""
    for section in nav:
        for entry in next(iter(section.values())):
            if isinstance(entry, dict) and page in entry.values():
                entry[next(iter(entry))] = entries


def finish(site: Path) -> None:
    """Labels tables, and makes pages load the shim for search in pages on the disk from here, not from another host."""
    shutil.copy(SHIM, site / "assets" / "javascripts" / SHIM.name)
    for path in site.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        up = "../" * (len(path.relative_to(site).parts) - 1)
        local = f"{up}assets/javascripts/{SHIM.name}"
        text = text.replace("https://unpkg.com/iframe-worker/shim", local)
        path.write_text(tables.labelled(text), encoding="utf-8")


def requests_to_others(site: Path) -> list[str]:
    """Returns the pages' scripts, styles and pictures that a browser would fetch from another host."""
    fetched = re.compile(r"<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)=\"?(?:https?:)?//[^\s\">]+")
    return [
        f"{path.relative_to(site)}: {found}"
        for path in sorted(site.rglob("*.html"))
        for found in fetched.findall(path.read_text(encoding="utf-8"))
        if 'rel="canonical"' not in found
    ]


def main() -> int:
    """Stages and builds; status 1 if a page, link, docstring or example is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--no-gallery", action="store_true", help="do not execute the examples")
    options = parser.parse_args()
    try:
        stage(with_gallery=not options.no_gallery)
    except gallery.ExampleError as error:
        print(error, file=sys.stderr)
        return 1
    shutil.rmtree(SITE, ignore_errors=True)
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--config-file", "mkdocs.yml"],
        cwd=STAGED,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        check=False,
    )
    if built.returncode != 0:
        return 1
    finish(SITE)
    foreign = requests_to_others(SITE)
    if foreign:
        print("pages request files from other hosts:", *foreign[:20], sep="\n", file=sys.stderr)
        return 1
    print(f"the site is in {SITE.relative_to(ROOT)}: open {SITE.relative_to(ROOT)}/index.html")
    return 0


if __name__ == "__main__":
    sys.exit(main())

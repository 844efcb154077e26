"""What a release needs: versions with dates, breaking changes, how to report and contribute, what is supported."""

from __future__ import annotations

import configparser
import re
from datetime import date

import pytest
import yaml

import hostcallback
from checkout import ROOT

CONFIG = configparser.ConfigParser()
CONFIG.read(ROOT / "setup.cfg", encoding="utf-8")
CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
SECTIONS = re.findall(r"^## \[([^\]]+)\](.*)$", CHANGELOG, re.MULTILINE)


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version.partition(".dev")[0])))


def test_the_changelog_is_cut_into_versions_with_dates() -> None:
    (first, rest), *released = SECTIONS
    assert (first, rest) == ("Unreleased", "")
    assert len(released) >= 3
    dates = [date.fromisoformat(text.removeprefix(" - ")) for _, text in released]
    assert dates == sorted(dates, reverse=True)
    versions = [numbers(version) for version, _ in released]
    assert versions == sorted(set(versions), reverse=True)


def test_the_package_is_the_newest_version_or_the_next_one() -> None:
    newest = SECTIONS[1][0]
    if ".dev" in hostcallback.__version__:
        assert numbers(hostcallback.__version__) > numbers(newest)
    else:
        assert hostcallback.__version__ == newest


def test_breaking_changes_are_named_first() -> None:
    sections = CHANGELOG.split("\n## [")[1:]
    for section in sections:
        headings = re.findall(r"^### (.*)", section, re.MULTILINE)
        assert headings.count("Breaking changes") <= 1
        assert headings.index("Breaking changes") == 0 if "Breaking changes" in headings else True
    # The change of the package's name is in the last of them that has any: a release empties the first section.
    breaking = [section for section in sections if "### Breaking changes" in section]
    assert "`hostcallback.receiver`" in "".join(section.split("### ")[1] for section in breaking)


@pytest.mark.parametrize(
    ("name", "links"),
    [
        ("SECURITY.md", ["docs/security.md", "CHANGELOG.md"]),
        (
            "CONTRIBUTING.md",
            ["docs/contributing.md", "docs/architecture.md", "SECURITY.md", "docs/support.md"],
        ),
        ("docs/support.md", ["environment.md", "gpu.md", "../CHANGELOG.md"]),
        ("README.md", ["SECURITY.md", "CONTRIBUTING.md", "docs/support.md", "docs/environment.md"]),
    ],
)
def test_a_document_of_the_release_links_to_the_others(name: str, links: list[str]) -> None:
    file = ROOT / name
    text = file.read_text(encoding="utf-8")
    for link in links:
        assert f"({link})" in text
        assert (file.parent / link).exists()


@pytest.mark.parametrize("name", ["bug_report", "feature_request"])
def test_an_issue_template_is_a_form_that_github_takes(name: str) -> None:
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml").read_text(encoding="utf-8"))
    assert {"name", "description", "body"} <= set(form)
    ids = [field["id"] for field in form["body"]]
    assert len(ids) == len(set(ids))
    for field in form["body"]:
        assert field["type"] in {"textarea", "input", "checkboxes", "dropdown"}
        assert field["attributes"]["label"]


def test_the_policy_names_the_versions_that_the_package_declares() -> None:
    text = (ROOT / "docs" / "support.md").read_text(encoding="utf-8")
    pythons = re.findall(r"Python :: (3\.\d+)", CONFIG["metadata"]["classifiers"])
    assert f"| Python | {', '.join(pythons)} |" in text
    floor = re.search(r"jax>=([\d.]+)", CONFIG["options"]["install_requires"])
    assert floor
    assert f"| JAX and jaxlib | {floor[1]} and newer |" in text

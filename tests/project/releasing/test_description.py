"""The page of the package: where its links lead, with and without an address of the repository."""

from __future__ import annotations

import sys

import pytest

from checkout import ROOT

sys.path.insert(0, str(ROOT / "tools"))

from releasing import description

README = """\
![A picture](docs/a.png)

[A page](docs/checks.md#part), [there](https://x.org), [`c`](tests/conftest.py) and [top](#top).
"""
ADDRESS = "https://github.com/owner/name"


def test_links_lead_to_the_files_of_the_version() -> None:
    page = description.long_description(README, ADDRESS, "1.2.3")
    assert page.startswith(f"![A picture]({ADDRESS}/raw/v1.2.3/docs/a.png)\n")
    assert f"[A page]({ADDRESS}/blob/v1.2.3/docs/checks.md#part), [there](https://x.org), " in page
    assert f"[`c`]({ADDRESS}/blob/v1.2.3/tests/conftest.py) and [top](#top)" in page
    assert f"{ADDRESS}/blob/HEAD/docs" in description.long_description(README, ADDRESS, "1.2.4.dev0")


def test_without_an_address_no_link_leads_nowhere() -> None:
    page = description.long_description(README, None, "1.2.3")
    assert page == "A page, [there](https://x.org), `c` and [top](#top).\n"
    assert description.project_urls(None, "1.2.3") == {}


@pytest.mark.parametrize(
    ("remote", "address"),
    [
        ("git@github.com:owner/name.git", ADDRESS),
        ("https://github.com/owner/name", ADDRESS),
        ("https://token@github.com/owner/name.git", ADDRESS),
        ("ssh://git@gitlab.example.com:2222/group/sub/name.git", "https://gitlab.example.com/group/sub/name"),
        ("/home/me/name.git", None),
        ("../name", None),
        ("", None),
    ],
)
def test_the_address_of_a_remote(remote: str, address: str | None) -> None:
    assert description.web_address(remote) == address


def test_the_environment_names_the_address_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_REPOSITORY", "owner/name")
    monkeypatch.delenv("GITHUB_SERVER_URL", raising=False)
    monkeypatch.delenv(description.VARIABLE, raising=False)
    assert description.repository() == ADDRESS
    monkeypatch.setenv(description.VARIABLE, "https://example.com/other/")
    assert description.repository() == "https://example.com/other"

"""A collector of many streams raises its limit of open files as far as the system allows."""

from __future__ import annotations

import resource

import pytest

from hostcallback.receiver.remote.collector.access import WANTED_FILES, allow_many_files

NONE = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("found", "then"),
    [
        ((256, 4096), (4096, 4096)),
        ((256, 4 * WANTED_FILES), (WANTED_FILES, 4 * WANTED_FILES)),
        ((256, NONE), (WANTED_FILES, NONE)),
        ((4096, 4096), None),
        ((2 * WANTED_FILES, NONE), None),
        ((NONE, NONE), None),
    ],
)
def test_the_limit_is_raised_up_to_what_is_allowed_and_never_lowered(
    found: tuple[int, int], then: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: found)
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: made.append(limits))
    allow_many_files()
    assert made == ([] if then is None else [then])

"""The queue of failed checks that the next call raises, while another thread takes its entry."""

from __future__ import annotations

from typing import Any

import pytest

import hostcallback.api  # noqa: F401  (before the rooms below it, whose imports depend on its order)
from hostcallback.lifecycle import raise_soon
from hostcallback.receiver.messages import deferred_errors


class _Taken(list[Any]):
    """A queue whose only entry another thread takes after the look at it."""

    def __len__(self) -> int:
        return 1

    def __contains__(self, entry: object) -> bool:
        return True


def test_an_entry_that_another_thread_takes_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred_errors, "raise_soon_queue", _Taken())
    monkeypatch.setattr(raise_soon, "raise_soon_queue", _Taken())
    assert not deferred_errors.DeferredErrors(1).take_checks()
    raise_soon.raise_now()

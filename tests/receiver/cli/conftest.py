"""A process that commands control."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from controlled import Controlled, controlled


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Controlled]:
    """A process with taps."""
    with controlled(tmp_path_factory.mktemp("sockets")) as found:
        yield found

"""The first elements of arrays, also of those that a rule has truncated before."""

from __future__ import annotations

import numpy as np
import pytest

from hostcallback.receiver.wire.truncation import (
    TruncatedArray,
    encode_truncated,
    head,
    head_of,
    split_truncated,
)


@pytest.mark.parametrize("elements", [3, 6, 10])
def test_the_head_of_an_array_knows_the_shape_of_the_whole(elements: int) -> None:
    array = np.arange(6.0).reshape(2, 3)
    cut = head(array, elements)
    assert cut.reshape(-1).tolist() == array.reshape(-1)[:elements].tolist()
    assert isinstance(cut, TruncatedArray) == (elements < 6)
    (again,) = split_truncated(encode_truncated([cut])[0], 0) if elements < 6 else [cut]
    assert getattr(again, "whole_shape", None) == ((2, 3) if elements < 6 else None)


def test_the_head_of_a_truncated_array_has_the_shape_of_the_first() -> None:
    truncated = head_of(np.arange(8.0), (100, 50))
    cut = head(truncated, 2)
    assert (cut.tolist(), cut.whole_shape) == ([0.0, 1.0], (100, 50))  # type: ignore[attr-defined]
    assert head(truncated, 8) is truncated

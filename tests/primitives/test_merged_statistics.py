"""Statistics of an array from those of its shares, where XLA computes them: as of the whole array."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from hostcallback.primitives.device_ops import reduce_merged_statistics, reduce_statistics

SHAPES = ((2,), (), (3, 1))
"""Of values that are measured together: six numbers of each statistic."""


def test_the_statistics_of_shares_are_those_of_the_whole_arrays() -> None:
    chance = np.random.default_rng(0)
    wholes = [chance.normal(size=(6, 4)).astype(np.float32) for _ in range(6)]
    wholes[1][0, 0] = wholes[4][5, 3] = 0
    wholes[2][1, 1] = np.inf
    wholes[3][5, 0] = np.nan
    split = [np.split(whole, [1, 4]) for whole in wholes]  # of three devices
    rows = jnp.stack(
        [
            jnp.stack(
                [
                    jnp.stack([*reduce_statistics(share[device]), jnp.float32(share[device].size)])
                    for share in split
                ]
            )
            for device in range(3)
        ]
    )
    merged = reduce_merged_statistics(rows, shapes=SHAPES)
    expected = jnp.stack([jnp.stack(reduce_statistics(whole)) for whole in wholes])  # [values, 7]
    begin = 0
    for number, shape in enumerate(SHAPES):
        of_shape = merged[7 * number : 7 * number + 7]
        assert [result.shape for result in of_shape] == [shape] * 7
        size = int(np.prod(shape))
        found = np.stack([np.ravel(result) for result in of_shape], axis=1)
        np.testing.assert_allclose(found, expected[begin : begin + size], rtol=1e-5)
        begin += size
    assert begin == len(wholes)


@pytest.mark.parametrize("empty", [0, 1])
def test_a_share_without_elements_counts_nothing(empty: int) -> None:
    whole = jnp.array([1.0, 2.0, 6.0])
    rows = [jnp.stack([*reduce_statistics(whole), jnp.float32(3)]), jnp.zeros(8)]
    merged = reduce_merged_statistics(jnp.stack(rows[:: -1 if empty == 0 else 1])[:, None], shapes=((),))
    np.testing.assert_allclose(jnp.stack(merged), jnp.stack(reduce_statistics(whole)), rtol=1e-6)

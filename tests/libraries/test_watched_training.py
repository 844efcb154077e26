"""`watch_nonfinite` around trainings of real libraries names what breaks them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest

import hostcallback as hcb
import training_programs
from training_programs import BATCHES, PROGRAMS, X, Y, nnx


def error_of(run: Callable[[], Any]) -> Any:
    """Runs programs in the context; returns the first report."""
    try:
        with hcb.outfeed_receiver(), hcb.watch_nonfinite():
            run()
    except hcb.TapFunctionException as group:
        return group.exceptions[0]
    raise AssertionError("nothing was reported")


@pytest.mark.slow_variants(every=3)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_the_operation_that_breaks_a_training_is_named(program: Any) -> None:
    bad = (X, Y.at[3, 0].set(0.0))  # log(0)
    error = error_of(lambda: program(lambda step: step, [*BATCHES[:3], bad, BATCHES[4]]))
    assert (error.primitive, error.reproduced, error.inf_count) == ("log", True, 1)
    assert error.source_line.file == training_programs.__file__
    assert dict(error.check.explanation.values) == {"operand 0": "0"}


def test_a_nan_in_the_batch_is_named_by_its_path() -> None:
    bad = (X.at[3, 1].set(jnp.nan), Y)
    error = error_of(lambda: nnx(lambda step: step, [bad]))
    assert error.primitive == "input x[3,1]"

"""The XLA FFI handler under jit, each scenario of `ffi_program.py` in a separate process."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.native_only


@pytest.mark.slow_variants
@pytest.mark.parametrize(
    "scenario",
    [
        "back_pressure",
        "waiting_holds_no_thread",
        "several_threads",
        "concurrent_thunks",
        "big_arrays",
        "results_pass_through",
        "dtypes",
        "many_operands",
        "devices",
        "drop_newest",
        "block_then_drop",
        "bad_prefix",
        "same_numbers",
    ],
)
def test_scenario(run_program, scenario):
    run_program("ffi_program.py", [scenario])

"""The native table of switches: bounded, with an error when it is full."""

from __future__ import annotations

import pytest

from python_process import python_output

pytestmark = pytest.mark.native_only

PROGRAM = """
from hostcallback.receiver.native import bindings as native
library = native.load()
assert library.hcb_switch(1, -1, 0) == native.EMITTED  # what was never off needs no entry
results = [library.hcb_switch(number + 1, -1, 1) for number in range(40_000)]
full = results.index(native.NO_MEMORY)
assert full == 32_768, full
assert set(results[full:]) == {native.NO_MEMORY}
assert library.hcb_switch(1, -1, 0) == native.EMITTED  # entries that are there can still be changed
assert library.hcb_switch(1, -1, 1) == native.EMITTED
assert library.hcb_abort_on_check(0, 1) == native.NO_MEMORY
"""


def test_a_full_table_is_reported() -> None:
    python_output("-c", PROGRAM, timeout_sec=60)

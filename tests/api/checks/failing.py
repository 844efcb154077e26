"""Shared by tests of checks: the failures that the next barrier raises."""

from __future__ import annotations

import pytest

import hostcallback as hcb


def failed() -> list[hcb.FailedCheck]:
    """The checks that the next barrier reports, the first failure first."""
    with pytest.raises(hcb.TapFunctionException) as caught:
        hcb.barrier_wait()
    errors = caught.value.exceptions
    assert all(isinstance(error, hcb.CheckError) for error in errors), errors
    return [error.check for error in errors if isinstance(error, hcb.CheckError)]


def failed_once() -> hcb.FailedCheck:
    """The only one."""
    (check,) = failed()
    return check

"""Programs of host_callback run under every jit."""

from __future__ import annotations

from typing import Any

import jax
import pytest

import hostcallback
from transforming import no_jit


@pytest.fixture(params=[jax.jit, hostcallback.jit, no_jit], ids=["jax.jit", "hcb.jit", "no jit"])
def jit(request: pytest.FixtureRequest) -> Any:
    return request.param

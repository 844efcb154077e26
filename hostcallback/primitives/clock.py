"""The primitive that reads the host's clock in a program, so that a loop can choose its steps by time."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from hostcallback import _jax_compat as compat

clock_p = Primitive("host_clock")
"""Takes an integer that changes from reading to reading. Returns a `uint32[2]`: the time in microseconds, which wraps
around after 71 minutes, and the least number of microseconds between two readings that costs little. It has no effect:
a reading that nothing uses is left out."""


def read_clock(step: Any) -> Any:
    """Returns the time and the least interval (see `clock_p`) after all steps before `step`."""
    return clock_p.bind(jnp.asarray(step))


def _impl(step: Any) -> Any:
    with jax.disable_jit(False):  # with it, the jitted function would call this one again
        return jax.jit(clock_p.bind)(step)


def _abstract(step: Any) -> Any:
    return compat.results_that_vary_as([step], [jax.core.ShapedArray((2,), np.dtype(np.uint32))])[0]


def _jvp(primals: Any, tangents: Any) -> Any:
    out = clock_p.bind(*primals)
    return out, compat.zero_tangent(out)


def _batch(args: Any, dims: Any) -> Any:
    (step,), (dim,) = args, dims
    return clock_p.bind(jnp.max(step, axis=dim)), None  # one clock for all elements


clock_p.def_abstract_eval(_abstract)
clock_p.def_impl(_impl)
ad.primitive_jvps[clock_p] = _jvp
batching.primitive_batchers[clock_p] = _batch
compat.lower_with_devices(clock_p)
# Lowering is registered in hostcallback.lowering, which knows the transports.

"""`progress`: a bar for a loop that the user wrote with `jax.lax`, or that a library has."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from hostcallback.api.progress.bar import (
    Progress,
    check_installed,
    check_total,
    emit,
    message,
    without_gradient,
)
from hostcallback.primitives.lanes import any_lane
from hostcallback.receiver.sinks.progress.message import Phase
from hostcallback.tracing.source_line import user_source_line

RATE = 10.0
"""Messages per second."""


def progress(total: Any, *, step: Any, desc: str | None = None, unit: str = "it", **postfix: Any) -> None:
    """Moves a progress bar, from any traced loop.

    Sends at most ten messages a second, and the one of the last step always. Each step asks the host whether it is
    time. `hcb.scan` and the like cost less, and show their last step whatever its number. Calls of one
    line share a bar.

    Args:
        total: number of steps, traced or not; None if it is not known. If it is wrong, or None, the bar ends at the
            next `barrier_wait`, and shows the last step a tenth of a second later.
        step: the number of this step, an integer, from 0 on.
        desc: the text before the bar.
        unit: what is counted.
        **postfix: values to show behind the bar, by name: scalars, traced or not.

    Raises:
        TypeError: `step` or `total` is no integer, or `desc` no text.
        ValueError: `total` is negative.
        ModuleNotFoundError: tqdm is not installed.

    Example:
        def body(i, x):
            hcb.progress(1000, step=i, desc="iterate", x=x)
            return jnp.cos(x)

        x = jax.lax.fori_loop(0, 1000, body, 1.0)
    """
    bar = Progress(desc, unit=unit)
    check_installed(bar.display)
    if total is not None:
        check_total(total, "total of hcb.progress")
    check_total(step, "step of hcb.progress")
    key, shown = str(user_source_line()), without_gradient(postfix)
    done = jnp.asarray(step) + 1
    known = -1 if total is None else total
    emit(message(Phase.UPDATE, done, known, shown), bar, key, own_rate=RATE)
    if total is not None:
        # Elements of a vmap may be at different steps: a condition per element would send in each step.
        last = any_lane(done == total)
        jax.lax.cond(last, lambda: emit(message(Phase.END, done, known, shown), bar, key), lambda: None)

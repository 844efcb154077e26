"""Times of places against work of a known length, and results with readings against those without."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import hostcallback as hcb
from python_process import python_output
from transforming import nap

TRAINED = """
import jax, jax.numpy as jnp, numpy as np, hostcallback as hcb

def loss(weights, x):
    for i, w in enumerate(weights):
        with jax.named_scope(f"layers/{i}"):
            x = x + jax.nn.gelu(jax.nn.softmax(x @ w) @ w.T)
    return jnp.mean(x**2)
@jax.jit
def step(weights, x):
    value, slopes = jax.value_and_grad(loss)(weights, x)
    return jax.tree.map(lambda w, slope: w - 0.1 * slope, weights, slopes), value
keys = jax.random.split(jax.random.key(0), 5)
weights, x = [0.1 * jax.random.normal(key, (64, 64)) for key in keys[1:]], jax.random.normal(keys[0], (48, 64))
plain = step(weights, x)
with hcb.observe(where="layers/*", what="time", tap_func=lambda times: None):
    timed = step(weights, x)
hcb.barrier_wait()
a, b = (np.concatenate([np.ravel(v) for v in jax.tree.leaves(t)]) for t in (plain, timed))
print((a != b).sum(), a.size, abs(a - b).max())
"""


@pytest.mark.slow
@pytest.mark.native_only
@pytest.mark.parametrize(
    ("flags", "most"), [("--xla_disable_hlo_passes=fusion", 0.0), ("", 1e-7)], ids=["unfused", "fused"]
)
def test_readings_change_no_operation_but_what_xla_fuses(flags: str, most: float) -> None:
    # A fused loop may round the product and the sum of two operations at once.
    options = {"JAX_DISABLE_MOST_OPTIMIZATIONS": None, "XLA_FLAGS": flags}
    differ, size, largest = python_output("-c", TRAINED, **options).split()
    assert float(largest) <= most
    assert int(differ) <= 0.02 * int(size)
    assert most or int(differ) == 0


@pytest.mark.slow
@pytest.mark.alone
def test_the_time_of_a_place_is_within_a_tenth_of_the_work_in_it() -> None:
    def program(x: Any) -> Any:
        with hcb.span("work"):
            x = nap(x, 0.5)
        return nap(x, 0.5)

    found: list[Any] = []
    with hcb.observe(what="time", tap_func=found.append):
        jax.jit(program)(jnp.ones((4, 4))).block_until_ready()
    hcb.barrier_wait()
    [values] = found
    assert 0.5 <= float(values["work"]["seconds"]) < 0.55
    assert 1.0 <= float(values["program"]["seconds"]) < 1.1


def test_a_place_begins_once_it_can_go_on_to_its_end() -> None:
    def program(x: Any) -> Any:
        with hcb.span("sum"):
            y = jnp.sin(x)
        with hcb.span("wait"):
            z = nap(x + 1, 0.05) * 2
        with hcb.span("sum"):
            return y + z

    found: list[Any] = []
    with hcb.observe(what="time", tap_func=found.append):
        jax.jit(program)(jnp.ones((4, 4))).block_until_ready()
    hcb.barrier_wait()
    [values] = found
    ends = int(values["wait"]["start_ns"]) + float(values["wait"]["seconds"]) * 1e9
    assert int(values["sum"]["start_ns"]) > ends - 1e6

"""If JAX's lowering is unknown, or fast dispatch is off, taps are slower and still correct."""

from __future__ import annotations

import pytest

from python_process import run_python

PROGRAM = """
import sys
import jax
import jax.numpy as jnp
from jax._src.interpreters import pxla
{before}
import hostcallback as hcb
from hostcallback.primitives import effects

frames = []
def profile(frame, event, arg):
    if event == "call":
        frames.append(frame.f_globals.get("__name__"))

seen = []
f = jax.jit(lambda x: hcb.id_tap(lambda v: seen.append(float(v)), x) * 2)
for i in range(3):
    f(jnp.float32(i))
sys.setprofile(profile)
f(jnp.float32(3))
sys.setprofile(None)
hcb.barrier_wait()
jax.effects_barrier()
slow = "jax._src.interpreters.pxla" in frames
print("installed", effects.installed, "slow", slow, "seen", seen, "untapped", float(jax.jit(lambda x: x + 1)(1.0)))
"""

RENAMED = """
code = pxla.lower_sharding_computation
def lower_sharding_computation(closed_jaxpr, *args, **kwargs):
    return code(closed_jaxpr, *args, **kwargs)
pxla.lower_sharding_computation = lower_sharding_computation
"""

OTHER_ARGUMENTS = """
import inspect
code = inspect.unwrap(pxla.lower_sharding_computation)
def lower_sharding_computation(program, *args, **kwargs):
    pxla._cached_lowering_to_hlo
    return code(program, *args, **kwargs)
pxla.lower_sharding_computation = lower_sharding_computation
"""


def run(before: str = "", **variables: str) -> tuple[str, str]:
    done = run_python("-c", PROGRAM.format(before=before), timeout_sec=120, **variables)
    return done.stdout, done.stderr


@pytest.mark.native_only  # programs with Python callbacks are dispatched from Python in any case
def test_a_tapped_program_is_dispatched_fast_by_default() -> None:
    out, err = run()
    assert out == "installed True slow False seen [0.0, 1.0, 2.0, 3.0] untapped 2.0\n"
    assert err == ""


@pytest.mark.slow
@pytest.mark.parametrize("before", [RENAMED, OTHER_ARGUMENTS])
def test_an_unknown_jax_is_left_alone_and_one_line_reports_it(before: str) -> None:
    out, err = run(before)
    assert out == "installed False slow True seen [0.0, 1.0, 2.0, 3.0] untapped 2.0\n"
    assert err.count("\n") == 1
    assert "JAX's slow path" in err
    assert "HOSTCALLBACK_FAST_DISPATCH=0" in err


@pytest.mark.slow
def test_fast_dispatch_can_be_switched_off_without_a_word() -> None:
    out, err = run(HOSTCALLBACK_FAST_DISPATCH="0")
    assert out == "installed False slow True seen [0.0, 1.0, 2.0, 3.0] untapped 2.0\n"
    assert err == ""


def test_a_switch_that_is_neither_on_nor_off_is_refused() -> None:
    out, err = run(HOSTCALLBACK_FAST_DISPATCH="maybe")
    assert out == ""
    assert "HOSTCALLBACK_FAST_DISPATCH='maybe': expected 1 (the default) or 0" in err

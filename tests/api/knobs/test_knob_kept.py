"""Knobs of programs that are exported, cached, kept in capsules, or run again; and those of forked children."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import hostcallback as hcb
from python_process import run_python, run_pythons

PROGRAM = Path(__file__).with_name("kept_program.py")


def output(*arguments: Any) -> list[str]:
    """The lines of the program."""
    done = run_python(PROGRAM, *map(str, arguments))
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.native_only
def test_an_exported_program_carries_the_default_and_reads_the_knob_of_its_name(tmp_path: Path) -> None:
    output("write", tmp_path)
    assert output("run", tmp_path) == ["2.0", "8.0", "8.0", "12.0"]


@pytest.mark.slow
@pytest.mark.native_only
def test_a_cached_program_has_no_value_in_it(tmp_path: Path) -> None:
    first, second = (output("cache", tmp_path, value) for value in (1, 3))
    assert [line.split()[0] for line in first] == ["4.0", "4.0"]
    assert second == ["12.0 hit", "12.0 hit"]


@pytest.mark.slow
def test_a_program_on_the_devices_of_several_processes_is_refused_with_the_cure() -> None:
    with socket.socket() as listening:
        listening.bind(("localhost", 0))
        port = listening.getsockname()[1]
    for printed in run_pythons([(PROGRAM, "several", str(i), str(port)) for i in range(2)], 100):
        assert "2.0\n" in printed
        assert 'of several processes, which would read different values: add agree="processes"' in printed


@pytest.mark.native_only
def test_export_without_permission_is_explained(name: str) -> None:
    with pytest.raises(ValueError, match=r"reads a knob.*disabled_checks=hcb\.export_checks\(\)"):
        jax.export.export(jax.jit(lambda x: x * hcb.knob(name, 1.0)))(1.0)


@pytest.mark.slow
@pytest.mark.native_only
def test_a_capsule_has_the_value_at_the_failure(name: str, tmp_path: Path) -> None:
    @jax.jit
    def f(x: Any) -> Any:
        y = x * hcb.knob(name, 2.0)
        hcb.check(y < 10, "{} is too large", y)
        return y

    hcb.knob(name, 2.0)
    hcb.knobs[name] = 50
    with hcb.capsule(tmp_path):
        f(1.0)
        with pytest.raises(hcb.TapFunctionException):
            hcb.barrier_wait()
    (capsule,) = tmp_path.iterdir()
    done = run_python("-m", "hostcallback.receiver.cli", "reproduce", capsule)
    assert "50.0 is too large" in done.stdout
    assert "\nreproduced: " in done.stdout


def test_a_second_run_of_a_step_that_looks_for_its_failure_reads_what_is_set(name: str) -> None:
    f = jax.jit(lambda x: jnp.log(x - hcb.knob(name, 1.0)))
    hcb.knob(name, 1.0)
    hcb.knobs[name] = 3
    with hcb.watch_nonfinite():
        f(2.0)
        with pytest.raises(hcb.TapFunctionException, match="log"):
            hcb.barrier_wait()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork:RuntimeWarning", "ignore:.*fork:DeprecationWarning")
def test_a_forked_child_has_knobs_of_its_own(name: str) -> None:
    hcb.knob(name, 1.0)
    child = os.fork()
    if not child:
        hcb.knobs[name] = 3
        os._exit(0 if hcb.knobs[name] == 3 else 1)
    assert os.waitpid(child, 0)[1] == 0
    hcb.knobs[name] = 2
    assert jax.jit(lambda x: x * hcb.knob(name, 1.0))(1.0) == 2


def test_a_knob_in_a_compiled_kernel_is_refused(name: str) -> None:
    def kernel(x: Any, out: Any) -> None:
        out[...] = x[...] * hcb.knob(name, 1.0)

    call = pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((4,), np.float32))
    with pytest.raises(NotImplementedError, match=rf"the read of knob {name} at .* is in a Pallas kernel"):
        jax.jit(call)(jnp.zeros(4))


def test_lowering_for_several_platforms_is_refused(name: str) -> None:
    f = jax.jit(lambda x: x * hcb.knob(name, 1.0))
    with pytest.raises(NotImplementedError, match="several platforms at once"):
        jax.export.export(f, platforms=["cpu", "cuda"], disabled_checks=hcb.export_checks())(1.0)

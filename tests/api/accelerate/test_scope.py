"""How `hcb.accelerate()` begins and ends: undone, nested, from the environment, with wrong options."""

from __future__ import annotations

import subprocess
import threading
from typing import Any

import jax
import numpy as np
import pytest

import hostcallback as hcb
from checkout import ROOT
from hostcallback import _jax_compat as compat
from python_process import run_python

X = np.float32(3)


def is_taken_over() -> bool:
    """Whether a callback that is traced now becomes a tap."""
    jaxpr = jax.make_jaxpr(lambda x: jax.debug.callback(print, x))(X)
    return any(str(equation.primitive) == "tap" for equation in jaxpr.eqns)


def python(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return run_python("-c", code, timeout_sec=60, PYTHONPATH=str(ROOT), **variables)


def test_a_block_ends_it() -> None:
    with hcb.accelerate() as acceleration:
        assert is_taken_over()
        assert acceleration.active
    assert not is_taken_over()
    assert not acceleration.active


def test_an_exception_ends_it_with_its_block() -> None:
    with pytest.raises(KeyError), hcb.accelerate():
        raise KeyError
    assert not is_taken_over()


def test_undo_ends_it() -> None:
    acceleration = hcb.accelerate()
    assert is_taken_over()
    acceleration.undo()
    assert not is_taken_over()


def test_undone_within_its_block_it_stays_undone() -> None:
    with hcb.accelerate() as acceleration:
        acceleration.undo()
        assert not is_taken_over()
    assert not is_taken_over()


def test_undone_twice_is_an_error_that_names_both_lines() -> None:
    acceleration = hcb.accelerate()
    acceleration.undo()
    with pytest.raises(
        RuntimeError, match=r"test_scope.py:\d+ .* undone already, again at .*test_scope.py:\d+"
    ):
        acceleration.undo()


def test_entered_when_it_is_undone_is_an_error() -> None:
    acceleration = hcb.accelerate()
    acceleration.undo()
    with pytest.raises(RuntimeError, match=r"call hcb\.accelerate"), acceleration:
        pass


def test_twice_lasts_until_both_are_undone_in_any_order() -> None:
    first, second = hcb.accelerate(), hcb.accelerate()
    first.undo()
    assert is_taken_over()
    second.undo()
    assert not is_taken_over()


def test_the_last_of_several_scopes_decides_the_arguments_of_callbacks() -> None:
    kinds: list[Any] = []

    def run() -> None:
        jax.block_until_ready(
            jax.jit(lambda x: [jax.debug.callback(lambda v: kinds.append(type(v)), x), x][1])(X)
        )
        hcb.barrier_wait()

    with hcb.accelerate():
        with hcb.accelerate(arrays="jax"):
            run()
        run()
    assert issubclass(kinds[0], jax.Array)
    assert kinds[1] is np.ndarray


def test_programs_traced_within_go_on_after_it() -> None:
    seen: list[Any] = []
    f = jax.jit(lambda x: [jax.debug.callback(seen.append, x), x][1])
    with hcb.accelerate():
        jax.block_until_ready(f(X))
    jax.block_until_ready(f(X))
    hcb.barrier_wait()
    assert len(seen) == 2


def test_another_librarys_replacement_of_bind_survives() -> None:
    primitive = compat.callback_primitive("jax.debug.callback")
    acceleration = hcb.accelerate()
    ours = primitive.bind
    bound: list[Any] = []

    def bind(*args: Any, **params: Any) -> Any:
        bound.append(args)
        return ours(*args, **params)

    primitive.bind = bind
    try:
        acceleration.undo()
        assert not is_taken_over()
        assert bound
        with hcb.accelerate():
            assert is_taken_over()
    finally:
        vars(primitive).pop("bind", None)
    assert not is_taken_over()


def test_in_traced_code_it_is_refused() -> None:
    @jax.jit
    def f(x: Any) -> Any:
        hcb.accelerate()
        return x

    with pytest.raises(RuntimeError, match=r"in code that JAX is tracing, at .*test_scope.py"):
        f(X)
    assert not is_taken_over()


@pytest.mark.slow
def test_an_endless_callback_is_named_and_blocks_nothing() -> None:
    entered, leave = threading.Event(), threading.Event()

    def waits(x: Any) -> None:
        entered.set()
        leave.wait()

    with hcb.accelerate():
        f = jax.jit(lambda x: [jax.debug.callback(waits, x), x + 1][1])
        assert float(f(X)) == 4
    entered.wait()
    with pytest.raises(hcb.TapTimeoutError, match="waits"):
        hcb.barrier_wait(timeout_sec=0.2)
    assert float(f(X)) == 4
    leave.set()
    hcb.barrier_wait()


def test_unknown_options_are_refused() -> None:
    with pytest.raises(ValueError, match=r"arrays='torch', expected 'numpy' .*test_scope.py"):
        hcb.accelerate(arrays="torch")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="verbose is 1, expected True or False"):
        hcb.accelerate(verbose=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="unexpected keyword argument 'fast'"):
        hcb.accelerate(fast=True)  # type: ignore[call-arg]
    assert not is_taken_over()


def test_verbose_tells_each_line_once(capsys: pytest.CaptureFixture[str]) -> None:
    with hcb.accelerate(verbose=True) as acceleration:
        for _ in range(2):
            is_taken_over()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("hostcallback: taken over: jax.debug.callback at ")
    assert "test_scope.py" in line
    assert [str(callback) for callback in acceleration.callbacks] == [line.removeprefix("hostcallback: ")]


PROGRAM = """
import hostcallback, jax
print(jax.make_jaxpr(lambda x: jax.debug.print("{}", x))(1.0).eqns[0].primitive)
"""


@pytest.mark.slow_variants
@pytest.mark.parametrize(("value", "primitive"), [("1", "tap"), ("0", "debug_print"), ("", "debug_print")])
def test_the_environment_begins_it_at_import(value: str, primitive: str) -> None:
    result = python(PROGRAM, HOSTCALLBACK_ACCELERATE=value)
    assert result.stdout.split() == [primitive], result.stderr
    assert not result.stderr


@pytest.mark.slow
def test_the_environment_can_turn_it_on() -> None:
    result = python(PROGRAM, HOSTCALLBACK_ACCELERATE="verbose")
    assert "hostcallback: taken over: jax.debug.print at <string>:3" in result.stderr


@pytest.mark.slow
def test_another_value_of_the_variable_is_refused() -> None:
    result = python(PROGRAM, HOSTCALLBACK_ACCELERATE="yes")
    assert result.returncode == 1
    assert "HOSTCALLBACK_ACCELERATE='yes': expected 1" in result.stderr

"""`hcb.log` logs the text that `hcb.print` prints, as records that name the user's line."""

from __future__ import annotations

import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hostcallback as hcb


def test_records_have_the_text_and_name_the_line_that_called_log(
    jit: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def f(x: Any) -> Any:
        assert hcb.log("100% of {} is {y:.1f}", x, y=x * 2) is None
        return x

    with caplog.at_level(logging.INFO):
        jit(f)(jnp.float32(3))
        hcb.barrier_wait()
    (record,) = caplog.records
    assert record.getMessage() == "100% of 3.0 is 6.0"
    assert (record.name, record.levelno) == ("hostcallback.log", logging.INFO)
    assert record.pathname == __file__
    assert record.lineno == f.__code__.co_firstlineno + 1
    assert record.funcName.endswith("f")


def test_each_element_of_a_batch_has_its_record(jit: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        jit(jax.vmap(lambda x: hcb.log("{}", x)))(jnp.arange(3))
        hcb.barrier_wait()
    assert caplog.messages == ["0", "1", "2"]


def test_a_level_that_is_off_is_off(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        hcb.log("text")
        hcb.barrier_wait()
    assert not caplog.records


def test_the_two_call_form_takes_a_logger_and_a_level(caplog: pytest.LogCaptureFixture) -> None:
    warn = hcb.log(logger=logging.getLogger("mine"), level=logging.WARNING, ordered=True)
    with np.printoptions(precision=2):
        warn("{} {level}", jnp.array([1.234]), level="high")
    hcb.barrier_wait()
    assert [(r.name, r.levelname, r.getMessage()) for r in caplog.records] == [
        ("mine", "WARNING", "[1.23] high")
    ]


def test_wrong_formats_are_refused_as_by_print() -> None:
    with pytest.raises(ValueError, match=r"Unused positional arguments to `hcb.log`: \[1\].*test_log.py"):
        hcb.log("text", 1)
    with pytest.raises(TypeError, match=r"hcb.log takes a format string first, got int 3"):
        hcb.log(3)  # type: ignore[call-overload]


@pytest.mark.parametrize("options", [{"logger": "mine"}, {"level": "INFO"}])
def test_a_logger_or_a_level_of_another_type_is_refused(options: Any) -> None:
    with pytest.raises(TypeError, match=r"takes a logging.Logger and a level as a number, got .*test_log.py"):
        hcb.log(**options)("text")


def test_the_text_matches_jax_debug_print(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    def f(log: Any) -> None:
        jax.jit(lambda x: log("{} {!r} {:.2f}", x, x, x[0]))(jnp.array([1.234]))

    with caplog.at_level(logging.INFO):
        f(hcb.log)
        hcb.barrier_wait()
    f(jax.debug.print)
    jax.effects_barrier()
    assert caplog.messages == capsys.readouterr().out.splitlines()

"""Taps have names: the user's, their function's, or their line's, so that rules can tell them apart."""

from __future__ import annotations

import inspect
import logging
import re
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import hostcallback as hcb
from checkout import ROOT
from hostcallback.receiver.tap_arguments import matches
from hostcallback.tracing.source_line import SourceLine, place_name
from python_process import python_output, run_python


def line() -> int:
    """The line that called."""
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


def bad(value: Any) -> None:
    raise ValueError("no")


def names_of(trace: Any) -> set[str]:
    """The names of the taps of a program."""
    before = set(hcb.taps.names)
    compiled = jax.jit(trace).lower(jnp.float32(1)).compile()
    found = set(hcb.taps.names) - before
    del compiled
    return found


def test_six_prints_without_names_are_told_apart_by_function_and_line(capsys: Any) -> None:
    first = line() + 3

    def train_step(x: Any) -> Any:
        hcb.print("a {}", x)
        hcb.print("b {}", x)
        hcb.print("c {}", x)
        hcb.print("d {}", x, name="named")
        hcb.log("e {}", x)
        hcb.callback(lambda value: None, x)
        return hcb.id_tap(lambda value: None, hcb.id_print(x))

    f = jax.jit(train_step)
    f(1.0).block_until_ready()
    hcb.barrier_wait()
    assert {
        *(f"print@train_step:{first + k}" for k in range(3)), "named", f"log@train_step:{first + 4}",
        f"lambda@train_step:{first + 5}", f"lambda@train_step:{first + 6}", f"id_print@train_step:{first + 6}",
    } <= set(hcb.taps.names)  # fmt: skip
    capsys.readouterr()
    hcb.taps[f"print@train_step:{first + 1}"].disable()
    hcb.taps["id_print"].disable()
    try:
        f(2.0).block_until_ready()
        hcb.barrier_wait()
        assert capsys.readouterr().out == "a 2.0\nc 2.0\nd 2.0\n"
        matched = hcb.taps["print"].disable()
        assert set(matched) >= {f"print@train_step:{first + k}" for k in range(3)}
        f(3.0).block_until_ready()
        hcb.barrier_wait()
        assert capsys.readouterr().out == "d 3.0\n"
    finally:
        hcb.taps["*"].reset()


def test_a_name_is_that_of_the_function_or_the_line() -> None:
    assert place_name("print", SourceLine("/a/b.py", 3, "Model.train.<locals>.step", "b")) == "print@step:3"
    assert place_name("print", SourceLine("/a/b.py", 3, "train.<locals>.<lambda>", "b")) == "print@train:3"
    assert place_name("print", SourceLine("/a/b.py", 3, "<module>", "b")) == "print@b.py:3"
    assert matches("print@step:3", "print")
    assert matches("print@step:3", "pr*")
    assert matches("print@step:3", "*@step:*")
    assert not matches("print@step:3", "prin")
    assert not matches("print@step:3", "id_print@*")
    assert matches("a@b", "a@b")


@pytest.mark.parametrize("emit", [hcb.print, hcb.log])
def test_a_text_takes_a_name_unless_it_has_a_placeholder_of_that_name(
    emit: Any, capsys: Any, caplog: Any
) -> None:
    caplog.set_level(logging.INFO, "hostcallback.log")
    assert names_of(lambda x: emit("step {}", x, name="of a text")) == {"of a text"}
    emit("hello {name}", name=jnp.int32(3))
    hcb.barrier_wait()
    assert (
        capsys.readouterr().out + "".join(record.getMessage() + "\n" for record in caplog.records)
        == "hello 3\n"
    )


def test_print_and_log_take_their_options_with_the_text(capsys: Any, caplog: Any) -> None:
    caplog.set_level(logging.INFO, "mine")
    jax.jit(lambda x: hcb.print("x {}", x, output_stream=sys.stderr))(1)
    jax.jit(lambda x: hcb.log("x {}", x, logger=logging.getLogger("mine"), level=logging.WARNING))(2)
    hcb.barrier_wait()
    assert capsys.readouterr() == ("", "x 1\n")
    assert [(record.name, record.levelname, record.getMessage()) for record in caplog.records] == [
        ("mine", "WARNING", "x 2")
    ]


def test_callback_takes_a_name_unless_its_function_takes_one() -> None:
    assert names_of(lambda x: hcb.callback(lambda value: None, x, name="history")) == {"history"}
    got: list[Any] = []
    hcb.callback(lambda value, name: got.append(name), 1.0, name="his own")
    hcb.callback(lambda value, **more: got.append(more), 1.0, name="his own")
    hcb.barrier_wait()
    assert got == ["his own", {"name": "his own"}]


@pytest.mark.parametrize(
    ("keywords", "cure"),
    [
        ({"end": ""}, r"hcb.print has no end=: each text is a line.* at .*test_names.py"),
        ({"file": sys.stderr}, r"hcb.print has no file=: output_stream= is an object with write\(str\)"),
        ({"sep": ", "}, r"hcb.print has no sep=: write the separator into the format string"),
        ({"every": 100}, r"hcb.print has no every=: .* hcb.taps\['loss'\].every\(100\)"),
        ({"flush": True}, r"hcb.print has no flush=: .*barrier_wait"),
        ({"nam": "loss"}, r"Did you mean name=\?"),
        ({"x": 3}, r"f-string.*the options of hcb.print are name, ordered, output_stream"),
    ],
)
def test_an_unknown_keyword_gets_its_own_message(keywords: dict[str, Any], cure: str) -> None:
    with pytest.raises(ValueError, match=cure):
        hcb.print("x {}", 1, **keywords)


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, lambda f: jax.jit(jax.vmap(f))])
@pytest.mark.parametrize("emit", [hcb.print, hcb.log])
def test_an_f_string_with_a_traced_value_is_refused(transform: Any, emit: Any) -> None:
    with pytest.raises(ValueError, match=r"Tracer.*an f-string, .*Pass the value: hcb.*test_names.py"):
        transform(lambda x: emit(f"x is {x}"))(jnp.ones(2))
    with pytest.raises(ValueError, match=r"Tracer.*an f-string"):
        jax.grad(lambda x: (emit(f"x is {x}"), x)[1])(1.0)


def test_tap_is_id_tap() -> None:
    got: list[float] = []
    assert hcb.tap is hcb.id_tap
    assert jax.jit(lambda x: hcb.tap(got.append, x, name="loss"))(1.5) == 1.5
    hcb.barrier_wait()
    assert got == [1.5]


def test_parameters_with_a_default_stay_the_users() -> None:
    got: list[Any] = []
    for index in range(2):
        hcb.tap(
            lambda value, device="cuda", index=index, transforms="mine": got.append(
                (device, index, transforms)
            ),
            1,
        )
    hcb.tap(lambda value, device: got.append(device), 1)
    shape = jax.ShapeDtypeStruct((), "float32")
    hcb.call(lambda value, device="cuda": got.append(device) or value, jnp.float32(1), result_shape=shape)
    hcb.barrier_wait()
    assert got == [("cuda", 0, "mine"), ("cuda", 1, "mine"), jax.devices()[0], "cuda"]


def test_scalars_arrive_as_python_numbers_on_request() -> None:
    got: list[Any] = []
    value = {
        "step": jnp.int32(3),
        "loss": jnp.bfloat16(1.5),
        "ok": jnp.array(True),
        "z": 1j,
        "x": jnp.ones(2),
    }
    jax.jit(lambda v: hcb.tap(got.append, v, python_scalars=True))(value)
    jax.jit(lambda v: hcb.callback(lambda **v: got.append(v), python_scalars=True, **v))(value)
    jax.jit(jax.vmap(lambda v: hcb.callback(got.append, v, python_scalars=True)))(jnp.arange(2))
    jax.jit(lambda v: hcb.tap(got.append, v))(value)
    hcb.barrier_wait()
    for found in got[:2]:
        assert {key: type(found[key]) for key in ["step", "loss", "ok", "z"]} == {
            "step": int, "loss": float, "ok": bool, "z": complex
        }  # fmt: skip
        assert found["x"].tolist() == [1, 1]
    assert [(type(n), n) for n in got[2:4]] == [(int, 0), (int, 1)]
    assert got[4]["step"].ndim == 0
    with pytest.raises(TypeError, match=r"python_scalars='yes', expected True or False, at .*test_names.py"):
        hcb.tap(got.append, 1, python_scalars="yes")  # type: ignore[call-overload]


def test_import_star_leaves_builtins_alone_and_brings_the_rest() -> None:
    import builtins

    there: dict[str, Any] = {}
    exec("from hostcallback import *", there)
    assert not {name for name in there if hasattr(builtins, name)} - {"__builtins__", "__doc__", "__name__"}
    assert there["tap"] is hcb.tap
    assert there["outfeed_receiver"] is hcb.outfeed_receiver


@pytest.mark.slow
def test_attributes_are_public_names_and_no_internal_modules_hide_them() -> None:
    program = """
import importlib, pkgutil, types, jax
import hostcallback as hcb
from hostcallback import receiver
more = {*hcb._NAMED_AS_BUILTINS, "receiver", "host_callback"}
for package in (hcb, receiver):
    for module in pkgutil.iter_modules(package.__path__):
        if module.name not in ("cli",) and not module.name.startswith("_"):
            importlib.import_module(f"{package.__name__}.{module.name}")
    for name in package.__all__:
        value = getattr(package, name)
        assert not isinstance(value, types.ModuleType) or name == "receiver", name
    for name in dir(package):
        assert name.startswith("_") or name in {*package.__all__, *more}, name
"""
    python_output("-c", program, timeout_sec=60)


TYPES = """
import jax
import hostcallback as hcb
from typing import assert_type

def step(x: jax.Array, n: int, both: tuple[jax.Array, str]) -> None:
    assert_type(hcb.tap(print, x), jax.Array)
    assert_type(hcb.tap(print, x, name="loss", ordered=False, extra=3), jax.Array)
    assert_type(hcb.id_tap(print, both), tuple[jax.Array, str])
    assert_type(hcb.id_tap(print, both, result=n), int)
    assert_type(hcb.id_print(both, what="x"), tuple[jax.Array, str])
    assert_type(hcb.id_print(x, result=n), int)
    assert_type(hcb.print("x {}", x, name="loss"), None)
    hcb.tap(3, x)
    hcb.tap(print, x, x)
"""


@pytest.mark.slow
def test_taps_are_typed(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    program = tmp_path / "program.py"
    program.write_text(TYPES)
    done = run_python("-m", "mypy", "--strict", program, cwd=ROOT, timeout_sec=110)
    lines = [int(found[1]) for found in re.finditer(r"program.py:(\d+): error", done.stdout)]
    assert lines == [14, 15], done.stdout

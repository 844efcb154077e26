"""Answers of the debugger's commands, over the frames of a real program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import hostcallback as hcb
from scripted import Script
from transforming import Jit

SCALE = 3
PACKAGE = Path(hcb.__file__).parent


def loss(script: Script, params: Any, x: Any) -> Any:
    y = params["w"] * x
    hcb.breakpoint(**script.streams)  # STOPS HERE
    return y.sum() + params["b"]


def line_of(text: str) -> int:
    with open(__file__) as file:
        return next(number for number, line in enumerate(file, 1) if text in line)


def run(*commands: str, jit: Jit = hcb.jit) -> Script:
    script = Script(*commands, "c")
    # This frame is above the frame of `loss`.
    above = "the caller"
    function = jit(lambda x: loss(script, {"w": x + 1, "b": 2.0}, x))
    jax.block_until_ready(function(jnp.arange(3.0)))
    assert above
    return script


def answer(command: str, jit: Jit = hcb.jit) -> str:
    return run(command, jit=jit).answers[0]


@pytest.mark.slow
def test_p_evaluates_over_locals_and_globals(jit: Jit) -> None:
    assert answer("p [int(v) * SCALE for v in y]", jit) == "[0, 6, 18]"
    assert answer("p params['b'], script.commands", jit) == "(2.0, ['c'])"
    assert answer("y.shape", jit) == "(3,)"
    assert answer("!y.ndim", jit) == "1"
    assert answer("p sorted(locals())", jit) == "['params', 'script', 'x', 'y']"


def test_traced_values_are_numpy_arrays() -> None:
    assert answer("p params") == "{'b': 2.0, 'w': array([1., 2., 3.], dtype=float32)}"
    assert answer("p type(y).__module__, y.flags.writeable") == "('numpy', True)"


def test_pp_pretty_prints() -> None:
    long = run("pp {i: 'x' * 30 for i in range(4)}").answers[0].splitlines()
    assert len(long) == 4


def test_the_error_of_an_expression_is_printed_and_the_prompt_stays() -> None:
    script = run("p nonsense", "p 1 / 0", "p )", "p", "raise SystemExit(3)", "nonsense", "p 1 + 1")
    errors = ["NameError", "ZeroDivisionError", "SyntaxError", "SyntaxError", "SystemExit", "NameError"]
    for text, error in zip(script.answers, errors, strict=False):
        assert text.startswith(f"*** {error}"), text
    assert script.answers[6] == "2"


def test_statements_assign_variables_that_later_commands_see() -> None:
    assert run("z = y.sum()", "p float(z)", "for i in range(2): z += 1", "p float(z)").answers[:4] == [
        "", "8.0", "", "10.0",
    ]  # fmt: skip


def test_where_lists_the_frames_and_marks_the_current_one() -> None:
    for command in ("w", "where", "bt"):
        lines = answer(command).splitlines()
        assert lines[-2].startswith(f"> {__file__}({line_of('# STOPS HERE')})loss()")
        assert lines[-1].startswith("-> hcb.breakpoint(**script.streams)")
        assert lines[-4].endswith("run.<locals>.<lambda>()")
        assert lines[-6].endswith(")run()")
        assert not any("/jax/" in line or f"{PACKAGE}/" in line for line in lines)


def test_up_and_down_change_the_frame() -> None:
    script = run("u", "p x.shape", "up", "p above", "d", "down 5", "p y.shape", "d", "up 100", "u", "u x")
    assert "<lambda>()" in script.answers[0]
    assert script.answers[1] == "(3,)"
    assert script.answers[2].splitlines()[0].endswith(")run()")
    assert script.answers[3] == "'the caller'"
    assert script.answers[5].splitlines()[0].endswith(")loss()")
    assert script.answers[6:8] == ["(3,)", "*** Newest frame"]
    assert script.answers[9:11] == ["*** Oldest frame", "*** expected a number of frames, got x"]


def test_list_shows_the_source_around_the_line() -> None:
    here = line_of("# STOPS HERE")
    script = run("l", "", "l .", "list 1, 2", "l x", "l 100000", "u", "l")
    first = script.answers[0].splitlines()
    assert [int(line[:4]) for line in first] == [*range(here - 5, here + 6)]
    assert [line for line in first if "->" in line[:8]] == [
        f"{here:4d} ->     hcb.breakpoint(**script.streams)  # STOPS HERE"
    ]
    assert script.answers[1].splitlines()[0].startswith(f"{here + 6:4d}")  # an empty line repeats the command
    assert script.answers[2] == script.answers[0]
    assert len(script.answers[3].splitlines()) == 2
    assert script.answers[4].startswith("*** expected line numbers")
    assert script.answers[5] == "[EOF]"
    assert "function = jit(lambda x" in script.answers[7]


def test_help_lists_the_commands() -> None:
    script = run("help", "h", "? u", "help list")
    for command in ("help", "p", "pp", "up", "down", "where", "bt", "list", "continue", "quit"):
        assert command in script.answers[0].split()
    assert script.answers[1] == script.answers[0]
    assert "goes to the caller's frame" in script.answers[2]


@pytest.mark.parametrize("command", ["c", "cont", "continue"])
def test_continue_has_these_names(command: str) -> None:
    assert len(run(command).answers) == 1


def test_a_program_from_no_file_has_no_source() -> None:
    script = Script("l", "p y, k", "u", "p k", "c")
    names: dict[str, Any] = {"hcb": hcb, "script": script, "k": 7, "unused": object()}
    code = "def f(x):\n    y = k\n    hcb.breakpoint(**script.streams)\n    return x * y + k\n"
    # Not the default "<string>": Python 3.13 keeps the text of `python -c` under that name, and shows it.
    exec(compile(code, "<made up>", "exec"), names)
    hcb.jit(names["f"])(1.0)
    assert script.answers[:2] == ["<no source>", "(7, 7)"]


def test_the_names_of_a_program_from_no_file_are_those_that_it_defines() -> None:
    script = Script("u", "p k, sorted(globals().keys() - {'__builtins__'})", "c")
    names: dict[str, Any] = {"__name__": "made up", "hcb": hcb, "script": script}
    code = "k = 7\ndef f(x):\n    hcb.breakpoint(**script.streams)\n    return x\nhcb.jit(f)(1.0)\n"
    exec(compile(code, "<made up>", "exec"), names)
    assert script.answers[1] == "(7, ['f', 'hcb', 'k', 'script'])"

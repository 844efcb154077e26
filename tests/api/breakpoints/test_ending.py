"""How a stop ends: by quitting, by errors, and how the program goes on."""

from __future__ import annotations

import io
import sys
import threading
import traceback
import types
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import hostcallback as hcb
from scripted import Script
from threads import in_threads, wait_for
from transforming import PROGRAM_FAILED, Jit, no_jit

EITHER = (*PROGRAM_FAILED, hcb.HostCallbackError)


def stopping(script: Any, jit: Jit) -> Any:
    def f(x: Any) -> Any:
        hcb.breakpoint(**script.streams)
        return x + 1

    return jit(f)


def deferred() -> list[type[BaseException]]:
    """The types of the errors that the next barrier raises."""
    try:
        hcb.barrier_wait()
    except hcb.TapFunctionException as group:
        return [type(error) for error in group.exceptions]
    return []


@pytest.mark.slow_variants
@pytest.mark.parametrize("command", ["q", "quit", "exit", "EOF"])
def test_quitting_ends_the_program_and_the_next_one_stops_again(jit: Jit, command: str) -> None:
    script = Script(command, "c") if command != "EOF" else Script()
    f = stopping(script, jit)
    with pytest.raises(
        EITHER, match=r"the program was ended by q\(uit\) at the breakpoint at .*test_ending\.py:\d+"
    ):
        jax.block_until_ready(f(1.0))
    assert deferred() == []  # the caller has the exception
    script.commands = ["c"]
    assert float(f(1.0)) == 2
    assert float(hcb.jit(lambda x: x * 2)(1.0)) == 2
    hcb.barrier_wait()


def test_quitting_in_a_loop_runs_no_more_of_it() -> None:
    script = Script("c", "q", "c")

    def body(i: Any, x: Any) -> Any:
        hcb.breakpoint(**script.streams)
        return x + i

    with pytest.raises(PROGRAM_FAILED, match="BreakpointQuit"):
        jax.block_until_ready(jax.jit(lambda x: jax.lax.fori_loop(0, 10, body, x))(0))
    assert script.commands == ["c"]
    assert deferred() == []


def test_a_terminal_that_fails_ends_the_program(jit: Jit) -> None:
    class Broken(Script):
        def write(self, text: str) -> int:
            raise OSError("the terminal went away")

    f = stopping(Broken(), jit)
    for _ in range(2):
        with pytest.raises((*EITHER, OSError), match="the terminal went away"):
            jax.block_until_ready(f(1.0))
    assert deferred() == ([OSError] * 2 if jit is jax.jit or jit is hcb.jit else [])
    assert float(stopping(Script("c"), jit)(1.0)) == 2


@pytest.mark.parametrize("stdin", [None, io.StringIO("c\n")], ids=["none", "no terminal"])
def test_without_a_terminal_the_program_does_not_wait(monkeypatch: pytest.MonkeyPatch, stdin: Any) -> None:
    monkeypatch.setattr(sys, "stdin", stdin)

    def f(x: Any) -> Any:
        hcb.breakpoint()
        return x

    with pytest.raises(hcb.BreakpointError, match=r"test_ending\.py:\d+ .* expected a terminal"):
        f(1.0)
    with pytest.raises(PROGRAM_FAILED, match=r"BreakpointError: hcb\.breakpoint stopped at"):
        hcb.jit(f)(1.0)
    assert deferred() == [hcb.BreakpointError]


def test_in_a_notebook_the_kernel_is_asked(jit: Jit, monkeypatch: pytest.MonkeyPatch) -> None:
    script, prompts = Script("p float(x)", "c"), []

    def raw_input(prompt: str) -> str:
        prompts.append(prompt)
        return script.readline().rstrip()

    kernel = types.SimpleNamespace(raw_input=raw_input)
    notebook = types.SimpleNamespace(get_ipython=lambda: types.SimpleNamespace(kernel=kernel))
    monkeypatch.setitem(sys.modules, "IPython", notebook)  # type: ignore[arg-type]

    def f(x: Any) -> Any:
        hcb.breakpoint(stdout=script)
        return x

    jax.block_until_ready(jit(f)(2.0))
    assert prompts == ["(hcb) "] * 2
    assert "2.0\n" in script.text
    kernel.raw_input = lambda prompt: {}["this frontend does not support input"]
    with pytest.raises(EITHER, match=r"the notebook cannot be asked there: .* does not support input"):
        jax.block_until_ready(jit(f)(2.0))
    assert deferred() == ([hcb.BreakpointError] if jit is jax.jit or jit is hcb.jit else [])


def test_an_evaluated_expression_may_stop_itself(jit: Jit) -> None:
    script = Script("p float(g(x))", "p float(y)", "c", "p float(x)", "c")

    @jit
    def g(x: Any) -> Any:
        y = 10 * x
        hcb.breakpoint(**script.streams)
        return y

    def f(x: Any) -> Any:
        assert g
        hcb.breakpoint(**script.streams)
        return x

    assert float(jit(f)(jnp.float32(2))) == 2
    assert script.answers[1:] == ["20.0", "20.0", "2.0", ""]


def test_evaluated_code_may_wait_for_a_stop_that_came_before_it() -> None:
    class Hesitating(Script):
        def readline(self) -> str:
            if self.commands[0] == "p thread.join()":
                wait_for(waits_for_its_turn, "the other stop")
            return super().readline()

    def waits_for_its_turn() -> bool:
        frame = sys._current_frames().get(thread.ident or 0)
        return frame is not None and "_take_turn" in [
            f.f_code.co_name for f, _ in traceback.walk_stack(frame)
        ]

    script = Hesitating("thread.start()", "p thread.join()", "p float(x)", "c", "c")
    thread = threading.Thread(target=lambda: stopping(script, no_jit)(3.0))

    def f(x: Any) -> Any:
        assert thread
        hcb.breakpoint(**script.streams)
        return x

    assert float(jax.jit(f)(jnp.float32(2))) == 2
    assert len(script.stops) == 2
    assert script.answers[2:] == ["3.0", "None", ""]


def test_ctrl_c_while_python_is_evaluated_returns_to_the_prompt() -> None:
    script = Script("raise KeyboardInterrupt", "p 1 + 1", "c")
    stopping(script, lambda f: f)(1.0)
    assert script.answers == ["--KeyboardInterrupt--", "2", ""]


def test_stops_of_several_threads_take_turns() -> None:
    script = Script(*["p threading.get_ident()", "p threading.get_ident()", "c"] * 4)
    programs = [stopping(script, hcb.jit if i % 2 else lambda f: f) for i in range(4)]
    in_threads(lambda i: jax.block_until_ready(programs[i](1.0)), 4)
    idents = [answer for answer in script.answers if answer]
    assert idents[::2] == idents[1::2]
    assert len(script.stops) == 4
    hcb.barrier_wait()

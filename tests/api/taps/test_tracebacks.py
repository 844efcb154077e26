"""Tracebacks that users see end at their line: the frames of this package are hidden, as JAX hides its own."""

from __future__ import annotations

import contextlib
import operator
import os
import signal
import subprocess
import sys
import traceback
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import hostcallback as hcb
from checkout import ROOT
from hostcallback.lifecycle import receivers
from hostcallback.receiver import Capsule
from python_process import run_python


def bad(value: Any) -> None:
    raise ValueError("no")


def receive() -> None:
    with hcb.outfeed_receiver():
        hcb.tap(bad, 1)


def wait() -> None:
    hcb.tap(bad, 1)
    hcb.barrier_wait()


def capture() -> None:
    with hcb.capture():
        hcb.tap(bad, 1)


MISUSES = {
    "tap": lambda: hcb.tap(3, 1),  # type: ignore[call-overload]
    "print": lambda: hcb.print("{} {}", 1),
    "print with options": lambda: hcb.print(ordered=True)("{} {}", 1),
    "id_print": lambda: hcb.id_print(1, output_stream=3),  # type: ignore[call-overload]
    "log": lambda: hcb.log("x", level="high"),
    "callback": lambda: hcb.callback(3, 1),  # type: ignore[call-overload]
    "call": lambda: hcb.call(bad, 1),
    "check": lambda: hcb.check(1.5, "x"),
    "observe": lambda: hcb.observe(3),  # type: ignore[call-overload]
    "breakpoint": lambda: hcb.breakpoint(when="yes"),
    "taps": lambda: hcb.taps["x"].every(0),
    "receiver": lambda: hcb.outfeed_receiver(timeout_sec=-1),
    "end of the receiver": receive,
    "barrier": wait,
    "read": lambda: hcb.read("nope"),
    "replay": lambda: hcb.receiver.replay("nope"),
    "record": lambda: hcb.record("nope", segment_sec=-1),
    "knobs": lambda: hcb.knobs["nope"],
    "setting a knob": lambda: operator.setitem(hcb.knobs, "nope", 1),
    "replaying knobs": lambda: hcb.knobs.replay("nope"),
    "csv": lambda: hcb.csv(3),  # type: ignore[arg-type]
    "a failed check of a step": lambda: hcb.checked(lambda: hcb.check(jnp.array(False), "no"))(),
    "an exception of a checked step": lambda: hcb.checked(lambda: hcb.print("{} {}", 1))(),
    "scan": lambda: hcb.scan(lambda c, x: (c + 0.5, x), jnp.int32(0), jnp.arange(3)),
    "fori_loop": lambda: hcb.fori_loop(0, 3, lambda i, x: x + 0.5, jnp.int32(0)),
    "while_loop": lambda: hcb.while_loop(lambda x: x < 3, lambda x: x + 0.5, jnp.int32(0)),
    "jit": lambda: jax.jit(lambda x: hcb.print("{} {}", x))(1.0),
    "vmap": lambda: jax.vmap(lambda x: hcb.tap(3, x))(jnp.ones(2)),  # type: ignore[call-overload]
    "no such name": lambda: hcb.id_prnt,  # type: ignore[attr-defined]
    "no such capsule": lambda: Capsule("nowhere.hcb"),
    "capture in a receiver": lambda: hcb.capture().__enter__(),
    "failing tap in a capture": capture,
    "decorator": lambda: hcb.watch_nonfinite()(3),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("what", list(MISUSES))
def test_a_misuse_ends_at_the_users_line(what: str) -> None:
    around = hcb.outfeed_receiver() if what == "capture in a receiver" else contextlib.nullcontext()
    with around, pytest.raises(Exception) as caught:  # noqa: PT011
        MISUSES[what]()
    hcb.barrier_wait()
    files = [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]
    ours = [f for f in files if f.startswith((f"{ROOT}{os.sep}hostcallback", f"{ROOT}{os.sep}receiver"))]
    assert ours == []
    assert files[-1] == __file__


INTERRUPTED = """
import sys, threading, time, jax, jax.numpy as jnp, hostcallback as hcb
jax.config.update("jax_cpu_enable_async_dispatch", {asynchronous})
launched = False
told = False
def seen(i):
    global told
    if not told and i >= 3 and launched and waits():
        print("waits", flush=True)
        told = True
    time.sleep(1e-3)
def waits():
    frame, files = sys._current_frames()[threading.main_thread().ident], ""
    while frame:
        files += frame.f_code.co_filename
        frame = frame.f_back
    return {where!r} in files
def body(i, x):
    hcb.tap(seen, i)
    return jnp.sin(x @ x / 300.0)
x = jnp.ones((300, 300))
{work}
"""
# "<string>" stands for any place. An interrupt while JAX launches the program has JAX's frames, without us too. One
# before the first instruction of a function of ours that is just called has that function's frame: no code of it runs
# yet that could hide it.
JITTED = "y = jax.jit(lambda x: jax.lax.fori_loop(0, 10_000, body, x))(x); launched = True"


@pytest.mark.slow_variants
@pytest.mark.native_only  # through Python the interrupt comes in a callback of JAX, or the program goes on to its end
@pytest.mark.parametrize(
    ("asynchronous", "work", "where"),
    [
        (True, f"{JITTED}; hcb.barrier_wait()", "barrier.py"),
        (True, f"{JITTED}; y.block_until_ready()", "<string>"),
        (False, "launched = True; hcb.fori_loop(0, 1_000, body, x)", "<string>"),
    ],
)
def test_an_interrupt_ends_at_the_users_line(asynchronous: bool, work: str, where: str) -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED.format(asynchronous=asynchronous, work=work, where=where)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with program:
        assert program.stdout is not None
        assert program.stdout.readline() == "waits\n"
        program.send_signal(signal.SIGINT)
        _, told = program.communicate(timeout=60)
    assert "KeyboardInterrupt" in told
    frames = [line.strip() for line in told.splitlines() if line.strip().startswith("File ")]
    assert frames
    assert all('"<string>"' in frame for frame in frames), told


CALLED = """
import os, signal, time, jax, hostcallback as hcb
def slow(x):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
jax.jit(lambda x: hcb.call(slow, x, result_shape=x))(1.0).block_until_ready()
"""


def test_an_interrupted_call_is_told_of_once_and_without_frames_of_this_package() -> None:
    told = run_python("-c", CALLED).stderr
    assert "KeyboardInterrupt" in told
    assert "no barrier_wait() or receiver reported it" not in told
    if receivers.use_native("cpu"):  # XLA's error of a Python callback has a text with all frames
        assert f"{ROOT}{os.sep}hostcallback" not in told


def test_a_report_has_no_note_of_jaxs_about_frames() -> None:
    hcb.tap(bad, 1)
    with pytest.raises(hcb.TapFunctionException) as caught:
        hcb.barrier_wait()
    assert "JAX has removed" not in "".join(traceback.format_exception(caught.value))


def test_an_argument_that_is_missing_is_told_with_the_name_that_was_used() -> None:
    with pytest.raises(TypeError, match=r"hcb\.tap\(\) missing 1 required positional argument: 'arg', at"):
        hcb.tap(1.0)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"hcb\.id_tap\(\) missing 1"):
        (lambda: hcb.id_tap(1.0))()  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"argument 'folder': did you mean directory=\?"):
        hcb.capsule(jax.jit(jnp.log), folder="x")  # type: ignore[call-overload]


def test_a_function_that_cannot_take_a_batch_is_told_of_it() -> None:
    jax.jit(jax.vmap(lambda x: hcb.id_tap(lambda value: float(value), x)))(jnp.ones(3))
    with pytest.raises(hcb.TapFunctionException) as caught:
        hcb.barrier_wait()
    assert "Under vmap the function gets the whole batch" in caught.value.exceptions[0].__notes__[1]
    jax.jit(lambda x: hcb.id_tap(lambda value: float(value), x))(jnp.ones(3))
    with pytest.raises(hcb.TapFunctionException) as caught:
        hcb.barrier_wait()
    assert len(caught.value.exceptions[0].__notes__) == 1


def test_all_frames_are_shown_if_jax_is_told_so() -> None:
    previous = jax.config.jax_traceback_filtering  # type: ignore[attr-defined]
    jax.config.update("jax_traceback_filtering", "off")
    try:
        with pytest.raises(TypeError) as caught:
            hcb.tap(3, 1)  # type: ignore[call-overload]
    finally:
        jax.config.update("jax_traceback_filtering", previous)
    files = [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert files[-1].endswith(os.path.join("api", "tap.py"))


def test_other_failures_under_vmap_are_not_laid_to_the_batch() -> None:
    def fail(value: Any, *_: Any) -> None:
        raise KeyError("of another kind")

    def refuse(value: Any, *_: Any) -> None:
        raise TypeError("of one element")

    jax.jit(jax.vmap(lambda x: hcb.id_tap(fail, x)))(jnp.ones(3))
    with hcb.accelerate():
        jax.jit(jax.vmap(lambda x: [jax.debug.callback(refuse, x), x][1]))(jnp.ones(3))
        with pytest.raises(hcb.TapFunctionException) as caught:
            hcb.barrier_wait()
    notes = [note for error in caught.value.exceptions for note in error.__notes__]
    assert "element 0 of the batch" in notes
    assert not [note for note in notes if "Under vmap" in note]

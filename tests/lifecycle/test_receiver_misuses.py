"""Misuses of receivers, logs and options are refused or logged, with the cure."""

from __future__ import annotations

import gc
import logging
import re
import traceback
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hostcallback as hcb
from hostcallback import receiver
from hostcallback.receiver.runtime.runtime import runtime
from hostcallback.receiver.sinks import factory
from python_process import run_python


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def run() -> None: ...


@pytest.mark.parametrize(
    ("misuse", "text"),
    [
        (
            lambda: hcb.outfeed_receiver("x"),
            r"outfeed_receiver\(receiver_name='x'\), at .*test_receiver_misuses.py",
        ),
        (
            lambda: hcb.outfeed_receiver(timeout_secs=3),
            r"'timeout_secs': did you mean timeout_sec=\?, at .*misuses.py",
        ),
        (
            lambda: hcb.record("log", confg={}),
            r"hcb\.record\(\) got an unexpected keyword argument 'confg': did you mean config=\?, at .*misuses.py",
        ),
        (
            lambda: hcb.read(),
            r"hcb\.read\(\) missing 1 required positional argument: 'paths', at .*misuses.py",
        ),
        (lambda: hcb.error_collector(max_error=3), r"did you mean max_errors=\?"),
        (
            lambda: hcb.outfeed_receiver(run),
            r"it is no decorator, with hcb.outfeed_receiver\(\): run\(\.\.\.\), at",
        ),
        (
            lambda: hcb.capture(run),
            r"it is no decorator, with hcb.capture\(\): run\(\.\.\.\), at .*misuses.py",
        ),
        (lambda: hcb.barrier_wait(timeout=3), r"did you mean timeout_sec=\?"),
        (lambda: hcb.call(print, 1, result_shapes=1), r"needs result_shape="),
        (
            lambda: hcb.tap(lambda value: None, 1, ordred=True),
            r"ordred=True .*did you mean ordered=\?, at .*py",
        ),
        (
            lambda: hcb.tap(lambda value: None, 1, step=3),
            r"step=3 to <lambda>, .*: give it a parameter 'step', at",
        ),
    ],
)
def test_wrong_arguments_get_a_cure(misuse: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        misuse()


def test_the_help_of_a_receiver_lists_all_policies_of_failures() -> None:
    text = str(hcb.outfeed_receiver.__doc__)
    assert [f'"{policy}" (' in text for policy in hcb.OnError] == [True] * len(hcb.OnError)


def test_a_type_error_of_the_function_itself_is_left_alone() -> None:
    with pytest.raises(TypeError, match="takes a function to call on the host"):
        hcb.tap(3, 1)  # type: ignore[call-overload]
    assert jax.jit(lambda x: hcb.tap(lambda value, **more: None, x, anything=3))(1.0) == 1


@pytest.mark.slow
def test_a_receiver_that_is_never_entered_says_so(caplog: pytest.LogCaptureFixture) -> None:
    hcb.outfeed_receiver(receiver_name="lost")
    gc.collect()
    (text,) = logged(caplog)
    assert "test_receiver_misuses.py:" in text
    assert "is not entered, and none of its options has an effect: with hcb.outfeed_receiver(...):" in text
    with hcb.outfeed_receiver():
        pass
    gc.collect()
    assert len(logged(caplog)) == 1


NOT_ENTERED = "receiver made at .*test_receiver_misuses.py:.* is not entered"


def test_a_receiver_that_is_entered_after_a_barrier_is_not_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    receiver = hcb.outfeed_receiver(record=tmp_path)
    hcb.tap(lambda value: None, jnp.float32(1))
    hcb.barrier_wait()
    with receiver:
        hcb.tap(lambda value: None, jnp.float32(1))
    del receiver
    gc.collect()
    assert logged(caplog) == []


def test_metrics_that_nothing_writes_name_the_receiver_that_is_not_entered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    factory.tell_of_metrics(runtime.warn_of_unwritten)  # once in a process: another test may have been told
    receiver = hcb.outfeed_receiver(writers=[hcb.csv(tmp_path / "metrics.csv")])
    hcb.metrics({"loss": jnp.float32(1)}, step=0)
    hcb.barrier_wait()
    assert any(re.search(f"nothing writes .*{NOT_ENTERED}: with receiver:", text) for text in logged(caplog))
    with receiver:
        hcb.metrics({"loss": jnp.float32(2)}, step=0)
    assert (tmp_path / "metrics.csv").read_text() == "step,loss\n0,2.0\n"


@pytest.mark.slow_variants
@pytest.mark.parametrize("ending", ["", "raise SystemExit(3)", "1 / 0"])
def test_the_end_of_a_program_tells_of_a_receiver_that_was_not_entered(tmp_path: Path, ending: str) -> None:
    (tmp_path / "train.py").write_text(
        "import hostcallback as hcb\n"
        "rx = hcb.outfeed_receiver(record='log')\n"
        f"hcb.id_tap(lambda value: None, 1.0)\n{ending}\n"
    )
    done = run_python("train.py", cwd=tmp_path)
    # A program that fails may have been about to enter it.
    expected = 0 if "/" in ending else 1
    assert done.stderr.count("train.py:2 (<module>) is not entered, and none of its options") == expected
    assert done.returncode == {"": 0, "1 / 0": 1}.get(ending, 3)


def test_a_forked_child_is_not_told_of_the_receivers_of_its_parent(tmp_path: Path) -> None:
    (tmp_path / "fork.py").write_text(
        "import os, hostcallback as hcb\n"
        "from hostcallback.receiver.runtime.dispatch.scope import never_entered\n"
        "rx = hcb.outfeed_receiver()\n"
        "if not (child := os.fork()):\n"
        "    os._exit(len(never_entered))\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 and len(never_entered) == 1\n"
        "with rx:\n    pass\n"
    )
    done = run_python("-W", "ignore", "fork.py", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "take",
    [hcb.read, receiver.replay, receiver.LogReader, hcb.record, hcb.control_file, hcb.ui, hcb.knobs.replay],
)
def test_what_is_no_path_is_refused_with_what_is_expected(take: Any) -> None:
    with pytest.raises(TypeError, match=r"got int 3, expected the (folder of a tap log|path of a f)"):
        take(3)


def test_observe_forward_and_otlp_end_at_the_users_line() -> None:
    def observed() -> None:
        with hcb.observe(where="sine"):
            jax.jit(jnp.sin)(1.0)

    for misuse in (observed, lambda: hcb.forward("host"), lambda: hcb.otlp(3)):  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"expected|nearest") as caught:
            misuse()
        assert traceback.extract_tb(caught.value.__traceback__)[-1].filename == __file__


def test_a_wrong_result_of_a_call_shows_no_frames_of_the_package() -> None:
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"returned float64\[3\] as result, expected float32"
    ) as caught:
        hcb.call(lambda x: np.zeros(3), jnp.float32(1), result_shape=jnp.float32(1))
    assert "sinks/call.py" not in str(caught.value)
    assert "test_receiver_misuses.py:" in str(caught.value)
    with pytest.raises(hcb.TapFunctionException) as group:
        hcb.barrier_wait()
    assert "sinks/call.py" not in "".join(traceback.format_exception(group.value))


@pytest.mark.parametrize("address", ["http://host:7070", "https://host:7070", "grpc://host:7070"])
def test_a_collectors_address_has_no_scheme(address: str) -> None:
    with pytest.raises(ValueError, match=r"a collector's address has no \w+://: give 'host:7070'"):
        hcb.outfeed_receiver(forward=address)
    with pytest.raises(ValueError, match="give 'host:7070'"):
        hcb.forward(address)


def test_a_record_that_cannot_be_made_says_what_record_takes(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "log", Path("/proc/log")):
        with pytest.raises(
            OSError, match=r"the log of record=.* cannot be made: give a folder in which you may"
        ):
            with hcb.outfeed_receiver(record=path):
                pass


def test_a_log_that_does_not_exist_cannot_be_replayed() -> None:
    with pytest.raises(
        FileNotFoundError, match=r"no such tap log: give the folder that record= wrote.*'nope'"
    ):
        receiver.replay("nope")


def test_a_stray_file_does_not_hide_a_folders_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with hcb.outfeed_receiver(record=tmp_path):
        hcb.tap(lambda value: None, jnp.float32(1), name="loss")
    (tmp_path / "stray.hcblog").write_bytes(b"junk")
    got: list[float] = []
    receiver.replay(tmp_path, bind={"loss": lambda value: got.append(float(value))})
    assert got == [1]
    assert any("stray.hcblog" in text and "left out" in text for text in logged(caplog))
    with pytest.raises(hcb.HostCallbackError, match=r"stray.hcblog is not a tap log"):
        receiver.LogReader(tmp_path / "stray.hcblog")


def test_a_control_file_that_does_not_exist_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    try:
        hcb.control_file(tmp_path / "taps.toml")
        assert logged(caplog) == [
            f"control file {tmp_path / 'taps.toml'} does not exist: its rules apply once it does"
        ]
        (tmp_path / "there.toml").write_text('["*"]\nevery = 2\n')
        hcb.control_file(tmp_path / "there.toml")
        assert len(logged(caplog)) == 1
    finally:
        hcb.control_file(None)


def test_the_last_of_an_abort_on_the_screen_is_the_check_and_not_jaxs_error() -> None:
    f = jax.jit(lambda x: (hcb.check(x > 0, "x is {}", x), x)[1])
    with pytest.raises(hcb.TapFunctionException) as caught:
        with hcb.outfeed_receiver(on_error="abort"):
            f(-1.0).block_until_ready()
    text = "".join(traceback.format_exception(caught.value))
    assert text.index("JaxRuntimeError") < text.index("CheckError: x is -1.0, at ")
    assert text.rindex(__file__) > text.index("CheckError")
    assert "with argument 0 = -1.0" in text


@pytest.mark.slow
def test_quitting_a_breakpoint_is_reported_once() -> None:
    program = """
import io, jax, hostcallback as hcb
f = jax.jit(lambda x: (hcb.breakpoint(stdin=io.StringIO("q\\\\n"), stdout=io.StringIO()), x)[1])
try:
    jax.block_until_ready(f(1.0))
except jax.errors.JaxRuntimeError as error:
    assert "q(uit)" in str(error)
hcb.barrier_wait()
"""
    done = run_python("-c", program, timeout_sec=60)
    assert done.returncode == 0, done.stderr
    assert "BreakpointQuit" not in done.stderr.replace("JaxRuntimeError", "")


def test_a_launch_has_one_name_in_reports_and_messages(tmp_path: Path) -> None:
    found: list[int] = []
    f = jax.jit(lambda x: (hcb.check(x > 0, "x is {}", x), x)[1])
    with pytest.raises(hcb.TapFunctionException) as caught:
        with hcb.outfeed_receiver(sinks=[lambda message: found.append(message.run_id)]):
            f(-1.0).block_until_ready()
    (error,) = caught.value.exceptions
    assert isinstance(error, hcb.CheckError)
    assert error.check.first.run_id == found[0]
    assert not found[0] or f", launch {found[0] & 0xFFFFFF:06x}\n" in str(error)


def test_a_receiver_that_is_entered_in_traced_code_is_told(caplog: pytest.LogCaptureFixture) -> None:
    def f(x: Any) -> Any:
        with hcb.outfeed_receiver():
            return hcb.id_tap(lambda value: None, x)

    f(1.0)
    assert logged(caplog) == []
    jax.jit(f)(1.0)
    (text,) = logged(caplog)
    assert re.search(
        r"test_receiver_misuses\.py:\d+ .* is entered in traced code: .* Enter it outside of jit", text
    )


EARLY = """
import hostcallback as hcb
hcb.taps["train/loss"].every(2)
hcb.taps["train/lss"].every(2)
for step in range(3):
    hcb.print("{}", step, name="train/loss")
hcb.barrier_wait()
hcb.taps["train/loss"].reset()
"""


@pytest.mark.slow
def test_rules_that_come_before_the_first_tap_are_told_once_they_match_nothing() -> None:
    done = run_python("-c", EARLY)
    assert done.stdout == "0\n2\n"
    assert done.stderr == (
        "no tap is called 'train/lss' so far; there are 'train/loss': what was set for it has had no effect\n"
    )
    done = run_python("-c", EARLY.partition("for ")[0])
    assert "no tap is called 'train/loss' so far, since none was traced yet: what was set" in done.stderr
    done = run_python(
        "-c", EARLY.partition("for ")[0] + 'hcb.taps["train/loss"].reset(); hcb.taps["*"].reset()'
    )
    assert done.stderr == (
        "no tap is called 'train/lss' so far, since none was traced yet: what was set for it has had no effect\n"
    )

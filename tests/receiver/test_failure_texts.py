"""The text of a traceback: Python's own without its marks, and no thread but the user's parses code."""

from __future__ import annotations

import io
import pickle
import traceback
from pathlib import Path

import pytest

from hostcallback.receiver.errors import JobError, TapFailure, TapFunctionException
from hostcallback.receiver.failures.check_report import FailedChecks
from hostcallback.receiver.failures.failure_report import Deferred, FailureHistory, report_of
from hostcallback.receiver.log import traceback_text
from hostcallback.receiver.text import say
from python_process import run_python


def raised(cause: str) -> BaseException:
    def inner() -> float:
        return 1 + (1 / 0) + 2

    try:
        try:
            inner()
        except ZeroDivisionError as error:
            if cause == "cause":
                raise ValueError("from another") from error
            if cause == "context":
                raise ValueError("while another was handled")  # noqa: B904
            if cause == "group":
                raise ExceptionGroup("two", [error, ValueError("no")]) from error
            error.add_note("a note")
            raise
    except Exception as error:
        return error
    raise AssertionError


def without_marks(lines: list[str]) -> list[str]:
    text = "".join(lines).splitlines()
    return [line for line in text if not set(line.replace("|", "")) <= set(" ~^") or not line.strip(" |")]


@pytest.mark.parametrize("limit", [None, -1])
@pytest.mark.parametrize("cause", ["none", "cause", "context", "group"])
def test_the_text_is_pythons_without_its_marks(cause: str, limit: int | None) -> None:
    error = raised(cause)
    pythons = traceback.format_exception(type(error), error, error.__traceback__, limit=limit)
    assert traceback_text(error, limit).splitlines() == without_marks(pythons)
    assert "ZeroDivisionError: division by zero" in traceback_text(error, limit)


PROGRAM = """
import logging
import sys
import threading

parsed = set()

def hook(event, arguments):
    is_main = threading.current_thread() is threading.main_thread()
    if event == "compile" and not is_main and "ast.py" in sys._getframe(1).f_code.co_filename:
        parsed.add(threading.current_thread().name)

logging.basicConfig()
import jax, jax.numpy as jnp
import hostcallback as hcb
from hostcallback import host_callback
from jax.experimental import io_callback
sys.addaudithook(hook)
failures = []

def fail(x, *_):
    raise ValueError("no " + str(x + 1))

def failing_log(x):
    try:
        fail(x)
    except ValueError:
        logging.getLogger("hostcallback").exception("one more")

def checked(x):
    hcb.check(x > 2, "x is {}", x)
    return x

def attempt(function, *arguments):
    try:
        jax.block_until_ready(function(*arguments))
        hcb.barrier_wait()
    except (hcb.TapFunctionException, jax.errors.JaxRuntimeError, host_callback.CallbackException) as error:
        failures.append(type(error).__name__)

attempt(jax.jit(lambda x: hcb.id_tap(fail, x)), 1.0)
attempt(jax.jit(lambda x: hcb.id_tap(failing_log, x)), 1.0)
attempt(jax.jit(lambda x: hcb.call(fail, x, result_shape=x)), 1.0)
attempt(jax.jit(checked), 1.0)
attempt(jax.jit(lambda x: host_callback.id_tap(fail, x)), 1.0)
with hcb.accelerate():
    attempt(jax.jit(lambda x: jax.debug.callback(fail, x)), 1.0)
    attempt(jax.jit(lambda x: io_callback(fail, None, x)), 1.0)
    attempt(jax.jit(lambda x: io_callback(fail, x, x)), 1.0)
with hcb.outfeed_receiver(on_failure="capsule"):
    attempt(jax.jit(checked), 1.0)
print(len(failures), "failures; parsed on", sorted(parsed))
"""


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["native", "callback"])
def test_receiver_threads_write_failures_down_without_parsing(tmp_path: Path, transport: str) -> None:
    # Two threads that parse at a time may both fail, see `traceback_text`.
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = run_python(
        program, cwd=tmp_path, timeout_sec=120, HOSTCALLBACK_TRANSPORT=transport, HOSTCALLBACK_EXIT_STATUS="0"
    )
    assert done.stdout == "8 failures; parsed on []\n", done.stderr
    assert done.stderr.count("ValueError: no 2.0") >= 3  # in the log


def test_a_line_is_written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # An unbuffered output (PYTHONUNBUFFERED) passes each write on: a line in two parts lets another thread's between.
    written: list[bytes] = []

    class Raw(io.RawIOBase):
        def writable(self) -> bool:
            return True

        def write(self, data: bytes) -> int:  # type: ignore[override]
            written.append(bytes(data))
            return len(data)

    monkeypatch.setattr("sys.stderr", io.TextIOWrapper(Raw(), write_through=True))  # type: ignore[type-var]
    say("hostcallback: lost: 3")
    assert written == [b"hostcallback: lost: 3\n"]


def test_the_failure_of_another_process_survives_pickle() -> None:
    error = JobError(2, "train.py:3 (step)", "ValueError: no")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (JobError, str(error))
    assert (again.process, again.source_line) == (2, "train.py:3 (step)")


def test_failures_are_pickled_whatever_the_arguments_of_their_taps() -> None:
    own = lambda value: value  # noqa: E731 - pickle finds no lambda
    failure = TapFailure(
        ValueError("no"), "loss", "a.py:3 (f)", "cpu:0", 7, kwargs={"own": own, "at": 3}, step=5
    )
    error = TapFunctionException("one", [failure.exception], [failure])  # type: ignore[list-item]
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    (same,) = again.failures
    assert same.exception is again.exceptions[0]
    assert same.kwargs == {"own": repr(own), "at": 3}
    assert (same.tap, same.source_line, same.seq, same.step) == ("loss", "a.py:3 (f)", 7, 5)


def test_a_report_names_eight_taps_with_incomplete_values_and_counts_the_rest() -> None:
    found = Deferred(FailedChecks(max_kept=1))
    found.incomplete.update({f"loss{number}": 20 - number for number in range(9)})
    report = report_of(found)
    assert report is not None
    text = str(report.exceptions[0])
    assert text.startswith("144 value(s) of arrays")
    assert "13 of the tap loss7 and of 1 more taps: " in text
    assert "loss8" not in text


def test_the_latest_failures_come_first_and_keep_their_texts() -> None:
    history = FailureHistory()
    error = raised("none")
    error.add_note("a long note " * 1000)
    lines = [f"a.py:{number}" for number in range(20)]
    for line in (*lines, lines[0]):
        history.add_exception(TapFailure(error, "f", line, "cpu:0", 0, time_ns=1, step=None))
    told = history.as_dicts()
    assert [each["source_line"] for each in told] == [lines[0], *reversed(lines[1:])]
    lengths = [len(each["traceback"]) for each in told]
    assert lengths[0] > 3900
    assert sum(lengths) == 64 << 10
    assert lengths == sorted(lengths, reverse=True)

"""However a process ends or forks, its messages are delivered, or reported as lost."""

from __future__ import annotations

import os
import signal
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import pytest

import hostcallback.api  # noqa: F401  (before the rooms below it, whose imports depend on its order)
from hostcallback.primitives import effects
from hostcallback.receiver.taplog.reading.reader import LogReader
from python_process import TAPPED, got, run_python, run_tapped, start_python


def test_messages_in_flight_at_the_end_of_the_program_are_delivered() -> None:
    result = run_tapped("for i in range(50): f(i)")
    assert result.returncode == 0, result.stderr
    assert got(result) == list(range(50))
    assert result.stderr == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "status", "error"),
    [
        pytest.param(
            "for i in range(20): jax.jit(lambda x: hcb.id_tap(emit, x))(i)", 0, "", id="dropped functions"
        ),
        pytest.param(
            "t = threading.Thread(target=lambda: [f(i) for i in range(20)]); t.start(); t.join()", 0, "",
            id="another thread",
        ),
        pytest.param(
            "for i in range(20): f(i)\nraise ValueError('in the program')", 1, "ValueError: in the program",
            id="an uncaught exception",
        ),
        pytest.param(
            "with hcb.outfeed_receiver():\n    for i in range(20): f(i)\n    sys.exit(7)", 7, "",
            id="sys.exit inside a receiver",
        ),
        pytest.param(
            "def steps():\n    with hcb.outfeed_receiver(), hcb.watch_nonfinite(), hcb.accelerate():\n"
            "        for i in range(99): yield f(i)\nrun = steps()\nfor _ in range(20): next(run)", 0, "",
            id="a generator that is not run to its end",
        ),
        pytest.param(
            "hcb.capture().__enter__()\nfor i in range(20): f(i)", 0, "", id="a capture that is open"
        ),
    ],
)  # fmt: skip
def test_however_a_program_ends_nothing_is_lost(program: str, status: int, error: str) -> None:
    result = run_tapped(program)
    assert result.returncode == status
    assert got(result) == list(range(20))
    assert (result.stderr.splitlines() or [""])[-1] == error


@pytest.mark.slow
def test_unreported_tap_exceptions_are_printed_at_exit() -> None:
    result = run_tapped(
        """
        def broken(x): raise RuntimeError("tap is broken")
        jax.jit(lambda x: hcb.id_tap(broken, x))(1.0)
        """
    )
    assert "tap is broken" in result.stderr
    assert "no barrier_wait() or receiver reported it" in result.stderr


CALL = """
def fail(x): raise RuntimeError("the user's failure")
def bad(x): raise ValueError("the tap's failure")
g = jax.jit(lambda x: hcb.call(fail, x, result_shape=x))
h = jax.jit(lambda x: hcb.id_tap(bad, x))
"""


@pytest.mark.slow_variants(every=3)
@pytest.mark.parametrize(
    ("program", "reported"),
    [
        pytest.param("jax.block_until_ready(g(1.0))", [], id="the program ends by it"),
        pytest.param("with hcb.outfeed_receiver(): jax.block_until_ready(g(1.0))", [], id="in a receiver"),
        pytest.param(
            "try: jax.block_until_ready(g(1.0))\nexcept Exception as error: raise OSError('other') from error", [],
            id="another exception is raised from it",
        ),
        pytest.param(
            "try: jax.block_until_ready(g(1.0))\nexcept Exception: raise OSError('other') from None",
            ["the user's failure"], id="it is suppressed",
        ),
        pytest.param("h(1.0); jax.block_until_ready(g(1.0))", ["the tap's failure"], id="a tap failed, too"),
        pytest.param(
            "try: jax.block_until_ready(g(1.0))\nexcept Exception: pass", ["the user's failure"], id="it is caught"
        ),
    ],
)  # fmt: skip
def test_a_failed_call_is_told_at_exit_if_the_program_goes_on(program: str, reported: list[str]) -> None:
    result = run_tapped(CALL + program)
    at_exit = result.stderr.partition("no barrier_wait() or receiver reported it:")[2]
    assert [text for text in ("the user's failure", "the tap's failure") if text in at_exit] == reported
    assert "while the receiver was closing" not in result.stderr
    if reported == ["the user's failure"]:
        assert "1 tap function call(s) raised; the programs that waited for them failed; the first" in at_exit


def test_a_breakpoint_without_a_terminal_shows_no_line_of_ours() -> None:
    result = run_tapped("jax.block_until_ready(jax.jit(lambda x: (hcb.breakpoint(), x)[1])(1.0))")
    assert result.returncode == 1
    assert "cannot read commands" in result.stderr
    assert "debugger.py" not in result.stderr
    assert "no barrier_wait() or receiver reported it" not in result.stderr


def test_a_failed_check_is_reported_though_an_exit_handler_waits_for_effects_before() -> None:
    # equinox registers such a handler when it is imported, which may be after the first tap.
    result = run_tapped(
        """
        import atexit
        f(0)
        for _ in range(2):
            atexit.register(jax.effects_barrier)
        jax.jit(lambda x: (hcb.check(x > 0, "x is {}", x), x)[1])(-1.0)
        """
    )
    assert result.returncode == 1
    assert got(result) == [0]
    assert "Exception ignored" not in result.stderr
    before, *reports = result.stderr.split("no barrier_wait() or receiver reported it:")
    assert len(reports) == 1, result.stderr
    assert "x is -1.0" in before  # as it happens
    assert "CheckError: x is -1.0" in reports[0]


def test_a_thread_that_goes_on_when_the_program_has_ended_gets_its_failures() -> None:
    result = run_tapped(
        """
        def train():
            threading.main_thread().join()
            jax.jit(lambda x: (hcb.check(x > 0, "x is {}", x), x)[1])(-1.0)
            try:
                jax.effects_barrier()
            except hcb.TapFunctionException:
                emit(1)
        f(0)
        threading.Thread(target=train).start()
        """
    )
    assert result.returncode == 0, result.stderr
    assert got(result) == [0, 1]


def test_a_tap_that_never_returns_does_not_hang_the_exit_and_the_loss_is_reported() -> None:
    result = run_tapped(
        """
        import hostcallback.lifecycle.wait_bounds as at_exit; at_exit.EXIT_STALL_SEC = 0.1
        f(0)
        hcb.barrier_wait()  # has compiled what waits at exit
        def stuck(x): threading.Event().wait()
        g = hcb.jit(lambda x: hcb.id_tap(stuck, x))
        for i in range(3): g(i)
        """
    )
    assert result.returncode == 0
    assert "tap stuck" in result.stderr
    assert "message(s) of cpu:0 were lost at exit" in result.stderr


@pytest.mark.native_only  # elsewhere XLA's thread runs the host function
@pytest.mark.skipif(
    not effects.installed, reason="without fast dispatch, the call waits for the host function"
)
def test_a_call_that_never_returns_does_not_hang_the_exit() -> None:
    result = run_tapped(
        """
        import hostcallback.lifecycle.wait_bounds as at_exit; at_exit.EXIT_STALL_SEC = 0.1
        begun = threading.Event()
        def stuck(x): begun.set(); threading.Event().wait()
        g = jax.pmap(lambda x: hcb.call(stuck, x, result_shape=x))  # on threads of XLA
        result = g(jnp.arange(2.0))
        begun.wait()
        """
    )
    assert result.returncode == 0
    assert "stuck, the host function of the call at " in result.stderr


SLOW = """
import hostcallback.lifecycle.wait_bounds
hostcallback.lifecycle.wait_bounds.EXIT_STALL_SEC = 0.5
hostcallback.lifecycle.wait_bounds.TELL_SEC = {tell_sec}
never = threading.Event()
def slow(x):
    never.wait(0.01)
    emit(x)
"""

SLOW_PROGRAMS = {
    "id_tap": "jax.jit(lambda x: lax.scan(lambda c, _: (hcb.id_tap(slow, c) + 1, None), x, None, length=150)[0])(0.0)",
    "accelerated": """
hcb.accelerate()
def body(c, _):
    jax.debug.callback(slow, c)
    return c + 1, None
jax.jit(lambda x: lax.scan(body, x, None, length=150)[0])(0.0)
""",
    "a batch": """
hcb.accelerate()
jax.jit(jax.vmap(lambda x: [jax.debug.callback(slow, x), x][1]))(jnp.arange(150.0))
""",
    "a metric writer of an open receiver": """
class Writer:
    def add_scalar(self, name, value, step):
        slow(value)
def body(c, _):
    hcb.metrics({"c": c}, step=c)
    return c + 1, None
receiver = hcb.outfeed_receiver(writers=[Writer()])
receiver.__enter__()
jax.jit(lambda x: lax.scan(body, x, None, length=150)[0])(0)
""",
}


@pytest.mark.slow_variants
@pytest.mark.parametrize("program", SLOW_PROGRAMS)
def test_the_exit_waits_as_long_as_anything_is_delivered(program: str) -> None:
    result = run_tapped(SLOW.format(tell_sec=60) + SLOW_PROGRAMS[program])
    assert result.returncode == 0, result.stderr
    assert sorted(got(result)) == list(range(150))
    assert result.stderr == ""


WAITS_FOR = {
    "id_tap": "message(s) of cpu:0, at the tap slow (",
    "a metric writer of an open receiver": "record(s) of the metric writer __main__.Writer",
}


@pytest.mark.slow_variants
@pytest.mark.parametrize("program", WAITS_FOR)
def test_the_exit_says_after_a_while_how_many_messages_are_left(program: str) -> None:
    result = run_tapped(SLOW.format(tell_sec=0.2) + SLOW_PROGRAMS[program])
    assert sorted(got(result)) == list(range(150))
    (line,) = result.stderr.splitlines()
    assert line.startswith("hostcallback: the program has ended and waits for 1")
    assert WAITS_FOR[program] in line
    assert line.endswith("Ctrl-C ends it without them")


@pytest.mark.slow_variants
@pytest.mark.parametrize("kind", WAITS_FOR)
def test_ctrl_c_ends_the_wait_at_exit_and_says_what_is_lost(kind: str) -> None:
    program = SLOW.format(tell_sec=0.2) + SLOW_PROGRAMS[kind].replace("150", "4000")
    with start_python("-c", TAPPED + program, stderr=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            first = process.stderr.readline()
            process.send_signal(signal.SIGINT)
            output, errors = process.communicate(timeout=20)  # all of them would take 40 seconds
        finally:
            process.kill()
    assert "Ctrl-C ends it without them" in first
    assert "interrupted at exit. Lost: " in errors
    assert WAITS_FOR[kind] in errors
    assert "Traceback" not in errors
    assert 0 < output.count("got") < 3000
    assert process.returncode == 0


@pytest.mark.slow_variants
@pytest.mark.native_only  # a Python callback that the interrupt hits fails its computation with JaxRuntimeError
@pytest.mark.parametrize("where", ["in a receiver", "bare"])
def test_ctrl_c_in_a_tapped_loop_delivers_the_emitted_messages(where: str) -> None:
    body = f"""
    sent = 0
    try:
        {"with hcb.outfeed_receiver():" if where == "in a receiver" else "if True:"}
            i = 0
            while True:
                f(i); i += 1; sent = i
                if i == 20: sys.stdout.write("ready\\n"); sys.stdout.flush()
    except KeyboardInterrupt:
        {"pass" if where == "in a receiver" else "hcb.barrier_wait()"}
        # In one piece: a message of the call that the interrupt hit may be printed meanwhile.
        sys.stdout.write(f"sent {{sent}}\\n"); sys.stdout.flush()
        raise
    """
    with start_python("-c", TAPPED + textwrap.dedent(body), stderr=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            lines = []
            for line in process.stdout:
                lines.append(line)
                if line.strip() == "ready":
                    process.send_signal(signal.SIGINT)
            errors = process.stderr.read()
            process.wait(60)
        finally:
            process.kill()
    assert "KeyboardInterrupt" in errors
    received = [int(line.split()[1]) for line in lines if line.startswith("got")]
    sent = next(int(line.split()[1]) for line in lines if line.startswith("sent"))
    # The interrupt may hit between a call and the count of it.
    assert received == list(range(len(received)))
    assert len(received) in (sent, sent + 1)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
def test_a_forked_child_is_sane_and_delivers_nothing_twice() -> None:
    result = run_tapped(
        """
        import warnings; warnings.simplefilter("ignore")
        gate = threading.Event()
        def slow(x): gate.wait(); print("slow", int(x), flush=True)
        g = hcb.jit(lambda x: hcb.id_tap(slow, x))
        for i in range(5): g(i).block_until_ready()
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            hcb.barrier_wait(timeout_sec=5)   # nothing to wait for: the queue is the parent's
            print("child done", flush=True)
            os._exit(3)  # JAX 0.8.0's own exit handlers crash in a forked child, with or without taps
        _, status = os.waitpid(pid, 0)
        print("child status", os.waitstatus_to_exitcode(status), flush=True)
        gate.set()
        """
    )
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[:2] == ["child done", "child status 3"]
    assert lines[2:] == [f"slow {i}" for i in range(5)]


@pytest.mark.slow
def test_a_forked_child_can_use_a_new_receiver() -> None:
    result = run_tapped(
        """
        import warnings; warnings.simplefilter("ignore")
        import multiprocessing
        f(0); hcb.barrier_wait()
        def child():
            with hcb.outfeed_receiver() as rx: pass
            print("receiver", len(rx.stats) >= 0, flush=True)
        p = multiprocessing.get_context("fork").Process(target=child); p.start(); p.join(30)
        print("exit", p.exitcode)
        """
    )
    assert "receiver True" in result.stdout
    assert "exit 0" in result.stdout


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
@pytest.mark.parametrize("running", [False, True], ids=["idle", "running"])
@pytest.mark.parametrize("record", [False, True], ids=["delivered", "recorded"])
def test_a_forked_child_ends_by_sys_exit(record: bool, running: bool, tmp_path: Any) -> None:
    # Without taps, JAX's pool of compiler threads hangs or crashes such a child at its end.
    result = run_tapped(
        f"""
        import contextlib, warnings; warnings.simplefilter("ignore")
        began = threading.Event()
        def note(x): began.set()
        def body(i, x):
            x = jnp.tanh(x @ x)
            hcb.id_tap(note, x[0, 0])
            return x
        g = hcb.jit(lambda x: lax.fori_loop(0, 1000, body, x))
        with hcb.outfeed_receiver(record={str(tmp_path) if record else None!r}):
            program = threading.Thread(target=lambda: g(jnp.ones((128, 128)) * 0.01).block_until_ready())
            program.start()
            began.wait()
            if not {running}:
                program.join()
                hcb.barrier_wait()
            pid = os.fork()
            if pid == 0:
                sys.exit(3)
            deadline = time.monotonic() + 30
            while not (ended := os.waitpid(pid, os.WNOHANG))[0] and time.monotonic() < deadline:
                threading.Event().wait(0.01)
            if not ended[0]:
                os.kill(pid, signal.SIGKILL)
            print("child", os.waitstatus_to_exitcode(ended[1]) if ended[0] else "hangs")
            program.join()
        """
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "child 3\n"


@pytest.mark.slow
def test_importing_and_not_tapping_starts_nothing() -> None:
    result = run_tapped("print('threads', threading.active_count())")
    assert "threads 1" in result.stdout


@pytest.mark.slow
def test_the_log_level_comes_from_the_environment() -> None:
    program = "import logging; print(logging.getLogger('hostcallback').level)"
    result = run_tapped(program, HOSTCALLBACK_LOG_LEVEL="DEBUG")
    assert result.stdout.split() == ["10"]
    bad = run_tapped("", HOSTCALLBACK_LOG_LEVEL="LOUD")
    assert "HOSTCALLBACK_LOG_LEVEL='LOUD' is not a logging level: use one of" in bad.stderr


def test_a_log_and_a_file_of_metrics_that_are_open_at_the_end_have_the_last_message(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.csv"
    program = f"""
    import time, jax, hostcallback as hcb
    f = jax.jit(lambda i: hcb.id_tap(lambda i: time.sleep(0.01), i))
    g = jax.jit(lambda i: (hcb.metrics({{"half": i / 2}}, step=i), i)[1])
    f(-1).block_until_ready()  # the exit handler is there before the module of the log is
    hcb.barrier_wait()
    log, metrics = {str(tmp_path / "log")!r}, {str(metrics)!r}
    receiver = hcb.outfeed_receiver(record=log, writers=[hcb.csv(metrics)]).__enter__()
    for i in range(20): f(i), g(i)
    """
    result = run_python("-c", textwrap.dedent(program))
    assert (result.returncode, result.stderr) == (0, "")
    reader = LogReader(tmp_path / "log")
    values = [int(message.value) for message in reader.messages() if not isinstance(message.value, dict)]
    assert values == list(range(20))
    assert all(segment.is_closed() for _, segment in reader.segments())
    assert metrics.read_text().splitlines() == ["step,half", *(f"{i},{i / 2}" for i in range(20))]

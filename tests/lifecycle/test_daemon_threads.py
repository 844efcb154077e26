"""Daemon threads that run JAX do not abort the exit of a process."""

from __future__ import annotations

import signal
import textwrap

import pytest

from python_process import got, run_python, run_tapped

DAEMONS = """
def forever():
    x = jnp.int32(0)
    while True:
        x = {call}

for _ in range(4):
    threading.Thread(target=forever, daemon=True).start()
while len(seen) < 50:
    threading.Event().wait(0.01)
"""


@pytest.mark.slow
@pytest.mark.parametrize("call", ["count(x)", "count(x).block_until_ready() + 1", "f(count(x))"])
def test_daemon_threads_that_run_programs_do_not_abort_the_exit(call: str) -> None:
    program = """
    seen = []
    count = jax.jit(lambda x: hcb.id_tap(seen.append, x + 1))
    """
    for _ in range(5):
        result = run_tapped(textwrap.dedent(program) + DAEMONS.format(call=call))
        assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.slow
def test_daemon_threads_that_compile_do_not_abort_the_exit() -> None:
    # Each call is a first one. Without taps, 10 of 12 such processes abort.
    program = """
    began = threading.Barrier(4)

    def forever():
        for count in range(100_000):
            jax.jit(lambda x: hcb.id_tap(lambda value: None, jnp.tanh(x @ x) + count)[0, 0])(jnp.ones((8, 8)))
            if count == 0:
                began.wait()

    for _ in range(3):
        threading.Thread(target=forever, daemon=True).start()
    began.wait()
    threading.Event().wait({delay})
    """
    for delay in (0.0, 0.05, 0.11, 0.2):
        result = run_tapped(textwrap.dedent(program).format(delay=delay))
        assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.slow
@pytest.mark.native_only
def test_programs_of_barriers_that_compile_do_not_abort_the_exit() -> None:
    # Python before 3.14 ended their thread within XLA ("terminate called without an active exception").
    program = """
    import hostcallback.sync.threads as threads

    threads.COMPILED_WITHIN_SEC = 60.0
    traced, held_program = threading.Event(), threads.held_program

    def takes_long_to_compile(x):
        y = jnp.sum(x) + jnp.arange(64.0)
        for _ in range(800):
            y = jnp.sort(jnp.sin(y))
        traced.set()
        return x + y[0].astype(x.dtype)

    def compiled_last(device):
        program = held_program(device)
        sys.stdout.write("compiled\\n")
        return program

    threads.barrier_copy, threads.held_program = takes_long_to_compile, compiled_last
    f(0)
    traced.wait()
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
    """
    result = run_tapped(program)
    assert result.returncode == -signal.SIGINT, result.stderr
    assert got(result) == [0]
    assert result.stdout.endswith("compiled\n")
    assert result.stderr.splitlines()[-1] == "KeyboardInterrupt"


@pytest.mark.slow
def test_a_daemon_thread_that_sleeps_in_jax_holds_the_exit_up_for_a_second_only() -> None:
    program = """
    tracing = threading.Event()
    threading.Thread(
        target=lambda: jax.make_jaxpr(lambda x: (tracing.set(), threading.Event().wait(60), x)[2])(1.0), daemon=True
    ).start()
    tracing.wait()
    f(0)
    import hostcallback.sync.threads as threads
    import hostcallback.api.process_exit as process_exit
    hold = threads.hold_daemon_threads
    def timed():
        began = time.monotonic()
        hold()
        print("held for", time.monotonic() - began < 5)
    process_exit.hold_daemon_threads = timed
    """
    result = run_tapped(program)
    assert (result.returncode, got(result)) == (0, [0]), result.stderr
    assert result.stdout.count("held for True") == 2


@pytest.mark.slow
def test_an_exit_handler_may_wait_for_a_daemon_thread() -> None:
    program = """
    import atexit, threading
    import jax
    ended = threading.Event()
    atexit.register(lambda: print("waited", ended.wait(60)))  # runs after those of hostcallback
    import hostcallback as hcb
    count = jax.jit(lambda x: hcb.id_tap(lambda value: None, x + 1))
    begun = threading.Event()

    def work():
        for i in range(100_000):
            count(i)
            begun.set()
        ended.set()

    threading.Thread(target=work, daemon=True).start()
    begun.wait()
    """
    result = run_python("-c", textwrap.dedent(program), timeout_sec=90)
    assert (result.returncode, result.stdout) == (0, "waited True\n"), result.stderr

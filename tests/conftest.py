"""Environment of every test: four CPU devices, one transport, and no deadline on property tests.

`make test` runs the whole suite with HOSTCALLBACK_TRANSPORT=native, and the folders in which a transport makes a
difference with =callback. Tests of the native transport itself carry the `native_only` marker and are left out of the
second run; so are tests that do not depend on a transport. Tests that take more than about a second are marked `slow`
and run in CI only; of those marked `slow_variants`, the first variant runs always, or with `every=N` each Nth. The
others are mostly transformations, which are no matter of the transport: CI runs them on the native one. In the first
run, tests without jit, one operation at a time, run only in two folders; in the second run, examples and libraries are
slow, and those that are slow in the first are left out.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

DEVICES = 4

QUICK_COMPILATION = {
    # Half of the time of these tests is compilation, of programs that run once. XLA's own fusion emitters, of jaxlib
    # up to 0.10, take most of it.
    "xla_cpu_use_fusion_emitters": "false",
    "xla_backend_optimization_level": "0",
}
"""Flags of XLA with which programs compile in half the time. TEST_COMPILATION=full compiles them as users'
programs are: `tools/matrix.py` does, and one run of `.ci/run` with the default JAX."""


def quick_compilation() -> list[str]:
    """The flags of `QUICK_COMPILATION` that this jaxlib knows (it aborts at others), and that are not set already."""
    if os.environ.get("TEST_COMPILATION") == "full":
        return []
    is_old = tuple(map(int, version("jaxlib").split(".")[:2])) <= (0, 10)
    known = [flag for flag in QUICK_COMPILATION if is_old or "fusion" not in flag]
    given = os.environ.get("XLA_FLAGS", "")
    return [f"--{flag}={QUICK_COMPILATION[flag]}" for flag in known if flag not in given]


# JAX reads these when it is first imported; subprocesses that tests start inherit them.
if "jax" in sys.modules:
    raise RuntimeError(
        "jax was imported before tests/conftest.py, so the tests cannot get their four CPU devices: "
        "find the pytest plugin or option that imports it"
    )
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join(
    [
        *(f for f in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in f),
        f"--xla_force_host_platform_device_count={DEVICES}",
        *quick_compilation(),
    ]
)

import hypothesis  # noqa: E402
import pytest  # noqa: E402

from recorder import Recorder  # noqa: E402

TRANSPORT = os.environ.get("HOSTCALLBACK_TRANSPORT") or "native"

# Codecs, logs, assembling, forwarding of recorded data, documents, packaging: tests without any transport.
TESTS = Path(__file__).parent
# Folders and files; the nearest decides.
WITHOUT_TRANSPORT = {
    TESTS / "receiver",
    TESTS / "project",
    TESTS / "receiver" / "ui" / "browser",
    TESTS / "hostile" / "test_bombs.py",
}
WITH_TRANSPORT = {
    TESTS / "receiver" / room for room in ("control", "runtime", "taplog/flight", "taplog/recording", "ui")
}

# Folders whose tests compile much, and exceptions in them.
SMALL = {TESTS / "host_callback", TESTS / "api" / "taps"}

# A shell that starts tests in the background makes them ignore Ctrl-C, and their child processes too.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Shared machines stall; pytest's own timeout ends tests that really hang.
hypothesis.settings.register_profile("hostcallback", deadline=None, print_blob=True)
hypothesis.settings.load_profile("hostcallback")


def pytest_report_header() -> str:
    """Prints the transport and the JAX version of the run, above the first test."""
    return f"hostcallback: {TRANSPORT} transport, jax {version('jax')}, {DEVICES} CPU devices"


def pytest_sessionstart() -> None:
    """Refuses to start without the native library: tests would run on the callback transport in its place."""
    # `nohup` and a shell's background jobs ignore these, and so would the processes that tests signal.
    for number in (signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    if TRANSPORT == "native":
        from hostcallback.receiver.native import bindings

        bindings.load()


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses by marker
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the tests of the native transport, and those without any transport, out of a run on the other one."""
    if os.environ.get("TEST_COMPILATION") != "full":
        left_out = [item for item in items if item.get_closest_marker("users_compilation")]
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)
    native = TRANSPORT == "native"
    numbers: Counter[str] = Counter()
    for item in items:
        room = item.path.parent
        eager = "no jit" in item.name
        if eager:
            item.add_marker(pytest.mark.eager)
        small = native and room in SMALL
        if eager and not small:
            item.add_marker(pytest.mark.slow)
        variants = item.get_closest_marker("slow_variants")
        if variants is not None and not item.get_closest_marker("slow"):
            function = item.nodeid.partition("[")[0]
            number, every = numbers[function], variants.kwargs.get("every", 0)
            if number % every if every else number:
                item.add_marker(pytest.mark.slow)
                item.add_marker(pytest.mark.later_variant)
            numbers[function] += 1
        if not native and room.name in ("examples", "libraries"):
            item.add_marker(pytest.mark.native_only if item.get_closest_marker("slow") else pytest.mark.slow)
    if native:
        return

    def runs_natively_only(item: pytest.Item) -> bool:
        named = [
            path for path in (item.path, *item.path.parents) if path in WITHOUT_TRANSPORT | WITH_TRANSPORT
        ]
        without = bool(named) and named[0] in WITHOUT_TRANSPORT
        return bool(item.get_closest_marker("native_only") or without)

    left_out = [item for item in items if runs_natively_only(item)]
    items[:] = [item for item in items if not runs_natively_only(item)]
    config.hook.pytest_deselected(items=left_out)


@pytest.fixture(scope="session")
def transport() -> str:
    """The transport that this run is about: `native` or `callback`."""
    return TRANSPORT


@pytest.fixture(params=["jax.jit", "no jit"])
def jit(request: pytest.FixtureRequest) -> Any:
    """How a test runs its programs: compiled, and in a second case one operation at a time (`transforming.Jit`)."""
    import jax

    from transforming import no_jit

    return jax.jit if request.param == "jax.jit" else no_jit


@pytest.fixture(scope="module", autouse=True)
def leave_what_is_older_uncollected() -> None:
    """Keeps what other modules and JAX made out of collections of garbage, which took a seventh of the run."""
    gc.collect(1)  # warns of what the last module has not closed
    gc.freeze()


@pytest.fixture(autouse=True)
def leave_no_knobs() -> Iterator[None]:
    """Forgets the knobs of a test, so that the logs of later ones do not begin with their values."""
    yield
    if "hostcallback.receiver.runtime.knobs" in sys.modules:
        from hostcallback import knobs

        for name in list(knobs):
            del knobs[name]


@pytest.fixture
def rec() -> Recorder:
    """A tap function that keeps its arguments."""
    return Recorder()

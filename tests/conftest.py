"""What every test runs under: four CPU devices, one transport, and no deadline on property tests.

`make test` runs the whole suite twice, with HOSTCALLBACK_TRANSPORT=native and =callback. A test that is about the
native transport itself carries the `native_only` marker and is left out of the second run.
"""

from __future__ import annotations

import os
import sys

DEVICES = 4

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
    ]
)

import hypothesis  # noqa: E402
import pytest  # noqa: E402

TRANSPORT = os.environ.get("HOSTCALLBACK_TRANSPORT") or "native"

# Shared machines stall; pytest's own timeout ends what really hangs.
hypothesis.settings.register_profile("hostcallback", deadline=None, print_blob=True)
hypothesis.settings.load_profile("hostcallback")


def pytest_report_header() -> str:
    """Says under which transport and JAX the run is, above the first test."""
    from importlib.metadata import version

    return f"hostcallback: {TRANSPORT} transport, jax {version('jax')}, {DEVICES} CPU devices"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the tests of the native transport out of a run on the other one."""
    if TRANSPORT == "native":
        return
    left_out = [item for item in items if item.get_closest_marker("native_only")]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)


@pytest.fixture(scope="session")
def transport() -> str:
    """The transport that this run is about: `native` or `callback`."""
    return TRANSPORT

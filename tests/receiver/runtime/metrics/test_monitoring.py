"""Events that listeners of `jax.monitoring` receive when a receiver ends."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.monitoring
import pytest

import hostcallback as hcb
from checkout import ROOT
from hostcallback.lifecycle import receivers
from hostcallback.receiver.runtime.stats import DeviceStats
from python_process import run_python

Heard = list[tuple[str, object, dict[str, object]]]

heard: Heard = []
listening = False


@pytest.fixture
def listen() -> Iterator[Heard]:
    """The received events. Listeners cannot be removed in all versions of JAX: there is one for all tests."""
    global listening
    if not listening:
        jax.monitoring.register_scalar_listener(lambda name, value, **k: heard.append((name, value, k)))
        jax.monitoring.register_event_duration_secs_listener(
            lambda name, value, **k: heard.append((name, value, k))
        )
        jax.monitoring.register_event_listener(lambda name, **k: heard.append((name, None, k)))
        listening = True
    heard.clear()
    yield heard
    heard.clear()


def test_a_receiver_that_ends_is_reported(listen: Heard) -> None:
    program = hcb.jit(lambda x: hcb.id_tap(lambda value: None, x, name="monitored"))
    with hcb.outfeed_receiver(receiver_name="watched"):
        program(1.0)
        program(2.0)
    ours = [(name, value, keys) for name, value, keys in listen if name.startswith("/hostcallback/")]
    of_device = {
        name: value for name, value, keys in ours if keys == {"device": "cpu:0", "receiver": "watched"}
    }
    duration = of_device.pop("/hostcallback/receiver/tap_duration")
    assert isinstance(duration, float)
    assert of_device == {
        "/hostcallback/receiver/messages": 2,
        "/hostcallback/receiver/bytes": 8,
        "/hostcallback/receiver/dropped": 0,
        "/hostcallback/receiver/failed": 0,
        "/hostcallback/receiver/unknown": 0,
        "/hostcallback/receiver/unrecorded": 0,
    }
    assert ours[-1] == ("/hostcallback/receiver/closed", None, {"receiver": "watched"})


def test_every_name_is_in_the_document(listen: Heard) -> None:
    receivers.record_receiver("", [DeviceStats("cpu:0")])
    document = (ROOT / "docs" / "metrics.md").read_text()
    names = {name for name, _, _ in listen if name.startswith("/hostcallback/")}
    assert len(names) == 8
    for name in names:
        assert f"`{name}`" in document


@pytest.mark.slow
def test_a_listener_that_raises_does_not_end_the_receiver() -> None:
    program = """
import jax, hostcallback as hcb

def listener(name, *args, **kwargs):
    if name.startswith("/hostcallback/"):
        raise RuntimeError("the listener is broken")

jax.monitoring.register_scalar_listener(listener)
try:
    with hcb.outfeed_receiver():
        hcb.jit(lambda x: hcb.id_tap(lambda value: 1 / 0, x))(1.0)
except hcb.TapFunctionException as error:
    print(len(error.exceptions))
"""
    done = run_python("-c", program, cwd=ROOT, timeout_sec=60)
    assert (done.returncode, done.stdout) == (0, "1\n")
    assert "a listener of jax.monitoring raised" in done.stderr

"""The metrics for Prometheus, scraped over HTTP while programs run."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator

import jax.numpy as jnp
import prometheus_client
import pytest
from jax import lax
from prometheus_client.parser import text_string_to_metric_families

import hostcallback as hcb
from checkout import ROOT

Samples = dict[tuple[str, str], float]


@pytest.fixture
def url() -> Iterator[str]:
    """Address at which a server of this process answers scrapes."""
    registry = prometheus_client.CollectorRegistry()
    hcb.prometheus_collector(registry)
    server, thread = prometheus_client.start_http_server(0, "127.0.0.1", registry)
    yield f"http://127.0.0.1:{server.server_port}/metrics"
    server.shutdown()
    server.server_close()
    thread.join()


def scrape(url: str) -> Samples:
    with urllib.request.urlopen(url, timeout=30) as response:
        text = response.read().decode()
    return {
        (sample.name, next(iter(sample.labels.values()), "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_counters_grow_over_all_receivers(url: str) -> None:
    def step(carry: jnp.ndarray, _: None) -> tuple[jnp.ndarray, None]:
        hcb.id_tap(lambda value: None, carry, name="scraped")
        hcb.id_tap(lambda value: 1 / (value[0] - 3), carry, name="scraped and failing")
        return carry + 1, None

    program = hcb.jit(lambda x: lax.scan(step, x, None, length=10)[0])
    with pytest.raises(hcb.TapFunctionException), hcb.outfeed_receiver():
        program(jnp.zeros(4, jnp.int32)).block_until_ready()
    before = scrape(url)
    for _ in range(2):
        with pytest.raises(hcb.TapFunctionException), hcb.outfeed_receiver():
            program(jnp.zeros(4, jnp.int32)).block_until_ready()
    program(jnp.full(4, 10, jnp.int32))
    hcb.barrier_wait()
    after = scrape(url)

    def grown(name: str) -> float:
        return after[name, "cpu:0"] - before[name, "cpu:0"]

    assert grown("hostcallback_delivered_messages_total") == 60
    assert grown("hostcallback_delivered_bytes_total") == 60 * 16
    assert grown("hostcallback_failed_messages_total") == 2
    assert grown("hostcallback_emitted_messages_total") >= 60
    assert grown("hostcallback_emitted_bytes_total") >= 60 * 192
    assert grown("hostcallback_tap_seconds_total") > 0
    for name in ("dropped", "unknown", "unrecorded"):
        assert grown(f"hostcallback_{name}_messages_total") == 0
    for name in ("queued_messages", "queued_bytes", "waiting_emissions"):
        assert after[f"hostcallback_{name}", "cpu:0"] == 0


def test_a_receiver_that_is_open_counts_at_once_and_a_scope_twice_never(url: str) -> None:
    program = hcb.jit(lambda x: hcb.id_tap(lambda value: None, x, name="counted once"))

    def delivered() -> float:
        return scrape(url).get(("hostcallback_delivered_messages_total", "cpu:0"), 0)

    before = delivered()
    receiver = hcb.outfeed_receiver()
    for round in range(1, 4):  # the same receiver again
        with receiver:
            program(1.0)
            hcb.barrier_wait()
            assert delivered() == before + 2 * round - 1
            program(1.0)
        assert delivered() == before + 2 * round


def test_suppressed_messages_are_counted_by_tap(url: str) -> None:
    program = hcb.jit(lambda x: hcb.id_tap(lambda value: None, x, name="suppressed and scraped"))
    hcb.taps["suppressed and scraped"].every(4)
    for _ in range(8):
        program(1.0)
    hcb.barrier_wait()
    hcb.taps["*"].reset()
    assert scrape(url)["hostcallback_suppressed_messages_total", "suppressed and scraped"] == 6


def test_a_registry_has_them_once() -> None:
    registry = prometheus_client.CollectorRegistry()
    collector = hcb.prometheus_collector(registry)
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        hcb.prometheus_collector(registry)
    registry.unregister(collector)
    hcb.prometheus_collector(registry)


def test_every_metric_is_in_the_document() -> None:
    registry = prometheus_client.CollectorRegistry()
    hcb.prometheus_collector(registry)
    document = (ROOT / "docs" / "metrics.md").read_text()
    for family in registry.collect():
        name = family.name + ("_total" if family.type == "counter" else "")
        assert f"| `{name}` |" in document, name

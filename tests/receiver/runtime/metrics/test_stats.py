"""`rx.stats` while messages wait: the queue is in it."""

from __future__ import annotations

import threading

import jax.numpy as jnp
import pytest
from jax import lax

import hostcallback as hcb
from checkout import ROOT
from hostcallback.receiver.runtime.dispatch.scope import Scope, Totals


def test_a_snapshot_has_the_queue_of_an_open_receiver() -> None:
    entered, leave = threading.Event(), threading.Event()

    def hold(value: object) -> None:
        entered.set()
        assert leave.wait(60)

    def step(carry: jnp.ndarray, _: None) -> tuple[jnp.ndarray, None]:
        hcb.id_tap(hold, carry, name="held")
        return carry + 1, None

    program = hcb.jit(lambda x: lax.scan(step, x, None, length=50)[0])
    with hcb.outfeed_receiver() as rx:
        program(0.0).block_until_ready()
        assert entered.wait(60)
        (row,) = [row for row in rx.stats if row.device == "cpu:0"]
        assert 0 < row.queued_messages <= 50
        assert row.waiting_emissions == 0
        leave.set()
    (row,) = [row for row in rx.stats if row.device == "cpu:0"]
    assert (row.delivered, row.queued_messages, row.queued_bytes) == (50, 0, 0)


def test_fields_are_in_the_document() -> None:
    document = (ROOT / "docs" / "metrics.md").read_text()
    with hcb.outfeed_receiver() as rx:
        pass
    for row in rx.stats[:1]:
        for name in (*row.__slots__, "messages_per_sec"):
            assert f"`{name}`" in document


@pytest.mark.parametrize("late", [False, True])
def test_totals_count_a_scope_while_it_is_open_and_when_it_is_over(late: bool) -> None:
    totals, default, scope = Totals(), Scope("default"), Scope("one")
    default.device_stats("cpu:0").delivered = 5
    totals.begin(scope, set())
    scope.opened("cpu:0")
    scope.device_stats("cpu:0").delivered = 3
    claimed = {scope}
    assert [row.delivered for row in totals.rows(default, claimed)] == [8]
    if late:  # its receiver gave up waiting, and messages come
        assert [row.delivered for row in totals.rows(default, set())] == [8]
        scope.device_stats("cpu:0").delivered = 4
    scope.closed("cpu:0")
    expected = 9 if late else 8
    assert [row.delivered for row in totals.rows(default, set())] == [expected]
    totals.begin(scope, set())
    scope.device_stats("cpu:0").delivered += 10
    assert [row.delivered for row in totals.rows(default, {scope})] == [expected + 10]

"""Values whose shards arrive in the streams of several processes: late, in part, twice, or never."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from collecting import wait_for
from hostcallback.receiver.remote.collector.store import Store
from hostcallback.receiver.remote.delivery.delivery import Delivery
from hostcallback.receiver.sinks.sharding import assembly
from stored_shards import ALONE, OTHERS, PARTS, StoredProcess, Taken

IDLE_SEC = 60.0

Open = Callable[..., tuple[Delivery, Taken]]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "log")
    yield store
    store.close()


@pytest.fixture
def open_delivery(store: Store) -> Iterator[Open]:
    opened: list[Delivery] = []

    def open_one(**options: Any) -> tuple[Delivery, Taken]:
        taken = Taken()
        opened.append(Delivery(store, sinks=[taken], prints=False, **options))
        return opened[-1], taken

    yield open_one
    for delivery in opened:
        delivery.close()


def idle(delivery: Delivery) -> None:
    assert delivery.wait_idle(IDLE_SEC)


def test_a_value_is_delivered_when_its_last_shard_has_come(store: Store, open_delivery: Open) -> None:
    delivery, taken = open_delivery()
    processes = [StoredProcess(store, number, processes=3) for number in range(3)]
    processes[2].bring(delivery, range(3))
    processes[0].bring(delivery, range(2))
    idle(delivery)
    assert taken.wholes == []
    processes[1].bring(delivery, range(1))
    idle(delivery)
    assert taken.numbers() == [0]
    processes[1].bring(delivery, range(1, 3))
    processes[0].bring(delivery, range(2, 3))
    idle(delivery)
    assert taken.numbers() == [0, 1, 2]
    assert {device for _, device, _ in taken.wholes} == {"run p0 cpu:0"}


def test_the_programs_order_holds_whatever_clocks_show(store: Store, open_delivery: Open) -> None:
    delivery, taken = open_delivery()
    ahead = StoredProcess(store, 0, clock_ns=10**18)
    behind = StoredProcess(store, 1, clock_ns=0)
    ahead.bring(delivery, range(500), [PARTS, OTHERS])
    idle(delivery)
    behind.bring(delivery, range(500), [PARTS, OTHERS])
    idle(delivery)
    assert taken.numbers() == taken.numbers("others") == list(range(500))
    assert [name for name, _, _ in taken.wholes] == ["parts", "others"] * 500


@pytest.mark.parametrize("bound", ["MAX_PENDING_VALUES", "MAX_PENDING_BYTES"])
def test_a_stream_far_ahead_waits_and_no_value_is_discarded(
    store: Store, open_delivery: Open, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    monkeypatch.setattr(assembly, bound, 40 if bound == "MAX_PENDING_VALUES" else 40 * 32)
    delivery, taken = open_delivery()
    ahead, behind = StoredProcess(store, 0), StoredProcess(store, 1)
    for first in range(0, 1000, 50):
        ahead.bring(delivery, range(first, first + 50), [PARTS, OTHERS, ALONE])
    idle(delivery)
    # The reader stopped at the bound, which the shards of two taps share, and goes on when there is room.
    assert taken.numbers("parts") == []
    assert 20 <= len([name for name, _, _ in taken.wholes if name == "alone"]) <= 150
    for first in range(0, 1000, 100):
        behind.bring(delivery, range(first, first + 100), [PARTS, OTHERS])
        idle(delivery)
    assert taken.numbers() == taken.numbers("others") == list(range(1000))
    assert len([name for name, _, _ in taken.wholes if name == "alone"]) == 1000
    assert not delivery.incomplete


def test_the_devices_of_a_process_may_be_far_from_each_other_in_its_stream(
    store: Store, open_delivery: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembly, "MAX_PENDING_VALUES", 10)
    delivery, taken = open_delivery()
    processes = [StoredProcess(store, number, devices=2) for number in range(2)]
    for process in processes:
        for device in range(2):
            for first in range(0, 200, 20):
                process.bring(delivery, range(first, first + 20), device=device)
    idle(delivery)
    assert taken.numbers() == list(range(200))
    assert not delivery.incomplete


@pytest.mark.slow
def test_incomplete_values_of_a_dead_process_are_discarded_and_block_no_other(
    store: Store, open_delivery: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembly, "MAX_PENDING_VALUES", 40)
    delivery, taken = open_delivery(patience_sec=0.3)
    alive, dead = StoredProcess(store, 0), StoredProcess(store, 1)
    dead.bring(delivery, range(10))
    for first in range(0, 1000, 50):
        alive.bring(delivery, range(first, first + 50), [PARTS, ALONE])
    wait_for(lambda: len(taken.wholes) == 1010, "all that is not of the dead process")
    idle(delivery)
    assert taken.numbers() == list(range(10))
    (reason,) = delivery.incomplete
    assert reason.startswith("parts at /home/me/train.py:12 (step)")
    left = 1000 - 10 - delivery.incomplete[reason]
    assert 0 < left <= 40
    # The process was alive after all: discarded values stay discarded, the others are complete now.
    dead.bring(delivery, range(10, 1000))
    idle(delivery)
    assert taken.numbers() == [*range(10), *range(1000 - left, 1000)]
    assert delivery.incomplete.total() == 1000 - 10 - left


def test_a_dropped_shard_costs_its_value_only(store: Store, open_delivery: Open) -> None:
    delivery, taken = open_delivery()
    first, second = StoredProcess(store, 0), StoredProcess(store, 1)
    first.bring(delivery, range(200))
    second.store(range(50))
    second.lose()
    second.bring(delivery, range(51, 200))
    idle(delivery)
    assert taken.numbers() == [number for number in range(200) if number != 50]


@pytest.mark.slow
def test_another_run_has_separate_run_ids(store: Store, open_delivery: Open) -> None:
    delivery, taken = open_delivery(patience_sec=0.3)
    for life in range(2):
        processes = [StoredProcess(store, number, job=f"{life}" * 32) for number in range(2)]
        processes[0].bring(delivery, range(20))
        processes[1].bring(delivery, range(10 + 10 * life))
        idle(delivery)
    assert taken.numbers() == [*range(10), *range(20)]
    wait_for(lambda: delivery.incomplete.total() == 10, "that the first life is given up")


@pytest.mark.parametrize(
    ("shards", "stream"), [(False, {"job": ""}), (True, {})], ids=["without a job", "wanted"]
)
def test_shards_are_delivered_by_themselves(
    store: Store, open_delivery: Open, shards: bool, stream: dict[str, Any]
) -> None:
    delivery, taken = open_delivery(shards=shards)
    for number in range(2):
        StoredProcess(store, number, **stream).bring(delivery, range(3))
    idle(delivery)
    assert taken.parts == len(taken.wholes) == 6


def test_processes_that_number_their_launches_differently_are_noticed(
    store: Store, open_delivery: Open
) -> None:
    delivery, taken = open_delivery()
    processes = [StoredProcess(store, number, base=number << 29) for number in range(2)]
    for process in processes:
        process.bring(delivery, range(100))
    idle(delivery)
    (reason,) = delivery.incomplete
    assert "jax_compilation_cache_dir" in reason
    assert delivery.incomplete[reason] == 100 + 64
    assert taken.parts == len(taken.wholes) == 200
    for number in range(2):
        arrays = [array for _, device, array in taken.wholes if device == f"run p{number} cpu:0"]
        assert [array[0] for array in arrays] == [1000.0 * k + 2 * number for k in range(100)]


def test_a_second_stream_of_a_process_goes_on_with_the_program(store: Store, open_delivery: Open) -> None:
    delivery, taken = open_delivery()
    processes = [StoredProcess(store, number) for number in range(2)]
    again = [StoredProcess(store, number) for number in range(2)]
    # The rest of the first stream of one of them comes last.
    processes[0].bring(delivery, range(100))
    for process in again:
        process.bring(delivery, range(100, 400))
    idle(delivery)
    processes[1].bring(delivery, range(100))
    idle(delivery)
    assert taken.numbers() == [*range(100, 400), *range(100)]
    assert not delivery.incomplete


def test_an_incomplete_value_outlives_the_collector(store: Store, open_delivery: Open) -> None:
    first, second = StoredProcess(store, 0), StoredProcess(store, 1)
    delivery, taken = open_delivery()
    first.bring(delivery, range(5), [PARTS, ALONE])
    second.bring(delivery, range(2))
    idle(delivery)
    assert taken.numbers() == [0, 1]
    delivery.close()
    for _ in range(2):
        # Delivered values do not come again, though incomplete ones are read once more.
        delivery, taken = open_delivery()
        idle(delivery)
        assert taken.wholes == []
        delivery.close()
    delivery, taken = open_delivery()
    second.bring(delivery, range(2, 5), [PARTS, ALONE])
    first.bring(delivery, range(5, 6), [PARTS, ALONE])
    idle(delivery)
    assert taken.numbers() == [2, 3, 4]
    assert len([name for name, _, _ in taken.wholes if name == "alone"]) == 4
    assert not delivery.incomplete


def test_parked_values_outlive_the_collector(
    store: Store, open_delivery: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembly, "MAX_PENDING_VALUES", 10)
    first, second = StoredProcess(store, 0), StoredProcess(store, 1)
    delivery, taken = open_delivery()
    first.bring(delivery, range(30), [PARTS, OTHERS, ALONE])
    first.bring(delivery, range(30, 60), [PARTS, OTHERS, ALONE])
    idle(delivery)
    found = list(taken.wholes)
    delivery.close()
    delivery, taken = open_delivery()
    second.bring(delivery, range(60), [PARTS, OTHERS])
    idle(delivery)
    assert taken.numbers() == taken.numbers("others") == list(range(60))
    alone = [name for name, _, _ in [*found, *taken.wholes] if name == "alone"]
    assert len(alone) == 60

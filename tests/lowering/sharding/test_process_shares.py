"""Each process of a program hands on what it has of a value once: the whole, or its different shards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import hostcallback as hcb
from hostcallback.lowering.partition import process_shares, shard_table
from hostcallback.receiver.messages import Consumer, Message
from hostcallback.receiver.sinks.sharding.shard_record import ProcessShare, RecordReader
from hostcallback.receiver.sinks.sharding.sinks import AssemblingSink, ProcessShardSink
from hostcallback.receiver.taplog.reading.logged_message import LoggedMessage
from hostcallback.receiver.taplog.reading.reader import LogReader

CONSUMER = Consumer(1, "tap", "here:1 (f)", lambda message: None)
LAYOUTS = {
    "in order": [0, 0, 1, 1],
    "alternating": [0, 1, 0, 1],
    "uneven": [0, 1, 1, 1],
    "last first": [1, 1, 0, 0],
}
SPECS = [P(), P("i"), P("j"), P(None, "i"), P("i", "j"), P("j", "i"), P(("i", "j")), P(None, ("j", "i"))]
WHOLE = np.arange(64.0).reshape(8, 8)


def places(spec: P) -> list[tuple[slice, ...]]:
    """The place of each partition's shard."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("i", "j"))
    found = NamedSharding(mesh, spec).devices_indices_map(WHOLE.shape)
    return [tuple(slice(*s.indices(8)[:2]) for s in found[device]) for device in mesh.devices.flat]


def handed_on(spec: P, processes: Sequence[int], option: str | None) -> dict[int, list[Message]]:
    """What each process hands on of one value."""
    parts = places(spec)
    table = shard_table(
        [WHOLE.shape], [[tuple(s.start for s in part) for part in parts]], [0, 0, 0, 0], processes
    )
    got: dict[int, list[Message]] = {process: [] for process in set(processes)}
    sinks = {process: ProcessShardSink(AssemblingSink(got[process].append), option) for process in got}
    for partition in (3, 0, 2, 1):
        arrays: list[Any] = [table[partition], WHOLE[parts[partition]].copy()]
        sinks[processes[partition]](Message(CONSUMER, arrays, 0, 0, 0, f"cpu:{partition}", None))
    assert not any(sink.pending_values for sink in sinks.values())
    return got


def index_of(message: Message) -> tuple[slice, ...]:
    return (slice(0, 8), slice(0, 8)) if message.shard_index is None else message.shard_index[0]


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_with_all_each_process_hands_on_what_it_has_once(layout: str, spec: P) -> None:
    processes = LAYOUTS[layout]
    for process, messages in handed_on(spec, processes, "all").items():
        mine = {
            str(part): part for part, owner in zip(places(spec), processes, strict=True) if owner == process
        }
        has_whole = sum(math.prod(s.stop - s.start for s in part) for part in mine.values()) == WHOLE.size
        shown = [index_of(message) for message in messages]
        if has_whole:
            assert [message.shard_index for message in messages] == [None]
        else:
            assert sorted(map(str, shown)) == sorted(mine)
        for message, index in zip(messages, shown, strict=True):
            np.testing.assert_array_equal(message.arrays[0], WHOLE[index])


@pytest.mark.parametrize("option", ["first", None])
@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_with_first_the_processes_hand_on_each_element_once_together(
    layout: str, spec: P, option: str | None
) -> None:
    messages = [m for found in handed_on(spec, LAYOUTS[layout], option).values() for m in found]
    counts = np.zeros(WHOLE.shape, int)
    for message in messages:
        counts[index_of(message)] += 1
        np.testing.assert_array_equal(message.arrays[0], WHOLE[index_of(message)])
    assert (counts == 1).all()


def test_a_replicated_value_is_the_first_processs() -> None:
    assert process_shares([[()] * 4], [0] * 4, [1, 1, 0, 0]) == [
        ProcessShare(2, False, False),
        ProcessShare(2, False, True),
        ProcessShare(2, True, False),
        ProcessShare(2, True, True),
    ]


def test_each_group_has_a_value_of_its_own() -> None:
    shares = process_shares([[(0,), (0,), (2,), (2,)]], [0, 1, 0, 1], [0, 1, 0, 1])
    assert shares == [ProcessShare(2, False, False)] * 4


def test_all_arrays_of_a_value_must_be_whole() -> None:
    replicated, split = [(0,)] * 4, [(0,), (0,), (2,), (2,)]
    assert [share.local for share in process_shares([replicated, split], [0] * 4, [0, 0, 1, 1])] == [0] * 4
    assert [share.local for share in process_shares([replicated, split], [0] * 4, [0, 1, 0, 1])] == [2] * 4


def test_records_of_earlier_versions_do_not_say_it() -> None:
    got: list[Message] = []
    sink = ProcessShardSink(AssemblingSink(got.append), None)
    for partition in range(2):
        sink(Message(CONSUMER, [np.array([0, 2, 0, partition, 4, 0]), np.zeros(4)], 0, 0, 0, "cpu:0", None))
    assert len(got) == 2
    record = np.array([0, 2, 0, 0, 4, 0, 3, 0, 0])
    with pytest.raises(ValueError, match="2 shards, 3 of them in this process"):
        RecordReader().read(Message(CONSUMER, [record, np.zeros(4)], 0, 0, 0, "cpu:0", None))


@pytest.mark.parametrize("option", ["first", "all"])
def test_the_descriptor_has_the_option(option: str, tmp_path: Path) -> None:
    def f(x: Any) -> Any:
        hcb.print(processes=option)("{}", x)
        hcb.log(processes=option)("{}", x)
        hcb.callback(processes=option)(lambda x: None, x)
        return hcb.id_print(hcb.id_tap(lambda x: None, x, processes=option), processes=option)

    with hcb.outfeed_receiver(record=tmp_path):
        jax.jit(f)(1.0)
    described = [
        record.tap.described for record in LogReader(tmp_path).records() if isinstance(record, LoggedMessage)
    ]
    assert [d.processes for d in described if d is not None] == [option] * 5


def test_another_value_of_the_option_is_refused() -> None:
    with pytest.raises(ValueError, match=r"processes='one', expected 'first' .*, 'all' .*, or None"):
        hcb.id_tap(print, 1, processes="one")

"""Programs of several processes that number their launches, alike or differently."""

from __future__ import annotations

from dataclasses import replace

import pytest
from shard_stories import scalar_program

from hostcallback.receiver.messages import Message
from hostcallback.receiver.sinks.sharding.assembly import OVERTAKEN_BY
from hostcallback.receiver.sinks.sharding.multi_process import APART, ProgramRun, ShardStream
from logged_frames import NORM

PARTS = replace(NORM, name="parts", shards="some")


@pytest.mark.parametrize("apart", [0, 1 << 29], ids=["alike", "differently"])
def test_shards_go_by_themselves_once_each_process_has_sent_enough_launches_of_other_numbers(
    apart: int,
) -> None:
    program, job = scalar_program(2), ProgramRun()
    got: list[Message] = []
    sinks = [
        ShardStream(
            job, process, process, lambda tap: True, lambda message: message.seq, lambda alone, sink: sink
        ).sink(PARTS, got.append)
        for process in (0, 1)
    ]
    for launch in range(OVERTAKEN_BY):
        assert len(got) == (0 if apart else launch)
        for process, sink in enumerate(sinks):
            sink(program.message(launch + process * apart, 0, process))
    wholes = [message for message in got if message.shard_index is None]
    if apart:
        assert (len(got), wholes) == (2 * OVERTAKEN_BY, [])
        assert job.discarded == {f"parts at {PARTS.source_line}: {APART}": 2 * OVERTAKEN_BY}
    else:
        assert len(got) == len(wholes) == OVERTAKEN_BY
        assert not job.discarded
    assert job.pending_values == 0

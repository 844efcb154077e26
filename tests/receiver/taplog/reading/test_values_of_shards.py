"""Values of several devices of one process, as readers put them together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from hostcallback.receiver.sinks.sharding.shard_record import ProcessShare, shard_record
from hostcallback.receiver.taplog.reading.logged_message import LoggedMessage
from hostcallback.receiver.taplog.reading.reader import LogReader
from logged_frames import BEGIN_NS, NORM, SECOND, block_of, frame, log_in

PARTS = replace(NORM, name="parts", consumer_id=501, shards="some")
DEVICES = 3


def test_a_whole_value_is_a_message_of_the_device_with_its_first_part(tmp_path: Path) -> None:
    share = ProcessShare(DEVICES)
    with log_in(tmp_path) as log:
        log.describe(PARTS)
        for device in reversed(range(DEVICES)):  # whichever comes first
            record = shard_record(
                [((2 * DEVICES,), (2 * device,))], shards=DEVICES, group=0, partition=device, share=share
            )
            part = np.arange(2.0) + 2 * device
            log.append(
                f"cpu:{device}", block_of(frame(PARTS, np.int64(record), part, seq=5 + DEVICES - device))
            )
    (whole,) = LogReader(tmp_path).values()
    assert isinstance(whole, LoggedMessage)
    assert whole.value.tolist() == [*range(2 * DEVICES)]
    message = whole.message
    assert (message.device, message.seq, message.shard_index) == ("cpu:0", 5 + DEVICES, None)
    assert message.time_ns == BEGIN_NS + message.seq * SECOND

"""The counts of a log's messages and the times of places in it, as `hcb stats` shows them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from hostcallback.receiver.sinks.times import DEVICE, PROGRAM, SECONDS, START
from hostcallback.receiver.taplog.reading.reader import LogReader
from hostcallback.receiver.taplog.reading.selection import Selection
from hostcallback.receiver.taplog.tap_stats import gather
from logged_frames import LOSS, block_of, frame, log_in

OF_PLACE = ["dict", [["value", SECONDS], ["value", START]], [["array"], ["array"]]]
TIMED = replace(
    LOSS, name="parts", consumer_id=99, kind="time", params={"axes": {PROGRAM: [DEVICE], "mlp": [DEVICE]}}, kwargs={},
    transforms=(), tree=["dict", [["value", PROGRAM], ["value", "mlp"]], [OF_PLACE, OF_PLACE]],
)  # fmt: skip
CALLS = 12
SLOW = 7


def test_the_times_of_places_are_in_the_stats_with_the_slowest_steps(tmp_path: Path) -> None:
    start = np.zeros((1, 1, 2), np.uint32)
    with log_in(tmp_path) as log:
        log.describe(TIMED)
        frames = []
        for call in range(CALLS):
            mlp = np.full((1, 1), 3.0 if call == SLOW else 0.25, np.float32)
            frames += [
                frame(LOSS, np.float32(call), np.int32(call), seq=2 * call, run_id=call),
                frame(TIMED, mlp + np.float32(0.5), start, mlp, start, seq=2 * call + 1, run_id=call),
            ]
        log.append("cpu:0", block_of(*frames))
    found = gather(LogReader(tmp_path).message_runs(Selection(), by_time=False), Selection(), 3)
    counted = {tap.name: (tap.messages, tap.first_step, tap.last_step) for tap in found.taps.values()}
    assert counted == {"loss": (CALLS, 0, CALLS - 1), "parts": (CALLS, 0, CALLS - 1)}
    mlp_row, whole = found.times["parts"].rows()
    assert (mlp_row.place, mlp_row.count, mlp_row.max, mlp_row.max_at) == ("mlp", CALLS, 3.0, f"step {SLOW}")
    assert (whole.count, whole.max) == (CALLS, 3.5)
    slowest, *others = found.times["parts"].slowest()
    assert (slowest.step, [place.place for place in slowest.places]) == (SLOW, ["mlp"])
    assert len(others) == 2

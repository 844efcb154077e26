"""The summary of a receiver's statistics as a text, and the counters of taps."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from hostcallback.receiver.messages import Consumer, Message
from hostcallback.receiver.runtime.stats import DeviceStats, StatsRows, TapCounters, summarize


def test_a_summary_has_a_line_for_each_device_with_messages() -> None:
    rows = [
        DeviceStats("cpu:0", 1_500, 2_048, 3, 4, tap_sec=0.25, first_time_ns=10**9, last_time_ns=2 * 10**9),
        DeviceStats("cpu:1", queued_messages=4),
        DeviceStats("cpu:2", dropped=1),
        DeviceStats("cpu:3", unknown=1_000, unrecorded=1_200),
        DeviceStats("cpu:4", unknown=234, unrecorded=34),
    ]
    assert summarize("train", rows).splitlines() == [
        "receiver 'train'",
        "device  messages    bytes     rate  dropped  failed  time in taps",
        " cpu:0     1,500  2.0 KiB  1,500/s        3       4       0.250 s",
        " cpu:2         0      0 B      0/s        1       0       0.000 s",
        " cpu:3         0      0 B      0/s        0       0       0.000 s",
        " cpu:4         0      0 B      0/s        0       0       0.000 s",
        "1,234 message(s) for unknown consumers",
        "1,234 message(s) could not be recorded",
    ]
    only = summarize("", rows[:1])
    assert only.splitlines()[0] == "receiver"
    assert "message(s)" not in only


def test_a_receiver_without_messages_says_so() -> None:
    assert summarize("train", [DeviceStats("cpu:0", queued_messages=1)]) == "receiver 'train': no messages"
    assert summarize("", []) == "receiver: no messages"


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), (1024**2, "1.0 MiB"),
        (3 * 1024**3, "3.0 GiB"), (2048 * 1024**3, "2048.0 GiB"),
    ],
)  # fmt: skip
def test_bytes_have_a_unit(count: int, text: str) -> None:
    assert f" {text} " in summarize("", [DeviceStats("cpu:0", 1, count)])


def test_rates_are_over_the_time_between_the_first_and_the_last_message() -> None:
    assert DeviceStats("cpu:0", 8, first_time_ns=10**9, last_time_ns=5 * 10**9).messages_per_sec == 2.0
    assert DeviceStats("cpu:0", 8, first_time_ns=10**9, last_time_ns=10**9).messages_per_sec == 0.0


def test_statistics_are_a_table_in_notebooks() -> None:
    row = DeviceStats("cpu:<0>", 7)
    for shown in (row._repr_html_(), StatsRows([row])._repr_html_()):
        assert "cpu:&lt;0&gt;" in shown
        assert "messages" in shown
        assert ">7<" in shown


def consumer(consumer_id: int = 1) -> Consumer:
    return Consumer(consumer_id, "counted", "here.py:1 (f)", print)


def message(of: Consumer, *arrays: Any, stacked: int = 0) -> Message:
    return Message(of, [*map(np.asarray, arrays)], 0, 0, 0, "cpu:0", None, stacked)


def test_taps_are_counted_with_their_bytes_failures_and_stacks() -> None:
    def sink(found: Message) -> str:
        if found.stacked == 3:
            raise ValueError("planted")
        return "result"

    began = time.perf_counter()
    counters, counted = TapCounters(), consumer()
    linked = counters.link(counted, sink)
    assert linked(message(counted, np.float32(1), np.zeros(3, np.int8))) == "result"
    linked(message(counted, np.zeros(5), stacked=5))
    with pytest.raises(ValueError, match="planted"):
        linked(message(counted, np.zeros(3, np.int8), stacked=3))
    ((of, counts),) = counters.snapshot()
    assert of is counted
    assert (counts.messages, counts.nbytes, counts.failed) == (1 + 5 + 3, 7 + 40 + 3, 1)
    assert 0 < counts.tap_sec < time.perf_counter() - began
    counters.count_folded(1, 10)
    ((_, later),) = counters.snapshot()
    assert (later.messages, later.nbytes, later.failed) == (19, 50, 11)
    assert counts.messages == 9  # a copy


def test_the_count_of_a_tap_goes_on_in_a_new_scope_and_restarts_when_it_is_registered_again() -> None:
    counters, counted, seen = TapCounters(), consumer(), []
    counters.link(counted, print)(message(counted))
    linked = counters.link(counted, seen.append)
    linked(message(counted))
    assert len(seen) == 1
    assert [counts.messages for _, counts in counters.snapshot()] == [2]
    other, again = consumer(2), consumer()
    counters.link(other, seen.append)(message(other))
    counters.link(again, seen.append)
    assert [(of, counts.messages) for of, counts in counters.snapshot()] == [(again, 0), (other, 1)]

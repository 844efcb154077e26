"""What a collector's log tells: exceptions of consumers, rarely, and messages that programs lost."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from collecting import Emitter, forwarder
from hostcallback.receiver import errors, limits
from hostcallback.receiver.messages import Message
from hostcallback.receiver.remote.collector.store import Store
from hostcallback.receiver.remote.delivery.delivery import Delivery
from hostcallback.receiver.remote.delivery.stream_printer import RateLimitedErrorLog
from hostcallback.receiver.remote.forwarding_protocol import StreamKey, StreamOffset


def report(*taps: str, more: int = 0, others: tuple[Exception, ...] = ()) -> errors.TapFunctionException:
    """What is raised if the functions of these taps raise; `others` are errors of no consumer."""
    failures = [
        errors.TapFailure(ValueError(f"{tap} {seq}"), tap, "train.py:1 (f)", "cpu:0", seq)
        for seq, tap in enumerate(taps)
    ]
    raised = [failure.exception for failure in failures if isinstance(failure.exception, Exception)]
    suppressed = {"train.py:1 (f)": more} if more else {}
    return errors.TapFunctionException("raised", [*raised, *others], failures, suppressed)


def test_the_first_tenth_and_hundredth_of_a_kind_are_logged_and_the_total(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = RateLimitedErrorLog()
    for _ in range(25):
        log.log(report("loss", "loss", "loss", "loss"))
    log.log(report("loss", "once"))
    assert caplog.messages == [
        "ValueError: loss 0",
        "ValueError: loss 1; 10 times by now",
        "ValueError: loss 3; 100 times by now",
        "ValueError: once 1",
    ]
    caplog.clear()
    log.end()
    assert caplog.messages == [
        "ValueError was raised by tap loss at train.py:1 (f), device cpu:0: 101 times in all"
    ]


def test_kinds_beyond_the_limit_count_together(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "COUNTED_NAMES", 2)
    log = RateLimitedErrorLog()
    log.log(report(*(f"tap {number}" for number in range(12))))
    assert [message.partition(";")[0] for message in caplog.messages] == [
        f"ValueError: tap {number} {number}" for number in (0, 1, 2, 11)
    ]
    caplog.clear()
    log.end()
    assert caplog.messages == []


def test_every_error_of_no_consumer_is_logged_and_what_was_left_out_is_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = RateLimitedErrorLog()
    for number in range(2):
        log.log(report("loss", more=7, others=(KeyError(number),)))
    left_out = "7 more exceptions of consumers are not shown"
    assert caplog.messages == [
        "ValueError: loss 0", "KeyError: 0", left_out, "KeyError: 1", left_out
    ]  # fmt: skip


def store_and_deliver(store: Store, delivery: Delivery, folder: str, data: bytes) -> None:
    """Delivers the first segment of a stream, which is sent from a folder of this name."""
    key = StreamKey.of_folder(folder)
    assert key is not None
    stream = store.open(key)
    stream.append(StreamOffset(1, 0), data)
    delivery.grown(key, stream.stored)
    assert delivery.wait_idle(10)


def test_the_end_of_a_collector_tells_how_often_a_consumer_has_raised(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(message: Message) -> None:
        raise ValueError(f"no {message.seq}")

    with closing(forwarder("localhost:1", tmp_path / "spool", drain_sec=0.0)) as recorder:
        Emitter(recorder).losses(4)
        recorder.flush()
        (spool,) = (tmp_path / "spool").iterdir()
        data = (spool / "000001.hcblog").read_bytes()
    with closing(Store(tmp_path / "log")) as store:
        with closing(Delivery(store, sinks=[refuse], prints=False)) as delivery:
            store_and_deliver(store, delivery, spool.name, data)
        raised = [text for text in caplog.messages if text.startswith("ValueError")]
    assert raised[0].startswith("ValueError: no 0")
    assert "times in all" not in "".join(raised[:-1])
    assert raised[-1].startswith("ValueError was raised by tap ")
    assert raised[-1].endswith("cpu:0: 4 times in all")


def test_messages_that_a_program_lost_are_told_and_counted_by_their_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(forwarder("localhost:1", tmp_path / "spool", drain_sec=0.0)) as recorder:
        for count, reason in ((4, "dropped"), (2, "a full disk"), (3, "dropped")):
            Emitter(recorder).losses(1)
            recorder.lose("cpu:0", count, reason)
            recorder.flush()
        (spool,) = (tmp_path / "spool").iterdir()
        data = (spool / "000001.hcblog").read_bytes()
    with closing(Store(tmp_path / "log")) as store, closing(Delivery(store, prints=False)) as delivery:
        store_and_deliver(store, delivery, spool.name, data)
        assert delivery.lost == {"dropped": 7, "a full disk": 2}
    assert [text.partition(": ")[2] for text in caplog.messages if "are missing" in text] == [
        f"{count} message(s) of cpu:0, 0 to 0, are missing: {reason}"
        for count, reason in ((4, "dropped"), (2, "a full disk"), (3, "dropped"))
    ]

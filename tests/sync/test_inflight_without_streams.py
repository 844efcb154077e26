"""Barriers where the threads' streams cannot be used: they wait for JAX's live arrays."""

from __future__ import annotations

import logging
import threading
from time import perf_counter
from typing import Any

import jax
import pytest

import hostcallback.api  # noqa: F401  (before the rooms below it, whose imports depend on its order)
from hostcallback.receiver.errors import TapTimeoutError
from hostcallback.sync import inflight
from hostcallback.sync.inflight import Sentinels
from hostcallback.sync.threads import DispatchError, DispatchingThreads, NoThreadError
from threads import in_another_thread


class Result:
    """The result of a program that ends once it was looked at some times."""

    def __init__(self, looks: float, *, is_deleted: bool = False, fails: bool = False) -> None:
        self.left, self._is_deleted, self._fails = looks, is_deleted, fails

    def is_deleted(self) -> bool:
        return self._is_deleted

    def is_ready(self) -> bool:
        if self._fails:
            raise RuntimeError("Array has been deleted.")
        self.left -= 1
        return self.left <= 0


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> jax.Device:
    """A device for which a program with taps was compiled."""
    found = jax.local_devices(backend="cpu")[0]
    monkeypatch.setattr(inflight, "_devices", {found})
    return found


def live(monkeypatch: pytest.MonkeyPatch, *results: Result) -> None:
    monkeypatch.setattr(jax, "live_arrays", lambda: list(results))


def test_without_known_threads_a_barrier_waits_for_all_live_arrays(
    device: jax.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Result(4), Result(7)
    live(monkeypatch, first, Result(99, is_deleted=True), Result(99, fails=True), second)
    monkeypatch.setattr(inflight, "_threads", None)
    looks: list[int] = []
    inflight.wait(None, lambda: looks.append(1))
    assert (first.left, second.left, len(looks)) == (0, 0, 3 + 6)
    inflight.wait(None, lambda: looks.append(1), [])  # for no device
    assert len(looks) == 9
    again = Result(2)
    live(monkeypatch, again)
    inflight.wait_for_tap_functions(None, lambda: None)
    assert again.left == 0


def test_a_barrier_gives_up_when_the_time_is_up(device: jax.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    live(monkeypatch, Result(float("inf")))
    ends = perf_counter() + 0.01
    monkeypatch.setattr(inflight, "_threads", None)
    with pytest.raises(
        TapTimeoutError, match=r"^dispatched computations were still running when the time was up"
    ):
        inflight.wait(ends, lambda: None)
    assert perf_counter() > ends

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        inflight.wait(None, stop)


@pytest.mark.parametrize("error", [DispatchError("no slot"), NoThreadError("the end")], ids=repr)
@pytest.mark.parametrize("of_taps", [False, True])
def test_where_sentinels_cannot_run_the_live_arrays_are_waited_for(
    device: jax.Device,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    of_taps: bool,
) -> None:
    def fail(self: Sentinels, look: Any) -> None:
        raise error

    result = Result(3)
    live(monkeypatch, result)
    monkeypatch.setattr(inflight, "_threads", DispatchingThreads())
    monkeypatch.setattr(inflight, "_asynchronous", False)
    monkeypatch.setattr(Sentinels, "wait", fail)
    with caplog.at_level(logging.ERROR):
        (inflight.wait_for_tap_functions if of_taps else inflight.wait)(None, lambda: None)
    assert result.left == 0
    what = "what a thread dispatched" if of_taps else "what runs"
    told = [f"a barrier could not find out {what}"] if isinstance(error, DispatchError) else []
    assert caplog.messages == told


def test_where_calls_return_late_a_barrier_needs_no_knowledge_of_the_other_threads(
    device: jax.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = DispatchingThreads()
    monkeypatch.setattr(inflight, "_threads", known)
    monkeypatch.setattr(inflight, "_asynchronous", False)
    live(monkeypatch, Result(float("inf")))
    in_another_thread(lambda: None)
    assert known.count().suspects is None
    inflight.wait(perf_counter() + 60, lambda: None)


def test_a_sentinel_that_cannot_be_dispatched_fails_its_barrier(
    device: jax.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(devices: Any) -> Any:
        raise ValueError("planted")

    monkeypatch.setattr(inflight, "sentinel_program", fail)
    with pytest.raises(DispatchError, match="a program of a barrier could not be run") as raised:
        Sentinels([device], [threading.get_ident()], several=False).wait(lambda: None)
    assert str(raised.value.__cause__) == "planted"


@pytest.mark.parametrize(("answers", "tried"), [([True], 1), ([False, True], 2), ([False] * 4, 3)], ids=str)
def test_the_streams_are_tried_until_they_are_known_three_times_at_most(
    monkeypatch: pytest.MonkeyPatch, answers: list[bool], tried: int
) -> None:
    left = list(answers)
    monkeypatch.setattr(inflight._Trials, "known", False)
    monkeypatch.setattr(inflight._Trials, "ended", 0)
    monkeypatch.setattr(inflight, "_try_streams", lambda: left.pop(0))
    found = [inflight.are_known(lambda: None) for _ in range(5)]
    assert len(answers) - len(left) == tried
    assert found == [*answers[:tried], *[answers[tried - 1]] * 5][:5]


def test_a_trial_that_takes_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    ended, looks = threading.Event(), []
    monkeypatch.setattr(inflight._Trials, "known", False)
    monkeypatch.setattr(inflight._Trials, "ended", 0)
    monkeypatch.setattr(inflight, "TRIAL_SEC", 0.02)
    monkeypatch.setattr(inflight.threads, "end", ended.set)
    monkeypatch.setattr(inflight, "_try_streams", lambda: ended.wait(20))
    assert inflight.are_known(lambda: looks.append(ended.is_set()))
    assert len(looks) >= 1
    assert not looks[0]

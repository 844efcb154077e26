"""The page draws 60 frames a second while 10,000 points a second arrive, by its scripts and by Chromium's trace."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import hostcallback as hcb

pytestmark = [pytest.mark.slow, pytest.mark.alone]

POINTS = 10_000
"""A second."""

TAPS = 10
BURSTS = 20
"""A second."""

LATE_MS = 34
"""A frame that comes so long after the one before has missed a refresh of 60 a second."""

FRAMES = """async (sec) => {
    const times = [];
    const end = performance.now() + sec * 1000;
    await new Promise((done) => {
        const frame = (now) => { times.push(now); performance.now() < end ? requestAnimationFrame(frame) : done(); };
        requestAnimationFrame(frame);
    });
    return times;
}"""

MARK = """() => {
    const mark = document.createElement("div");
    Object.assign(mark.style, { position: "fixed", bottom: "0", width: "9px", height: "9px", background: "red" });
    document.body.append(mark);
    mark.animate([{ left: "0px" }, { left: "600px" }], { duration: 5000, iterations: Infinity });
}"""
"""Something that moves, of which the main thread makes each frame: without it Chromium draws what has changed only."""

CATEGORIES = "devtools.timeline", "disabled-by-default-devtools.timeline.frame"


def traced(page: Any, sec: float) -> tuple[list[float], list[dict[str, Any]]]:
    """The times of the page's frames in ms as its scripts see them, and the events of Chromium's own trace."""
    browser = page.context.browser
    browser.start_tracing(page=page, categories=list(CATEGORIES))
    times = page.evaluate(FRAMES, sec)
    return times, json.loads(browser.stop_tracing())["traceEvents"]


def drawn_frames(events: list[dict[str, Any]]) -> tuple[list[float], int]:
    """When frames were drawn, in ms, and how many that were begun after the first of them never were.

    Headless Chromium notes a `DroppedFrame` for each frame that comes after the deadline of its refresh, and most of
    these are drawn right after. So a frame counts as dropped if it has no `DrawFrame`.
    """
    drawn = {each["args"]["frameSeqId"]: each["ts"] / 1000 for each in events if each["name"] == "DrawFrame"}
    begun = {each["args"]["frameSeqId"] for each in events if each["name"] in ("BeginFrame", "DroppedFrame")}
    missing = [number for number in begun - drawn.keys() if min(drawn) < number < max(drawn)]
    return sorted(drawn.values()), len(missing)


@jax.jit
def burst(first: Any) -> Any:
    """Sends as many points of each tap as a burst has."""

    def step(i: Any, number: Any) -> Any:
        for tap in range(TAPS):
            hcb.id_tap(
                lambda value: None, {"step": number, "loss": jnp.sin(number / 500.0)}, name=f"layer_{tap}"
            )
        return number + 1

    return jax.lax.fori_loop(0, POINTS // TAPS // BURSTS, step, first)


@contextmanager
def sending(log: Path) -> Iterator[list[float]]:
    """Sends bursts from a thread; yields the times at which they were sent."""
    ended = threading.Event()
    sent: list[float] = []

    def send() -> None:
        number = jnp.int32(0)
        due = time.monotonic()
        while not ended.wait(max(due - time.monotonic(), 0)):
            number = burst(number).block_until_ready()
            sent.append(time.monotonic())
            due += 1 / BURSTS

    with hcb.outfeed_receiver(sinks=[hcb.record(log, run="frames")]):
        thread = threading.Thread(target=send)
        thread.start()
        try:
            yield sent
        finally:
            ended.set()
            thread.join()


def test_charts_that_grow_keep_sixty_frames_a_second(
    visit: Callable[..., Any], serve: Any, expect: Any, tmp_path: Path
) -> None:
    with sending(tmp_path) as sent:
        page = visit(serve(tmp_path).address, "Charts")
        card = page.get_by_role("article", name="layer_0 loss")
        card.locator(".u-over").wait_for()
        before = card.locator(".legend b").inner_text()
        start = time.monotonic()
        page.evaluate(MARK)
        times, events = traced(page, 5)
        points = sum(start <= at < start + 5 for at in sent) * POINTS / BURSTS / 5
        expect(card.locator(".legend b")).not_to_have_text(before)
    drawn, dropped = drawn_frames(events)
    rate, late, longest = pace(times)
    drawn_rate, drawn_late, drawn_longest = pace(drawn)
    print(
        f"{points:,.0f} points a second; scripts see {rate:.1f} frames a second, {late:.1%} late, the longest "
        f"{longest:.0f} ms; Chromium drew {drawn_rate:.1f} frames a second, {drawn_late:.1%} late, the longest "
        f"{drawn_longest:.0f} ms, and dropped {dropped} of {dropped + len(drawn)}"
    )
    assert points > 0.9 * POINTS
    assert min(rate, drawn_rate) > 55, (times, drawn)
    assert max(late, drawn_late) < 0.05, (times, drawn)
    assert dropped < 0.05 * len(drawn)


def pace(times: list[float]) -> tuple[float, float, float]:
    """Of the times of frames in ms: frames a second, the share that came late, and the longest pause in ms."""
    pauses = [after - earlier for earlier, after in pairwise(times)]
    late = sum(pause > LATE_MS for pause in pauses) / len(pauses)
    return 1000 * len(pauses) / (times[-1] - times[0]), late, max(pauses)

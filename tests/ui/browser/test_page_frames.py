"""The page draws 60 frames a second while 10,000 points a second arrive."""

from __future__ import annotations

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

FRAMES = """async (sec) => {
    const times = [];
    const end = performance.now() + sec * 1000;
    await new Promise((done) => {
        const frame = (now) => { times.push(now); performance.now() < end ? requestAnimationFrame(frame) : done(); };
        requestAnimationFrame(frame);
    });
    return times;
}"""


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
        times = page.evaluate(FRAMES, 5)
        points = sum(start <= at < start + 5 for at in sent) * POINTS / BURSTS / 5
        expect(card.locator(".legend b")).not_to_have_text(before)
    frames = [after - earlier for earlier, after in pairwise(times)]
    rate = 1000 * len(frames) / (times[-1] - times[0])
    late = sum(frame > 34 for frame in frames) / len(frames)
    print(
        f"{points:,.0f} points and {rate:.1f} frames a second, {late:.1%} late, the longest {max(frames):.0f} ms"
    )
    assert points > 0.9 * POINTS
    assert rate > 55, frames
    assert late < 0.05, frames

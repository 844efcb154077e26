"""The benchmarks of the page of `hcb ui`: opening a large log, following many taps, following a training loop."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import perf_counter, time_ns
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import hostcallback as hcb
from hostcallback.receiver.messages import Consumer, Message
from hostcallback.receiver.taplog.writing.recorder import Recorder
from hostcallback.receiver.wire.tap_descriptor import TapDescriptor
from tools.bench.machine import peak_mib
from tools.bench.row import Row, figure, measure
from tools.bench.separate_process import ROOT

SCALARS = 10_000_000
PROCESSES, TAPS = 64, 16
WATCH_SEC = 10.0
CHARTS = 12
STEPS, WIDTH = 20_000, 160


class _Page:
    # `hcb ui` in a child process, and the requests of a page.

    def __init__(self, *arguments: Any) -> None:
        command = [sys.executable, "-m", "hostcallback.receiver.cli", "ui", "--no-browser", "--until-eof"]
        self._process = subprocess.Popen(
            [*command, *map(str, arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert self._process.stdout is not None
        self._base, _, token = self._process.stdout.readline().strip().partition("/#token=")
        self._headers = {"Authorization": f"Bearer {token}"}

    def open(self, path: str) -> Any:
        return urllib.request.urlopen(
            urllib.request.Request(self._base + path, headers=self._headers), timeout=60
        )

    def ask(self, path: str) -> Any:
        with self.open(path) as answer:
            return json.load(answer)

    def cpu_sec(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def peak_mib(self) -> float:
        return peak_mib(self._process.pid)

    def close(self) -> None:
        with self._process:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(30)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """A page is open: it takes events, and asks for its visible charts after each, and for a new overview."""
        ended = threading.Event()
        scalars = [tap["id"] for tap in self.ask("/api/overview")["taps"] if tap["kind"] == "scalar"]
        charts = "&".join(f"tap={number}" for number in scalars[:CHARTS])
        watch = ",".join(map(str, scalars[:256]))

        def look() -> None:
            with self.open(f"/api/events?watch={watch}") as events:
                for line in events:
                    if ended.is_set():
                        return
                    if line.startswith(b"data:"):
                        self.ask(f"/api/series?{charts}")
                        if json.loads(line[5:])["overview"]:
                            self.ask("/api/overview")

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(15)


def page_of_a_large_log(rounds: int) -> list[Row]:
    """A log of ten million scalars: from the start of `hcb ui` to the first chart, which covers the whole log.

    Then the memory once all of the log has been read.
    """

    def ten_million(x: Any) -> Any:
        def step(_: Any, x: Any) -> Any:
            hcb.id_tap(_ignore, x, name="loss")
            return x * 0.9999 + 0.001

        return lax.fori_loop(0, SCALARS, step, x)

    seconds, memory = [], []
    with tempfile.TemporaryDirectory() as folder:
        with hcb.outfeed_receiver(record=folder):
            jax.jit(ten_million)(jnp.float32(3)).block_until_ready()
        for _ in range(max(3, rounds)):
            began = perf_counter()
            page = _Page(folder)
            (tap,) = [tap for tap in page.ask("/api/overview")["taps"] if tap["kind"] == "scalar"]
            (shown,) = page.ask(f"/api/series?tap={tap['id']}")["series"]
            seconds.append(perf_counter() - began)
            assert len(shown["x"]) > 100
            while shown["count"] < SCALARS:
                (shown,) = page.ask(f"/api/series?tap={tap['id']}")["series"]
            memory.append(page.peak_mib())
            page.close()
    return [
        figure(seconds).within(2.0, "hcb ui: 10,000,000 scalars, from its start to the first chart", "s"),
        figure(memory).within(300.0, "hcb ui: memory with 10,000,000 scalars", "MiB"),
    ]


def watched_page(rounds: int) -> list[Row]:
    """1,024 taps of 64 logs that grow, each with two messages per second: the server's share of a core."""
    watched, unwatched = [], []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        recorders = [stack.enter_context(hcb.record(Path(folder, f"p{n}"))) for n in range(PROCESSES)]
        ended, taps = threading.Event(), [_tap(number) for number in range(TAPS)]

        def emit() -> None:
            seq = 0
            while not ended.wait(0.5):
                for recorder in recorders:
                    _emit(recorder, taps, seq)
                seq += 1

        thread = threading.Thread(target=emit)
        thread.start()
        page = _Page(folder)
        try:
            while len(page.ask("/api/overview?limit=2000")["taps"]) < TAPS:
                ended.wait(0.2)
            for _ in range(max(3, min(rounds, 5))):
                with page.watched():
                    watched.append(_share(page, ended))
                ended.wait(1.0)
                unwatched.append(_share(page, ended))
        finally:
            ended.set()
            thread.join()
            page.close()
    name = f"hcb ui: {PROCESSES * TAPS:,} taps of {PROCESSES} logs, two messages per second each"
    return [
        figure(watched).within(5.0, f"{name}, watched", "% of a core"),
        figure(unwatched).within(0.5, f"{name}, not watched", "% of a core"),
    ]


def page_of_a_training_loop(rounds: int) -> list[Row]:
    """A loop of jitted steps that records a loss each, while a page follows the process, and without a page."""

    def tapped(x: Any, i: Any) -> Any:
        x = jnp.sin(x @ x) * 0.1
        hcb.metrics({"loss": x[0, 0]}, step=i)
        return x

    step, start = jax.jit(tapped), jnp.ones((WIDTH, WIDTH)) * 0.1
    numbers = [jnp.int32(i) for i in range(STEPS)]

    def loop() -> float:
        x, began = start, perf_counter()
        for i in numbers:
            x = step(x, i)
        x.block_until_ready()
        return (perf_counter() - began) * 1e6 / STEPS

    with tempfile.TemporaryDirectory() as folder, hcb.outfeed_receiver(record=folder):
        loop()
        hcb.barrier_wait()
        page = _Page(os.getpid())

        def followed() -> float:
            with page.watched():
                return loop()

        try:
            ours, alone = measure([followed, loop], rounds)
        finally:
            page.close()
    name = "a step of a recorded loop while a page follows the process"
    return [ours.versus(alone, name, "us/step", "the same loop without a page", 1.05)]


def _share(page: _Page, ended: threading.Event) -> float:
    began, before = perf_counter(), page.cpu_sec()
    ended.wait(WATCH_SEC)
    return 100 * (page.cpu_sec() - before) / (perf_counter() - began)


def _tap(number: int) -> TapDescriptor:
    return TapDescriptor(
        f"tap{number}", f"train.py:{number + 1} (step)", number + 100, "tap", {}, {}, (),
        ["dict", [["value", "loss"], ["value", "step"]], [["array"], ["array"]]], None, "global",
    )  # fmt: skip


def _emit(recorder: Recorder, taps: list[TapDescriptor], seq: int) -> None:
    for number, tap in enumerate(taps):
        consumer = Consumer(tap.consumer_id, tap.name, tap.source_line, print, describe=lambda tap=tap: tap)
        arrays = [np.asarray(np.float32(seq)), np.asarray(np.int32(seq))]
        recorder(Message(consumer, arrays, seq * len(taps) + number, time_ns(), 5, "cpu:0", None))
    recorder.flush()


def _ignore(value: Any) -> None:
    pass

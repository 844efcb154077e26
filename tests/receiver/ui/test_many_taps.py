"""Logs with more taps than the page keeps are shown in seconds and in bounded memory."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from many_taps import write_many
from test_live import hcb_ui, until

from checkout import ROOT
from hostcallback.receiver.ui.index import log_index, taps
from hostcallback.receiver.ui.index.taps import DistinctCounter


def test_what_is_left_out_is_counted_and_what_is_kept_is_found(
    tmp_path: Path, serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(taps, "MAX_TAPS", 500)
    monkeypatch.setattr(log_index, "MAX_DESCRIBED", 500)
    client = serve(write_many(tmp_path, 4_000, segment_bytes=1 << 18))
    found = until(
        lambda: client.get("/api/overview").json(), lambda found: found["runs"][0]["messages"] == 4_000
    )
    assert (len(found["taps"]), abs(found["taps_left_out"] - 3_500) < 35) == (500, True)
    assert found["taps_total"] == 500 + found["taps_left_out"]
    assert "taps are left out: the page keeps the first 500" in found["sources"][0]["message"]
    (tap,) = client.get("/api/overview", params={"filter": "layer_499"}).json()["taps"]
    assert tap["count"] == 1
    (series,) = client.get("/api/series", params={"tap": tap["id"]}).json()["series"]
    assert series["min"] == [499.0]


def test_different_items_are_counted_in_bounded_memory() -> None:
    counter = DistinctCounter()
    assert counter.count == 0
    for number in (*range(5), *range(5)):
        counter.add(f"tap_{number}")
    assert counter.count == 5
    for number in range(100_000):
        counter.add(f"tap_{number}")
    assert abs(counter.count - 100_000) < 1_000


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(500)  # writing them takes a minute
def test_a_million_names_are_answered_in_seconds_and_300_mebibytes(tmp_path: Path) -> None:
    # In another process: the memory of the server is that of a process without JAX, and of this one.
    writer = [sys.executable, str(Path(__file__).with_name("many_taps.py")), str(tmp_path), "1000000"]
    subprocess.run(
        writer, check=True, timeout=400, env={"PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'helpers'}"}
    )
    started = time.monotonic()
    with hcb_ui(tmp_path) as client:
        client.get("/api/overview")
        first = time.monotonic() - started
        asked = time.monotonic()
        found = until(
            lambda: client.get("/api/overview").json(),
            lambda found: found["runs"][0]["messages"] == 1_000_000,
            seconds=60,
        )
        took = time.monotonic() - asked
        peak = peak_mebibytes(client.server_pid)
    print(f"first answer after {first:.1f} s, all read after {took:.1f} s more, {peak} MiB")
    assert (len(found["taps"]), abs(found["taps_left_out"] - 950_000) < 10_000) == (2_000, True)
    assert first < 5
    assert peak < 300


def peak_mebibytes(pid: int) -> int:
    """The most memory that a process has had."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) // 1024

"""The measurements at scale themselves, made small: `tools/scale.py`."""

from __future__ import annotations

import re
import sys

import numpy as np
import pytest

from checkout import ROOT
from python_process import python_output

sys.path.insert(0, str(ROOT))

from tools.bench.servers import nats_server_program
from tools.scale import messages, model, run
from tools.scale.senders import LOADS, Measured

SCALE = ROOT / "tools" / "scale.py"


def test_all_messages_come_once_and_in_order() -> None:
    found = messages.run(5000)
    assert found.faults() == []
    assert "| their sum, of integers | 12,497,500 |" in found.table()


def test_a_message_too_few_too_many_or_at_a_wrong_place_is_a_fault() -> None:
    found = messages.Found(4, messages.Numbers(), resident_mib=[100.0, 100.0 + messages.BOUND_MIB + 1])
    found.numbers(np.array([0, 2, 1], np.int32))
    assert [fault.partition(",")[0] for fault in found.faults()] == [
        "3 messages came",
        "their sum is 3",
        "2 messages came out of order",
        f"memory grew by {messages.BOUND_MIB + 1:.1f} MiB",
    ]
    with pytest.raises(ValueError, match="expected a multiple of 1,000,000"):
        messages.run(1_000_001)


def measured(hosts: int, load: str) -> Measured:
    """As if each slice took 0.3 ms of the collector, and each MiB 2 ms; no processor is ever used up."""
    per_second, scalars = LOADS[load]
    slices = hosts * per_second
    write_bytes = 100 + 192 * scalars
    mib = slices * write_bytes / 2**20
    return Measured(
        hosts=hosts, load=load, messages=int(slices * scalars), messages_sec=slices * scalars, slices_sec=slices,
        mib_sec=mib, collector_ms=5 + 0.3 * slices + 2 * mib, hosts_ms=hosts + slices,
        wire_bytes=250 * (scalars > 0), file_bytes=write_bytes / max(scalars, 1), resident_mib=60 + 0.25 * hosts,
        files=20 + 2 * hosts, p50_ms=20.0, p99_ms=40.0, late_sec=0.0,
    )  # fmt: skip


def test_the_model_finds_the_constants_that_made_the_figures() -> None:
    rows = [measured(hosts, load) for hosts in (8, 32, 128) for load in LOADS]
    fitted = model.fit(rows, [8, 32])
    assert fitted.collector == pytest.approx((5, 0.3, 2))
    assert fitted.stream_bytes == pytest.approx((100, 192))
    assert fitted.predict(128, *LOADS["small"]).collector_ms == pytest.approx(
        measured(128, "small").collector_ms
    )
    assert fitted.most_slices == pytest.approx(995 / 0.3)
    lines = model.comparison(rows, fitted).splitlines()
    assert len(lines) == 2 + len(rows)
    assert sum(line.endswith("| fitted |") for line in lines) == 8
    assert "| connections of each | 250 |" in model.plan([fitted], 500, 80, 5.0)


def test_the_document_has_a_place_for_each_table() -> None:
    text = run.DOCUMENT.read_text(encoding="utf-8")
    names = re.findall(r"<!-- scale: (\w+) -->", text)
    assert names == ["messages", "senders", "model", "comparison", "plan", "nats", "columns"]
    changed = run.written(text, {"plan": "| a | b |\n"})
    assert run.written(changed, {"plan": "| a | c |\n"}) == run.written(text, {"plan": "| a | c |\n"})
    with pytest.raises(ValueError, match="has no mark"):
        run.written(text, {"weather": ""})


@pytest.mark.slow
def test_few_hosts_on_a_collector_have_no_faults() -> None:
    printed = python_output(SCALE, "senders", "--clients", "1,2", "--fit", "1,2", "--sec", "1")
    assert "\n0 fault(s)" in printed
    assert "| 2 | large |" in printed
    assert "| connections of each |" in printed


@pytest.mark.slow
@pytest.mark.skipif(nats_server_program() is None, reason="nats-server is not installed")
def test_few_hosts_through_nats_have_no_faults() -> None:
    printed = python_output(SCALE, "nats", "--clients", "2", "--sec", "1")
    assert "\n0 fault(s)" in printed
    assert "| 2 | large |" in printed


@pytest.mark.slow
def test_a_short_run_is_recorded_and_read_as_columns() -> None:
    printed = python_output(SCALE, "columns", "--count", "100000")
    assert "\n0 fault(s)" in printed
    assert "| scalars that were recorded | 100,000 |" in printed

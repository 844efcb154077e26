"""`hcb diff` and `hcb convert` in processes that cannot import JAX, on logs made by hand."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from hcb_command import hcb, start
from hostcallback.receiver.messages import Consumer, Message
from hostcallback.receiver.taplog.writing.recorder import record
from hostcallback.receiver.wire.tap_descriptor import TapDescriptor

LOSS = TapDescriptor(
    name="loss", source_line="train.py:12 (step)", consumer_id=77, kind="tap", params={}, kwargs={}, transforms=(),
    tree=["dict", [["value", "loss"], ["value", "step"]], [["array"], ["array"]]], shards=None, sharding="global",
)  # fmt: skip


def write(log: Path, *, steps: int = 50, wrong: int = -1) -> Path:
    """A log of losses, one of which may be wrong."""
    consumer = Consumer(77, LOSS.name, LOSS.source_line, print, describe=lambda: LOSS)
    with record(log) as recorder:
        for step in range(steps):
            arrays = [np.float32(step if step != wrong else -1), np.int32(step)]
            recorder(Message(consumer, list(map(np.asarray, arrays)), step, 10**18 + step, 5, "cpu:0", None))
    return log


def test_diff(tmp_path: Path) -> None:
    write(tmp_path / "a")
    write(tmp_path / "b", wrong=31)
    result = hcb(tmp_path, "diff", "a", "b")
    assert result.returncode == 1
    assert result.stdout == (
        "step 31: loss at train.py:12 (step), cpu:0, process 0, message 31 in A, 31 in B\n"
        "  loss: A 31.0, B -1.0 (by 32, relative 32)\n"
    )
    assert hcb(tmp_path, "diff", "a", "a").returncode == 0
    missing = hcb(tmp_path, "diff", "a", "nothing")
    assert missing.returncode == 2
    assert missing.stderr == (
        "hcb: nothing: no such tap log: give the folder that record= wrote, or files *.hcblog of it\n"
    )


@pytest.mark.parametrize("to", ["npz", "parquet", "tensorboard", "trace"])
def test_convert(to: str, tmp_path: Path) -> None:
    if to in ("parquet", "tensorboard"):
        pytest.importorskip({"parquet": "pyarrow", "tensorboard": "tensorboardX"}[to])
    write(tmp_path / "a")
    result = hcb(tmp_path, "convert", "a", "--to", to, "-o", "out")
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "no_jax", "out"]


@pytest.mark.slow
def test_the_reader_of_the_output_may_stop(tmp_path: Path) -> None:
    write(tmp_path / "a", steps=20_000)
    with start(tmp_path, "cat", "a", "--json") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert json.loads(process.stdout.readline())["step"] == 0
        process.stdout.close()
        assert process.wait(60) == 141
        assert process.stderr.read() == ""


def test_a_trace_for_the_standard_output(tmp_path: Path) -> None:
    write(tmp_path / "a", steps=2)
    result = hcb(tmp_path, "convert", "a", "--to", "trace", "-o", "-")
    assert hcb(tmp_path, "convert", "a", "--to", "trace", "-o", "b.gz").returncode == 0
    assert gzip.decompress((tmp_path / "b.gz").read_bytes()).decode() == result.stdout
    assert [event["name"] for event in json.loads(result.stdout)["traceEvents"] if event["ph"] == "i"] == [
        "loss"
    ] * 2

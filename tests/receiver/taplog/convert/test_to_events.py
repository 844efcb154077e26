"""`hcb convert` to JSON lines, TensorBoard's event files and traces."""

from __future__ import annotations

import gzip
import json
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from logged_runs import STEPS, nothing, record_odd, record_train, recorded

import hostcallback as hcb
from hostcallback.receiver.cli import main
from hostcallback.receiver.taplog.convert.perfetto import read_profile
from python_process import python_output


def convert(log: Path, to: str, output: Path | str, *options: str) -> None:
    """Runs the command."""
    assert main(["convert", str(log), "--to", to, "-o", str(output), *options]) == 0


def events(path: Path) -> list[dict[str, Any]]:
    """The events of a trace."""
    found: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return found


def test_json_lines_are_cats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["convert", str(tmp_path), "--to", "jsonl", "-o", str(tmp_path / "out")])
    assert "JSON lines are written by `hcb cat --json LOG > OUT`" in capsys.readouterr().err


def test_an_existing_file_is_kept_without_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = record_odd(tmp_path / "log")
    output = tmp_path / "out"
    output.write_text("precious")
    assert main(["convert", str(log), "--to", "trace", "-o", str(output)]) == 1
    assert "--force" in capsys.readouterr().err
    assert output.read_text() == "precious"
    convert(log, "trace", output, "--force")
    assert sum(event.get("cat") == "tap" for event in events(output)) > 1


def test_a_failed_conversion_leaves_no_file_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = record_train(tmp_path / "log")
    record_train(log)
    segment = min(log.iterdir())
    (tmp_path / "here").mkdir()
    assert main(["convert", str(log), "--to", "npz", "-o", str(tmp_path / "gone" / "out")]) == 1
    assert f"{tmp_path / 'gone'}: No such file" in capsys.readouterr().err
    data = bytearray(segment.read_bytes())
    data[data.rindex(b"HCB\x01")] ^= 255  # a frame's, wherever the padding between chunks is
    segment.write_bytes(data)
    for to in ("trace", "npz"):
        output = tmp_path / "here" / f"out.{to}"
        assert main(["convert", str(log), "--to", to, "-o", str(output)]) == 1
        assert "checksums do not match" in capsys.readouterr().err
    # The good messages are there.
    assert events(tmp_path / "here" / "out.trace")
    assert len(np.load(output)["train:step"]) > 0
    assert len(list(output.parent.iterdir())) == 2


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--to", "npz", "-o", "-"), "standard output"),
        (("--to", "npz", "-o", "out.gz"), "gzip"),
        (("--to", "npz", "-o", "out", "--beside", "profile"), "--beside"),
    ],
)
def test_incompatible_options_are_refused(
    arguments: tuple[str, ...], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(record_odd(tmp_path / "log")), *arguments]) == 1
    assert reason in capsys.readouterr().err


def read_tensorboard(folder: Path) -> list[Any]:
    """The events of the one event file in a folder: (tag, step, wall time, value)."""
    # tensorboardX only writes; its protobuf classes read.
    from tensorboardX.proto.event_pb2 import Event

    (path,) = folder.glob("events.out.tfevents.*.hcb")
    data, found = path.read_bytes(), []
    while data:
        size = int.from_bytes(data[:8], "little")  # then a checksum of it, the event, and a checksum of that
        event = Event.FromString(data[12 : 12 + size])
        data = data[16 + size :]
        found += [(value.tag, event.step, event.wall_time, value) for value in event.summary.value]
    return found


def test_tensorboard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tensorboardX")
    log = record_train(tmp_path / "log")
    convert(log, "tensorboard", tmp_path / "runs")
    found = read_tensorboard(tmp_path / "runs")
    loss = [(step, value.simple_value) for tag, step, _, value in found if tag == "train/loss"]
    assert loss == [(i, i) for i in range(STEPS)]
    capsys.readouterr()
    assert main(["cat", "--json", str(log), "--name", "train"]) == 0
    times = [json.loads(line)["time_ns"] * 1e-9 for line in capsys.readouterr().out.splitlines()]
    walls = [wall for tag, _, wall, _ in found if tag == "train/loss"]
    assert walls == pytest.approx(times, abs=1e-3)
    grads = [value.histo for tag, _, _, value in found if tag == "train/grads/0"]
    assert [(histo.num, histo.max) for histo in grads] == [(6, 5 * i) for i in range(STEPS)]
    prints = [
        value.tensor.string_val[0]
        for tag, _, _, value in found
        if tag.startswith("print") and value.tensor.string_val
    ]
    assert prints == [f"c is {float(i)}".encode() for i in range(STEPS)]
    checks = [step for tag, step, _, _ in found if tag.startswith("check")]
    assert checks == [STEPS - 2, STEPS - 1]
    assert not [tag for tag, _, _, _ in found if tag == "train/step"]
    assert main(["convert", str(log), "--to", "tensorboard", "-o", str(tmp_path / "runs")]) == 1
    convert(log, "tensorboard", tmp_path / "runs", "--force")
    assert len(read_tensorboard(tmp_path / "runs")) == len(found)


def test_tensorboard_reports_left_out_messages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tensorboardX")
    convert(record_odd(tmp_path / "log"), "tensorboard", tmp_path / "runs")
    said = capsys.readouterr().err
    assert "left out: 1 of complex numbers" in said
    assert "1 of arrays without a finite element" in said
    tags = {tag for tag, _, _, _ in read_tensorboard(tmp_path / "runs")}
    assert {"odd/0/bf16", "odd/0/int4", "odd/1"} <= tags


def test_tensorboard_needs_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboardX")
    log = record_train(tmp_path / "log")

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    convert(log, "tensorboard", tmp_path / "runs")
    assert len(read_tensorboard(tmp_path / "runs")) > STEPS


def test_tensorboard_has_a_run_for_each_device(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    tapped = hcb.jit(lambda x: hcb.id_tap(nothing, x, name="loss"))
    with recorded(tmp_path / "log"):
        for number, device in enumerate(jax.devices()[:2]):
            tapped(jax.device_put(jnp.float32(number), device))
    convert(tmp_path / "log", "tensorboard", tmp_path / "runs")
    runs = sorted((tmp_path / "runs").iterdir())
    assert [run.name[-5:] for run in runs] == ["cpu_0", "cpu_1"]
    assert [read_tensorboard(run)[0][3].simple_value for run in runs] == [0, 1]


def test_trace_has_instants_and_counters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = record_train(tmp_path / "log")
    convert(log, "trace", tmp_path / "out.json")
    found = events(tmp_path / "out.json")
    instants = [event for event in found if event["ph"] == "i"]
    assert Counter(event["name"].partition("@")[0] for event in instants) == {
        "train": STEPS,
        "print": STEPS,
        "check": 2,
    }
    assert [event["args"]["step"] for event in instants if event["name"] == "train"] == list(range(STEPS))
    texts = [event["args"]["value"] for event in instants if event["name"].startswith("print@")]
    assert texts == [f"c is {float(i)}" for i in range(STEPS)]
    losses = [e["args"]["value"] for e in found if e["ph"] == "C" and e["name"] == "train/loss cpu:0"]
    assert losses == list(range(STEPS))
    names = {
        (e["pid"], e.get("tid")): e["args"]["name"] for e in found if e["ph"] == "M" and "name" in e["args"]
    }
    assert names[instants[0]["pid"], instants[0]["tid"]] == "cpu:0"
    zero = int(json.loads((tmp_path / "out.json").read_text())["otherData"]["zero_unix_ns"])
    capsys.readouterr()
    assert main(["cat", "--json", str(log)]) == 0
    times = [json.loads(line)["time_ns"] for line in capsys.readouterr().out.splitlines()]
    assert [zero + round(event["ts"] * 1000) for event in instants] == times


PROFILED = """
import sys
import jax, jax.numpy as jnp
import hostcallback as hcb

@hcb.jit
def step(x):
    with hcb.span("product"):
        x = x @ x * 0.01
    return hcb.id_tap(lambda x: None, x, name="loss")

x = step(jnp.ones((64, 64)))
with hcb.outfeed_receiver(record=sys.argv[1]), hcb.observe(what="time", tap_func=lambda times: None):
    x = step(x)
    x.block_until_ready()
    with jax.profiler.trace(sys.argv[2]):
        for i in range(3):
            with jax.profiler.StepTraceAnnotation("train", step_num=i):
                x = step(x)
                x.block_until_ready()
"""


def test_perfetto_is_another_name_of_the_trace(tmp_path: Path) -> None:
    log = record_train(tmp_path / "log")
    convert(log, "trace", tmp_path / "trace.json")
    convert(log, "perfetto", tmp_path / "perfetto.json")
    assert (tmp_path / "trace.json").read_bytes() == (tmp_path / "perfetto.json").read_bytes()


@pytest.mark.slow
def test_trace_merged_with_a_profile_of_jax(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, profile = tmp_path / "log", tmp_path / "profile"
    python_output("-c", PROFILED, log, profile)
    convert(log, "trace", tmp_path / "out.json.gz", "--beside", str(profile))
    found = json.loads(gzip.decompress((tmp_path / "out.json.gz").read_bytes()))["traceEvents"]
    spans = [(e["ts"], e["ts"] + e["dur"]) for e in found if e.get("name") == "train" and e["ph"] == "X"]
    taps = [
        event["ts"]
        for event in found
        if event.get("cat") == "tap" and event["ph"] == "i" and "loss" in event["name"]
    ]
    assert len(spans) == len(taps) == 3  # the message before the profile is not of its time
    assert all(start <= ts <= stop for (start, stop), ts in zip(spans, taps, strict=True))
    products = [(e["ts"], e["ts"] + e["dur"]) for e in found if e.get("name") == "product" and e["ph"] == "X"]
    assert len(products) == 3
    assert all(
        start <= begin <= end <= stop for (start, stop), (begin, end) in zip(spans, products, strict=True)
    )
    jax_pids = {event["pid"] for event in read_profile(profile).events}
    assert not jax_pids & {event["pid"] for event in found if event.get("cat") == "tap"}

    other = record_odd(tmp_path / "other")
    assert (
        main(["convert", str(other), "--to", "trace", "-o", str(tmp_path / "no"), "--beside", str(profile)])
        == 1
    )
    assert "from the time of the profile" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()
    (planes,) = profile.rglob("*.xplane.pb")
    planes.write_bytes(planes.read_bytes()[:-40])
    assert (
        main(["convert", str(log), "--to", "trace", "-o", str(tmp_path / "no"), "--beside", str(profile)])
        == 1
    )
    assert "hcb: " in capsys.readouterr().err
    assert (
        main(["convert", str(log), "--to", "trace", "-o", str(tmp_path / "no"), "--beside", str(tmp_path)])
        == 1
    )
    assert "no profile of jax.profiler.trace" in capsys.readouterr().err

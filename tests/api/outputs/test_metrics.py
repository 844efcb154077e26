"""`hcb.metrics` in traced code, and what the writers of a receiver get."""

from __future__ import annotations

import csv
import json
import linecache
import logging
import os
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collecting_writer import BlockedWriter, CollectingWriter
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import hostcallback as hcb
from threads import wait_for


def loop(steps: int, **options: Any) -> Any:
    """A jitted scan that sends the metrics `loss` = i/2 and `acc` = i at each step i."""

    def body(carry: Any, i: Any) -> Any:
        hcb.metrics({"loss": i / 2, "acc": i}, step=i, **options)
        return carry, None

    return jax.jit(lambda: lax.scan(body, 0, jnp.arange(steps))[0])


@pytest.fixture
def writer() -> CollectingWriter:
    return CollectingWriter()


def test_each_step_of_a_scan_is_one_record_in_order_on_a_thread_of_the_writer(
    writer: CollectingWriter,
) -> None:
    before = {*threading.enumerate()}
    with hcb.outfeed_receiver(writers=[writer]) as rx:
        loop(3_000)()
    wait_for(lambda: not any("writer" in each.name for each in {*threading.enumerate()} - before), "its end")
    assert writer.rows == [(i, {"acc": float(i), "loss": i / 2}) for i in range(3_000)]
    assert all("writer" in name for name in writer.threads)
    assert writer.flushed
    assert not writer.closed  # it is the user's
    (row,) = rx.writers
    assert (row.written, row.failed, row.dropped, row.partial) == (3_000, 0, 0, 0)


UNWRITTEN = """
import jax, jax.numpy as jnp, hostcallback as hcb

@jax.jit
def step(i):
    hcb.metrics({"loss": i * 2.0}, step=i)

def train():
    for i in range(3):
        step(jnp.int32(i))
    hcb.barrier_wait()

with hcb.outfeed_receiver({with_what}):
    train()
print("with a receiver", flush=True)
train()
train()
"""


@pytest.mark.slow
@pytest.mark.parametrize("with_what", ["sinks=[lambda message: None]", ""])
def test_metrics_that_nothing_writes_are_told_of_once(with_what: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", UNWRITTEN.replace("{with_what}", with_what)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
    )
    told = "nothing writes the values of hcb.metrics at <string>:6 (step), because "
    if with_what:
        assert done.stdout.startswith(f"with a receiver\n{told}no receiver is open: put the training into ")
    else:
        assert done.stdout.startswith(f"{told}the open receiver has no writers: give it ")
    assert done.stdout.count("nothing writes") == 1
    assert "outfeed_receiver(writers=[hcb.csv('metrics.csv')])" in done.stdout


def test_files_hold_every_step(tmp_path: Path) -> None:
    table, lines = tmp_path / "runs" / "m.csv", tmp_path / "m.jsonl"
    with hcb.outfeed_receiver(writers=[hcb.csv(table), hcb.jsonl(lines)]):
        loop(5)()
    with table.open() as file:
        assert [*csv.DictReader(file)] == [
            {"step": str(i), "acc": str(float(i)), "loss": str(i / 2)} for i in range(5)
        ]
    assert [json.loads(line) for line in lines.read_text().splitlines()] == [
        {"step": i, "acc": float(i), "loss": i / 2} for i in range(5)
    ]


def test_numbers_that_json_lacks_are_read_back_from_a_file_of_lines(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    values = [0.5, float("nan"), float("inf"), -float("inf")]
    with hcb.outfeed_receiver(writers=[hcb.jsonl(path)]):
        lax.scan(
            lambda carry, x: (carry + 1, hcb.metrics({"loss": x}, step=carry)),
            jnp.int32(0),
            jnp.array(values),
        )

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    lines = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    assert [str(float(line["loss"])) for line in lines] == ["0.5", "nan", "inf", "-inf"]
    pandas = pytest.importorskip("pandas")
    np.testing.assert_array_equal(pandas.read_json(path, lines=True)["loss"].to_numpy(), values)


def test_a_csv_file_has_one_row_for_the_taps_of_each_step_of_a_loop_in_their_order(tmp_path: Path) -> None:
    def step(x: Any, i: Any) -> Any:
        hcb.metrics({"loss": x}, step=i)
        jax.lax.cond(i % 10 == 0, lambda: emit(i), lambda: None)
        return x + 1, None

    def emit(i: Any) -> None:
        hcb.metrics({"accuracy": i * 0.5}, step=i)

    with hcb.outfeed_receiver(writers=[hcb.csv(tmp_path / "m.csv")]):
        jax.jit(lambda x: jax.lax.scan(step, x, jnp.arange(50))[0])(jnp.float32(1))
    with (tmp_path / "m.csv").open(newline="") as file:
        rows = [*csv.DictReader(file)]
    assert [int(row["step"]) for row in rows] == [*range(50)]
    assert [float(row["loss"]) for row in rows] == [1.0 + i for i in range(50)]
    assert [row["accuracy"] for row in rows] == [str(i * 0.5) if i % 10 == 0 else "" for i in range(50)]


def test_a_csv_file_merges_the_taps_of_a_step_and_gets_new_columns(tmp_path: Path) -> None:
    path = tmp_path / "m.csv"

    @jax.jit
    def step(i: Any) -> None:
        hcb.metrics({"train": i}, step=i)
        hcb.metrics({"test": -i}, step=i)

    with hcb.outfeed_receiver(writers=[hcb.csv(path)]):
        hcb.metrics({"train": 5}, step=0)
        hcb.barrier_wait()
        step(jnp.int32(1))
    assert path.read_text().split() == ["step,train,test", "0,5.0,", "1,1.0,-1.0"]
    with hcb.outfeed_receiver(writers=[hcb.csv(path, mode="a")]):
        step(jnp.int32(2))
    assert path.read_text().split() == ["step,train,test", "0,5.0,", "1,1.0,-1.0", "2,2.0,-2.0"]


def test_names_and_texts_from_anybody_are_no_formulas_and_no_paths(tmp_path: Path) -> None:
    names = ["=cmd|' /C calc'!A1", "+1", "-1", "@sum", "../../up", "/etc/x", "n" * 4000, 'a,"b"\nc', "plain"]
    table, lines = tmp_path / "a" / "m.csv", tmp_path / "a" / "m.jsonl"
    with hcb.outfeed_receiver(writers=[hcb.csv(table), hcb.jsonl(lines)]):
        hcb.metrics({**dict.fromkeys(names, 1.0), "said": hcb.text("=1+1")}, step=0)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "m.csv", "m.jsonl"]
    with table.open(newline="") as file:
        head, row = csv.reader(file)
    assert not [cell for cell in head + row if cell.startswith(("=", "+", "-", "@"))]
    assert {cell.removeprefix("'") for cell in head} == {*names, "step", "said"}
    assert row[head.index("said")] == "'=1+1"
    assert set(json.loads(lines.read_text())) == {*names, "step", "said"}


def test_a_csv_file_goes_on_after_a_column_could_not_be_added(tmp_path: Path) -> None:
    path, in_the_way = tmp_path / "m.csv", tmp_path / "m.csv.new"
    receiver = hcb.outfeed_receiver(writers=[hcb.csv(path)])
    receiver.__enter__()
    hcb.metrics({"train": 0}, step=0)
    hcb.barrier_wait()
    in_the_way.mkdir()
    hcb.metrics({"train": 1, "test": 1}, step=1)
    hcb.barrier_wait()
    in_the_way.rmdir()
    hcb.metrics({"train": 2, "test": 2}, step=2)
    with pytest.warns(hcb.MetricsWarning):
        receiver.__exit__(None, None, None)
    assert path.read_text().split() == ["step,train,test", "0,0.0,", "1,1.0,", "2,2.0,2.0"]


def test_a_barrier_flushes_the_writers(writer: CollectingWriter) -> None:
    with hcb.outfeed_receiver(writers=[writer]):
        loop(10)()
        hcb.barrier_wait()
        assert len(writer.rows) == 10
        assert writer.flushed == 1


def test_names_of_nested_values_and_messages_without_a_step(writer: CollectingWriter) -> None:
    emit = jax.jit(lambda x: hcb.metrics({"grads": {"w": x, "b": [x + 1, None]}}))
    with hcb.outfeed_receiver(writers=[writer]):
        for x in (1.0, 2.0):
            emit(x)
    assert writer.rows == [
        (0, {"grads/b/0": 2.0, "grads/w": 1.0}),
        (1, {"grads/b/0": 3.0, "grads/w": 2.0}),
    ]


def test_histograms_images_and_texts_arrive(writer: CollectingWriter) -> None:
    @jax.jit
    def emit(x: Any) -> None:
        hcb.metrics(
            {
                "h": hcb.histogram(x * jnp.arange(6.0).reshape(2, 3), bins=7),
                "i": hcb.image(jnp.full((2, 4), 0.5)),
                "t": hcb.text("x is {:.1f}", x),
                "plain": "a {brace}",
            },
            step=4,
        )

    with hcb.outfeed_receiver(writers=[writer]) as rx:
        emit(2.0)
    ((step, histograms),) = writer.histograms
    values, bins = histograms["h"]
    assert (step, values.tolist(), bins) == (4, [0, 2, 4, 6, 8, 10], 7)
    ((_, images),) = writer.images
    assert images["i"].shape == (1, 2, 4, 1)
    assert images["i"].dtype == np.uint8
    assert np.unique(images["i"]).tolist() == [128]
    assert writer.texts == [(4, {"t": "x is 2.0", "plain": "a {brace}"})]
    assert rx.writers[0].partial == 0


@pytest.mark.parametrize(
    ("reduce", "expected"),
    [("mean", 2.0), ("last", 3.0), ("max", 3.0), ("min", 1.0), ("sum", 6.0), ("each", None)],
)
def test_vmap_lanes_become_one_value(reduce: str, expected: float | None, writer: CollectingWriter) -> None:
    def emit(x: Any, i: Any) -> None:
        hcb.metrics({"x": x}, step=i, reduce=reduce)

    with hcb.outfeed_receiver(writers=[writer]):
        jax.jit(jax.vmap(emit, in_axes=(0, None)))(jnp.array([1.0, 2.0, 3.0]), 7)
    if expected is None:
        assert writer.rows == [(7, {"x/0": 1.0, "x/1": 2.0, "x/2": 3.0})]
    else:
        assert writer.rows == [(7, {"x": expected})]


def test_lanes_of_nested_vmaps_and_of_histograms(writer: CollectingWriter) -> None:
    def emit(x: Any) -> None:
        hcb.metrics({"x": x, "h": hcb.histogram(x * jnp.ones(2))}, step=0, reduce={"x": "each"})

    table = jnp.arange(6.0).reshape(2, 3)
    with hcb.outfeed_receiver(writers=[writer]):
        jax.jit(jax.vmap(jax.vmap(emit, in_axes=0), in_axes=1))(table)
    # The outermost vmap is over the columns; the innermost one's index varies fastest.
    assert [*writer.rows[0][1].values()] == table.T.reshape(-1).tolist()
    assert sorted(writer.histograms[0][1]["h"][0]) == sorted([*table.reshape(-1).tolist()] * 2)


@pytest.mark.parametrize(
    ("reduce", "expected"),
    [
        ("mean", [(3, 1.5), (7, 5.5), (9, 8.5)]),
        ("last", [(3, 3), (7, 7), (9, 9)]),
        ("max", [(3, 3), (7, 7), (9, 9)]),
        ("min", [(3, 0), (7, 4), (9, 8)]),
        ("sum", [(3, 6), (7, 22), (9, 17)]),
    ],
)
def test_every_n_steps_become_one_record_and_the_end_writes_the_rest(
    reduce: str, expected: Any, writer: CollectingWriter
) -> None:
    with hcb.outfeed_receiver(writers=[writer]):
        loop(10, every=4, reduce=reduce)()
        hcb.barrier_wait()
        assert len(writer.rows) == 2
    assert [(step, row["acc"]) for step, row in writer.rows] == expected


def test_numbers_become_a_histogram_over_steps(writer: CollectingWriter) -> None:
    with hcb.outfeed_receiver(writers=[writer]):
        loop(6, every=3, reduce={"acc": "histogram"})()
    assert [h["acc"][0].tolist() for _, h in writer.histograms] == [[0, 1, 2], [3, 4, 5]]
    assert [row for _, row in writer.rows] == [{"loss": 0.5}, {"loss": 2.0}]


def on_devices(**options: Any) -> Any:
    """A program in shard_map: device d sends `x` = d + 10 i at each of 50 steps i."""
    mesh = Mesh(np.array(jax.devices()), ("d",))

    def local(x: Any) -> Any:
        def body(carry: Any, i: Any) -> Any:
            hcb.metrics({"x": x[0] + 10 * i}, step=i, **options)
            return carry, None

        return lax.scan(body, x, jnp.arange(50))[0]

    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("d"), out_specs=P("d")))
    return jax.block_until_ready(run(jnp.arange(4)))


def test_devices_of_a_step_become_one_value(writer: CollectingWriter) -> None:
    with hcb.outfeed_receiver(writers=[writer]):
        on_devices()
    assert writer.rows == [(i, {"x": 1.5 + 10 * i}) for i in range(50)]


def test_devices_apart_and_over_steps(writer: CollectingWriter) -> None:
    with hcb.outfeed_receiver(writers=[writer]):
        on_devices(reduce="each", every=25)
    assert writer.rows == [(i, {f"x/cpu:{d}": float(d + 10 * i) for d in range(4)}) for i in (24, 49)]


def test_a_value_that_the_compiler_shards_is_one_record(writer: CollectingWriter) -> None:
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("d",)), P("d"))

    @jax.jit
    def f(x: Any) -> Any:
        hcb.metrics({"mean": x.mean(), "h": hcb.histogram(x)}, step=1)
        return x

    with hcb.outfeed_receiver(writers=[writer]):
        f(jax.device_put(jnp.arange(8.0), sharding))
    assert writer.rows == [(1, {"mean": 3.5})]
    assert writer.histograms[0][1]["h"][0].tolist() == [*range(8)]


def test_grad_sends_primals_only(writer: CollectingWriter) -> None:
    def loss(x: Any) -> Any:
        hcb.metrics({"x": x}, step=0)
        return x * x

    with hcb.outfeed_receiver(writers=[writer]):
        jax.jit(jax.grad(loss))(3.0)
    assert writer.rows == [(0, {"x": 3.0})]


def test_a_writer_that_raises_is_reported_once_and_the_others_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Failing:
        def log_metrics(self, metrics: Any, step: int) -> None:
            raise OSError(f"no space at {step}")

    good = CollectingWriter()
    with pytest.warns(hcb.MetricsWarning, match=r"Failing: 100 failed.*no space at 0") as warned:
        with hcb.outfeed_receiver(writers=[Failing(), good]) as rx:
            loop(100)()
    line = linecache.getline(warned[0].filename, warned[0].lineno)
    assert "with hcb.outfeed_receiver(writers=[Failing(), good]) as rx" in line
    assert len(good.rows) == 100
    assert [row.failed for row in rx.writers] == [100, 0]
    assert len([r for r in caplog.records if r.levelno == logging.WARNING and "Failing" in r.message]) == 1


def test_a_writer_that_blocks_does_not_hold_the_loop_or_the_others() -> None:
    everything = threading.Event()

    class Good(CollectingWriter):
        def write_scalars(self, step: int, scalars: dict[str, float]) -> None:
            super().write_scalars(step, scalars)
            if len(self.rows) == 1_000:
                everything.set()

    blocked, good = BlockedWriter(), Good()
    rx = hcb.outfeed_receiver(writers=[blocked, good], timeout_sec=0.3).__enter__()
    loop(1_000)()
    assert blocked.entered.wait(60)
    assert everything.wait(60)  # the limit also holds for a tap, which a busy machine delays
    with pytest.warns(hcb.MetricsWarning, match=r"BlockedWriter: 999 were left out"):
        rx.__exit__(None, None, None)
    assert len(good.rows) == 1_000
    assert rx.writers[0].written == 0
    blocked.let_go.set()


class SlowWriter(CollectingWriter):
    """Takes 10 ms for a record."""

    def write_scalars(self, step: int, scalars: dict[str, float]) -> None:
        threading.Event().wait(0.01)
        super().write_scalars(step, scalars)


@pytest.mark.slow
@pytest.mark.parametrize("at", ["a barrier", "the end"])
def test_a_slow_writer_that_goes_on_loses_nothing(at: str, caplog: pytest.LogCaptureFixture) -> None:
    writer = SlowWriter()
    with hcb.outfeed_receiver(writers=[writer], timeout_sec=0.2):  # for one record, not for all
        loop(100)()
        if at == "a barrier":
            hcb.barrier_wait()
            assert len(writer.rows) == 100
    assert len(writer.rows) == 100
    assert not caplog.records


def test_a_barrier_with_a_timeout_does_not_wait_for_a_blocked_writer() -> None:
    blocked = BlockedWriter()
    with hcb.outfeed_receiver(writers=[blocked]) as rx:
        loop(10)()
        assert blocked.entered.wait(60)
        hcb.barrier_wait(timeout_sec=0.2)
        assert rx.writers[0].written == 0
        blocked.let_go.set()
    assert rx.writers[0].written == 10


def test_metrics_without_a_receiver_are_no_error() -> None:
    loop(3)()
    hcb.barrier_wait()


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda x: hcb.metrics(x), TypeError, r"takes a dict of values by name, got .*test_metrics\.py:\d+"),
        (lambda x: hcb.metrics({"v": jnp.ones(3)}), ValueError, r"'v' has the shape \(3,\).*hcb\.histogram"),
        (lambda x: hcb.metrics({"v": object()}), TypeError, "'v' is object .* expected a real number"),
        (lambda x: hcb.metrics({"v": x + 1j}), TypeError, "'v' is .* expected a real number"),
        (lambda x: hcb.metrics({"v": x}, step=x), TypeError, "step is .* expected an integer"),
        (lambda x: hcb.metrics({"v": x}, step=0.5), TypeError, "step is float 0.5, expected an integer"),
        (lambda x: hcb.metrics({"v": x, "step": 1}, step=2), ValueError, "the step is given twice"),
        (lambda x: hcb.metrics({"v": x}, every=0), ValueError, "every is 0, expected a whole number"),
        (lambda x: hcb.metrics({"v": x}, reduce="median"), ValueError, "reduce is 'median', expected one of 'mean'"),
        (lambda x: hcb.metrics({"v": x}, reduce={"w": "max"}), ValueError, "reduce names 'w', expected one of v"),
        (lambda x: hcb.metrics({"a": {"b": x}, "a/b": x}), ValueError, "two values have the name 'a/b'"),
        (lambda x: hcb.metrics({"i": hcb.image(jnp.ones((3, 8, 8)))}), ValueError, r"shape \(3, 8, 8\), expected"),
        (lambda x: hcb.metrics({"h": hcb.histogram(x, bins=0)}), ValueError, "bins is 0"),
        (lambda x: hcb.metrics({"h": hcb.histogram("x")}), TypeError, "takes an array of real numbers, got str"),
        (lambda x: hcb.metrics({"t": hcb.text(x)}), TypeError, "takes a text or a format string"),
    ],
)  # fmt: skip
def test_bad_values_are_refused_with_the_line_and_the_cure(call: Any, error: Any, says: str) -> None:
    with pytest.raises(error, match=says):
        jax.jit(lambda x: call(x))(1.0)


@pytest.mark.parametrize(
    ("writers", "says"),
    [
        ("runs/1", "writers is 'runs/1', expected a sequence"),
        ([3], r"writers has int '3', expected hcb\.tensorboard"),
        ([logging.getLogger("x")], "writers has Logger"),
        ([CollectingWriter], "has the class CollectingWriter, expected an object"),
    ],
)
def test_things_that_are_no_writers_are_refused(writers: Any, says: str) -> None:
    with pytest.raises(TypeError, match=says):
        hcb.outfeed_receiver(writers=writers)


@pytest.mark.parametrize("make", [hcb.csv, hcb.jsonl, hcb.tensorboard])
def test_a_file_that_cannot_be_made_is_an_error_of_the_call(make: Any, tmp_path: Path) -> None:
    if make is hcb.tensorboard:
        pytest.importorskip("tensorboardX")
    name = f"hcb.{make.__name__}"
    (tmp_path / "file").write_text("")
    with pytest.raises(
        NotADirectoryError,
        match=rf"{name} cannot write this: {tmp_path}/file is a file, expected a folder: give",
    ):
        make(tmp_path / "file" / "deeper" / "m")
    with pytest.raises(TypeError, match=rf"{name}: (file|folder) is int 3, expected the path of a f"):
        make(3)
    kind, wrong = (
        (NotADirectoryError, tmp_path / "file") if make is hcb.tensorboard else (IsADirectoryError, tmp_path)
    )
    with pytest.raises(kind, match=f"{name} writes .*, and this is a (file|folder): (give|add) a") as caught:
        make(wrong)
    assert traceback.extract_tb(caught.value.__traceback__)[-1].filename == __file__
    with hcb.outfeed_receiver(writers=[make(tmp_path / "new" / "folder" / "m")]):
        pass
    assert (tmp_path / "new" / "folder" / "m").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everything")
@pytest.mark.parametrize("make", [hcb.csv, hcb.jsonl])
def test_a_file_that_may_not_be_written_is_an_error_of_the_call(make: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "file").chmod(0o400)
    tmp_path.chmod(0o500)
    for path in (tmp_path / "file", tmp_path / "folder" / "m"):
        with pytest.raises(PermissionError, match="cannot write this: Permission denied: give a path"):
            make(path)


def test_a_file_has_one_of_two_modes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mode is 'x'"):
        hcb.jsonl(tmp_path / "m.jsonl", mode="x")

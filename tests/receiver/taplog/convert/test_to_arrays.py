"""`hcb convert` to .npz and Parquet, read back with numpy and pyarrow."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from logged_runs import STEPS, nothing, record_odd, record_train, recorded

import hostcallback as hcb
from hostcallback.receiver.cli import main
from hostcallback.receiver.taplog.convert import npz, parquet


def convert(log: Path, to: str, output: Path, *options: str) -> None:
    """Runs the command."""
    assert main(["convert", str(log), "--to", to, "-o", str(output), *options]) == 0


def to_npz(log: Path, folder: Path, *options: str) -> dict[str, Any]:
    """Contents of the .npz."""
    convert(log, "npz", folder / "out.npz", *options)
    with np.load(folder / "out.npz") as file:
        return {**file, "taps": json.loads(str(file["taps"]))}


def to_rows(log: Path, folder: Path, *options: str) -> list[dict[str, Any]]:
    """The rows of the Parquet file; times as nanoseconds."""
    pa = pytest.importorskip("pyarrow", reason="the test's own extra, which has no wheel for every Python")
    import pyarrow.parquet

    convert(log, "parquet", folder / "out.parquet", *options)
    table = pyarrow.parquet.read_table(folder / "out.parquet")
    place = table.schema.get_field_index("time")
    rows: list[dict[str, Any]] = table.set_column(place, "time", table["time"].cast(pa.int64())).to_pylist()
    return rows


def test_npz_stacks_each_leaf(tmp_path: Path) -> None:
    got = to_npz(record_train(tmp_path / "log"), tmp_path)
    steps = np.arange(STEPS)
    np.testing.assert_array_equal(got["train:step"], steps)
    np.testing.assert_array_equal(got["train/loss"], steps.astype(np.float32))
    expected = steps[:, None, None] * np.arange(6.0).reshape(2, 3)
    np.testing.assert_array_equal(got["train/grads/0"], expected)
    assert got["train/grads/1"].dtype == np.bool_
    np.testing.assert_array_equal(got["train/grads/1"], steps > 2)
    (printed,) = [key for key in got if key.startswith("print@") and key.endswith("/c")]
    np.testing.assert_array_equal(got[printed], steps)
    assert (np.diff(got["train:time_ns"]) > 0).all()
    assert (np.diff(got["train:seq"].astype(np.int64)) > 0).all()
    assert got["devices"][got["train:device"]].tolist() == ["cpu:0"] * STEPS
    assert got["taps"]["train"]["leaves"]["grads/0"] == {"dtype": "float32", "shape": [2, 3]}
    assert "logged_runs.py" in got["taps"]["train"]["source_line"]
    assert len(got["check/0"]) == 2
    assert got["check:folded"].tolist() == [0, 0]


def test_npz_keeps_every_array_of_taps_with_odd_names(tmp_path: Path) -> None:
    names = ["a\0b", "a\0c", "a", "a\\x00b", "../../up", "x" * 3000]
    with hcb.outfeed_receiver(record=tmp_path / "log"):

        @jax.jit
        def emit(x: Any) -> Any:
            for number, name in enumerate(names):
                hcb.id_tap(nothing, {"l\0f": x + number, "l\0g": -x - number}, name=name)
            return x

        emit(jnp.float32(0)).block_until_ready()
    got = to_npz(tmp_path / "log", tmp_path)
    taps = {about["name"]: key for key, about in got["taps"].items()}
    assert set(taps) == set(names)
    for number, name in enumerate(names):
        assert got[f"{taps[name]}/l\\x00f"].tolist() == [number]
        assert got[f"{taps[name]}/l\\x00g"].tolist() == [-number]


def test_npz_keeps_leaves_whose_names_are_equal(tmp_path: Path) -> None:
    with recorded(tmp_path / "log"):
        hcb.jit(lambda x: hcb.id_tap(nothing, {"a": {"b": x}, "a/b": x + 1}, name="same"))(jnp.float32(1))
    got = to_npz(tmp_path / "log", tmp_path)
    assert sorted([*got["same/a/b"], *got["same/a/b#2"]]) == [1, 2]


def test_npz_has_dtypes_that_numpy_lacks_as_wider_ones(tmp_path: Path) -> None:
    got = to_npz(record_odd(tmp_path / "log"), tmp_path)
    assert got["odd/0/bf16"].dtype == np.float32
    np.testing.assert_array_equal(got["odd/0/bf16"], [[1.5, np.nan]])
    assert got["odd/0/int4"].dtype == np.int8
    assert got["odd/0/int4"].tolist() == [[[1, -2]]]
    assert got["odd/0/complex"].dtype == np.complex64
    assert got["odd/0/key"].tolist() == [jax.random.key_data(jax.random.key(3)).tolist()]
    assert got["odd/0/empty"].shape == (1, 0, 2)
    assert got["odd/1"].tolist() == [7.0]
    assert got["taps"]["odd"]["leaves"]["0/int4"]["dtype"] == "int4"
    assert got["no array:step"].shape == (1,)
    assert got["taps"]["no array"]["leaves"] == {}


def test_npz_stacks_each_shape_separately(tmp_path: Path) -> None:
    tapped = hcb.jit(lambda x: hcb.id_tap(nothing, x, name="varying"))
    with recorded(tmp_path / "log"):
        for size in (2, 3, 2):
            tapped(jnp.full((size,), float(size)))
    got = to_npz(tmp_path / "log", tmp_path)
    assert got["varying"].tolist() == [[2, 2], [2, 2]]
    assert got["varying#2"].tolist() == [[3, 3, 3]]
    assert got["taps"]["varying#2"]["name"] == "varying"
    assert got["varying:seq"][0] < got["varying#2:seq"][0] < got["varying:seq"][1]


def test_npz_of_a_log_beyond_its_buffer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = record_train(tmp_path / "log")
    expected = to_npz(log, tmp_path)
    (tmp_path / "small").mkdir()
    monkeypatch.setattr(npz, "BUFFER_BYTES", 100)
    got = to_npz(log, tmp_path / "small")
    assert list(got) == list(expected)
    for key in set(got) - {"taps"}:
        np.testing.assert_array_equal(got[key], expected[key])


def test_parquet_has_a_row_for_each_array(tmp_path: Path) -> None:
    rows = to_rows(record_train(tmp_path / "log"), tmp_path)
    loss = [row for row in rows if (row["name"], row["leaf"]) == ("train", "loss")]
    assert [row["value"] for row in loss] == list(range(STEPS))
    assert [row["step"] for row in loss] == list(range(STEPS))
    assert {(row["device"], row["dtype"], tuple(row["shape"])) for row in loss} == {("cpu:0", "float32", ())}
    assert [row["time"] for row in loss] == sorted(row["time"] for row in loss)
    assert {row["kind"] for row in loss} == {"tap"}
    assert all("logged_runs.py:" in row["source_line"] for row in loss)
    grads = [row for row in rows if row["leaf"] == "grads/0"]
    assert grads[2]["shape"] == [2, 3]
    assert grads[2]["floats"] == [0, 2, 4, 6, 8, 10]
    assert grads[2]["value"] is None
    assert grads[2]["integers"] is None
    assert [row["integers"] for row in rows if row["leaf"] == "grads/1"] == [[i > 2] for i in range(STEPS)]


def test_parquet_of_every_dtype(tmp_path: Path) -> None:
    rows = {(row["name"], row["leaf"]): row for row in to_rows(record_odd(tmp_path / "log"), tmp_path)}
    assert rows["odd", "0/bf16"]["dtype"] == "bfloat16"
    np.testing.assert_array_equal(rows["odd", "0/bf16"]["floats"], [1.5, np.nan])
    assert rows["odd", "0/int4"]["integers"] == [1, -2]
    assert rows["odd", "0/complex"]["floats"] == [1, 2, 0, 0]
    assert rows["odd", "0/big"]["integers"] == [2**32 - 1]
    assert rows["odd", "0/yes"]["value"] == 1
    assert rows["odd", "0/empty"]["floats"] == []
    assert rows["no array", None]["dtype"] is None


def test_parquet_is_written_in_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow", reason="the test's own extra, which has no wheel for every Python")
    import pyarrow.parquet

    log = record_train(tmp_path / "log")
    expected = to_rows(log, tmp_path)
    (tmp_path / "small").mkdir()
    monkeypatch.setattr(parquet, "ROW_GROUP_ROWS", 5)
    # Each group is in order of time; taps that sent in turns may be in several.
    found = to_rows(log, tmp_path / "small")
    assert sorted(found, key=lambda row: row["time"]) == expected
    for name in {row["name"] for row in expected}:
        assert [row for row in found if row["name"] == name] == [
            row for row in expected if row["name"] == name
        ]
    assert pyarrow.parquet.ParquetFile(tmp_path / "small" / "out.parquet").num_row_groups > 3


def test_shards_come_with_their_places(tmp_path: Path) -> None:
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
    whole = jnp.arange(8.0)
    placed = jax.device_put(whole, NamedSharding(mesh, PartitionSpec("x")))
    with recorded(tmp_path / "log"):
        hcb.jit(lambda x: hcb.id_tap(nothing, x, name="sharded") * 2)(placed)
    got = to_npz(tmp_path / "log", tmp_path)
    assert got["sharded"].shape == (4, 2)
    assert sorted(got["devices"]) == [f"cpu:{i}" for i in range(4)]
    for shard, ((start, stop),) in zip(got["sharded"], got["sharded:index"], strict=True):
        np.testing.assert_array_equal(shard, whole[start:stop])
    rows = to_rows(tmp_path / "log", tmp_path)
    assert sorted((row["start"], row["floats"]) for row in rows) == [
        ([i], [float(i), i + 1.0]) for i in range(0, 8, 2)
    ]


def test_heads_tell_the_whole_shape(tmp_path: Path) -> None:
    tapped = hcb.jit(lambda x: hcb.id_tap(nothing, x, name="cut"))
    hcb.taps["cut"].truncate(3)
    try:
        with recorded(tmp_path / "log"):
            tapped(jnp.arange(12.0).reshape(3, 4))
    finally:
        hcb.taps["cut"].reset()
    got = to_npz(tmp_path / "log", tmp_path)
    assert got["cut"].tolist() == [[0, 1, 2]]
    assert got["taps"]["cut"]["leaves"][""] == {"dtype": "float32", "shape": [3], "whole_shape": [3, 4]}
    (row,) = to_rows(tmp_path / "log", tmp_path)
    assert (row["floats"], row["whole_shape"]) == ([0, 1, 2], [3, 4])


def test_a_selection_is_converted(tmp_path: Path) -> None:
    got = to_npz(record_train(tmp_path / "log"), tmp_path, "--name", "train", "--step", "2:3")
    assert got["train:step"].tolist() == [2, 3]
    assert "print/c" not in got


@pytest.mark.parametrize(("to", "package"), [("parquet", "pyarrow"), ("tensorboard", "tensorboardX")])
def test_a_missing_extra_is_named(
    to: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = record_train(tmp_path / "log")
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["convert", str(log), "--to", to, "-o", str(tmp_path / "out")]) == 1
    assert f"pip install 'hostcallback[{to}]'" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log"]

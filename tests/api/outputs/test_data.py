"""`hcb.capture` and `hcb.read`: messages as columns by tap."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import hostcallback as hcb
from python_process import python_output, run_python


def nothing(*args: Any, **kwargs: Any) -> None:
    """A tap function."""


@jax.jit
def program(x: Any) -> Any:
    """Ten steps: `train` with loss = x/2**i, `state` with an array of shape (2, 3) and a key of no step."""

    def body(carry: Any, i: Any) -> Any:
        hcb.id_tap(nothing, {"loss": carry, "step": i}, name="train")
        hcb.id_tap(nothing, carry + jnp.arange(6).reshape(2, 3), name="state")
        return carry / 2, None

    return lax.scan(body, x, jnp.arange(10))[0]


LOSS = [8 / 2**i for i in range(10)]


def test_captured_taps_are_columns_by_name() -> None:
    with hcb.capture() as taps:
        program(8.0)
    assert set(taps) == {"train", "state"}
    columns = taps["train"].to_numpy()
    assert [*columns] == ["step", "time", "loss"]
    assert columns["step"].tolist() == [*range(10)]
    assert columns["loss"].tolist() == LOSS
    assert columns["loss"].dtype == np.float32
    assert (np.diff(columns["time"].astype(np.int64)) >= 0).all()
    state = taps["state"].to_numpy()["state"]
    assert state.shape == (10, 2, 3)
    assert state[1].tolist() == [[4, 5, 6], [7, 8, 9]]


def test_what_is_captured_can_be_read_within_the_block_and_is_gone_when_closed() -> None:
    with hcb.capture() as taps:
        program(8.0)
        hcb.barrier_wait()
        assert len(taps["train"].to_numpy()["loss"]) == 10
        program(8.0)
        hcb.barrier_wait()
        assert len(taps["train"].to_numpy()["loss"]) == 20
    folder = Path(taps._folder)
    assert folder.exists()
    taps.close()
    assert not folder.exists()


def test_a_tap_that_has_not_arrived_is_looked_for_after_a_barrier() -> None:
    with hcb.capture() as taps:
        with pytest.raises(hcb.UnknownTapError, match=r"no tap 'train'.*call hcb\.barrier_wait\(\) first"):
            taps["train"]
        program(8.0)
    with pytest.raises(hcb.UnknownTapError) as caught:
        taps["tram"]
    assert "barrier_wait" not in str(caught.value)


def test_a_capture_is_a_sink_of_another_receiver() -> None:
    taps = hcb.capture()
    with hcb.outfeed_receiver(sinks=[taps]):
        program(8.0)
        with pytest.raises(hcb.DeviceClaimedError) as claimed:
            hcb.capture().__enter__()
        assert "capture through that receiver" in "".join(claimed.value.__notes__)
    assert taps["train"].to_numpy()["loss"].tolist() == LOSS


def test_a_capture_raises_what_tap_functions_raised() -> None:
    def failing(x: Any) -> None:
        raise ValueError("no")

    with pytest.raises(hcb.TapFunctionException, match="no"):
        with hcb.capture() as taps:
            hcb.jit(lambda x: hcb.id_tap(failing, x, name="bad"))(1.0)
    assert taps["bad"].to_numpy()["bad"].tolist() == [1.0]


def test_recorded_logs_are_read_without_jax(tmp_path: Path) -> None:
    with hcb.outfeed_receiver(record=tmp_path):
        program(8.0)
    code = (
        "import sys, hostcallback as hcb\n"
        f"data = hcb.read({str(tmp_path)!r})\n"
        "print(list(data), data['train'].to_numpy()['loss'].tolist())\n"
        "print([m for m in ('jax', 'pandas', 'xarray', 'pyarrow') if m in sys.modules])"
    )
    assert python_output("-c", code, timeout_sec=60).splitlines() == [f"['state', 'train'] {LOSS}", "[]"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the memory of a process from /proc")
def test_a_log_larger_than_the_memory_of_its_reader_is_read_in_parts(tmp_path: Path) -> None:
    steps, length = 640, 64 << 10

    def body(carry: Any, i: Any) -> Any:
        hcb.id_tap(nothing, {"x": carry, "step": i, "mean": carry[0]}, name="large")
        return carry + 1, None

    with hcb.outfeed_receiver(record=tmp_path):
        jax.jit(lambda: lax.scan(body, jnp.zeros(length), jnp.arange(steps))[0])()
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) > steps * length * 4
    # 160 MiB of values, and 64 MiB of memory above what the imports take.
    code = (
        "import resource, hostcallback as hcb\n"
        f"data = hcb.read({str(tmp_path)!r})['large']\n"
        "next(iter(data))\n"
        "now = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (now + (64 << 20),) * 2)\n"
        "print(sum(float(value) for batch in data for value in batch.values[1]))\n"
        "print(data.select(columns=['mean']).to_numpy()['mean'].sum())\n"
        "print(data.select(first_step=600, limit=3).to_numpy()['x'][:, 0].tolist())\n"
        "try:\n    data.to_numpy()\nexcept MemoryError:\n    print('too large')\n"
    )
    found = run_python("-c", code, timeout_sec=60)
    total = float(sum(range(steps)))
    assert found.stdout.splitlines() == [str(total), str(total), "[600.0, 601.0, 602.0]", "too large"], found


def test_selected_columns_and_a_limit_leave_out_the_rest() -> None:
    with hcb.capture() as taps:
        program(8.0)
        hcb.id_tap(nothing, {"a": jnp.ones(3), "b": jnp.int32(7)}, name="two")
    data = taps["train"].select(limit=4)
    assert data.to_numpy()["loss"].tolist() == LOSS[:4]
    assert data.select(first_step=2).to_numpy()["step"].tolist() == [2, 3, 4, 5]
    assert taps["train"].select(limit=0).to_numpy()["step"].tolist() == []
    assert [*taps["two"].select(columns=["b"]).to_numpy()] == ["step", "time", "b"]
    with pytest.raises(ValueError, match="the tap 'two' has no column 'c'; it has 'a', 'b'"):
        taps["two"].select(columns=["c"])
    with pytest.raises(TypeError, match=r"columns is 'b', expected a list of names: columns=\['b'\]"):
        taps["two"].select(columns="b")
    for limit in (-1, 1.5):
        with pytest.raises((TypeError, ValueError), match=f"limit is {limit}"):
            taps["two"].select(limit=limit)  # type: ignore[arg-type]


@pytest.mark.native_only
def test_taps_of_exported_programs_are_columns_too() -> None:
    def step(carry: Any, i: Any) -> Any:
        hcb.id_tap(nothing, {"loss": carry, "step": i}, name="exported")
        hcb.id_tap(nothing, carry + jnp.arange(3), name="state of export")
        return carry / 2, None

    jitted = jax.jit(lambda x: lax.scan(step, x, jnp.arange(10))[0])
    exported = jax.export.export(jitted, disabled_checks=hcb.export_checks())(jnp.float32(8))
    for name in ("exported", "state of export"):
        hcb.bind(name, nothing)
    try:
        with hcb.capture() as taps:
            exported.call(jnp.float32(8))
            program(8.0)
            exported.call(jnp.float32(8))
    finally:
        for name in ("exported", "state of export"):
            hcb.unbind(name)
    assert {*taps} == {"exported", "state of export", "state", "train"}
    columns = taps["exported"].to_numpy()
    assert columns["loss"].tolist() == [*LOSS, *LOSS]
    assert columns["step"].tolist() == [*range(10), *range(10)]
    assert taps["state of export"].to_numpy()["state of export"][1].tolist() == [4, 5, 6]
    assert len(taps["exported"].select(first_step=9).to_numpy()["step"]) == 2
    assert len(taps["train"].to_numpy()["step"]) == 10


def test_batches_join_alike_messages_and_selections_leave_out_others() -> None:
    with hcb.capture() as taps:
        for x in (8.0, 16.0):
            program(x)
    (batch,) = taps["train"]
    assert len(batch) == 20
    assert [column.name for column in batch.columns] == ["loss", "step"]
    some = taps["train"].select(first_step=2, last_step=3).to_numpy()
    assert some["step"].tolist() == [2, 3, 2, 3]
    assert some["loss"].tolist() == [2.0, 1.0, 4.0, 2.0]
    assert taps["train"].select(device="cpu:3").to_numpy()["step"].tolist() == []


def test_metrics_are_columns_by_their_names() -> None:
    with hcb.capture() as taps:
        for i in range(3):
            hcb.metrics({"loss": i / 2, "grads": {"w": 1.0}}, step=i)
    (name,) = taps
    assert name.startswith("metrics@")
    columns = taps["metrics"].to_numpy()
    assert {key: columns[key].tolist() for key in ("step", "loss", "grads/w")} == {
        "step": [0, 1, 2],
        "loss": [0.0, 0.5, 1.0],
        "grads/w": [1.0] * 3,
    }


def test_taps_that_come_between_others_unevenly_are_read_whole() -> None:
    @jax.jit
    def uneven() -> Any:
        def body(carry: Any, i: Any) -> Any:
            hcb.id_tap(nothing, {"x": i * 2, "step": i}, name="always")
            lax.cond(
                i % 3 == 0,
                lambda: hcb.id_tap(nothing, jnp.full((3, 2), i), name="sometimes").sum(),
                lambda: 0,
            )
            return carry, None

        return lax.scan(body, 0, jnp.arange(1_000))[0]

    with hcb.capture() as taps:
        uneven()
    assert taps["always"].to_numpy()["x"].tolist() == [*range(0, 2_000, 2)]
    sometimes = taps["sometimes"].to_numpy()
    assert sometimes["sometimes"].tolist() == [[[i] * 2] * 3 for i in range(0, 1_000, 3)]
    assert sometimes["step"].tolist() == [*range(0, 1_000, 3)]


def lanes() -> hcb.TapData:
    """Captures a tap under two vmaps, of sizes 2 (outer) and 3, with a leaf of which only the outer is batched."""

    def tap(x: Any, y: Any) -> None:
        hcb.id_tap(nothing, {"x": x, "y": y}, name="lanes")

    with hcb.capture() as taps:
        xs = jnp.arange(6.0).reshape(2, 3)
        jax.jit(jax.vmap(jax.vmap(tap, (0, None)), (0, 0)))(xs, jnp.array([[10.0, 11], [20, 21]]))
    return taps["lanes"]


def test_lanes_are_axes_from_the_outermost_vmap_on() -> None:
    columns = lanes().to_numpy()
    assert columns["x"].tolist() == [[[0, 1, 2], [3, 4, 5]]]
    assert columns["y"].tolist() == [[[[10, 11]], [[20, 21]]]]


def test_lanes_in_pandas_are_rows() -> None:
    pytest.importorskip("pandas")
    frame = lanes().to_pandas()
    assert frame[["lane0", "lane1", "x"]].to_numpy().tolist() == [
        [i, j, 3.0 * i + j] for i in range(2) for j in range(3)
    ]
    assert [cell.tolist() for cell in frame["y"]] == [[10, 11]] * 3 + [[20, 21]] * 3


def test_lanes_in_xarray_are_dimensions() -> None:
    pytest.importorskip("xarray")
    data = lanes().to_xarray()
    assert data["x"].dims == ("message", "lane0", "lane1")
    assert data["y"].dims == ("message", "lane0", "y_0")
    assert float(data["x"].isel(message=0, lane0=1, lane1=2)) == 5


def test_pandas_has_steps_times_devices_and_leaves() -> None:
    pandas = pytest.importorskip("pandas")
    with hcb.capture() as taps:
        program(8.0)
    frame = taps["train"].to_pandas()
    assert [*frame.columns] == ["step", "time", "device", "loss"]
    assert frame["loss"].tolist() == LOSS
    assert isinstance(frame["time"].dtype, pandas.DatetimeTZDtype)
    assert set(frame["device"]) == {"cpu:0"}


def test_xarray_has_the_step_as_dimension() -> None:
    pytest.importorskip("xarray")
    with hcb.capture() as taps:
        program(8.0)
    data = taps["train"].to_xarray()
    assert data["loss"].dims == ("step",)
    assert float(data["loss"].sel(step=3)) == 1.0
    assert taps["state"].to_xarray()["state"].shape == (10, 2, 3)


@pytest.mark.parametrize("length", [2, 40])
def test_lines_that_share_a_name_are_in_the_order_of_the_program(length: int) -> None:
    def body(number: Any, _: Any) -> tuple[Any, None]:
        hcb.id_tap(nothing, number, name="shared")
        hcb.id_tap(nothing, number + 1, name="shared")
        hcb.id_tap(nothing, number + 2, name="shared")
        return number + 3, None

    with hcb.capture() as taps:
        jax.jit(lambda: lax.scan(body, 0, None, length=length))()
    data = taps["shared"].to_numpy()
    assert data["shared"].tolist() == list(range(3 * length))
    assert (np.diff(data["time"]) >= np.timedelta64(0, "ns")).all()


def test_missing_steps_are_masked_in_numpy() -> None:
    with hcb.capture() as taps:
        for function in (
            lambda x: hcb.id_tap(nothing, x, name="first"),
            lambda x: hcb.id_tap(nothing, {"x": x, "step": 3}, name="second"),
            lambda x: hcb.id_tap(nothing, x, name="first"),
        ):
            jax.block_until_ready(jax.jit(function)(jnp.float32(1)))  # one after the other
    steps = taps["first"].to_numpy()["step"]
    assert isinstance(steps, np.ma.MaskedArray)
    assert steps.tolist()[0] is None
    assert -(2**63) not in steps.filled().tolist()
    assert type(taps["second"].to_numpy()["step"]) is np.ndarray


def test_messages_of_a_repeated_step_are_the_dimension_of_xarray() -> None:
    pytest.importorskip("xarray")
    step = jax.jit(lambda i, x: hcb.id_tap(nothing, {"x": x, "step": i}, name="again"))
    with hcb.capture() as taps:
        for i, x in ((0, 1.0), (1, 2.0), (1, 3.0)):
            step(jnp.int32(i), jnp.float32(x))
    data = taps["again"].to_xarray()
    assert data["x"].dims == ("message",)
    assert data["x"].values.tolist() == [1.0, 2.0, 3.0]
    assert data["step"].values.tolist() == [0, 1, 1]


def on_devices() -> hcb.TapData:
    """Captures a tap in shard_map: device d sends x = d + 10 i at each of 5 steps i."""
    mesh = Mesh(np.array(jax.devices()), ("d",))

    def local(x: Any) -> Any:
        def body(carry: Any, i: Any) -> Any:
            hcb.id_tap(nothing, {"x": x[0] + 10 * i, "step": i}, name="devices")
            return carry, None

        return lax.scan(body, x, jnp.arange(5))[0]

    with hcb.capture() as taps:
        run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("d"), out_specs=P("d")))
        jax.block_until_ready(run(jnp.arange(4)))
    return taps["devices"]


def test_devices_of_equal_steps_are_a_dimension_of_xarray() -> None:
    pytest.importorskip("xarray")
    data = on_devices().to_xarray()
    assert data["x"].dims == ("step", "device")
    assert data["x"].sel(device="cpu:2").values.tolist() == [2, 12, 22, 32, 42]


def test_each_device_has_batches() -> None:
    assert {batch.device: batch.values[1].tolist() for batch in on_devices()} == {
        f"cpu:{d}": [d + 10 * i for i in range(5)] for d in range(4)
    }


def test_values_that_the_compiler_shards_are_whole() -> None:
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("d",)), P("d"))
    with hcb.capture() as taps:
        jax.jit(lambda x: hcb.id_tap(nothing, x, name="sharded"))(jax.device_put(jnp.arange(8.0), sharding))
    assert taps["sharded"].to_numpy()["sharded"].tolist() == [[*range(8)]]


def test_arrow_is_read_batch_by_batch() -> None:
    pytest.importorskip("pyarrow")
    with hcb.capture() as taps:
        program(8.0)
    reader = taps["train"].to_arrow()
    assert reader.schema.names == ["step", "time", "device", "process", "loss"]
    table = reader.read_all()
    assert table.column("loss").to_pylist() == LOSS
    state = taps["state"].to_arrow().read_all().column("state").combine_chunks()
    assert state.to_numpy_ndarray().shape == (10, 2, 3)


def test_arrow_takes_arrays_without_elements() -> None:
    pytest.importorskip("pyarrow")
    with hcb.capture() as taps:
        for _ in range(2):
            hcb.id_tap(nothing, {"flat": jnp.zeros((0,), jnp.int8), "rows": jnp.zeros((0, 3))}, name="empty")
    table = taps["empty"].to_arrow().read_all()
    shapes = {name: table.column(name).combine_chunks().to_numpy_ndarray().shape for name in ("flat", "rows")}
    assert shapes == {"flat": (2, 0), "rows": (2, 0, 3)}


def test_a_tap_of_several_layouts() -> None:
    with hcb.capture() as taps:
        for shape in ((), (2,)):
            hcb.id_tap(nothing, jnp.ones(shape), name="odd")
    with pytest.raises(ValueError, match=r"'odd' have 2 layouts: odd float32\[\]; odd float32\[2\]"):
        taps["odd"].to_numpy()
    assert [table.values[0].shape for table in taps["odd"].tables()] == [(1,), (1, 2)]
    pytest.importorskip("pandas")
    assert len(taps["odd"].to_pandas()) == 2


def test_low_precision_becomes_float32_and_names_that_are_taken_get_a_suffix() -> None:
    with hcb.capture() as taps:
        hcb.id_tap(nothing, {"time": jnp.bfloat16(1.5), "lane": 2, "step": 3}, name="names")
    columns = taps["names"].to_numpy()
    assert columns["time_value"].dtype == np.float32
    assert (columns["time_value"][0], columns["lane_value"][0], columns["step"][0]) == (1.5, 2, 3)


def test_a_tap_that_is_not_there_lists_those_that_are() -> None:
    with hcb.capture() as taps:
        program(8.0)
        for _ in range(2):
            hcb.print("x")
        hcb.print("y")
    with pytest.raises(hcb.UnknownTapError, match=r"no tap 'trian'; its taps are .*Did you mean 'train'\?"):
        taps["trian"]
    with pytest.raises(KeyError, match=r"'print' matches 'print@.*: give a whole name, as in data\['print@"):
        taps["print"]
    assert "trian" not in taps
    with hcb.capture() as none, pytest.raises(hcb.UnknownTapError, match="its taps are none"):
        none["loss"]


def test_what_is_asked_of_the_wrong_object_has_a_cure() -> None:
    with hcb.capture() as taps:
        program(8.0)
    with pytest.raises(
        hcb.UnknownTapError, match=r"'loss' is a column of 'train': data\['train'\]\.to_numpy\(\)"
    ):
        taps["loss"]
    assert "loss" not in taps
    with pytest.raises(
        TypeError, match=r"data\['train'\]\.to_numpy\(\)\['loss'\], or \.to_pandas\(\)\['loss'\]"
    ):
        taps["train"]["loss"]
    data = taps.data()
    with pytest.raises(
        AttributeError, match=r"to_pandas is of one tap: data\['state'\]\.to_pandas.*'state', 'train'"
    ):
        data.to_pandas()
    with pytest.raises(AttributeError, match="'LogData' object has no attribute 'to_csv'"):
        data.to_csv()
    with pytest.raises(ValueError, match="no column 'los'; it has 'loss'") as found:
        taps["train"].select(columns=["los"])
    files = {Path(frame.path).name for frame in found.traceback}
    assert files == {"test_data.py"}


def test_of_several_runs_in_a_folder_the_last_is_read_and_the_others_are_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for run in ("first", "second", "third"):
        with hcb.record(tmp_path, run=run) as log, hcb.outfeed_receiver(record=log):
            hcb.tap(nothing, {"name": np.float32(len(run))}, name="run")
    for _ in range(2):
        assert hcb.read(tmp_path)["run"].to_numpy()["name"].tolist() == [5]
    said = [record.getMessage() for record in caplog.records if "hcb.read" in record.getMessage()]
    assert said == [
        "hcb.read: of 3 runs, this is the last, third; run=NAME reads another, run='all' all of them: second, first"
    ]
    assert hcb.read(tmp_path, run="second")["run"].to_numpy()["name"].tolist() == [6]
    assert len(hcb.read(tmp_path, run="all")["run"].to_numpy()["name"]) == 3
    assert len([record for record in caplog.records if "hcb.read" in record.getMessage()]) == 1


def test_a_damaged_log_gives_the_rest_and_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with hcb.record(tmp_path) as log, hcb.outfeed_receiver(record=log):
        for x in (8.0, 16.0, 32.0):
            program(x)
            hcb.barrier_wait()  # each has a chunk
    (file,) = tmp_path.glob("*.hcb*")
    data = bytearray(file.read_bytes())
    at = data.index(np.float32(16).tobytes() + bytes(4))
    data[at] ^= 255
    file.write_bytes(data)
    losses = hcb.read(tmp_path)["train"].to_numpy()["loss"].tolist()
    assert losses[:10] == LOSS
    assert losses[-10:] == [4 * loss for loss in LOSS]
    assert len(losses) < 30
    assert "messages are missing in 1 place(s) of the log" in caplog.text


def test_a_folder_without_a_log_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="no tap log"):
        hcb.read(tmp_path)


@pytest.mark.parametrize("package", ["pandas", "xarray", "pyarrow"])
def test_a_missing_package_gets_the_command_that_installs_it(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with hcb.capture() as taps:
        program(8.0)
    convert = {"pandas": "to_pandas", "xarray": "to_xarray", "pyarrow": "to_arrow"}[package]
    with pytest.raises(hcb.HostCallbackError, match=rf"{package}: pip install 'hostcallback\[\w+\]'"):
        getattr(taps["train"], convert)()

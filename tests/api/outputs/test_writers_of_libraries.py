"""Metrics in the writers of other libraries: of those that are installed, the real ones."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import hostcallback as hcb


@jax.jit
def program() -> Any:
    """Five steps, each with a number, a histogram, an image and a text."""

    def body(carry: Any, i: Any) -> Any:
        hcb.metrics(
            {
                "loss": i / 2,
                "h": hcb.histogram(jnp.arange(8.0) * i),
                "im": hcb.image(jnp.full((4, 4, 3), 0.2)),
                "note": hcb.text("step {}", i),
            },
            step=i,
        )
        return carry, None

    return lax.scan(body, 0, jnp.arange(5))[0]


def write_to(writer: Any) -> hcb.WriterStats:
    """Runs the program with one writer, and returns what became of the records."""
    with hcb.outfeed_receiver(writers=[writer]) as rx:
        program()
    (stats,) = rx.writers
    assert (stats.written, stats.failed, stats.dropped) == (5, 0, 0), stats
    return stats


def test_tensorboard_gets_scalars_histograms_images_and_texts(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event

    assert write_to(hcb.tensorboard(tmp_path / "run")).partial == 0
    (file,) = (tmp_path / "run").iterdir()
    data, events = file.read_bytes(), []
    while data:  # length, checksum, event, checksum
        nbytes = int.from_bytes(data[:8], "little")
        events.append(Event.FromString(data[12 : 12 + nbytes]))
        data = data[16 + nbytes :]
    values = [(event.step, value) for event in events for value in event.summary.value]
    assert [(step, value.simple_value) for step, value in values if value.tag == "loss"] == [
        (i, i / 2) for i in range(5)
    ]
    assert [value.histo.num for _, value in values if value.tag == "h"] == [8.0] * 5
    assert {(value.image.height, value.image.width) for _, value in values if value.tag == "im"} == {(4, 4)}
    assert [value.tensor.string_val[0] for _, value in values if value.tag.startswith("note")] == [
        f"step {i}".encode() for i in range(5)
    ]


def test_tensorboard_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(
        hcb.HostCallbackError, match=r"tensorboardX: pip install 'hostcallback\[tensorboard\]'"
    ):
        hcb.tensorboard("runs/1")


@pytest.mark.slow
def test_a_run_of_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = wandb.init(project="p", mode="offline", dir=tmp_path)
    assert write_to(run).partial == 0
    assert (run.summary["loss"], run.summary["note"]) == (1.5, "step 3")  # wandb holds the last step back
    run.finish()


@pytest.mark.slow
def test_the_active_run_of_the_module_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(tmp_path.as_uri())
    mlflow.set_experiment("x")
    with pytest.raises(ValueError, match="has no active run"), hcb.outfeed_receiver(writers=[mlflow]):
        pass
    with mlflow.start_run() as run:
        assert write_to(mlflow).partial == 5  # the histograms
    client = mlflow.MlflowClient()
    images = [entry.path for entry in client.list_artifacts(run.info.run_id, "images")]
    assert sorted(path.split("+")[2] for path in images if path.endswith(".png")) == [*"01234"]
    notes = client.list_artifacts(run.info.run_id, "note")
    assert sorted(entry.path for entry in notes) == [f"note/{i}.txt" for i in range(5)]
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(point.step, point.value) for point in history] == [(i, i / 2) for i in range(5)]


def test_a_logger_with_the_signatures_of_mlflow_gets_images_and_texts() -> None:
    seen: list[Any] = []

    class Logger:  # the parameters are those of mlflow 3.17, where those of images have defaults
        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            seen.append((step, metrics))

        def log_image(
            self,
            image: Any,
            artifact_file: str | None = None,
            key: str | None = None,
            step: int | None = None,
        ) -> None:
            seen.append((step, key, image.shape))

        def log_text(self, text: str, artifact_file: str) -> None:
            seen.append((artifact_file, text))

    assert write_to(Logger()).error == "takes no histograms: these metrics are left out"
    assert seen[:3] == [(0, {"loss": 0.0}), (0, "im", (4, 4, 3)), ("note/0.txt", "step 0")]
    assert [call[0] for call in seen] == [place for i in range(5) for place in (i, i, f"note/{i}.txt")]


def test_a_logger_whose_images_are_others_than_mlflows_gets_none() -> None:
    class Logger:  # as Lightning's
        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            pass

        def log_image(self, key: str, images: list[Any], step: int | None = None) -> None:
            raise AssertionError

    assert (
        write_to(Logger()).error
        == "takes no histograms and no images and no texts: these metrics are left out"
    )


def test_a_tensorboard_writer_of_the_users_gets_the_time_of_the_emission(tmp_path: Path) -> None:
    tensorboard = pytest.importorskip("tensorboardX")

    class Writer(tensorboard.SummaryWriter):  # type: ignore[misc, name-defined]
        times: ClassVar[list[Any]] = []

        def add_scalar(self, tag: str, value: Any, global_step: Any = None, walltime: Any = None) -> None:
            self.times.append(walltime)
            super().add_scalar(tag, value, global_step, walltime)

    before = time.time()
    with Writer(str(tmp_path)) as writer:
        write_to(writer)
    assert len(writer.times) == 5
    assert all(before <= at <= time.time() for at in writer.times)


@pytest.mark.slow
def test_the_current_run_of_the_module_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    trackio = pytest.importorskip("trackio")
    trackio.init(project="p")
    write_to(trackio)
    trackio.finish()


def test_a_run_that_tracks_as_aims_does(monkeypatch: pytest.MonkeyPatch) -> None:
    # A stand-in for the package aim, with its classes at the top.
    package = type(sys)("aim_stand_in")
    monkeypatch.setitem(sys.modules, "aim_stand_in", package)
    for kind in ("Distribution", "Image", "Text"):
        setattr(package, kind, lambda value, kind=kind: (kind, value))

    class Run:
        def __init__(self) -> None:
            self.tracked: list[Any] = []

        def track(self, value: Any, name: str, step: int) -> None:
            self.tracked.append((name, step, value if isinstance(value, float) else value[0]))

    Run.__module__ = "aim_stand_in"
    run = Run()
    assert write_to(run).partial == 0
    assert run.tracked[:4] == [
        ("loss", 0, 0.0), ("note", 0, "Text"), ("h", 0, "Distribution"), ("im", 0, "Image"),
    ]  # fmt: skip


def test_histograms_of_libraries_have_the_finite_values() -> None:
    seen: list[list[float]] = []

    class Writer:
        def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
            raise AssertionError

        def add_histogram(self, tag: str, values: Any, global_step: int, bins: int) -> None:
            seen.append(values.tolist())

    with hcb.outfeed_receiver(writers=[Writer()]) as rx:
        for values in (jnp.array([1, jnp.nan, 2, jnp.inf]), jnp.array([jnp.nan]), jnp.array([3, 4])):
            hcb.metrics({"h": hcb.histogram(values)}, step=0)
    assert seen == [[1, 2], [3, 4]]
    assert rx.writers[0].failed == 0


def test_a_backend_that_logs_one_scalar_at_a_time_as_metrax_does() -> None:
    seen: list[Any] = []

    class Backend:
        def log_scalar(self, event: str, value: float | np.ndarray[Any, Any], **kwargs: Any) -> None:
            seen.append((event, value, kwargs["step"]))

    stats = write_to(Backend())
    assert seen == [("loss", i / 2, i) for i in range(5)]
    assert (stats.partial, stats.error) == (
        5, "takes no histograms and no images and no texts: these metrics are left out",
    )  # fmt: skip


def test_a_logger_of_dicts_gets_one_call_a_step() -> None:
    class Logger:
        def __init__(self) -> None:
            self.calls: list[Any] = []

        def log(self, values: dict[str, Any], step: int) -> None:
            self.calls.append((step, values))

    logger = Logger()
    assert write_to(logger).partial == 5
    assert logger.calls == [(i, {"loss": i / 2, "note": f"step {i}"}) for i in range(5)]

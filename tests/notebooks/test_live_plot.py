"""A live plot has the values of taps and metrics, in bounded memory."""

from __future__ import annotations

import gc
import itertools
import logging
import sys
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import hostcallback as hcb
from checkout import HELPERS
from hostcallback.receiver.sinks.plotting import Curve, NotebookDisplay
from python_process import python_output
from threads import wait_for

pytest.importorskip("matplotlib", reason="live_plot draws with matplotlib; pip install 'hostcallback[plot]'")


@jax.jit
def _train(x: jax.Array) -> jax.Array:
    def step(x: jax.Array, i: jax.Array) -> tuple[jax.Array, None]:
        hcb.metrics({"loss": x**2, "acc": 1 - x}, step=i)
        hcb.id_tap(_ignore, {"step": i * 10, "w": jnp.stack([x, 3 * x])}, name="grads")
        hcb.id_tap(_ignore, x, name="plain")
        return x * 0.5, None

    return lax.scan(step, x, jnp.arange(4))[0]


def _ignore(*_: object) -> None:
    pass


def _lines(plot: hcb.LivePlot, panel: int) -> dict[str, list[list[float]]]:
    return {
        str(line.get_label()): np.asarray(line.get_xydata()).tolist()
        for line in plot.figure.axes[panel].lines
    }


def test_metrics_and_taps_are_plotted_by_step(tmp_path: Path) -> None:
    with hcb.live_plot("loss", "grads/*", "plain", log="loss") as plot:
        _train(jnp.float32(1))
    assert _lines(plot, 0) == {"loss": [[0, 1], [1, 0.25], [2, 0.0625], [3, 0.015625]]}
    assert _lines(plot, 1) == {"grads/w": [[0, 2], [10, 1], [20, 0.5], [30, 0.25]]}
    assert _lines(plot, 2) == {"plain": [[0, 1], [1, 0.5], [2, 0.25], [3, 0.125]]}
    assert [axes.get_yscale() for axes in plot.figure.axes] == ["log", "linear", "linear"]
    assert all(line.get_visible() for axes in plot.figure.axes for line in axes.get_xgridlines())
    plot.save(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert repr(plot) == "<live_plot loss, grads/*, plain: 12 values>"


def test_it_is_a_sink_and_a_writer_of_another_receiver() -> None:
    both, metrics = hcb.live_plot(), hcb.live_plot("*")
    with hcb.outfeed_receiver(sinks=[both], writers=[metrics]):
        _train(jnp.float32(1))
    assert set(_lines(both, 0)) == {"loss", "acc", "grads/w", "plain"}
    assert set(_lines(metrics, 0)) == {"loss", "acc"}
    with hcb.outfeed_receiver(), pytest.raises(hcb.DeviceClaimedError) as caught, both:
        pass
    assert any("sinks=[hcb.live_plot(...)]" in note for note in caught.value.__notes__)


IN_A_CELL = """
import sys, threading
sys.path.insert(0, sys.argv[1])
from IPython.core.interactiveshell import InteractiveShell
from hostcallback.receiver.sinks.plotting import NotebookDisplay
from threads import wait_for

def draw():
    drawn.append(threading.current_thread().name)
    return b"\\x89PNG\\r\\n\\x1a\\n"

drawn = []
shell = InteractiveShell.instance()
display = NotebookDisplay(draw, 0.0)
for pictures in (2, 3):
    display.changed()
    wait_for(lambda: len(drawn) == pictures, "the picture of a change")
display.close()
print(*drawn, sep="\\n")
"""


def test_the_picture_of_a_cell_is_drawn_again_when_something_changed() -> None:
    pytest.importorskip("IPython")
    thread = "hostcallback-live-plot"
    drawn = [line for line in python_output("-c", IN_A_CELL, HELPERS).splitlines() if "<" not in line]
    assert drawn == ["MainThread", thread, thread, "MainThread"]


class Cell:
    """The module `IPython.display` of a notebook with one cell, which keeps the pictures that it has shown."""

    def __init__(self) -> None:
        self.pictures: list[bytes] = []

    def Image(self, *, data: bytes) -> bytes:
        return data

    def display(self, picture: bytes, *, display_id: bool) -> Cell:
        assert display_id
        self.update(picture)
        return self

    def update(self, picture: bytes) -> None:
        self.pictures.append(picture)


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Cell:
    cell = Cell()
    monkeypatch.setitem(sys.modules, "IPython.display", cell)  # type: ignore[arg-type]
    return cell


def test_a_cell_rests_between_its_pictures_and_has_the_last_one_at_the_end(cell: Cell) -> None:
    count = itertools.count()
    display = NotebookDisplay(lambda: b"%d" % next(count), 3600.0)
    display.changed()
    wait_for(lambda: cell.pictures == [b"0", b"1"], "the picture of a change")
    display.changed()
    display.close()
    assert cell.pictures == [b"0", b"1", b"2"]


def test_a_plot_that_cannot_be_drawn_says_so_and_ends_no_program(
    cell: Cell, caplog: pytest.LogCaptureFixture
) -> None:
    pictures = iter([b"first"])
    display = NotebookDisplay(lambda: next(pictures), 0.0)
    with caplog.at_level(logging.WARNING, logger="hostcallback"):
        display.changed()
        wait_for(lambda: "hcb.live_plot cannot draw: StopIteration: " in caplog.text, "the warning")
        wait_for(lambda: not display._thread.is_alive(), "the end of its thread", 10)
        display.changed()
        display.close()
    assert cell.pictures == [b"first"]
    assert caplog.text.count("cannot draw") == 2, "once while it runs, and once at its end"


@pytest.mark.slow
def test_a_plot_that_is_kept_keeps_no_tap_functions() -> None:
    class Tap:
        def __call__(self, value: object) -> None:
            pass

    def emit(tap: Tap) -> None:
        jax.jit(lambda x: hcb.id_tap(tap, x, name="loss"))(jnp.float32(1))

    taps = [Tap()]
    freed = weakref.ref(taps[0])
    with hcb.live_plot("loss") as plot:
        emit(taps.pop())
    jax.clear_caches()
    hcb.barrier_wait()
    gc.collect()
    assert freed() is None
    assert _lines(plot, 0) == {"loss": [[0, 1]]}


def test_a_name_without_values_is_reported_with_those_that_had_some(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="hostcallback"), hcb.live_plot("los") as plot:
        _train(jnp.float32(1))
    assert "hcb.live_plot got no value of the name 'los'; there were 'loss'" in caplog.text
    assert plot.figure.axes[0].texts[0].get_text() == "no values yet"


def test_a_curve_is_bounded_and_keeps_its_spikes() -> None:
    curve = Curve(8, 0.0)
    for step in range(100):
        curve.add(step, 1000.0 if step == 41 else step)
    points = curve.points()
    assert len(points.steps) == 7
    assert curve.stride == 16
    assert points.steps.tolist() == [0, 16, 32, 48, 64, 80, 96]
    assert points.highs.tolist() == [15, 31, 1000, 63, 79, 95, 99]
    assert points.lows.tolist() == [0, 16, 32, 48, 64, 80, 96]
    assert points.means[0] == 7.5


def test_nonfinite_values_leave_a_gap_and_are_counted() -> None:
    with hcb.live_plot("loss", smooth=0.5) as plot:
        for value in (1.0, float("nan"), 3.0, float("inf")):
            hcb.id_tap(_ignore, jnp.float32(value), name="loss")
    (smooth, raw) = plot.figure.axes[0].lines
    assert smooth.get_label() == "loss (2 not finite)"
    # (0.5 * 0.5 + 0.5 * 3) / (0.5 * 0.5 + 0.5), the moving average of 1 and 3
    assert smooth.get_ydata() == pytest.approx([1, 1, 7 / 3, 7 / 3])
    assert np.isnan(raw.get_ydata()).tolist() == [False, True, False, True]


def test_wrong_options_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"smooth is 1, expected a number from 0 to below 1"):
        hcb.live_plot("a", smooth=1)
    with pytest.raises(ValueError, match=r"max_points is 1\.5"):
        hcb.live_plot("a", max_points=1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"every_sec is -1"):
        hcb.live_plot("a", every_sec=-1)
    with pytest.raises(ValueError, match=r"log has 'b', expected True, False, or names among a"):
        hcb.live_plot("a", log="b")
    with pytest.raises(TypeError, match=r"names of values, got \['a'\]"):
        hcb.live_plot(["a"])  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(hcb.HostCallbackError, match=r"pip install 'hostcallback\[plot\]'"):
        hcb.live_plot("a")

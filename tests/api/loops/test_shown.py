"""What is shown of a bar: by the example, in a log, while the loop runs, by rich."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hostcallback as hcb
from checkout import ROOT
from hostcallback.receiver.cli import main
from hostcallback.receiver.sinks.progress.bars import Bars, LineDisplay, Look, Phase, Place, Step, TqdmDisplay
from terminals import screen

pytest.importorskip("tqdm")  # environments of other JAX versions may lack it


def add(carry: Any, _: Any) -> Any:
    return carry + 1, carry


@pytest.mark.slow
def test_the_example_shows_one_bar_and_its_result() -> None:
    result = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "progress.py")],
        capture_output=True, timeout=100, check=True,
    )  # fmt: skip
    assert result.stdout.startswith(b"4 epochs, the mean of the last is 0.")
    (line,) = screen(result.stderr.decode())
    assert line.startswith("epoch: 100%")
    assert "4/4" in line


def test_the_bar_moves_while_the_loop_runs() -> None:
    reached = threading.Event()
    steps: list[int] = []

    def see(message: Any) -> None:
        steps.append(int(message.arrays[1]))
        if len(steps) > 2:
            reached.set()

    stop = jnp.int32(0)
    with hcb.outfeed_receiver(sinks=[see]):
        # Ends when the host has seen messages of three different times.
        def goes_on(n: Any) -> Any:
            done = jax.pure_callback(lambda n: jnp.int32(reached.is_set()), stop, n)
            return (done == 0) & (n < 10_000_000)

        count = jax.jit(lambda: hcb.while_loop(goes_on, lambda n: n + 1, 0, progress="wait"))()
        assert count < 10_000_000
    assert steps[0] == 0
    assert steps[-1] == count
    assert steps == sorted(steps)


def test_a_log_of_progress_prints_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    progress = hcb.Progress("train", postfix=lambda carry, y: {"y": y})
    with hcb.outfeed_receiver(record=tmp_path):
        jax.jit(lambda: hcb.scan(add, 0, length=40, progress=progress))()
    capsys.readouterr()
    main(["cat", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert any("train: 0/40" in line for line in lines), lines
    assert "train: 40/40 y=39 (ended)" in lines[-1]


def test_a_bar_and_metrics_of_one_name_are_two_taps_of_the_data() -> None:
    def body(carry: Any, i: Any) -> Any:
        hcb.metrics({"loss": carry}, step=i, name="train")
        return carry / 2, carry

    bar = hcb.Progress("train", postfix=lambda carry, y: {"loss": y, "total": carry})
    with hcb.capture() as taps:
        jax.jit(lambda: hcb.scan(body, 8.0, jnp.arange(4), progress=bar))()
    assert [*taps] == ["train", "train (progress)"]
    columns = taps["train"].to_numpy()
    assert [*columns] == ["step", "time", "loss"]
    assert columns["loss"].tolist() == [8, 4, 2, 1]
    assert (taps["train"].kinds, taps["train (progress)"].kinds) == (["metrics"], ["progress"])
    begin, rest = taps["train (progress)"].tables()
    assert begin.names == ["phase", "done", "total"]
    assert [values.tolist() for values in begin.values] == [[0], [0], [4]]
    assert rest.names == ["phase", "done", "total", "postfix/loss", "postfix/total"]
    assert [values[-1].item() for values in rest.values] == [2, 4, 4, 1, 0.5]
    assert "train (progress)" in taps._repr_html_()


def test_a_bar_whose_name_in_the_data_is_taken_has_another(tmp_path: Path) -> None:
    def body(carry: Any, i: Any) -> Any:
        for name in ("train", "train (progress)"):
            hcb.metrics({"loss": carry}, step=i, name=name)
        return carry / 2, None

    with hcb.outfeed_receiver(record=tmp_path / "log"):
        jax.jit(lambda: hcb.scan(body, 8.0, jnp.arange(4), progress="train"))()
    taps = hcb.read(tmp_path / "log")
    names = ["train", "train (progress)", "train (progress 2)"]
    assert [*taps] == [taps[name].name for name in taps] == sorted(names)
    assert [taps[name].kinds for name in names] == [["metrics"], ["metrics"], ["progress"]]
    assert taps["train (progress)"].to_numpy()["loss"].tolist() == [8, 4, 2, 1]
    bar = taps["train (progress 2)"]
    assert bar.to_numpy()["done"][-1] == bar.select(limit=9).to_numpy()["done"][-1] == 4
    assert main(["convert", str(tmp_path / "log"), "--to", "npz", "-o", str(tmp_path / "out.npz")]) == 0
    with np.load(tmp_path / "out.npz") as arrays:
        about = json.loads(str(arrays["taps"]))
        assert {name: tap["kind"] for name, tap in about.items()} == {
            name: taps[name].kinds[0] for name in names
        }
        assert arrays["train (progress 2)/done"][-1] == 4
    assert main(["convert", str(tmp_path / "log"), "--to", "trace", "-o", str(tmp_path / "out.json")]) == 0
    events = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    assert {event["name"] for event in events if event["ph"] == "i"} == {*names}


def test_a_bar_alone_keeps_its_name_in_the_data() -> None:
    with hcb.capture() as taps:
        jax.jit(lambda: hcb.scan(add, 0, length=40, progress="train"))()
    assert [*taps] == ["train"]
    assert taps["train"].to_numpy()["done"][-1] == 40


LOOPS: dict[str, Callable[[Any, Any], Any]] = {
    "scan": lambda first, bar: hcb.scan(add, 0, length=300, progress=bar(first)),
    "fori_loop": lambda first, bar: hcb.fori_loop(700, 1000, lambda i, x: x + i, 0, progress=bar(first)),
    "traced bounds": lambda first, bar: hcb.fori_loop(
        first, 1000, lambda i, x: x + i, 0, progress=bar(first)
    ),
    "while_loop": lambda first, bar: hcb.while_loop(
        lambda i: i < 1000, lambda i: i + 1, first, progress=bar(first, total=1000)
    ),
}


@pytest.mark.parametrize("first", [700, np.int32(700)], ids=["int", "int32"])
@pytest.mark.parametrize("loop", LOOPS)
def test_the_bar_of_a_loop_that_goes_on_begins_where_the_last_one_ended(loop: str, first: Any) -> None:
    steps: list[tuple[int, int]] = []
    with hcb.outfeed_receiver(sinks=[lambda message: steps.append(tuple(map(int, message.arrays[1:3])))]):
        bar = functools.partial(hcb.Progress, "train")
        jax.jit(lambda first: LOOPS[loop](first, lambda first, **more: bar(initial=first, **more)))(first)
    assert (steps[0], steps[-1]) == ((700, 1000), (1000, 1000))


@pytest.mark.parametrize("terminal", [False, True])
def test_bars_of_devices_that_are_open_together_name_their_devices(
    terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    bars, look = Bars(), Look("train", "it", "tqdm", leave=True)
    for phase, step in (Phase.BEGIN, 0), (Phase.UPDATE, 20), (Phase.END, 40):
        for number in range(3):
            device = f"cpu:{number}"
            place = Place("loop", device, ())
            bars.take(place, look, number, Step(phase, step, 40, {}), device, 10**9 * (step + 1))
    lines = screen(capsys.readouterr().err)[-3:]
    names = [line.partition("]:")[0] for line in lines]
    assert names == ["train [cpu:0", "train [cpu:1", "train [cpu:2"]
    assert all("40/40 " in line for line in lines)


def test_a_display_whose_package_is_missing_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for module in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "rich", None)  # type: ignore[arg-type]
    bars = Bars()
    for step in range(3):
        place = Place("loop", "cpu:0", ())
        bars.take(
            place, Look("train", "it", "rich", leave=True), 1, Step(Phase.UPDATE, step, 3, {}), "cpu:0", 1
        )
    (said,) = [record.getMessage() for record in caplog.records]
    assert (
        "progress bars are not shown: they need the package rich: pip install 'hostcallback[top]' (" in said
    )
    assert not bars.open


def test_steps_that_were_done_before_are_not_in_the_rate(capsys: pytest.CaptureFixture[str]) -> None:
    for make in (TqdmDisplay, LineDisplay):
        display = make("train", "it")
        display.show(700, 1000, "", 10**9)
        display.show(720, 1000, "", 3 * 10**9)
        display.close(leave=True)
        (line,) = screen(capsys.readouterr().err)
        assert re.search(r"720/1000 \[00:02<00:28, +(9\.\d\d|10\.0\d?)it/s\]", line), line


def test_lines_of_a_bar_that_begins_again_have_the_times_and_steps_of_its_new_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    display = LineDisplay("train", "it")
    display.show(0, 1000, "", 10**9)
    display.show(900, 1000, "", 2 * 10**9)
    display.reset()
    display.close(leave=True)
    assert not capsys.readouterr().err, "the step before is no step of the new run"
    display.show(500, 1000, "", 100 * 10**9)
    assert not capsys.readouterr().err
    display.show(520, 1000, "", 102 * 10**9)
    display.close(leave=True)
    (line,) = screen(capsys.readouterr().err)
    assert re.search(r"520/1000 \[00:02<00:48, +(9\.\d\d|10\.0\d?)it/s\]", line), line


def test_a_bar_that_goes_on_shows_its_own_rate_from_the_first_step_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    display = TqdmDisplay("train", "it")
    for second in range(1, 5):
        display.show(900_000 + 20 * second, 906_000, "", 2 * second * 10**9)
    drawn = capsys.readouterr().err
    display.close(leave=True)
    rates = [float(rate) for rate in re.findall(r"(?<!\?), +([\d.]+)it/s", drawn)]
    assert len(rates) >= 3, drawn
    assert all(9.5 < rate < 10.5 for rate in rates), drawn


def test_a_wrong_bar_or_postfix_is_refused_with_the_users_line() -> None:
    with pytest.raises(TypeError, match=r"progress is int 5, expected True, .*, at .*test_shown\.py:\d+"):
        hcb.scan(lambda c, x: (c, x), 0, jnp.arange(3), progress=5)  # type: ignore[arg-type]
    bar = hcb.Progress("train", postfix=lambda carry, y: 5)  # type: ignore[arg-type,return-value]
    with pytest.raises(TypeError, match=r"postfix returned 5, expected a dict .*, at .*test_shown\.py:\d+"):
        hcb.scan(lambda c, x: (c, x), 0, jnp.arange(3), progress=bar)


def test_a_wrong_initial_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"initial of a Progress is -1, expected 0 or more, at .*test_shown\.py"
    ):
        hcb.Progress(initial=-1)
    with pytest.raises(TypeError, match=r"initial of a Progress is None, expected .*test_shown\.py"):
        hcb.Progress(initial=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("small", [np.uint8(254), jnp.uint8(254)], ids=["numpy", "jax"])
def test_steps_before_do_not_overflow_the_integer_in_which_they_are_given(small: Any) -> None:
    steps: list[tuple[int, int]] = []
    with hcb.outfeed_receiver(sinks=[lambda message: steps.append(tuple(map(int, message.arrays[1:3])))]):
        hcb.scan(add, 0, length=10, progress=hcb.Progress(initial=small))
    assert (steps[0], steps[-1]) == ((254, 264), (264, 264))


@jax.tree_util.register_pytree_node_class
class Variable:
    """Stands for an array, as a variable of flax.nnx does."""

    def __init__(self, value: Any) -> None:
        self.value = value

    shape = property(lambda self: self.value.shape)
    dtype = property(lambda self: self.value.dtype)

    def tree_flatten(self) -> tuple[tuple[Any], None]:
        return (self.value,), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple[Any]) -> Any:
        return cls(*children)


def test_variables_are_steps_totals_and_values(capsys: pytest.CaptureFixture[str]) -> None:
    @jax.jit
    def train(step: Any, total: Any, loss: Any) -> None:
        hcb.progress(total, step=step, desc="any", loss=loss)

    step, total, loss = Variable(jnp.int32(9)), Variable(jnp.int32(10)), Variable(jnp.float32(0.5))
    train(step, total, loss)
    hcb.barrier_wait()
    assert "10/10 " in (shown := capsys.readouterr().err)
    assert "loss=0.5" in shown
    hcb.scan(add, 0, length=3, progress=hcb.Progress("loop", total=total, initial=Variable(jnp.int32(7))))
    hcb.barrier_wait()
    assert "10/10 " in capsys.readouterr().err


def test_a_step_that_is_no_integer_is_refused_with_the_line() -> None:
    with pytest.raises(
        TypeError, match=r"step of hcb\.progress is .*expected a whole number.*test_shown\.py:\d+"
    ):
        jax.jit(lambda x: hcb.progress(10, step=x))(1.5)
    with pytest.raises(
        ValueError, match=r"total of hcb\.progress is -1, expected 0 or more, at .*test_shown\.py"
    ):
        hcb.progress(-1, step=0)


def test_rich_shows_the_bar_if_asked(capsys: pytest.CaptureFixture[str]) -> None:
    progress = hcb.Progress("[red]train", display="rich")
    jax.jit(lambda: hcb.scan(add, 0, length=40, progress=progress))()
    hcb.barrier_wait()
    text = capsys.readouterr().err
    assert "[red]train" in text
    assert "40/40" in text


def test_any_loop_shows_its_last_step_and_values(capsys: pytest.CaptureFixture[str]) -> None:
    def body(i: Any, x: Any) -> Any:
        hcb.progress(5000, step=i, desc="any", x=x)
        return x + 1

    def loop(x: Any) -> Any:
        return jax.lax.fori_loop(0, 5000, body, x)

    for program, x in ((loop, jnp.float32(0)), (jax.vmap(loop), jnp.zeros(3))):
        jax.jit(program)(x)
        hcb.barrier_wait()
        (line,) = screen(capsys.readouterr().err)
        assert "any: 100%" in line
        assert "5000/5000 " in line
        assert "x=4999" in line


def test_a_rule_leaves_no_end_of_a_bar_out(capsys: pytest.CaptureFixture[str]) -> None:
    with hcb.outfeed_receiver():
        hcb.taps["thinned"].rate(0.001)
        jax.jit(lambda: hcb.scan(add, 0, length=40, progress="thinned"))()
    hcb.taps["thinned"].reset()
    (line,) = screen(capsys.readouterr().err)
    assert "40/40 " in line

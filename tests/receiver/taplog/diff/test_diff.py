"""`hcb diff`: differences of two runs of real programs, and of logs that were made for it."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import hostcallback as hcb
from hostcallback.receiver.cli import CommandError, main
from hostcallback.receiver.cli.commands import diff as diff_command
from hostcallback.receiver.taplog.diff.comparison import Tolerance, array_difference

STEPS = 20


def nothing(*args: Any, **kwargs: Any) -> None:
    """A tap function."""


@hcb.jit
def train(x: Any, planted: Any, at: Any) -> Any:
    """Adds `planted` to an element in step `at`, after two taps of that step."""

    def body(carry: Any, i: Any) -> tuple[Any, None]:
        hcb.id_tap(nothing, {"step": i, "loss": carry.sum()}, name="loss")
        grads = carry * 0.5
        hcb.id_tap(nothing, grads, name="grads")
        carry = jnp.where(i == at, carry.at[1, 2].add(planted), carry)
        hcb.id_tap(nothing, {"params": carry, "nan": jnp.nan * carry[0]}, name="params")
        hcb.print("sum {}", carry.sum())
        return carry, None

    return lax.scan(body, x, jnp.arange(STEPS))[0]


def record(log: Path, planted: float = 0.0, at: int = 7, **options: Any) -> Path:
    """The log of one run."""
    with hcb.outfeed_receiver(record=log, **options):
        train(jnp.ones((2, 3)), jnp.float32(planted), at)
    return log


def diff(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, list[dict[str, Any]], str]:
    """The status, the differences, the last line's counts, and the text on standard error."""
    capsys.readouterr()
    status = main(["diff", "--json", *map(str, arguments)])
    out, err = capsys.readouterr()
    return status, [json.loads(line) for line in out.splitlines()], err


def test_logs_of_several_runs_are_compared_unless_both_are_of_the_same_processes() -> None:
    def log(*writers: str) -> Any:
        runs = [SimpleNamespace(title=writer) for writer in writers]
        return SimpleNamespace(writers=list(writers), runs=runs)

    diff_command._refuse_one_run(log("a", "b"), log("a", "c"))
    diff_command._refuse_one_run(log("a"), log("a"))
    with pytest.raises(CommandError, match=r"its folder has a, b: --run NAME --run NAME"):
        diff_command._refuse_one_run(log("a", "b"), log("b", "a"))


def test_what_differs_in_the_configurations_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, config in (("a", {"lr": 0.01, "seed": 1, "note": "wide"}), ("b", {"lr": 0.02, "seed": 1})):
        with hcb.outfeed_receiver(sinks=[hcb.record(tmp_path / name, config=config)]):
            train(jnp.ones((2, 3)), jnp.float32(0), 7)
    capsys.readouterr()
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "  configuration: lr is 0.01 in A, 0.02 in B",
        "  configuration: note is wide in A, not set in B",
        f"{4 * STEPS} message(s) compared: no difference",
    ]


def test_two_runs_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = record(tmp_path / "a"), record(tmp_path / "b")
    capsys.readouterr()
    assert main(["diff", str(a), str(b)]) == 0
    assert capsys.readouterr().out == f"{4 * STEPS} message(s) compared: no difference\n"


def test_the_first_message_that_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = record(tmp_path / "a"), record(tmp_path / "b", 0.25)
    status, (found, _), _ = diff(capsys, a, b)
    assert status == 1
    assert (found["what"], found["name"], found["step"], found["device"]) == ("value", "params", 7, "cpu:0")
    assert __file__ in found["source_line"]
    assert found["leaves"] == [
        {
            "leaf": "params",
            "index": [1, 2],
            "a": 1.0,
            "b": 1.25,
            "max_absolute": 0.25,
            "max_relative": 0.2,
            "differing": 1,
            "elements": 6,
        }
    ]
    assert main(["diff", str(a), str(b)]) == 1
    text = capsys.readouterr().out
    assert "step 7: params at " in text
    assert "params[1, 2]: A 1.0, B 1.25 (1 of 6 elements differ, by at most 0.25, relative 0.2)" in text


def test_tolerance(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = record(tmp_path / "a"), record(tmp_path / "b", 0.25)
    status, (found, _), _ = diff(capsys, a, b, "--atol", "0.24")
    assert (status, found["name"], found["step"]) == (1, "params", 7)
    assert diff(capsys, a, b, "--atol", "0.25")[0] == 0
    assert diff(capsys, a, b, "--rtol", "0.2")[0] == 0
    with pytest.raises(SystemExit) as ended:
        main(["diff", str(a), str(b), "--rtol", "nan"])
    assert ended.value.code == 2


def test_all_differences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = record(tmp_path / "a"), record(tmp_path / "b", 0.25, 18)
    status, found, _ = diff(capsys, a, b, "--all")
    places = [(item["step"], item["name"].partition("@")[0]) for item in found[:-1]]
    assert places == [
        (18, "params"),
        (18, "print"),
        (19, "loss"),
        (19, "grads"),
        (19, "params"),
        (19, "print"),
    ]
    counts = {"compared": 80, "different": 6, "passed_over": 0, "unaligned": 0, "left_out": []}
    assert found[-1] == {"what": "summary", **counts}
    status, found, _ = diff(capsys, a, b, "--all", "--name", "grads", "--name", "loss")
    assert [item["name"] for item in found[:-1]] == ["loss", "grads"]
    assert diff(capsys, a, b, "--step", ":17")[0] == 0
    status, _, err = diff(capsys, a, b, "--name", "losses")
    assert status == 2
    assert "hcb: no tap of the log is called 'losses'; there are" in err
    assert "no messages to compare" not in err


def record_with_bar(log: Path, shown: float, run: str = "") -> Path:
    """The log of a loop with a bar that has `shown` behind it, with a metric and a time."""

    def body(carry: Any, i: Any) -> tuple[Any, Any]:
        hcb.metrics({"loss": carry}, step=i, name="train")
        with hcb.span("work"):
            carry = jnp.sin(carry)
        return carry, None

    bar = hcb.Progress("bar", postfix=lambda carry, y: {"shown": shown})
    with (
        hcb.outfeed_receiver(record=hcb.record(log, run=run)),
        hcb.observe(what="time", name="parts", tap_func=nothing),
    ):
        jax.jit(lambda x: hcb.scan(body, x, jnp.arange(STEPS), progress=bar)[0])(1.0)
    return log


def test_bars_and_times_are_left_out_unless_they_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tqdm")
    a, b = record_with_bar(tmp_path / "a", 1.0), record_with_bar(tmp_path / "b", 2.0)
    capsys.readouterr()
    assert main(["diff", str(a), str(b)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "2 taps are left out, because the messages of bars and times depend on the clock: bar, parts; --name compares "
        "them",
        f"{STEPS} message(s) compared: no difference",
    ]
    status, (summary,), _ = diff(capsys, a, b)
    assert (status, summary["compared"], summary["left_out"]) == (0, STEPS, ["bar", "parts"])
    status, (found, summary), _ = diff(capsys, a, b, "--name", "ba*")
    assert (status, found["name"], summary["left_out"]) == (1, "bar", [])
    status, (found, summary), _ = diff(capsys, a, b, "--name", "parts")
    assert (status, found["name"], summary["left_out"]) == (1, "parts", [])


def test_a_bar_of_the_name_of_a_tap_is_left_out_by_the_name_that_it_has_in_the_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def body(carry: Any, i: Any) -> tuple[Any, None]:
        hcb.metrics({"loss": carry}, step=i, name="train")
        return carry / 2, None

    for name in ("a", "b"):
        with hcb.outfeed_receiver(record=tmp_path / name):
            jax.jit(lambda: hcb.scan(body, 8.0, jnp.arange(4), progress="train")[0])()
    assert "train (progress)" in hcb.read(tmp_path / "a")
    status, (summary,), _ = diff(capsys, tmp_path / "a", tmp_path / "b")
    assert (status, summary["compared"], summary["left_out"]) == (0, 4, ["train (progress)"])
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert "depend on the clock: train (progress); " in capsys.readouterr().out


def test_a_log_with_a_bar_alone_has_nothing_to_compare(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tqdm")
    for name in ("a", "b"):
        with hcb.outfeed_receiver(record=tmp_path / name):
            jax.jit(lambda: hcb.scan(lambda c, _: (c + 1, None), 0, length=3, progress="bar"))()
    status, (summary,), err = diff(capsys, tmp_path / "a", tmp_path / "b")
    assert (status, summary["left_out"]) == (2, ["bar"])
    assert "no messages to compare" in err
    assert "of the taps that are not left out" in err


def test_of_several_devices_the_earliest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tapped = hcb.jit(lambda x: hcb.id_tap(nothing, x, name="x"))

    def run(log: Path, order: list[int], values: dict[tuple[int, int], float]) -> Path:
        with hcb.outfeed_receiver(record=log):
            for step in range(3):
                for device in order:
                    value = jnp.float32(values.get((device, step), 0))
                    tapped(jax.device_put(value, jax.devices()[device])).block_until_ready()
        return log

    a = run(tmp_path / "a", [0, 1, 2], {})
    b = run(tmp_path / "b", [2, 0, 1], {(0, 2): 1, (2, 1): 5})  # in another order of the devices
    status, (found, _), _ = diff(capsys, a, b)
    assert (status, found["device"], found["leaves"][0]["b"]) == (1, "cpu:2", 5.0)
    assert diff(capsys, a, b, "--device", "cpu:1")[0] == 0
    assert [item["device"] for item in diff(capsys, a, b, "--all")[1][:-1]] == ["cpu:0", "cpu:2"]


def test_a_device_that_one_log_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tapped = hcb.jit(lambda x: hcb.id_tap(nothing, x, name="x"))
    for log, devices in (("a", 2), ("b", 1)):
        with hcb.outfeed_receiver(record=tmp_path / log):
            for device in jax.devices()[:devices]:
                tapped(jax.device_put(jnp.float32(0), device))
    status, (found, _), _ = diff(capsys, tmp_path / "a", tmp_path / "b")
    assert (status, found["what"], found["device"], found["b"]) == (1, "missing", "cpu:1", None)


def test_a_run_that_ends_earlier(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = record(tmp_path / "a"), record(tmp_path / "b")
    (path,) = b.iterdir()
    os.truncate(path, path.stat().st_size * 2 // 3)
    status, (found, _), err = diff(capsys, a, b)
    assert (status, found["what"], found["b"], err) == (1, "missing", None, "")
    capsys.readouterr()
    assert main(["diff", "--all", str(a), str(b)]) == 1
    assert "more message(s) of params only in A" in capsys.readouterr().out
    # The other way round it is missing in A.
    status, (found, _), err = diff(capsys, b, a)
    assert (status, found["what"], found["a"]) == (1, "missing", None)


def run_taps(log: Path, *, extra: bool = False, shape: int = 2, key: str = "x", word: str = "w") -> Path:
    """A program with a tap that may be missing, or otherwise made."""

    def body(carry: Any, i: Any) -> tuple[Any, None]:
        hcb.id_tap(nothing, carry[0], name="first", word=word)
        if extra:
            hcb.id_tap(nothing, i, name="extra")
        hcb.id_tap(nothing, {key: carry}, name="second")
        return carry, None

    with hcb.outfeed_receiver(record=log):
        hcb.jit(lambda x: lax.scan(body, x, jnp.arange(50))[0])(jnp.zeros(shape))
    return log


@pytest.mark.parametrize(
    ("change", "what", "name"),
    [
        ({"extra": True}, "missing", "extra"),
        ({"shape": 3}, "type", "second"),
        ({"key": "y"}, "tree", "second"),
        ({"word": "v"}, "kwargs", "first"),
    ],
)
def test_other_programs(
    change: dict[str, Any], what: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = run_taps(tmp_path / "a"), run_taps(tmp_path / "b", **change)
    status, (found, _), _ = diff(capsys, a, b)
    assert (status, found["what"], found["name"]) == (1, what, name)
    status, (found, _), _ = diff(capsys, b, a)
    assert (status, found["what"], found["name"]) == (1, what, name)


def test_a_tap_at_another_line_is_hinted_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    programs = [
        hcb.jit(lambda x: hcb.id_tap(nothing, x, name="loss")),
        hcb.jit(lambda x: hcb.id_tap(nothing, x, name="loss")),
    ]
    for folder, program in zip("ab", programs, strict=True):
        with hcb.outfeed_receiver(record=tmp_path / folder):
            program(jnp.float32(1))
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    hint = "the other log has a tap loss at another line: --ignore-lines compares taps by name"
    assert hint in capsys.readouterr().err
    assert main(["diff", "--ignore-lines", str(tmp_path / "a"), str(tmp_path / "b")]) == 0


@pytest.mark.slow
def test_dropped_messages_are_not_a_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gate = threading.Event()

    def wait(value: Any) -> None:
        gate.wait(30)

    def body(carry: Any, i: Any) -> tuple[Any, None]:
        hcb.id_tap(wait, {"step": i, "x": jnp.zeros(20_000) + i}, name="x")
        hcb.id_tap(wait, i * 2, name="y")
        return carry, None

    program = hcb.jit(lambda x: lax.scan(body, x, jnp.arange(2_000))[0])
    with hcb.outfeed_receiver(record=tmp_path / "a", back_pressure="drop_newest") as rx:
        program(jnp.float32(0)).block_until_ready()
        gate.set()
    assert sum(row.dropped for row in rx.stats) > 0
    with hcb.outfeed_receiver(record=tmp_path / "b"):
        program(jnp.float32(0))
    for first, second in (("a", "b"), ("b", "a")):
        status, found, err = diff(capsys, tmp_path / first, tmp_path / second)
        assert [item for item in found if item["what"] != "summary"] == []
        assert (status, err) == (0, "")
        assert found[-1]["passed_over"] == sum(row.dropped for row in rx.stats)
        assert found[-1]["compared"] == sum(row.delivered for row in rx.stats)


def test_damage_is_trouble_and_no_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = record(tmp_path / "a"), record(tmp_path / "b")
    record(b)  # a second run, in a separate segment
    record(a)
    path = min(b.iterdir())
    data = bytearray(path.read_bytes())
    data[5_000] ^= 255
    path.write_bytes(data)
    status, (found,), err = diff(capsys, a, b)
    assert (status, found["what"]) == (2, "summary")
    assert "checksums do not match" in err
    assert found["compared"] > 0


def test_trouble(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = record(tmp_path / "a")
    assert main(["diff", str(a), str(tmp_path / "nowhere")]) == 2
    assert "no such tap log: give the folder" in capsys.readouterr().err
    (tmp_path / "text").write_text("no log")
    assert main(["diff", str(a), str(tmp_path / "text")]) == 2


def test_shards_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
    place = NamedSharding(mesh, PartitionSpec("x"))
    program = hcb.jit(lambda x: hcb.id_tap(nothing, x, name="sharded") * 2)
    for log, planted in (("a", 0.0), ("b", 0.0), ("c", 1.0)):
        with hcb.outfeed_receiver(record=tmp_path / log):
            program(jax.device_put(jnp.zeros(8).at[5].set(planted), place))
    assert diff(capsys, tmp_path / "a", tmp_path / "b")[0] == 0
    status, (found, _), _ = diff(capsys, tmp_path / "a", tmp_path / "c")
    assert (status, found["device"], found["leaves"][0]["index"]) == (1, "cpu:2", [1])


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("dtype", "a", "b", "expected"),
    [
        ("float32", [1, NAN, INF, -0.0], [1, NAN, INF, 0.0], None),
        ("float32", [1, NAN], [1, 2], ((1,), NAN, 1)),
        ("float32", [INF], [-INF], ((0,), INF, 1)),
        ("bfloat16", [1, NAN, 3], [1, NAN, 3.5], ((2,), 0.5, 1)),
        ("float8_e4m3fn", [1, NAN], [1, NAN], None),
        ("float8_e4m3fn", [1, 2], [1, 4], ((1,), 2, 1)),
        ("int4", [-8, 7], [-8, 6], ((1,), 1, 1)),
        ("uint64", [2**64 - 1, 5], [0, 5], ((0,), float(2**64 - 1), 1)),
        ("int64", [-(2**63)], [2**63 - 1], ((0,), float(2**64 - 1), 1)),
        ("bool", [True, False], [True, True], ((1,), 1, 1)),
        ("complex64", [1 + 2j, complex(NAN, 0)], [1 + 2j, complex(0, NAN)], None),
        ("complex64", [1 + 2j], [1 - 2j], ((0,), 4, 1)),
    ],
)
def test_elements_of_every_dtype(dtype: str, a: Any, b: Any, expected: Any) -> None:
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    found = array_difference(np.array(a, kind), np.array(b, kind), Tolerance())
    if expected is None:
        assert found is None
        return
    assert found is not None
    index, absolute, count = expected
    assert (found.index, found.count) == (index, count)
    np.testing.assert_equal(found.max_absolute, absolute)


@pytest.mark.parametrize(("dtype", "alike"), [("float32", True), ("int32", False), ("uint8", False)])
def test_tolerance_is_for_floats(dtype: str, alike: bool) -> None:
    found = array_difference(np.array([100], dtype), np.array([101], dtype), Tolerance(relative=0.1))
    assert (found is None) == alike


def test_an_infinity_is_like_no_number() -> None:
    tolerance = Tolerance(relative=1.0, absolute=INF)
    assert array_difference(np.float32([1]), np.float32([INF]), tolerance) is not None
    assert array_difference(np.float32([NAN]), np.float32([1]), tolerance) is not None

"""`outfeed_receiver(on_failure="capsule")`: failures of programs that no `hcb.capsule` holds leave their reports."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import hostcallback as hcb
from hostcallback.api.capsule_contents import capsule_path
from hostcallback.receiver import Capsule
from hostcallback.receiver.cli import main
from python_process import files_no_longer_than
from threads import wait_for


def checked(x: Any) -> Any:
    hcb.check(x < 1, "x is {}", x)
    return x * 2


def refuse(value: Any) -> None:
    if value > 1:
        raise ValueError("too large")


def tapped(x: Any) -> Any:
    hcb.tap(refuse, x, name="first")
    return x


def capsules(folder: Path) -> list[Capsule]:
    assert not list(folder.glob(".*"))
    return sorted(map(Capsule, folder.glob("*.hcb")), key=lambda capsule: capsule.path)


def test_a_failed_check_leaves_its_report(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    step, folder = jax.jit(checked), tmp_path / "capsules"
    with (
        caplog.at_level(logging.ERROR),
        pytest.raises(hcb.TapFunctionException),
        hcb.outfeed_receiver(
            receiver_name="train/1", on_failure="capsule", capsules=folder, record=tmp_path / "log"
        ),
    ):
        _ = [tapped(step(jnp.float32(n)) * 0) for n in range(4)]
    (capsule,) = capsules(folder)
    assert capsule.path.name == f"train_1-0-{os.getpid()}.hcb"
    assert (capsule.failure.kind, capsule.failure.text) == ("check", "x is 1.0")
    assert "test_receiver_capsules.py" in capsule.report
    assert capsule.inputs == []
    assert f"hcb reproduce --show {capsule.path}" in caplog.text
    assert [line for line in capsule.messages if "first" in line]
    assert main(["reproduce", "--show", str(capsule.path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("in train/1 failed: check")
    assert "left out: the inputs: no step is known: wrap it, step = hcb.capsule(step)" in out
    assert main(["reproduce", str(capsule.path)]) == 2
    assert "wrap it, step = hcb.capsule(step)" in capsys.readouterr().err


def test_the_file_is_there_before_the_receiver_ends(tmp_path: Path) -> None:
    found = []
    with hcb.outfeed_receiver(on_failure="capsule", capsules=tmp_path):
        jax.jit(tapped)(jnp.float32(2))
        with pytest.raises(hcb.TapFunctionException):
            hcb.barrier_wait()
        found = capsules(tmp_path)
    assert [capsule.failure.text for capsule in found] == ["ValueError: too large"]


@pytest.mark.native_only
def test_a_wrapped_step_writes_its_own(tmp_path: Path) -> None:
    step = hcb.capsule(jax.jit(checked), tmp_path / "steps")
    with (
        pytest.raises(hcb.TapFunctionException),
        hcb.outfeed_receiver(on_failure="capsule", capsules=tmp_path / "others"),
    ):
        _ = [step(jnp.float32(n)) for n in range(3)], jax.jit(tapped)(jnp.float32(2))
    assert [capsule.name for capsule in capsules(tmp_path / "steps")] == ["checked"]
    assert [capsule.failure.kind for capsule in capsules(tmp_path / "others")] == ["tap exception"]


def test_few_lines_leave_capsules_and_each_one(tmp_path: Path) -> None:
    def failing(value: Any) -> None:
        raise ValueError(str(value))

    def step(x: Any) -> Any:
        hcb.tap(failing, x)
        hcb.tap(failing, x + 1)
        hcb.tap(failing, x + 2)
        hcb.tap(failing, x + 3)
        return x

    with (
        pytest.raises(hcb.TapFunctionException),
        hcb.outfeed_receiver(on_failure="capsule", capsules=tmp_path),
    ):
        _ = [jax.jit(step)(jnp.int32(n)) for n in range(4)]
    assert len({capsule.failure.source_line for capsule in capsules(tmp_path)}) == 3
    assert len(capsules(tmp_path)) == 3


def test_a_nan_that_is_watched_leaves_a_capsule(tmp_path: Path) -> None:
    step = hcb.watch_nonfinite(jax.jit(lambda x: jnp.log(x).sum()))
    with (
        pytest.raises(hcb.TapFunctionException),
        hcb.outfeed_receiver(on_failure="capsule", capsules=tmp_path),
    ):
        step(jnp.array([1.0, -1.0]))
    (capsule,) = capsules(tmp_path)
    assert capsule.failure.kind == "nonfinite"
    assert "log" in capsule.failure.text


def test_a_folder_that_cannot_be_made_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_bytes(b"")
    with (
        pytest.raises(hcb.TapFunctionException, match="x is"),
        hcb.outfeed_receiver(on_failure="capsule", capsules=tmp_path / "file"),
    ):
        jax.jit(checked)(jnp.float32(2))
    assert "could not be written" in caplog.text


def test_a_capsule_that_the_disk_has_no_room_for_leaves_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    step = jax.jit(checked)
    step(jnp.float32(0))

    def fail() -> None:
        step(jnp.float32(2))
        wait_for(lambda: "could not be written: File too large" in caplog.text)

    with (
        pytest.raises(hcb.TapFunctionException, match="x is"),
        hcb.outfeed_receiver(on_failure="capsule", capsules=tmp_path),
        files_no_longer_than(1000),
    ):
        fail()
    assert not list(tmp_path.iterdir())


def test_a_file_of_an_earlier_process_is_kept(tmp_path: Path) -> None:
    first = capsule_path(tmp_path, "a b", 3)
    first.write_bytes(b"")
    second = capsule_path(tmp_path, "a b", 3)
    assert (first.name, second.name) == (f"a_b-3-{os.getpid()}.hcb", f"a_b-3-{os.getpid()}-2.hcb")


def test_options_that_are_wrong() -> None:
    with pytest.raises(ValueError, match="on_failure is 'core', expected 'capsule', or None"):
        hcb.outfeed_receiver(on_failure="core")  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match="capsules is 'x', and on_failure is None: give on_failure='capsule'"
    ):
        hcb.outfeed_receiver(capsules="x")
    with pytest.raises(TypeError, match="capsules is a int, expected the path of a folder"):
        hcb.outfeed_receiver(on_failure="capsule", capsules=3)  # type: ignore[arg-type]

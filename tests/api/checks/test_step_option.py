"""`hcb.check(step=)` gives a failure its step, with and without `{step}` in the text; prints and logs take it too."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from failing import failed_once
from jax import lax
from jax.sharding import Mesh, PartitionSpec

import hostcallback as hcb
from hostcallback.receiver.cli import main
from transforming import Jit


def positive(x: Any, step: Any, text: str = "x is {}") -> Any:
    hcb.check(x > 0, text, x, step=step)
    return x * 2


@pytest.mark.parametrize("text", ["x is {}", "x is {} at {step}"])
@pytest.mark.parametrize("step", [7, np.int64(7), jnp.uint8(7)], ids=["int", "numpy", "jax"])
def test_a_failure_has_the_step_that_the_check_is_given(jit: Jit, step: Any, text: str) -> None:
    jit(lambda x: positive(x, step, text))(-1.0)
    check = failed_once()
    assert (check.step, check.steps, check.without_step) == (7, [7], 0)
    assert check.explanation.text == text.format("-1.0", step=7)
    assert ", step 7, message " in check.report()


def test_a_traced_step_is_that_of_the_failure(jit: Jit) -> None:
    jit(positive)(-1.0, 7)
    assert failed_once().steps == [7]


def scan(x: Any) -> Any:
    return lax.scan(lambda c, i: (c - 1, positive(c, i)), x, jnp.arange(5))[1]


def in_shard_map(x: Any) -> Any:
    mesh = Mesh(jax.devices()[:2], ("i",))
    spec = PartitionSpec("i")
    return jax.shard_map(lambda x: scan(x[0])[None], mesh=mesh, in_specs=spec, out_specs=spec)(
        jnp.stack([x, x])
    )


TRANSFORMED: dict[str, tuple[Callable[[Any], Any], int]] = {
    "scan": (scan, 2),
    "vmap": (lambda x: jax.vmap(scan)(jnp.stack([x, x + 1])), 2),
    "grad": (jax.grad(lambda x: scan(x).sum()), 2),
    "checkpointed grad": (jax.grad(jax.checkpoint(lambda x: scan(x).sum())), 2),
    "shard_map": (in_shard_map, 4),
    "fori_loop": (lambda x: lax.fori_loop(0, 5, lambda i, c: positive(c - 1, i) * 0 + c - 1, x), 2),
}


@pytest.mark.parametrize("how", TRANSFORMED)
def test_transformations_keep_the_step(how: str) -> None:
    program, count = TRANSFORMED[how]
    jax.jit(program)(3.0)
    check = failed_once()
    steps = [2, 3, 4] if how == "fori_loop" else [3, 4]
    assert (check.count, check.steps, check.without_step) == (count * len(steps) // 2, steps, 0)


def test_the_step_of_the_check_comes_before_one_in_its_arguments(
    jit: Jit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def program(x: Any) -> None:
        hcb.check(x > 0, "{} {nested}", {"step": 3, "x": x}, nested={"step": x.astype(int)}, step=7)

    with hcb.outfeed_receiver(record=tmp_path, on_error="warn") as receiver:
        jit(program)(jnp.float32(-1))
    (check,) = receiver.failed_checks
    main(["cat", str(tmp_path)])
    assert (check.steps, capsys.readouterr().out.split()[2]) == ([7], "7")


def test_a_step_that_vmap_batches_is_unknown_and_not_wrong() -> None:
    jax.jit(jax.vmap(positive))(-jnp.ones(3), jnp.arange(3))
    check = failed_once()
    assert (check.step, check.steps, check.without_step) == (None, [], 1)


@pytest.mark.parametrize("step", [1.5, jnp.arange(3), "seven"], ids=["float", "array", "text"])
def test_what_is_no_step_is_refused_with_the_cure(step: Any) -> None:
    with pytest.raises(
        TypeError,
        match=r"hcb.check: step is .*, expected an integer or a traced integer without dimensions, at .*step_option.py",
    ):
        hcb.check(True, "never", step=step)


def test_prints_and_logs_take_a_step_for_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    @jax.jit
    def program(i: Any) -> None:
        hcb.print("printed", step=i)
        hcb.log("logged {}", i * 2, step=i + 1)

    with hcb.outfeed_receiver(record=tmp_path):
        program(7)
    assert capsys.readouterr().out == "printed\n"
    assert "logged 14" in caplog.text
    main(["cat", str(tmp_path)])
    steps = {
        line.split()[3].partition("@")[0]: line.split()[2] for line in capsys.readouterr().out.splitlines()
    }
    assert steps == {"print": "7", "log": "8"}
    with pytest.raises(TypeError, match=r"hcb.print: step is float 0.5, expected an integer"):
        hcb.print("printed", step=0.5)


def test_a_callback_in_a_branch_sends_each_violation_to_a_function() -> None:
    seen: list[int] = []

    @jax.jit
    def program(x: Any) -> Any:
        def step(x: Any, i: Any) -> Any:
            bad = i % 3 == 2
            lax.cond(bad, lambda: hcb.callback(lambda i: seen.append(int(i)), i, name="jumps"), lambda: None)
            return x, None

        return lax.scan(step, x, jnp.arange(9))[0]

    program(1.0)
    hcb.barrier_wait()
    assert seen == [2, 5, 8]
    shown = (Path(__file__).parents[3] / "docs" / "checks.md").read_text()
    assert '`hcb.callback(function, i, name="jumps")` to a function' in shown

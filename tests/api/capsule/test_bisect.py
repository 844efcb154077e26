"""`hcb reproduce`: the first operation at which two runs of a failing step part, and values that are not finite."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import hostcallback as hcb
from hostcallback.api.capsule.programs import Digest, digests
from hostcallback.api.capsule.reproduce import first_divergence
from hostcallback.receiver import Capsule
from hostcallback.receiver.cli import main

pytestmark = pytest.mark.native_only


def recurrent(w: Any, xs: Any) -> Any:
    def advance(state: Any, x: Any) -> Any:
        with jax.named_scope("cell"):
            state = jnp.tanh(state @ w + x)
        return state, (state**2).sum()

    _, energies = lax.scan(advance, jnp.zeros(4), xs)
    return jnp.log1p(jnp.exp(energies.sum() * 20))  # overflows in 32 bits


def step(w: Any, xs: Any) -> Any:
    loss, gradient = jax.value_and_grad(recurrent)(w, xs)
    hcb.check(jnp.isfinite(loss), "the loss is {}", loss)
    return w - gradient, loss


@pytest.fixture(scope="module")
def capsule(tmp_path_factory: pytest.TempPathFactory) -> Capsule:
    folder = tmp_path_factory.mktemp("capsules")
    with pytest.raises(hcb.TapFunctionException), hcb.outfeed_receiver():
        hcb.capsule(jax.jit(step), folder)(jnp.eye(4), np.ones((6, 4), np.float32))
    (path,) = folder.glob("*.hcb")
    return Capsule(path)


def test_the_operation_that_overflows_in_32_bits_is_named(
    capsule: Capsule, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reproduce", str(capsule.path), "--bisect"]) == 1
    first, here, other, how = capsys.readouterr().out.splitlines()
    assert first.startswith("the first operation that differs: exp [] at ")
    assert "test_bisect.py" in first
    assert "max inf" in here
    assert other.startswith("  float64: min ")
    assert "one of them is not finite" in how


def _embedded(table: Any, tokens: Any) -> Any:
    return jnp.exp(table[tokens].sum() * 40)  # the gradient is a scatter-add


def _reduced(table: Any, tokens: Any) -> Any:
    halves = table.astype(jnp.bfloat16)
    peak = lax.reduce(halves, jnp.bfloat16(0), lambda a, b: a + b * jnp.bfloat16(1), (0, 1))
    windows = lax.reduce_window(table[None], 0.0, lax.add, (1, 2, 2), (1, 1, 1), "VALID")
    return jnp.exp(peak.astype(jnp.float32) + windows.sum() + lax.cumsum(table).sum())


@pytest.mark.slow_variants
@pytest.mark.parametrize("loss", [_embedded, _reduced])
def test_what_combines_elements_is_promoted(
    loss: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(table: Any, tokens: Any) -> Any:
        value = loss(table, tokens)
        hcb.check(jnp.isfinite(value), "the loss is {}", value)
        return value if loss is _reduced else jax.grad(loss)(table, tokens)

    with pytest.raises(hcb.TapFunctionException), hcb.outfeed_receiver():
        hcb.capsule(jax.jit(train), tmp_path)(jnp.ones((8, 4)), np.array([1, 2, 1], np.int32))
    (path,) = tmp_path.glob("*.hcb")
    assert main(["reproduce", str(path), "--bisect"]) == 1
    assert capsys.readouterr().out.startswith("the first operation that differs: exp [] at ")


@pytest.mark.parametrize(
    "other", ["device:1", pytest.param(sys.executable, marks=pytest.mark.slow, id="python")]
)
def test_devices_and_interpreters_with_the_same_jax_agree(
    capsule: Capsule, capsys: pytest.CaptureFixture[str], other: str
) -> None:
    assert main(["reproduce", "--bisect", other, str(capsule.path)]) == 0
    assert capsys.readouterr().out.startswith("no operation differs: ")


def test_devices_that_send_at_the_same_time_have_digests_in_their_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))

    def body(x: Any) -> Any:
        hcb.check(x.sum() < 3, "the sum is {}", x.sum())
        return lax.fori_loop(0, 100, lambda i, x: x + 1, x)

    step = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("d"), out_specs=P("d")))
    with pytest.raises(hcb.TapFunctionException), hcb.outfeed_receiver():
        hcb.capsule(step, tmp_path)(jax.device_put(jnp.arange(4.0), NamedSharding(mesh, P("d"))))
    (path,) = tmp_path.glob("*.hcb")
    added = [digest.stats[0] for digest in digests(Capsule(path)) if re.match(r"add \[1\]", digest.name)]
    assert added == [device + i for i in range(1, 101) for device in range(4)]
    assert main(["reproduce", str(path), "--bisect"]) == 0
    assert capsys.readouterr().out.startswith("no operation differs: ")


def test_sides_that_do_not_exist_are_named(capsule: Capsule, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "--bisect", "device:77", str(capsule.path)]) == 2
    assert "this process has the devices 0 to 3" in capsys.readouterr().err
    assert main(["reproduce", "--bisect", "/no/python", str(capsule.path)]) == 2
    assert "/no/python" in capsys.readouterr().err


def test_digests_are_those_of_the_values_in_program_order(capsule: Capsule) -> None:
    found = digests(capsule)
    cells = [d for d in found if d.name.startswith("tanh") and "scope cell" in d.name]
    assert [d.iterations for d in cells] == [(i,) for i in range(6)]
    state, expected = np.zeros(4, np.float32), []
    for _ in range(6):
        state = np.tanh(state @ np.eye(4, dtype=np.float32) + 1)
        expected.append([state.min(), state.max(), state.mean(), np.sqrt((state**2).mean()), *state])
    np.testing.assert_allclose([d.stats for d in cells], expected, rtol=1e-5)
    assert len({d.hash for d in cells}) == 6
    names = [d.name for d in found]
    assert names.index(cells[0].name) < next(i for i, name in enumerate(names) if name.startswith("exp"))
    assert any("(backward)" in name for name in names)


def test_a_difference_is_found_where_it_is() -> None:
    left = [Digest(f"op{i}", (), 0, i, (0.0, 1.0, 0.5, 0.7)) for i in range(5)]
    assert first_divergence(left, left, 0.0) == (None, 5, 0)
    other_bits = [*left[:3], replace(left[3], hash=99), left[4]]
    found, compared, missing = first_divergence(left, other_bits, 0.0)
    assert found is not None
    assert (found.left.name, compared, missing) == ("op3", 3, 0)
    assert first_divergence(left, other_bits, 1e-3)[0] is None
    other_mean = [left[0], replace(left[1], stats=(0.0, 1.0, 0.6, 0.7)), *left[3:]]
    found, compared, missing = first_divergence(left, other_mean, 1e-3)
    assert found is not None
    assert (found.left.name, round(found.relative, 3)) == ("op1", 0.1)
    assert first_divergence(left, other_mean, 0.5)[1:] == (4, 1)
    with_nan = [replace(left[0], stats=(float("nan"),) * 4), *left[1:]]
    assert first_divergence(with_nan, with_nan, 1e-3)[0] is None
    assert first_divergence(left, with_nan, 1e-3)[0] is not None
    for rest, differs in ((1.0000001, False), (1.1, True), (float("nan"), True)):
        here, other = (
            [replace(left[0], hash=i, stats=(float("nan"),) * 4 + (x, 0.5))]
            for i, x in enumerate((1.0, rest))
        )
        assert (first_divergence(here, other, 1e-3)[0] is not None) == differs


def test_the_prompt_has_inputs_and_results(
    capsule: Capsule, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = iter(["print('inputs', sorted(inputs))", "print('loss', float(results[-1]), failures[0].text)"])

    def read(prompt: str = "") -> str:
        line = next(lines, None)
        if line is None:
            raise EOFError
        return line

    monkeypatch.setattr("builtins.input", read)
    assert main(["reproduce", "--breakpoint", str(capsule.path)]) == 0
    out = capsys.readouterr().out
    assert "inputs ['w', 'xs']" in out
    assert "loss inf the loss is inf" in out
    stopped = out[out.index("stopped at operation") :].splitlines()
    line = next(
        n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "hcb.check(" in text
    )
    place = next(n for n, text in enumerate(stopped) if text.startswith("->"))
    assert f": tap [] at {__file__}:{line} (step)" in stopped[place]
    assert "       value 0" in stopped[place + 1]
    before = out[out.index("the first result that is not finite:") :].splitlines()
    assert ": exp [] at " in before[1]
    assert before[2] == "       value inf"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["{path}", "--bisect", "gpu:0"],
            "--bisect gpu:0: expected float64, device:N, or the path of another Python",
        ),
        (["{folder}"], "{folder}: not a file; the folder has {name}"),
    ],
    ids=["an unknown side", "a folder"],
)
def test_wrong_arguments(
    arguments: list[str], expected: str, capsule: Capsule, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"path": capsule.path, "folder": capsule.path.parent, "name": capsule.path.name}
    assert main(["reproduce", *(argument.format(**names) for argument in arguments)]) != 0
    assert expected.format(**names) in capsys.readouterr().err


def failed(folder: Path, x: Any) -> str:
    """The path of the capsule of a step whose results are not finite."""
    step = hcb.capsule(jax.jit(lambda x: 2 * jnp.log(x)), folder, nonfinite=True)
    with pytest.raises(hcb.TapFunctionException), hcb.outfeed_receiver():
        step(jnp.asarray(x, jnp.float32))
    (path,) = folder.glob("*.hcb")
    return str(path)


def test_an_array_that_is_not_finite_says_how_many_values_and_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = failed(tmp_path, [[1, 2, np.e], [0, -1, -2]])
    values = "2 NaN and 1 infinite values of 6, the first at [1, 0]; the finite ones: min 0, max 1"
    assert main(["reproduce", path]) == 0
    assert f"): {values}\n" in capsys.readouterr().out
    monkeypatch.setattr("builtins.input", lambda prompt="": (_ for _ in ()).throw(EOFError))
    assert main(["reproduce", path, "--breakpoint"]) == 0
    assert f"       {values}, first elements 0, 0.693147, 1, -inf\n" in capsys.readouterr().out


@pytest.mark.slow_variants
@pytest.mark.parametrize(
    ("x", "values"),
    [
        (
            [[1, np.nan], [np.inf, 3]],
            "1 NaN and 1 infinite values of 4, the first at [0, 1]; the finite ones: min 1, max 3",
        ),
        ([-np.inf, np.inf], "0 NaN and 2 infinite values of 2, the first at [0]"),
        (np.nan, "1 NaN and 0 infinite values"),
    ],
    ids=["some", "all", "a scalar"],
)  # fmt: skip
def test_an_input_that_is_not_finite_says_so_too(
    x: Any, values: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["reproduce", failed(tmp_path, x)])
    assert f"the input x has {values}\n" in capsys.readouterr().out


def test_digests_of_other_versions_and_foreign_ones_are_shown_without_it() -> None:
    digest = Digest("log [2, 3] at a.py:1 (f)", (), 0, 1, (0.0,) * 8)
    assert digest.not_finite == ""
    assert replace(digest, bad=(0, 0, 0), finite=(0.0, 1.0)).not_finite == ""
    for first in 6, -1:
        assert (
            replace(digest, bad=(1, 0, first), finite=(0.0, 1.0)).not_finite == "1 NaN and 0 infinite values"
        )


def test_operations_on_typed_shards_have_digests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mesh = jax.make_mesh((2, 2), ("d", "m"), axis_types=(AxisType.Explicit,) * 2)

    def train(w: Any, x: Any) -> Any:
        def loss(w: Any, x: Any) -> Any:
            return jnp.mean(jnp.log(x @ w))

        _, (losses, gradients) = lax.scan(lambda c, x: (c, jax.value_and_grad(loss)(w, x)), 0, x)
        return w - gradients.sum(0), losses

    w = jax.device_put(jnp.ones((4, 2)), NamedSharding(mesh, P(None, "m")))
    x = jax.device_put(jnp.ones((3, 8, 4)).at[1, 5].set(-1.0), NamedSharding(mesh, P(None, "d")))
    with pytest.raises(hcb.TapFunctionException), hcb.outfeed_receiver():
        hcb.capsule(jax.jit(train), tmp_path, nonfinite=True)(w, x)
    (path,) = tmp_path.glob("*.hcb")
    assert not any("operations" in what or "--bisect" in what for what in Capsule(path).left_out)
    assert main(["reproduce", str(path)]) == 0
    assert "reproduced: nonfinite " in capsys.readouterr().out

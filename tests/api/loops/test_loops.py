"""Loops with progress bars: results, gradients and steps shown, under every transformation."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

import hostcallback as hcb
from hostcallback.lifecycle import receivers
from terminals import screen

pytest.importorskip("tqdm")  # environments of other JAX versions may lack it

STEPS = 1000


def scan(x: Any, **options: Any) -> Any:
    return hcb.scan(lambda c, x: (jnp.sin(c) + x, c * 2), x, jnp.arange(float(STEPS)), **options)


def plain_scan(x: Any) -> Any:
    return lax.scan(lambda c, x: (jnp.sin(c) + x, c * 2), x, jnp.arange(float(STEPS)))


LOOPS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "scan": (lambda x: scan(x, progress="bar"), plain_scan),
    "reverse": (
        lambda x: hcb.scan(lambda c, x: (c + x, c), x, jnp.arange(float(STEPS)), reverse=True, progress="bar"),
        lambda x: lax.scan(lambda c, x: (c + x, c), x, jnp.arange(float(STEPS)), reverse=True),
    ),
    "unrolled": (lambda x: scan(x, unroll=4, progress="bar"), plain_scan),
    "fori_loop": (
        lambda x: hcb.fori_loop(5, 5 + STEPS, lambda i, x: jnp.sin(x) + i, x, progress="bar"),
        lambda x: lax.fori_loop(5, 5 + STEPS, lambda i, x: jnp.sin(x) + i, x),
    ),
    "fori_loop with traced bounds": (
        lambda x: hcb.fori_loop(0, x.astype(int) * 0 + STEPS, lambda i, x: jnp.sin(x) + i, x, progress="bar"),
        lambda x: lax.fori_loop(0, x.astype(int) * 0 + STEPS, lambda i, x: jnp.sin(x) + i, x),
    ),
    "while_loop": (
        lambda x: hcb.while_loop(lambda s: s[0] < STEPS, lambda s: (s[0] + 1, jnp.sin(s[1])), (0, x), progress="bar"),
        lambda x: lax.while_loop(lambda s: s[0] < STEPS, lambda s: (s[0] + 1, jnp.sin(s[1])), (0, x)),
    ),
}  # fmt: skip


def assert_equal(found: Any, expected: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, expected)
    assert jax.tree.structure(found) == jax.tree.structure(expected)


def wrong(carry: Any) -> Any:
    return {**carry, "mean": carry["mean"][None]}


WRONG: dict[str, Callable[[Any, Any], Any]] = {
    "scan": lambda loops, init: loops.scan(lambda carry, x: (wrong(carry), x), init, jnp.arange(3)),
    "unrolled": lambda loops, init: loops.scan(
        lambda carry, x: (wrong(carry), x), init, jnp.arange(4), unroll=2
    ),
    "scan over another structure": lambda loops, init: loops.scan(lambda c, x: ([c], x), init, jnp.arange(3)),
    "fori_loop": lambda loops, init: loops.fori_loop(0, 3, lambda i, carry: wrong(carry), init),
    "fori_loop with a traced bound": lambda loops, init: loops.fori_loop(
        0, init["mean"].astype(int), lambda i, carry: wrong(carry), init
    ),
    "while_loop": lambda loops, init: loops.while_loop(lambda carry: carry["mean"] < 3, wrong, init),
}


@pytest.mark.parametrize("loop", WRONG)
@pytest.mark.parametrize("stop", [False, True])
@pytest.mark.parametrize("is_jitted", [False, True])
def test_a_wrong_carry_is_reported_as_by_jax(loop: str, stop: bool, is_jitted: bool) -> None:
    class Ours:
        scan = functools.partial(hcb.scan, stop=stop)
        fori_loop = functools.partial(hcb.fori_loop, stop=stop)
        while_loop = functools.partial(hcb.while_loop, stop=stop)

    init = {"mean": jnp.float32(0), "count": jnp.int32(0)}
    told = []
    for loops in (Ours, lax):
        run = functools.partial(WRONG[loop], loops)
        with pytest.raises(TypeError) as caught:
            (jax.jit(run) if is_jitted else run)(init)
        told.append(str(caught.value))
    assert told[0] == told[1]
    assert "state[" not in told[0]


@pytest.mark.parametrize("loop", ["scan", "fori_loop", "while_loop"])
def test_a_python_number_in_the_carry_becomes_what_the_body_makes_of_it(loop: str) -> None:
    run: dict[str, Callable[[Any], Any]] = {
        "scan": lambda loops: loops.scan(lambda c, x: (c + x, None), 0, jnp.arange(3.0))[0],
        "fori_loop": lambda loops: loops.fori_loop(0, 3, lambda i, c: c + jnp.float32(0.5), 0),
        "while_loop": lambda loops: loops.while_loop(lambda c: c < 3, lambda c: c + jnp.float32(1), 0),
    }
    found, expected = run[loop](hcb), run[loop](lax)
    assert (found.dtype, float(found)) == (expected.dtype, float(expected))


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_has_the_results_of_jax_and_a_bar_that_ends_at_its_last_step(
    loop: str, capsys: pytest.CaptureFixture[str]
) -> None:
    barred, plain = LOOPS[loop]
    x = jnp.float32(0.5)
    found = jax.jit(barred)(x)
    hcb.barrier_wait()
    (line,) = screen(capsys.readouterr().err)
    assert re.search(rf"\b{STEPS}(/{STEPS}|it) ", line), line
    assert_equal(found, jax.jit(plain)(x))


@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "no jit"])
def test_the_results_of_a_scan_are_weakly_typed_where_those_of_jax_are(jit: Any) -> None:
    def step(carry: Any, x: Any) -> Any:
        return carry * 2, (carry, jnp.where(x > 1, 1.0, 2.0), 3, x, x > 1)

    def types(scan: Any) -> list[tuple[Any, bool]]:
        outs = jit(lambda xs: scan(step, 1.0, xs))(jnp.arange(4.0))
        return [(leaf.dtype, leaf.weak_type) for leaf in jax.tree.leaves(outs)]

    assert types(hcb.scan) == types(lax.scan)
    assert {weak for _, weak in types(lax.scan)} == {True, False}


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_under_vmap_has_the_results_of_jax(loop: str, capsys: pytest.CaptureFixture[str]) -> None:
    barred, plain = LOOPS[loop]
    x = jnp.arange(3.0) / 4
    found = jax.jit(jax.vmap(barred))(x)
    hcb.barrier_wait()
    lines = screen(capsys.readouterr().err)
    assert all(f"{STEPS}" in line for line in lines), lines
    assert len(lines) in (1, 3)
    assert_equal(found, jax.jit(jax.vmap(plain))(x))


@pytest.mark.slow_variants
@pytest.mark.parametrize("loop", ["scan", "reverse", "unrolled", "fori_loop"])
def test_gradients_through_a_loop_are_those_of_jax(loop: str, capsys: pytest.CaptureFixture[str]) -> None:
    barred, plain = LOOPS[loop]

    def loss(loop: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda x: sum(jnp.sum(leaf) for leaf in jax.tree.leaves(loop(x)))

    x = jnp.float32(0.5)
    for wrapped in (loss(barred), jax.checkpoint(loss(barred))):
        found = jax.jit(jax.grad(wrapped))(x)
        hcb.barrier_wait()
        (line,) = screen(capsys.readouterr().err)
        assert f"{STEPS}/{STEPS} " in line
        assert_equal(found, jax.grad(loss(plain))(x))


def test_gradients_flow_to_values_that_the_step_closes_over() -> None:
    def loss(scan: Any) -> Any:
        return lambda w, x: scan(lambda c, x: (c * w + x, None), 0.0, x)[0]

    x = jnp.arange(5.0)
    found = jax.grad(loss(hcb.scan), argnums=(0, 1))(0.5, x)
    assert_equal(found, jax.grad(loss(lax.scan), argnums=(0, 1))(0.5, x))


def test_what_a_gradient_does_not_ask_for_need_not_be_differentiable() -> None:
    def loss(scan: Any) -> Any:
        def step(c: Any, x: Any) -> tuple[Any, Any]:
            halved = jax.pure_callback(lambda x: x / 2, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
            return c * halved + x, c

        return lambda start, xs: scan(step, start, xs)[0]

    xs = jnp.arange(5.0)
    found, expected = (jax.eval_shape(jax.grad(loss(scan)), 0.5, xs) for scan in (hcb.scan, lax.scan))
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)


def test_elements_of_a_vmap_that_end_at_different_steps_have_a_bar_each(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = jax.jit(jax.vmap(lambda n: hcb.fori_loop(0, n, lambda i, x: x + i, 0, progress="sum")))
    assert run(jnp.array([10, 0, 30])).tolist() == [45, 0, 435]
    hcb.barrier_wait()
    lines = screen(capsys.readouterr().err)
    assert [line.split(":")[0] for line in lines] == ["sum [0]", "sum [1]", "sum [2]"]
    assert "10/10 " in lines[0]
    assert "30/30 " in lines[2]


def test_each_device_of_a_shard_map_has_a_bar(capsys: pytest.CaptureFixture[str]) -> None:
    mesh = jax.sharding.Mesh(jax.devices(), ("d",))
    spec = jax.sharding.PartitionSpec("d")
    run = jax.jit(
        jax.shard_map(lambda x: scan(x, progress="train")[0], mesh=mesh, in_specs=spec, out_specs=spec)
    )
    assert_equal(run(jnp.arange(4.0)), jax.vmap(lambda x: plain_scan(x)[0])(jnp.arange(4.0)))
    hcb.barrier_wait()
    lines = screen(capsys.readouterr().err)
    assert len(lines) == 4
    assert all("1000/1000 " in line for line in lines)


def test_a_program_that_the_compiler_partitions_has_one_bar(capsys: pytest.CaptureFixture[str]) -> None:
    mesh = jax.sharding.Mesh(jax.devices(), ("d",))
    x = jax.device_put(jnp.arange(8.0), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d")))
    progress = hcb.Progress("train", postfix=lambda c, y: {"mean": y.mean()})
    found = jax.jit(lambda x: scan(x, progress=progress)[0])(x)
    hcb.barrier_wait()
    (line,) = screen(capsys.readouterr().err)
    assert "1000/1000 " in line
    assert "mean=" in line
    assert_equal(found, jax.vmap(lambda x: plain_scan(x)[0])(jnp.arange(8.0)))


def test_an_inner_bar_begins_again_and_goes_with_the_outer_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)

    def epoch(x: Any, _: Any) -> Any:
        return hcb.scan(lambda c, _: (c + 1, None), x, length=50, progress="batch")[0], None

    x, _ = jax.jit(lambda x: hcb.scan(epoch, x, length=3, progress="epoch"))(0)
    assert x == 150
    hcb.barrier_wait()
    text = capsys.readouterr().err
    (line,) = screen(text)
    assert line.startswith("epoch: 100%")
    assert text.count("batch:   0%") >= 3


def test_values_of_the_last_step_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    progress = hcb.Progress("fit", unit="step", postfix=lambda c, y: {"carry": c, "y": y})
    jax.jit(lambda: hcb.scan(lambda c, _: (c + 1, c * 10), 0, length=7, progress=progress))()
    hcb.barrier_wait()
    (line,) = screen(capsys.readouterr().err)
    assert "7/7 " in line
    assert "carry=7, y=60" in line


def test_taps_in_the_body_and_in_the_condition_run_once_per_step() -> None:
    seen: list[int] = []
    asked: list[int] = []

    def condition(n: Any) -> Any:
        hcb.id_tap(lambda n: asked.append(int(n)), n)
        return n < 20

    def body(n: Any) -> Any:
        hcb.id_tap(lambda n: seen.append(int(n)), n)
        return n + 1

    assert jax.jit(lambda: hcb.while_loop(condition, body, 0))() == 20
    hcb.barrier_wait()
    assert seen == [*range(20)]
    assert asked == [*range(21)]


@pytest.mark.parametrize("in_condition", [False, True], ids=["body", "body and condition"])
def test_taps_in_the_body_are_of_the_elements_that_have_not_ended(in_condition: bool) -> None:
    seen: list[tuple[int, ...]] = []
    tested: list[tuple[int, ...]] = []

    def condition(state: Any) -> Any:
        number, end, step = state
        if in_condition:
            hcb.callback(lambda *pair: tested.append(tuple(map(int, pair))), number, step)
        return step < end

    def body(state: Any) -> Any:
        number, end, step = state
        hcb.callback(lambda *pair: seen.append(tuple(map(int, pair))), number, step)
        return number, end, step + 1

    def run(number: Any, end: Any) -> Any:
        return hcb.while_loop(condition, body, (number, end, 0), progress="ends")[2]

    ends = jnp.asarray([3, 0, 5, 1])
    assert jax.jit(jax.vmap(run))(jnp.arange(4), ends).tolist() == ends.tolist()
    hcb.barrier_wait()
    assert sorted(seen) == [(n, step) for n, end in enumerate(ends.tolist()) for step in range(end)]
    together, seen[:], alone = sorted(tested), [], []
    for number, end in enumerate(ends):
        tested.clear()
        jax.jit(run)(number, end)
        hcb.barrier_wait()
        alone += tested
    assert together == sorted(alone)


def test_a_loop_without_steps_and_a_loop_with_a_wrong_total_have_bars(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def step(c: Any, _: Any) -> Any:
        return c + 1, None

    def run() -> None:
        hcb.scan(step, 0, length=0, progress="none")
        hcb.scan(step, 0, length=9, progress=hcb.Progress("few", total=5))
        hcb.scan(step, 0, length=9, progress=hcb.Progress("many", total=50))

    jax.jit(run)()
    hcb.barrier_wait()
    none, few, many = screen(capsys.readouterr().err)
    assert none.startswith("none: 0it")
    assert few.startswith("few: 9it")
    assert "9/50 " in many


@pytest.mark.parametrize(
    ("progress", "error", "text"),
    [
        (3, TypeError, "expected True, a description, or hcb.Progress"),
        (lambda: hcb.Progress("x", total=-1), ValueError, "0 or more"),
        (lambda: hcb.Progress(3), TypeError, "desc of a Progress is a text"),
        (lambda: hcb.Progress("x", display="curses"), ValueError, "'tqdm' or 'rich'"),
        (lambda: hcb.Progress(postfix=lambda c, y: 3), TypeError, "expected a dict"),
    ],
)
def test_wrong_arguments_are_refused_with_the_cure(progress: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        hcb.scan(lambda c, _: (c, None), 0, length=3, progress=progress() if callable(progress) else progress)


def test_a_missing_library_is_an_error_with_the_command_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'hostcallback\[progress\]'"):
        hcb.scan(lambda c, _: (c, None), 0, length=3)


def test_errors_of_the_scan_itself_are_those_of_jax() -> None:
    with pytest.raises(TypeError, match="carry"):
        hcb.scan(lambda c, _: ((c, c), None), 0, length=3)
    with pytest.raises(TypeError, match="lenght"):
        hcb.scan(lambda c, x: (c, x), 0.0, jnp.ones(3), lenght=3)
    with pytest.raises(ValueError, match="length"):
        hcb.scan(lambda c, x: (c, None), 0, jnp.arange(3), length=4)


def test_the_bar_of_a_program_that_fails_is_closed_at_the_barrier(capsys: pytest.CaptureFixture[str]) -> None:
    def step(c: Any, _: Any) -> Any:
        return hcb.call(lambda c: 1 // (int(c) < 5) + c, c, result_shape=c), None

    with pytest.raises((jax.errors.JaxRuntimeError, ValueError, hcb.TapFunctionException)):
        jax.block_until_ready(jax.jit(lambda c: hcb.scan(step, c, length=9, progress="fails"))(jnp.int32(0)))
    with pytest.raises(hcb.TapFunctionException):
        hcb.barrier_wait()
    capsys.readouterr()
    jax.jit(lambda: hcb.scan(lambda c, _: (c + 1, None), 0, length=3, progress="next"))()
    hcb.barrier_wait()
    (line,) = screen(capsys.readouterr().err)
    assert line.startswith("next: 100%")


SHORT = {
    "scan": lambda loops, x, **bar: loops.scan(lambda c, y: (c + y, c), x[0], x, **bar)[0],
    "unrolled": lambda loops, x, **bar: loops.scan(lambda c, y: (c + y, c), x[0], x, unroll=2, **bar)[0],
    "fori_loop": lambda loops, x, **bar: loops.fori_loop(2, 7, lambda i, c: c + i, x[0], **bar),
    "while_loop": lambda loops, x, **bar: loops.while_loop(lambda c: c < 9, lambda c: c * 2 + 1, x[1], **bar),
}


@pytest.mark.parametrize("loop", SHORT)
def test_a_loop_without_jit_has_the_results_of_jax_and_its_bar(
    loop: str, capsys: pytest.CaptureFixture[str]
) -> None:
    x = jnp.arange(5.0)
    with jax.disable_jit():
        expected = SHORT[loop](lax, x)
        found = SHORT[loop](hcb, x, progress="without jit")
        batch = jax.vmap(lambda x: SHORT[loop](hcb, x, progress=False))(x[:, None] + x)
        batched = jax.vmap(lambda x: SHORT[loop](hcb, x, progress="batch"))(x[:, None] + x)
        hcb.barrier_wait()
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(batched, batch)
    assert "without jit" in capsys.readouterr().err


def test_an_eager_scan_and_while_loop_are_one_operation() -> None:
    start, below, x = jnp.float32(1), jnp.float32(20), jnp.arange(5.0)
    with jax.transfer_guard("disallow"):  # of the numbers that separate operations would take
        total, _ = hcb.scan(lambda c, y: (c + y, c), start, x, progress="guarded")
        batch, _ = jax.vmap(lambda c: hcb.scan(lambda c, y: (c + y, c), c, x, progress="guarded"))(x)
        power = hcb.while_loop(lambda c: c[0] < c[1], lambda c: (c[0] + c[0], c[1]), (start, below))
        sum_ = hcb.fori_loop(0, 5, lambda i, c: c + c, start, progress="guarded")
    assert (float(total), batch.tolist(), float(power[0]), float(sum_)) == (11, [10, 11, 12, 13, 14], 32, 32)


def test_a_body_without_a_pair_and_a_postfix_of_other_arguments_are_refused_with_the_line() -> None:
    with pytest.raises(TypeError, match=r"returned .*, expected a pair \(carry, y\), at .*test_loops.py:\d+"):
        hcb.scan(lambda c, _: c, 0, jnp.arange(3), progress="x")
    bar = hcb.Progress("x", postfix=lambda c: {"c": c})
    with pytest.raises(TypeError, match=r"is called as postfix\(carry, y\): .*, at .*test_loops.py:\d+"):
        hcb.scan(lambda c, x: (c, x), 0, jnp.arange(3), progress=bar)
    two = hcb.Progress("x", postfix=lambda a, b: {"a": a})
    with pytest.raises(TypeError, match=r"is called as postfix\(value\): .*'b'"):
        hcb.fori_loop(0, 3, lambda i, x: x, 0, progress=two)


@pytest.mark.parametrize(
    ("loop", "arguments"),
    [
        ("scan", (0.0, lambda c, x: (c, x), jnp.arange(3.0))),
        ("while_loop", (lambda x: x * 1.0, lambda x: x + 1, 0.0)),
        ("while_loop", (lambda x: x < jnp.ones(2), lambda x: x + 1, 0.0)),
        ("fori_loop", (0, 3.0, lambda i, x: x + 1, 0.0)),
    ],
)
def test_what_jax_refuses_is_refused_with_its_words(loop: str, arguments: Any) -> None:
    with pytest.raises(TypeError) as theirs:
        getattr(lax, loop)(*arguments)
    with pytest.raises(TypeError) as ours:
        getattr(hcb, loop)(*arguments)
    assert str(ours.value).partition("\n")[0] == str(theirs.value).partition("\n")[0]


def test_a_bar_in_a_shard_map_over_some_axes_is_refused_with_the_cure() -> None:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("i", "j"))

    def run(**options: Any) -> Any:
        def each(x: Any) -> Any:
            return hcb.scan(lambda c, a: (c + lax.psum(c, "i"), None), x, jnp.arange(3.0), **options)[0]

        spec = PartitionSpec("i")
        return jax.jit(jax.shard_map(each, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={"i"}))(
            jnp.arange(4.0)
        )

    with pytest.raises(
        NotImplementedError, match=r"the loop at \S+test_loops.py:\d+ .*pass progress=False, and"
    ):
        run()
    if receivers.use_native(
        "cpu"
    ):  # JAX's callbacks, which would read the request to stop, are refused there
        np.testing.assert_array_equal(run(progress=False), run(progress=False, stop=True))

"""Capsules of all kinds of programs: transformed, in loops, on several devices, in threads, under JAX's settings."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import hostcallback as hcb
from checkout import python_path
from hostcallback.api.capsule.reproduce import reproduce
from hostcallback.receiver import Capsule
from python_process import python_output
from threads import in_threads

native = pytest.mark.native_only


def capsules(folder: Path) -> list[Capsule]:
    assert not list(folder.glob(".*")), "no file is left unfinished"
    return [Capsule(path) for path in sorted(folder.glob("*.hcb"))]


def failing(function: Callable[[], Any], **options: Any) -> None:
    with pytest.raises(hcb.TapFunctionException), hcb.outfeed_receiver(**options):
        jax.block_until_ready(function())


def checked(x: Any) -> Any:
    hcb.check(jnp.all(x < 5), "x is {}", x.max())
    return x * 2


def in_scan(xs: Any) -> Any:
    return lax.scan(lambda c, x: (c + x, checked(c + x)), jnp.float32(0), xs)


def in_while(xs: Any) -> Any:
    return lax.while_loop(lambda x: x.sum() < 50, checked, xs)


def in_batched_while(xs: Any) -> Any:
    return jax.vmap(lambda x: lax.while_loop(lambda y: y < 9, lambda y: checked(y) + 1, x))(xs)


def in_cond(xs: Any) -> Any:
    return lax.cond(xs[0] > 1, checked, lambda x: x, xs)


def in_grad(xs: Any) -> Any:
    return jax.grad(lambda x: jax.checkpoint(checked)(x).sum())(xs)


def in_vmap(xs: Any) -> Any:
    return jax.vmap(checked)(xs)


def in_both_calls(xs: Any) -> Any:
    inner = jax.jit(in_scan)
    return inner(xs - 3), inner(xs)


PROGRAMS = [checked, in_scan, in_while, in_batched_while, in_cond, in_grad, in_vmap, in_both_calls]


@pytest.mark.slow_variants(every=4)
@native
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("program", PROGRAMS, ids=[f.__name__ for f in PROGRAMS])
def test_a_program_that_fails_in_its_first_call(
    program: Callable[[Any], Any], donate: bool, tmp_path: Path
) -> None:
    options = {"donate_argnums": 0} if donate else {}
    expected = np.array([2.0, 3.0, 4.0], np.float32)
    expected = expected * 2 if program in (checked, in_cond, in_grad, in_vmap, in_batched_while) else expected
    x = jnp.array(expected)
    failing(lambda: hcb.capsule(jax.jit(program, **options), tmp_path)(x))
    (capsule,) = capsules(tmp_path)
    assert capsule.failure.kind == "check"
    np.testing.assert_array_equal(capsule.array(capsule.inputs[0]), expected)
    assert reproduce(capsule).is_exact


@native
def test_another_process_reproduces_a_text_of_several_lines_exactly(tmp_path: Path) -> None:
    def program(x: Any) -> Any:
        hcb.check(jnp.all(x < 5), "x is\n{}", x)
        return x

    failing(lambda: hcb.capsule(jax.jit(program), tmp_path)(jnp.full((2, 2), 7.0)))
    (capsule,) = capsules(tmp_path)
    assert capsule.failure.text == "x is\n[[7. 7.]\n [7. 7.]]"
    again = f"from hostcallback.receiver.cli import main; print(main(['reproduce', {str(capsule.path)!r}]))"
    assert python_output("-c", again, PYTHONPATH=python_path()).splitlines()[-1] == "0"


@native
def test_a_block_holds_for_all_programs_and_nothing_outside(tmp_path: Path) -> None:
    one, other = jax.jit(checked), jax.jit(in_scan)

    def calls() -> None:
        with hcb.capsule(tmp_path):
            one(jnp.array([1.0]))
            other(jnp.array([3.0, 1.0]))
            other(jnp.array([3.0, 3.0]))

    with pytest.raises(hcb.TapFunctionException), hcb.outfeed_receiver():
        one(jnp.array([9.0]))
    assert not capsules(tmp_path)
    failing(calls)
    with pytest.raises(hcb.TapFunctionException), hcb.outfeed_receiver():
        one(jnp.array([9.0]))
    assert [capsule.name for capsule in capsules(tmp_path)] == ["in_scan"]


@native
def test_a_replica_of_each_device_fails_and_one_capsule_is_left(tmp_path: Path) -> None:
    mesh = Mesh(np.array(jax.devices()), ("d",))
    x = jax.device_put(np.arange(8, dtype=np.float32), NamedSharding(mesh, PartitionSpec("d")))
    mapped = jax.shard_map(checked, mesh=mesh, in_specs=PartitionSpec("d"), out_specs=PartitionSpec("d"))
    with hcb.capsule(tmp_path):
        failing(lambda: jax.jit(mapped)(x * 10))
    (capsule,) = capsules(tmp_path)
    np.testing.assert_array_equal(capsule.array(capsule.inputs[0]), np.arange(8) * 10)
    assert reproduce(capsule).same is not None


@native
@pytest.mark.parametrize("axes", [{"a", "b"}, {"a"}], ids=["all axes", "some axes"])
def test_the_mesh_of_the_context(axes: set[str], tmp_path: Path) -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("a", "b"))
    x = jax.device_put(np.full((4, 4), 7, np.float32), NamedSharding(mesh, PartitionSpec("a")))
    spec = PartitionSpec("a")
    with jax.set_mesh(mesh):
        mapped = jax.jit(jax.shard_map(checked, in_specs=spec, out_specs=spec, axis_names=axes))
        failing(lambda: hcb.capsule(mapped, tmp_path)(x))
    (capsule,) = capsules(tmp_path)
    assert not [what for what in capsule.left_out if "program" in what]
    assert reproduce(capsule).is_exact


@native
@pytest.mark.parametrize("shape", [(2, 2), (1, 2)])
def test_automatic_sharding(shape: tuple[int, int], tmp_path: Path) -> None:
    mesh = Mesh(np.array(jax.devices()[: math.prod(shape)]).reshape(shape), ("a", "b"))
    x = jax.device_put(np.ones((4, 8), np.float32), NamedSharding(mesh, PartitionSpec("a", "b")))

    def step(x: Any, w: Any) -> Any:
        y = lax.scan(lambda c, w: (jnp.tanh(c @ w) * 3, None), x, w)[0]
        hcb.check(y.max() < 2.9, "y is {}", y.max())
        return y

    plain = jax.jit(lambda x, w: lax.scan(lambda c, w: (jnp.tanh(c @ w) * 3, None), x, w)[0])
    held = hcb.capsule(jax.jit(step, donate_argnums=0), tmp_path)
    w = jnp.ones((3, 8, 8)) * 0.1
    expected = plain(x, w)
    results = []
    failing(lambda: results.append(held(x, w)))
    np.testing.assert_array_equal(results[0], expected)
    (capsule,) = capsules(tmp_path)
    assert capsule.inputs[0].mesh == (("a", shape[0]), ("b", shape[1]))
    assert capsule.array(capsule.inputs[0]).shape == (4, 8)
    assert reproduce(capsule).is_exact


@native
def test_pmap(tmp_path: Path) -> None:
    with hcb.capsule(tmp_path):
        failing(lambda: jax.pmap(checked)(jnp.arange(12.0).reshape(4, 3) / 2))
    (capsule,) = capsules(tmp_path)
    assert (capsule.name, capsule.array(capsule.inputs[0]).size) == ("pmap", 12)
    assert reproduce(capsule).same is not None  # which device is first may change


def test_threads(tmp_path: Path) -> None:
    def work(number: int) -> None:
        step = hcb.capsule(jax.jit(checked), tmp_path / str(number))
        for n in range(20):
            step(jnp.full(3, 10.0 + number if n == 13 else 1.0))

    with pytest.raises(hcb.TapFunctionException), hcb.outfeed_receiver():
        in_threads(work, 4)
    found = {n: capsules(tmp_path / str(n)) for n in range(4)}
    # The failures are of one line, of which the first is reported.
    (n,) = [n for n, each in found.items() if each]
    (capsule,) = found[n]
    assert np.all(capsule.array(capsule.inputs[0]) == 10 + n)


@native
def test_threads_that_did_not_enter_the_block(tmp_path: Path) -> None:
    for all_threads in (False, True):
        folder = tmp_path / str(all_threads)
        with hcb.capsule(folder, all_threads=all_threads):
            thread = threading.Thread(target=lambda: jax.jit(lambda x: checked(x))(jnp.full(3, 7.0)))
            failing(lambda thread=thread: (thread.start(), thread.join()))
        assert len(capsules(folder)) == all_threads


SETTINGS: dict[str, Callable[[], Any]] = {
    "disable_jit": jax.disable_jit,
    "check_tracer_leaks": jax.checking_leaks,
    "transfer_guard": lambda: jax.transfer_guard("disallow"),
    "x64": lambda: jax.enable_x64(True),
    "precision": lambda: jax.default_matmul_precision("float32"),
    "debug_nans": lambda: jax.debug_nans(True),
}


@pytest.mark.slow_variants(every=3)
@native
@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_jax(name: str, tmp_path: Path) -> None:
    x = jnp.array([2.0, 3.0, 4.0])
    results = []
    with SETTINGS[name]():
        failing(lambda: results.append(hcb.capsule(jax.jit(in_scan), tmp_path)(x)))
        np.testing.assert_array_equal(results[0][1], [4, 10, 18])
    if name == "disable_jit":
        assert not capsules(tmp_path)  # each operation is a program
        return
    (capsule,) = capsules(tmp_path)
    assert reproduce(capsule).is_exact


@native
def test_an_abort_leaves_the_inputs(tmp_path: Path) -> None:
    for number, program in enumerate((checked, in_scan, in_while)):
        folder = tmp_path / str(number)
        held = hcb.capsule(jax.jit(program), folder)
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            failing(lambda held=held: held(jnp.array([4.0, 5.0, 6.0])), on_error="abort")
        (capsule,) = capsules(folder)
        np.testing.assert_array_equal(capsule.array(capsule.inputs[0]), [4, 5, 6])


def step_with_nan(params: Any, batch: Any) -> Any:
    def loss(params: Any) -> Any:
        return jnp.mean((batch["x"] @ params["w"]) ** 2)

    value, gradient = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), value


@native
def test_a_nan_that_came_in_with_the_data_is_seen_again(tmp_path: Path) -> None:
    held = hcb.capsule(jax.jit(step_with_nan, donate_argnums=0), tmp_path, nonfinite=True)
    x = np.ones((4, 3), np.float32)

    def run() -> None:
        params = {"w": jnp.ones(3)}
        for n in range(4):
            batch = x.copy()
            batch[2, 1] = np.nan if n == 2 else 1
            params, _ = held(params, {"x": batch})

    failing(run)
    capsule = capsules(tmp_path)[0]
    assert capsule.failure.kind == "nonfinite"
    assert [entry.path for entry in capsule.inputs] == ["params/w", "batch/x"]
    assert np.isnan(capsule.array(capsule.inputs[1])[2, 1])
    assert reproduce(capsule).is_exact


@native
def test_a_wrapper_in_a_jitted_function_diagnoses_the_program_around_it(tmp_path: Path) -> None:
    @jax.jit
    def step(x: Any) -> Any:
        return jnp.log(hcb.capsule(jnp.sin, tmp_path, nonfinite=True)(x) - 2)

    with pytest.raises(hcb.TapFunctionException) as caught, hcb.outfeed_receiver():
        step(jnp.ones(3))
    assert "log: 3 NaN and 0 infinite values" in str(caught.value)


@native
def test_keys_that_a_program_closes_over_are_converted_before_a_receiver_thread_needs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A thread that runs programs of JAX while all threads of the device wait for it would wait without end.
    key, threads, key_data = jax.random.key(3), [], jax.random.key_data

    def noted(keys: Any) -> Any:
        if not isinstance(keys, jax.core.Tracer):
            threads.append(threading.current_thread())
        return key_data(keys)

    monkeypatch.setattr(jax.random, "key_data", noted)
    step = jax.jit(lambda x: jnp.log(x) + jax.random.normal(key, (2,)))
    failing(lambda: hcb.capsule(step, tmp_path, nonfinite=True)(jnp.array([1.0, -1.0])))
    (capsule,) = capsules(tmp_path)
    assert capsule.failure.text.startswith("log"), capsule.failure.text
    assert reproduce(capsule).is_exact
    assert threads == [threading.main_thread()]


@native
def test_functions_that_were_compiled_ahead_of_time_say_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = jax.jit(checked).lower(jnp.ones(3)).compile()
    with hcb.capsule(tmp_path):
        failing(lambda: before(jnp.full(3, 9.0)))
    assert not capsules(tmp_path)
    assert "hcb.capsule saw no program of a jitted function in the block" in caplog.text
    assert "compiled ahead of time" in caplog.text
    with pytest.raises(TypeError, match=r"hcb.capsule got a function that was compiled ahead of time"):
        hcb.capsule(before, tmp_path)
    with hcb.capsule(tmp_path):
        held = jax.jit(lambda x: checked(x)).lower(jnp.ones(3)).compile()
    failing(lambda: held(jnp.full(3, 9.0)))
    (capsule,) = capsules(tmp_path)
    assert reproduce(capsule).is_exact


@native
def test_exported_programs(tmp_path: Path) -> None:
    def module() -> str:
        exported = jax.export.export(jax.jit(checked), disabled_checks=hcb.export_checks())(jnp.ones(3))
        text = exported.mlir_module()
        return "\n".join(
            line.partition(" loc(")[0] for line in text.splitlines() if not line.startswith("#loc")
        )

    plain = module()
    with hcb.capsule(tmp_path, nonfinite=True):
        assert module() == plain, "what is exported in the block is the program as it is"
    exported = jax.export.export(jax.jit(jnp.log))(jnp.ones(3))
    with hcb.capsule(tmp_path, nonfinite=True):
        failing(lambda: jax.jit(lambda x: exported.call(x) * 2)(-jnp.ones(3)))
    (capsule,) = capsules(tmp_path)
    np.testing.assert_array_equal(capsule.array(capsule.inputs[0]), -np.ones(3))
    assert reproduce(capsule).is_exact


LARGE = """
import sys
import jax, jax.numpy as jnp, numpy as np
import hostcallback as hcb
from hostcallback.receiver import Capsule
from pathlib import Path

def step(x, many):
    hcb.check(x[0] < 1, "x is {}", x[0])
    return x + sum(many)[0]

held = hcb.capsule(jax.jit(step, donate_argnums=0), sys.argv[1])
x = np.arange(1 << 20, dtype=np.float32)
x[0] = 3
try:
    with hcb.outfeed_receiver():
        held(x, [np.full(5, i, np.float32) for i in range(300)])
except hcb.TapFunctionException:
    pass
(path,) = Path(sys.argv[1]).glob("*.hcb")
capsule = Capsule(path)
print(sum(not entry.left_out for entry in capsule.inputs), capsule.left_out[:1])
assert all(entry.left_out or np.isfinite(capsule.array(entry)).all() for entry in capsule.inputs)
"""


@native
@pytest.mark.slow
@pytest.mark.parametrize(
    ("ring", "budget", "arrives"), [("1048576", "65536", True), ("16384", "1048576", False)]
)
def test_inputs_that_are_larger_than_the_ring_or_its_budget(
    ring: str, budget: str, arrives: bool, tmp_path: Path
) -> None:
    sizes = {"HOSTCALLBACK_RING_BYTES": ring, "HOSTCALLBACK_BLOCK_BUDGET_BYTES": budget}
    printed = python_output("-c", LARGE, tmp_path, PYTHONPATH=python_path(), **sizes)
    count = int(printed.split()[0])
    assert (count == 301) == arrives, printed


@native
def test_as_many_inputs_are_kept_as_their_descriptions_fit_into_half_of_the_ring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOSTCALLBACK_RING_BYTES", "512")
    held = hcb.capsule(jax.jit(lambda x, y, z: checked(x) + y + z), tmp_path)
    failing(lambda: held(np.full(3, 9.0, np.float32), np.float32(1), np.float32(2)))
    (capsule,) = capsules(tmp_path)
    # A description has 128 bytes; the smallest inputs are kept.
    assert [bool(entry.left_out) for entry in capsule.inputs] == [True, False, False]


@native
def test_a_capsule_whose_programs_take_long_is_no_stalled_tap(tmp_path: Path) -> None:
    def step(x: Any) -> Any:
        hcb.check(x[0] < 1, "x is {}", x[0])
        for _ in range(20):
            x = jnp.sin(x)
        return x

    held = hcb.capsule(jax.jit(step), tmp_path)
    failing(lambda: held(jnp.full(4, 3.0)), timeout_sec=0.01)
    (capsule,) = capsules(tmp_path)
    assert reproduce(capsule).is_exact


@native
def test_constants_and_keys(tmp_path: Path) -> None:
    table = jnp.arange(5.0)

    def step(x: Any, key: Any) -> Any:
        noisy = x + table + jax.random.normal(key, (5,))
        hcb.check(noisy.max() < 3, "it is {}", noisy.max())
        return jax.random.split(key), noisy

    key = jax.random.key(3)
    failing(lambda: hcb.capsule(jax.jit(step), tmp_path)(jnp.ones(5), key))
    (capsule,) = capsules(tmp_path)
    found = {entry.path: capsule.array(entry) for entry in capsule.inputs}
    np.testing.assert_array_equal(found["key"], jax.random.key_data(key))
    if "constant 0" in found:  # from 0.12 on JAX may have it in the program
        np.testing.assert_array_equal(found["constant 0"], table)
    assert reproduce(capsule).is_exact

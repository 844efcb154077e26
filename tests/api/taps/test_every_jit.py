"""Taps stay on JAX's fast dispatch path under every jit, and change nothing else about a jitted function."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import hostcallback as hcb
from hostcallback.primitives import effects
from recorder import Recorder
from threads import in_threads


def python_frames_of(call: Any) -> list[str]:
    """The Python functions that run during a call, by module."""
    frames: list[str] = []

    def profile(frame: Any, event: str, arg: Any) -> None:
        if event == "call":
            frames.append(f"{frame.f_globals.get('__name__')}.{frame.f_code.co_name}")

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return frames


def calls_of_the_python_executor(call: Any) -> bool:
    return "jax._src.interpreters.pxla.__call__" in python_frames_of(call)


def ways_to_compile(f: Any) -> dict[str, Any]:
    mesh = Mesh(jax.devices(), ("i",))
    spec = PartitionSpec("i")
    x = jnp.ones(4)
    donating = jax.jit(f, donate_argnums=0)
    ways = {
        "jax.jit": jax.jit(f),
        "hcb.jit": hcb.jit(f),
        "donated": lambda x: donating(x + 1),
        "ahead of time": jax.jit(f).lower(x).compile(),
        "explicit shardings": jax.jit(f, in_shardings=NamedSharding(mesh, spec)),
        "nested": jax.jit(lambda x: jax.jit(f)(x) * 2),
        "grad": jax.jit(jax.grad(lambda x: f(x).sum())),
        "vmap": jax.jit(jax.vmap(f)),
        "shard_map": jax.jit(jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec)),
    }
    if jax.__version_info__ >= (0, 9):  # before, pmap is not a jit and lowers its programs itself
        ways["pmap"] = jax.pmap(f)
    return ways


@pytest.mark.native_only  # JAX dispatches programs with Python callbacks from Python
@pytest.mark.parametrize("way", sorted(ways_to_compile(lambda x: x)))
def test_a_tapped_call_stays_on_the_cpp_dispatch_path(way: str, rec: Recorder) -> None:
    call = ways_to_compile(lambda x: hcb.id_tap(rec, x) * 0.5)[way]
    x = jnp.ones(4)
    for _ in range(3):
        call(x)
    hcb.barrier_wait()
    delivered = len(rec)
    assert not calls_of_the_python_executor(lambda: call(x))
    hcb.barrier_wait()
    assert len(rec) == delivered + delivered // 3


@pytest.mark.native_only
def test_an_effect_of_jaxs_takes_a_call_off_the_cpp_dispatch_path() -> None:
    # So that the test above can fail.
    call = jax.jit(lambda x: (jax.debug.callback(lambda v: None, x), x * 0.5)[1])
    for _ in range(3):
        call(1.0)
    assert calls_of_the_python_executor(lambda: call(1.0))


def test_a_program_without_taps_is_lowered_as_it_is() -> None:
    untapped = jax.make_jaxpr(lambda x: x + 1)(1.0)
    tapped = jax.make_jaxpr(lambda x: hcb.id_tap(print, x + 1))(1.0)
    assert effects.rewrite(untapped, "jit(f)", (False,), (None,), 1) is untapped
    rewritten = effects.rewrite(tapped, "jit(f)", (False,), (None,), 1)
    assert (rewritten is not tapped) == effects.installed  # HOSTCALLBACK_FAST_DISPATCH=0 leaves it


def test_it_is_not_traced_again_and_keeps_name_and_docstring(rec: Recorder) -> None:
    traces = 0

    @jax.jit
    def step(x: Any) -> Any:
        """Steps."""
        nonlocal traces
        traces += 1
        return hcb.id_tap(rec, x) + 1

    for _ in range(5):
        step(1.0)
    step(jnp.ones(3))
    assert traces == 2
    assert (step.__name__, step.__doc__) == ("step", "Steps.")
    hcb.barrier_wait()
    assert len(rec) == 6


def test_static_arguments_by_position_and_by_name(rec: Recorder) -> None:
    class Mode:
        def __init__(self, scale: float) -> None:
            self.scale = scale

    @partial(jax.jit, static_argnums=0, static_argnames=("repeat", "label"))
    def f(mode: Mode, x: Any, *, repeat: int, label: tuple[str, ...]) -> Any:
        for i in range(repeat):
            hcb.id_tap(rec, x * mode.scale, i=i, label=label)
        return x

    mode = Mode(2.0)
    f(mode, 3.0, repeat=2, label=("a",))
    f(mode, 4.0, repeat=2, label=("a",))
    f(Mode(10.0), x=1.0, repeat=1, label=("b", "c"))
    hcb.barrier_wait()
    assert rec.floats() == [6.0, 6.0, 8.0, 8.0, 10.0]
    assert rec.kwargs[-1] == {"i": 0, "label": ("b", "c")}


def test_the_decorator_form_with_arguments_and_methods(rec: Recorder) -> None:
    class Model:
        @partial(jax.jit, static_argnums=0)
        def __call__(self, x: Any) -> Any:
            return hcb.id_tap(rec, x * 2)

    assert float(Model()(4.0)) == 8.0

    @hcb.jit(donate_argnums=0)
    def g(x: Any) -> Any:
        return hcb.id_tap(rec, x + 1)

    assert float(g(jnp.float32(1.0))) == 2.0
    hcb.barrier_wait()
    assert rec.floats() == [8.0, 2.0]


def test_closed_over_arrays_and_pytrees(rec: Recorder) -> None:
    weights = jnp.arange(1000.0)
    table = np.arange(3.0)

    @jax.jit
    def f(tree: Any) -> Any:
        hcb.id_tap(rec, (weights[tree["i"]], jnp.asarray(table)[tree["i"]]))
        return {"same": tree["x"], "new": tree["x"] + weights.sum(), "none": None, "py": 3}

    x = jnp.ones(4)
    out = f({"i": 2, "x": x})
    hcb.barrier_wait()
    assert [float(v) for v in rec.values[0]] == [2.0, 2.0]
    np.testing.assert_array_equal(out["same"], x)
    assert out["none"] is None
    assert int(out["py"]) == 3


def test_out_shardings_and_in_shardings(rec: Recorder) -> None:
    mesh = Mesh(jax.devices(), ("i",))
    spec = PartitionSpec("i")
    sharded = NamedSharding(mesh, spec)
    inner = jax.shard_map(lambda x: hcb.id_tap(rec, x), mesh=mesh, in_specs=spec, out_specs=spec)
    f = jax.jit(lambda x: (inner(x), x * 2), in_shardings=sharded, out_shardings=(sharded, None))
    tapped, doubled = f(jnp.arange(4.0))
    assert tapped.sharding.is_equivalent_to(sharded, 1)
    np.testing.assert_array_equal(doubled, [0.0, 2.0, 4.0, 6.0])
    hcb.barrier_wait()
    assert len(rec) == 4
    on_second = jax.jit(
        lambda x: hcb.id_tap(rec, x), out_shardings=jax.sharding.SingleDeviceSharding(jax.devices()[1])
    )
    on_second(jax.device_put(5.0, jax.devices()[1]))
    hcb.barrier_wait()
    assert rec.devices[-1] == jax.devices()[1]


def test_other_effects_in_the_same_program(rec: Recorder, capfd: pytest.CaptureFixture[str]) -> None:
    seen: list[int] = []

    def f(x: Any) -> Any:
        def body(c: Any, i: Any) -> Any:
            hcb.id_tap(rec, i)
            jax.debug.print("i={i}", i=i, ordered=True)
            jax.debug.callback(lambda v: seen.append(int(v)), i)
            return c + 1, None

        return lax.scan(body, x, jnp.arange(4))[0]

    assert float(jax.jit(f)(0.0)) == 4.0
    jax.effects_barrier()
    hcb.barrier_wait()
    assert [int(v) for v in rec.values] == [0, 1, 2, 3]
    assert sorted(seen) == [0, 1, 2, 3]
    assert capfd.readouterr().out.split() == ["i=0", "i=1", "i=2", "i=3"]


def test_references_are_read_and_written(rec: Recorder) -> None:
    new_ref = getattr(jax, "new_ref", None) or jax.array_ref  # 0.8 has both names, later ones the first
    counter = new_ref(jnp.int32(0))

    @jax.jit
    def f(ref: Any, x: Any) -> Any:
        ref[...] = ref[...] + 1
        return hcb.id_tap(rec, x + ref[...])

    f(counter, 10)
    f(counter, 10)
    hcb.barrier_wait()
    assert [int(v) for v in rec.values] == [11, 12]
    assert int(counter[...]) == 2


def test_ahead_of_time_compilation(rec: Recorder) -> None:
    f = jax.jit(lambda x: hcb.id_tap(rec, x) + 1)
    assert f.eval_shape(1.0).shape == ()
    assert "hostcallback_tap" in f.lower(1.0).as_text() or "callback" in f.lower(1.0).as_text()
    compiled = f.lower(jnp.float32(1.0)).compile()
    assert float(compiled(jnp.float32(2.0))) == 3.0
    assert float(f.trace(jnp.float32(1.0)).lower().compile()(jnp.float32(3.0))) == 4.0
    f.clear_cache()
    f(4.0)
    hcb.barrier_wait()
    assert rec.floats() == [2.0, 3.0, 4.0]


def test_after_clear_caches_taps_still_arrive(rec: Recorder) -> None:
    f = jax.jit(lambda x: hcb.id_tap(rec, x) + 1)
    f(1.0)
    jax.clear_caches()
    f(2.0)
    hcb.barrier_wait()
    assert rec.floats() == [1.0, 2.0]


def test_an_untapped_function_is_just_jitted() -> None:
    f = jax.jit(lambda x, y=1: {"a": x + y})
    assert float(f(1.0)["a"]) == 2.0
    assert float(f(1.0, y=5)["a"]) == 6.0
    assert float(jax.grad(lambda x: f(x)["a"])(1.0)) == 1.0


def test_an_exception_while_tracing_is_the_users_own() -> None:
    @jax.jit
    def f(x: Any) -> Any:
        if x > 0:
            return hcb.id_tap(print, x)
        return x

    with pytest.raises(jax.errors.TracerBoolConversionError):
        f(1.0)


def test_a_leaked_tracer_is_reported_by_jax() -> None:
    leaked: list[Any] = []

    @jax.jit
    def f(x: Any) -> Any:
        leaked.append(x)
        return hcb.id_tap(lambda v: None, x)

    f(1.0)
    with pytest.raises(jax.errors.UnexpectedTracerError):
        jax.jit(lambda y: hcb.id_tap(lambda v: None, y + leaked[0]))(1.0)
    hcb.barrier_wait()


def test_signatures_with_results_of_different_structure(rec: Recorder) -> None:
    @partial(jax.jit, static_argnums=1)
    def f(x: Any, kind: int) -> Any:
        if kind < 3:
            x = hcb.id_tap(rec, x)
        return [[x + 1], {"a": x + 1}, {"a": x[None] * jnp.ones(5000), "b": x}, None, x, {"a": x}][kind]

    for kind in [0, 1, 2, 3, 4, 5, 0, 1, 2, 5, 4, 3, 2, 1, 0]:
        f(jnp.float32(kind), kind)
    hcb.barrier_wait()
    assert rec.floats() == [0.0, 1.0, 2.0, 0.0, 1.0, 2.0, 2.0, 1.0, 0.0]


def test_an_input_that_is_returned_is_the_programs_own_result(rec: Recorder) -> None:
    x = jnp.arange(4.0)
    same, tapped = jax.jit(lambda x: (x, hcb.id_tap(rec, x)))(x)
    plain, _ = jax.jit(lambda x: (x, x + 0))(x)
    hcb.barrier_wait()
    np.testing.assert_array_equal(same, tapped)
    assert (same.unsafe_buffer_pointer() == x.unsafe_buffer_pointer()) == (
        plain.unsafe_buffer_pointer() == x.unsafe_buffer_pointer()
    )


def test_an_unused_argument_is_dropped_and_a_donated_one_is_reused(rec: Recorder) -> None:
    def f(x: Any, unused: Any) -> Any:
        return hcb.id_tap(rec, x) + 1

    lowered = jax.jit(f, donate_argnums=0).lower(jnp.ones(8), jnp.ones(3))
    text = lowered.as_text()
    assert "tensor<3xf32>" not in text
    assert "tf.aliasing_output" in text
    x = jnp.ones(8)
    jax.jit(f, donate_argnums=0)(x, jnp.ones(3))
    assert x.is_deleted()
    hcb.barrier_wait()
    assert len(rec) == 1


def test_names_of_arguments_and_results_stay_in_the_program() -> None:
    def f(weights: Any) -> Any:
        return {"loss": hcb.id_tap(print, weights["w"]) * 2}

    def names(f: Any) -> list[str]:
        text = jax.jit(f).lower({"w": 1.0}).as_text(debug_info=True)
        return [
            name
            for name in ("weights['w']", "result['loss']")
            if name in text or name.replace("'", "\\'") in text
        ]

    assert names(f) == names(lambda weights: {"loss": weights["w"] * 2}) != []


def test_threads_that_compile_and_call_one_function_at_once(rec: Recorder) -> None:
    f = jax.jit(lambda x: hcb.id_tap(rec, x) + 1)

    def work(i: int) -> None:
        for k in range(50):
            f(jnp.full(1 + k % 5, float(i)))

    in_threads(work, 4)
    hcb.barrier_wait()
    assert len(rec) == 200


def test_jax_jit_may_be_replaced_by_ours(monkeypatch: pytest.MonkeyPatch, rec: Recorder) -> None:
    monkeypatch.setattr(jax, "jit", hcb.jit)
    jax.jit(lambda x: hcb.id_tap(rec, x))(1.0)
    hcb.barrier_wait()
    assert rec.floats() == [1.0]

"""`hcb.call` returns the host function's result to the device: structure, shapes, dtypes, order, devices."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import hostcallback as hcb
from hostcallback import _jax_compat as compat
from hostcallback.receiver.runtime.runtime import runtime
from recorder import Recorder
from threads import in_another_thread, in_threads
from transforming import Jit

F32 = jax.ShapeDtypeStruct((), np.float32)


def array(*shape: int, dtype: Any = np.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def test_the_result_arrives_on_the_device(jit: Jit) -> None:
    f = jit(lambda x: 2 * hcb.call(np.cumsum, x + 1, result_shape=x))
    np.testing.assert_array_equal(f(jnp.arange(4.0)), [2, 6, 12, 20])
    assert isinstance(f(jnp.arange(4.0)), jax.Array)


def test_pytrees_go_and_come(jit: Jit) -> None:
    def host(arg: Any, scale: float) -> Any:
        assert isinstance(arg["x"], np.ndarray)
        assert arg["name"] == "a text"
        assert arg["none"] is None
        return {"sum": arg["x"].sum() * scale, "pair": (arg["x"], [arg["n"]]), "nothing": None}

    def f(x: Any, n: Any) -> Any:
        arg = {"x": x, "n": n, "name": "a text", "none": None}
        result = {"sum": F32, "pair": (x, [n]), "nothing": None}
        return hcb.call(host, arg, result_shape=result, scale=10)

    out = jit(f)(jnp.arange(3.0), jnp.int32(7))
    assert float(out["sum"]) == 30
    np.testing.assert_array_equal(out["pair"][0], [0, 1, 2])
    assert out["pair"][1][0].dtype == np.int32
    assert int(out["pair"][1][0]) == 7
    assert out["nothing"] is None


@pytest.mark.parametrize("result_shape", [None, (), {}, []], ids=repr)
def test_a_result_without_arrays(jit: Jit, result_shape: Any) -> None:
    seen: list[float] = []

    def host(x: Any) -> Any:
        seen.append(float(x))
        return result_shape

    out = jit(lambda x: (hcb.call(host, x, result_shape=result_shape), x + 1))(jnp.float32(1))
    hcb.barrier_wait()
    assert out[0] == result_shape
    assert seen == [1.0]


@pytest.mark.parametrize(
    ("arg", "shape"),
    [((), (2,)), (np.ones((2, 0), np.float32), (3,)), (np.float32(1), (0, 4)), (np.float32(1), ())],
    ids=["no argument", "empty argument", "empty result", "scalars"],
)
def test_arguments_and_results_without_elements(jit: Jit, arg: Any, shape: tuple[int, ...]) -> None:
    out = jit(lambda x: hcb.call(lambda x: np.ones(shape, np.float32), x, result_shape=array(*shape)))(arg)
    np.testing.assert_array_equal(out, np.ones(shape))


NARROW_DTYPES = [
    "bool",
    "int8",
    "int16",
    "int32",
    "uint8",
    "uint16",
    "uint32",
    "float16",
    "float32",
    "complex64",
    "bfloat16",
    "float8_e5m2",
    "float8_e4m3fn",
    "int4",
    "uint4",
    "int2",
    "uint2",
    "float4_e2m1fn",
]


def values_of(name: str, shape: tuple[int, ...]) -> Any:
    dtype = np.dtype(getattr(ml_dtypes, name, None) or name)
    numbers = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    if name == "bool":
        return numbers % 3 == 0
    return (numbers % 2 if "float" in name else numbers % 4 - 2 * (name[0] == "i")).astype(dtype)


@pytest.mark.slow_variants(every=6)
@pytest.mark.parametrize("shape", [(), (5,), (3, 7)], ids=str)
@pytest.mark.parametrize("name", NARROW_DTYPES)
def test_every_dtype_arrives_unchanged(name: str, shape: tuple[int, ...]) -> None:
    value = values_of(name, shape)

    def host(x: Any) -> Any:
        np.testing.assert_array_equal(x.astype(complex), np.flip(value).astype(complex))
        assert x.dtype == value.dtype
        return np.flip(x)

    # Reversed on the device and used there, so that XLA's own code packs and unpacks it.
    out = hcb.jit(lambda x: jnp.flip(hcb.call(host, jnp.flip(x), result_shape=x)))(jnp.asarray(value))
    assert out.dtype == value.dtype
    np.testing.assert_array_equal(np.asarray(out).astype(complex), np.flip(value).astype(complex))


@pytest.mark.parametrize("name", ["int64", "uint64", "float64", "complex128"])
def test_wide_dtypes_go_and_come_where_they_are_enabled(name: str) -> None:
    enable: Any = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
    value = (np.arange(5) + 2**40).astype(name)
    with enable(True):
        out = hcb.jit(lambda x: hcb.call(lambda x: x + 1, x, result_shape=x))(jnp.asarray(value))
        assert out.dtype == name
        np.testing.assert_array_equal(np.asarray(out), value + 1)


def test_without_wide_dtypes_results_become_narrow_as_everywhere_in_jax() -> None:
    wide = {"float64": 1.5, "int64": 3, "uint64": 3, "complex128": 1 + 2j}
    shapes = {name: array(2, dtype=name) for name in wide}
    out = hcb.call(lambda _: {n: np.full(2, v, n) for n, v in wide.items()}, 0, result_shape=shapes)
    assert {name: str(leaf.dtype) for name, leaf in out.items()} == {
        "float64": "float32",
        "int64": "int32",
        "uint64": "uint32",
        "complex128": "complex64",
    }
    assert all((out[name] == wide[name]).all() for name in wide)


def test_numbers_and_other_arrays_are_taken_as_they_are_meant() -> None:
    result_shape = (F32, jnp.bfloat16(0), 0, True, 1j, array(3), array(2, dtype=np.int32))
    returned = (1, 2.5, 7, False, 2, jnp.arange(3.0), np.array([1, 2], ">i4"))
    out = hcb.call(lambda _: returned, 0, result_shape=result_shape)
    assert [str(leaf.dtype) for leaf in out] == [
        "float32", "bfloat16", "int32", "bool", "complex64", "float32", "int32",
    ]  # fmt: skip
    assert [np.asarray(leaf).tolist() for leaf in out] == [1, 2.5, 7, False, 2, [0, 1, 2], [1, 2]]


def test_results_may_have_any_memory_layout() -> None:
    whole = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    views = (whole.T, whole[:, ::2], np.broadcast_to(np.float32(5), (3, 3)), np.asfortranarray(whole))
    out = hcb.call(lambda _: views, 0, result_shape=views)
    for got, expected in zip(out, views, strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.slow
def test_arrays_of_64_mib() -> None:
    x = jnp.arange(16 << 20, dtype=jnp.float32)
    f = jax.jit(lambda x: hcb.call(lambda x: x * 2, x, result_shape=x)[-3:])
    for _ in range(3):
        np.testing.assert_array_equal(f(x), 2 * np.asarray(x[-3:]))


def test_a_hundred_arrays() -> None:
    arrays = [jnp.full(i % 7, i, jnp.int16) for i in range(100)]
    out = jax.jit(lambda xs: hcb.call(lambda xs: [x + 1 for x in xs], xs, result_shape=xs))(arrays)
    for x, y in zip(arrays, out, strict=True):
        np.testing.assert_array_equal(y, x + 1)


def test_the_host_function_owns_its_arguments() -> None:
    kept: list[Any] = []

    def host(x: Any) -> Any:
        kept.append(x)
        x += 1
        return x

    f = hcb.jit(lambda x: hcb.call(host, x, result_shape=x))
    outs = [f(jnp.full(n, float(n))) for n in (1, 1000, 100_000)]
    for n, x, out in zip((1, 1000, 100_000), kept, outs, strict=True):
        assert x.shape == (n,)
        assert (x == n + 1).all()
        assert (out == n + 1).all()


def test_the_host_function_gets_device_and_transforms_if_it_names_them(jit: Jit) -> None:
    seen: list[Any] = []

    def host(x: Any, device: Any, transforms: Any, tag: str) -> Any:
        seen.append((device, transforms, tag))
        return x

    device = jax.devices()[2]
    jit(lambda x: hcb.call(host, x, result_shape=x, tag="mine"))(jax.device_put(1.0, device))
    hcb.barrier_wait()
    assert seen == [(device, (), "mine")]


def test_a_call_fires_in_every_step_though_its_result_is_unused() -> None:
    seen: list[int] = []

    def step(i: Any, x: Any) -> Any:
        hcb.call(lambda i: seen.append(int(i)), i, result_shape=None)
        return x + 1

    assert float(jax.jit(lambda x: lax.fori_loop(0, 50, step, x))(jnp.float32(0))) == 50
    hcb.barrier_wait()
    assert seen == list(range(50))


def test_calls_and_taps_keep_the_programs_order() -> None:
    log: list[Any] = []

    def host(i: Any) -> Any:
        log.append(("call", int(i)))
        return i

    def step(x: Any, i: Any) -> Any:
        hcb.id_tap(lambda i: log.append(("before", int(i))), i)
        x = x + hcb.call(host, i, result_shape=i)
        hcb.id_tap(lambda i: log.append(("after", int(i))), i)
        return x, None

    # A program of more than eight thunks, which XLA runs concurrently where no dependency orders them.
    out = jax.jit(lambda x: lax.scan(step, jnp.sin(x).astype(int), jnp.arange(40))[0])(jnp.float32(0))
    hcb.barrier_wait()
    assert int(out) == 780
    assert log == [(what, i) for i in range(40) for what in ("before", "call", "after")]


def test_an_unordered_call_still_returns_its_result() -> None:
    @hcb.jit
    def f(x: Any) -> Any:
        calls = [hcb.call(lambda x, i=i: x + i, x, result_shape=x, ordered=False) for i in range(10)]
        return sum(calls)

    assert float(f(jnp.float32(1))) == 55


def test_two_thousand_calls_in_a_scan() -> None:
    f = jax.jit(
        lambda x: lax.scan(lambda c, _: (hcb.call(lambda c: c + 1, c, result_shape=c), None), x, None, 2000)[
            0
        ]
    )
    for _ in range(3):
        assert float(f(jnp.float32(0))) == 2000


def test_each_device_calls_with_its_part() -> None:
    seen: dict[int, Any] = {}

    def host(x: Any, device: Any) -> Any:
        seen[device.id] = x
        return x * device.id

    mesh = Mesh(np.array(jax.devices()), ("i",))
    spec = PartitionSpec("i")
    f = jax.shard_map(lambda x: hcb.call(host, x, result_shape=x), mesh=mesh, in_specs=spec, out_specs=spec)
    out = jax.jit(f)(jnp.arange(8.0))
    np.testing.assert_array_equal(out, np.arange(8.0) * np.repeat(np.arange(4), 2))
    assert {i: x.tolist() for i, x in seen.items()} == {i: [2 * i, 2 * i + 1] for i in range(4)}


def test_a_result_varies_over_the_mesh_as_the_argument_does() -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("i", "j"))

    def loop(x: Any) -> Any:  # a carry must keep its type
        return lax.fori_loop(0, 3, lambda _, c: hcb.call(lambda c: c + 1, c, result_shape=c), x)

    def f(x: Any, y: Any, z: Any) -> Any:
        return loop(x), loop(y), loop(z)

    specs = (PartitionSpec("i", "j"), PartitionSpec("i"), PartitionSpec())
    g = jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=specs)
    for out in hcb.jit(g)(jnp.ones((2, 2)), jnp.ones(2), jnp.ones(())):
        assert (out == 4).all()


def test_pmap_calls_on_every_device() -> None:
    out = jax.pmap(lambda x: hcb.call(lambda x, device: x + device.id, x, result_shape=x))(jnp.zeros(4))
    np.testing.assert_array_equal(out, np.arange(4.0))


def test_calls_with_collectives_between_them() -> None:
    mesh = Mesh(np.array(jax.devices()), ("i",))

    def step(c: Any, _: Any) -> Any:
        c = hcb.call(lambda c: c + 1, c, result_shape=c)
        return lax.pmean(c, "i") + 0 * c, None

    f = jax.shard_map(
        lambda x: lax.scan(step, x, None, 20)[0],
        mesh=mesh, in_specs=PartitionSpec("i"), out_specs=PartitionSpec("i"),
    )  # fmt: skip
    np.testing.assert_allclose(hcb.jit(f)(jnp.arange(4.0)), 21.5)


def test_a_partitioned_program_is_refused_with_the_line_and_the_cure() -> None:
    mesh = Mesh(np.array(jax.devices()), ("i",))
    x = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, PartitionSpec("i")))
    with pytest.raises(
        NotImplementedError, match=r"test_call\.py:\d+ .*partitions over 4 devices.*jax\.shard_map"
    ):
        hcb.jit(lambda x: hcb.call(np.cumsum, x, result_shape=x))(x)


def test_four_threads_mix_nothing() -> None:
    f = jax.jit(
        lambda x: lax.scan(lambda c, _: (hcb.call(lambda c: c + 1, c, result_shape=c), None), x, None, 100)[0]
    )
    f(jnp.zeros(3))
    found: dict[int, list[float]] = {}

    def work(thread: int) -> None:
        found[thread] = [float(f(jnp.full(3, 1000.0 * thread + i))[0]) for i in range(10)]

    in_threads(work, 4)
    assert found == {t: [1000.0 * t + i + 100 for i in range(10)] for t in range(4)}


def test_two_calls_of_one_function_share_a_consumer_and_a_program_that_captures_more_does_not() -> None:
    def make(n: int) -> Callable[[Any], Any]:
        return hcb.jit(lambda x: hcb.call(lambda x: x + n, x, result_shape=x))

    first, second = make(1), make(10)
    assert (float(first(1.0)), float(second(1.0)), float(first(2.0))) == (2, 11, 3)


def test_a_barrier_covers_the_taps_of_host_functions(rec: Recorder) -> None:
    inner = hcb.jit(lambda x: hcb.id_tap(rec, x))

    def host(x: Any) -> Any:
        inner(x)
        return x

    hcb.jit(lambda x: hcb.call(host, x, result_shape=x))(jnp.float32(3))
    hcb.barrier_wait()
    assert rec.floats() == [3.0]


def test_calls_are_in_the_receivers_statistics() -> None:
    f = hcb.jit(lambda x: hcb.call(lambda x: x, x, result_shape=x))
    began = time.perf_counter()
    with hcb.outfeed_receiver() as receiver:
        for _ in range(5):
            f(jnp.float32(1))
    (row,) = [row for row in receiver.stats if row.delivered]
    assert (row.device, row.delivered, row.delivered_bytes, row.failed) == ("cpu:0", 5, 20, 0)
    assert 0 < row.tap_sec < time.perf_counter() - began


@pytest.mark.parametrize("policy", ["block", "drop_newest", "sample"])
def test_a_call_is_never_dropped_however_full_the_queue_is(policy: str) -> None:
    gate = threading.Event()
    log: list[Any] = []

    def slow(x: Any) -> None:
        gate.wait(60)
        log.append("tap")

    def host(x: Any) -> Any:
        log.append("call")
        return x + 1

    taps = hcb.jit(lambda x: lax.fori_loop(0, 90, lambda i, c: hcb.id_tap(slow, c), x)[0])
    call = hcb.jit(lambda x: hcb.call(host, x, result_shape=x)[0])
    results: list[float] = []
    with hcb.outfeed_receiver(back_pressure=policy) as receiver:
        programs = [
            threading.Thread(target=lambda: taps(jnp.ones(1 << 18)).block_until_ready()),
            threading.Thread(target=lambda: results.append(float(call(jnp.ones(1 << 18))))),
        ]
        programs[0].start()
        if policy == "block":  # it waits for room, and the call behind it
            while not any(r.source.counters().waiting_producers for r in runtime.receivers(["cpu:0"])):
                pass
        else:
            programs[0].join(60)
        programs[1].start()
        gate.set()
        for program in programs:
            program.join(60)
    assert results == [2.0]
    assert log.count("call") == 1
    (row,) = [row for row in receiver.stats if row.delivered]
    assert (row.dropped > 0) == (policy != "block")
    assert row.dropped + row.delivered == 91


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (("no function", 1), TypeError, "hcb.call takes a function"),
        (
            (abs, 1, {"vmap_method": "parallel"}),
            ValueError,
            "vmap_method='parallel', expected one of 'sequential'",
        ),
        ((abs, 1, {"result_shape": "a text"}), TypeError, "result_shape is 'a text', expected"),
        ((abs, 1, {"result_shape": {"x": object()}}), TypeError, r"result_shape\['x'\] is <object"),
        ((abs, np.array(["text"])), TypeError, "dtype <U4"),
        ((abs, 1, {"name": 3}), TypeError, "a tap's name is a text"),
    ],
    ids=["function", "vmap_method", "result_shape", "result leaf", "argument", "name"],
)
def test_wrong_arguments_are_named_with_the_cure(arguments: Any, error: type[Exception], text: str) -> None:
    host_func, arg, *more = arguments
    options = {"result_shape": F32, **(more[0] if more else {})}
    with pytest.raises(error, match=text):
        hcb.call(host_func, arg, **options)


def test_a_traced_keyword_argument_is_named() -> None:
    with pytest.raises(TypeError, match="the keyword argument 'step' of cumsum is a traced value"):
        jax.jit(lambda x: hcb.call(np.cumsum, x, result_shape=x, step=x))(jnp.ones(3))


def test_export_is_refused_with_the_line() -> None:
    with pytest.raises(NotImplementedError, match=r"test_call\.py:\d+ .*is exported"):
        jax.export.export(jax.jit(lambda x: hcb.call(np.cumsum, x, result_shape=x)))(jnp.ones(3))


def test_a_program_that_goes_lets_its_host_function_go() -> None:
    import gc
    import weakref

    class Held:
        def __call__(self, x: Any) -> Any:
            return x

    held = Held()
    gone = weakref.ref(held)
    f = hcb.jit(functools.partial(lambda h, x: hcb.call(h, x, result_shape=x), held))
    f(jnp.float32(1))
    del f, held
    jax.clear_caches()
    hcb.barrier_wait()
    gc.collect()
    assert gone() is None


def test_after_a_call_taps_are_traced_and_lowered_without_a_look_at_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: list[Any] = []
    ordered_tokens = compat.ordered_tokens

    def look(tokens: Any, effect: Any) -> Any:
        looks.append(effect)
        return ordered_tokens(tokens, effect)

    def in_a_new_thread() -> None:  # no program with an effect has left its token in it
        f = jax.jit(lambda x: hcb.id_tap(lambda value: None, x))
        monkeypatch.setattr(compat, "ordered_tokens", look)
        f.lower(jnp.float32(1))

    assert float(jax.jit(lambda x: hcb.call(lambda v: v + 1, x, result_shape=x))(jnp.float32(1))) == 2
    in_another_thread(in_a_new_thread)
    assert looks == []


@pytest.mark.native_only
def test_a_call_behind_a_tap_does_not_wait_for_the_reader_to_rest() -> None:
    def step(x: Any, _: Any) -> Any:
        return hcb.call(lambda v: v, hcb.id_tap(lambda v: None, x), result_shape=x) + 1, None

    program = hcb.jit(lambda x: lax.scan(step, x, None, length=200)[0])
    assert float(program(jnp.float32(0))) == 200
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        program(jnp.float32(0)).block_until_ready()
        times.append(time.perf_counter() - begin)
    hcb.barrier_wait()
    assert min(times) < 200 * 4e-3  # a rest would make it 10 ms a step, else it takes less than 0.1

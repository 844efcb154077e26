"""Consumer ids: the same in every process, shared by equal taps, kept as long as a program can emit to them."""

from __future__ import annotations

import gc
import textwrap
import tracemalloc
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import hostcallback as hcb
from hostcallback.receiver.runtime.runtime import runtime
from python_process import python_output
from recorder import Recorder

RETRACES = 3_000


def ids_in(program: str) -> list[str]:
    """The consumer ids in the programs that a fresh process compiles, in order."""
    prelude = """
    import functools, re, sys
    import jax, jax.numpy as jnp
    import hostcallback as hcb
    from hostcallback.receiver.wire.frame import decode_header
    def ids(f, *args):
        text = jax.jit(f).lower(*args).as_text()
        for raw in re.findall(r'prefix = dense<"0x([0-9A-F]+)">', text):
            print("id", decode_header(bytes.fromhex(raw) ).consumer_id)
    """
    printed = python_output("-c", textwrap.dedent(prelude) + textwrap.dedent(program), timeout_sec=60)
    return [line.split()[1] for line in printed.splitlines() if line.startswith("id")]


PROGRAM = """
    captured = []
    def make(n):
        return lambda v: captured.append((n, v))
    class Collector:
        def __call__(self, v): pass
        def method(self, v, tag): pass
    a, b = Collector(), Collector()
    def f(x):
        hcb.id_tap(print, x)
        hcb.id_tap(make(1), x)
        hcb.id_tap(make(2), x)
        hcb.id_tap(a, x); hcb.id_tap(b, x)
        hcb.id_tap(a.method, x, tag="t")
        hcb.id_tap(functools.partial(max, 3), x)
        hcb.id_print({"x": x, "f": jax.nn.relu}, what="loss", stream={1, 2, 3})
        return jax.vmap(lambda v: hcb.id_print(v, step=3))(x)
    ids(f, jnp.ones(3))
    ids(jax.grad(lambda x: f(x).sum()), jnp.ones(3))
"""


@pytest.mark.slow
@pytest.mark.native_only
def test_ids_are_equal_in_every_process() -> None:
    first, second = ids_in(PROGRAM), ids_in(PROGRAM)
    assert len(first) > 12
    assert first == second


@pytest.mark.slow
@pytest.mark.native_only
def test_different_taps_have_different_ids_and_equal_taps_share_one() -> None:
    ids = ids_in(
        """
        def tap(v, k): pass
        def f(x):
            for k in range(3):
                hcb.id_tap(tap, x, k=k)      # differ by kwargs
            for _ in range(2):
                hcb.id_tap(tap, x, k="same")  # equal: one place, one function, equal kwargs
            return x
        ids(f, 1.0)
        """
    )
    assert len(ids) == 5
    assert len(set(ids[:4])) == 4
    assert ids[3] == ids[4]


def test_closures_of_one_factory_are_separate_consumers() -> None:
    boxes: list[list[float]] = [[], [], []]

    def collect_into(box: list[float]) -> Any:
        return lambda v: box.append(float(v))

    for i, box in enumerate(boxes):
        tap = collect_into(box)
        hcb.jit(lambda x, tap=tap: hcb.id_tap(tap, x))(float(i))
    hcb.barrier_wait()
    assert boxes == [[0.0], [1.0], [2.0]]


@pytest.mark.slow
@pytest.mark.native_only  # most of it only traces
def test_nothing_leaks_over_thousands_of_retraces(rec: Recorder) -> None:
    def retrace(i: int) -> None:
        # A new function each time, with a tap that captures a new object: nothing can be shared.
        marker = [i]
        jax.make_jaxpr(lambda x: hcb.id_tap(lambda v: rec(v, transforms=marker, device=None), x))(1.0)

    def traced(i: int) -> None:
        marker = [i]
        hcb.jit(lambda x: hcb.id_tap(lambda v: marker.append(v), x)).lower(1.0)

    for i in range(500):
        retrace(i)
    for i in range(20):
        traced(i)
    hcb.barrier_wait()
    gc.collect()
    hcb.barrier_wait()
    known = len(runtime.registry)
    tracemalloc.start()
    before = tracemalloc.take_snapshot()
    for i in range(RETRACES):
        retrace(i)
    for i in range(50):
        traced(i)
    jax.clear_caches()
    gc.collect()
    hcb.barrier_wait()
    gc.collect()
    after = tracemalloc.take_snapshot()
    tracemalloc.stop()
    ours = [s for s in after.compare_to(before, "filename") if "hostcallback" in s.traceback[0].filename]
    grown = sum(s.size_diff for s in ours)
    # Two words a retrace remain: the number that keeps ids of captured objects from being used again is one entry
    # for all of them here.
    assert grown < 20 * RETRACES, [str(s) for s in ours]
    assert len(runtime.registry) <= known


@pytest.mark.slow
def test_retracing_equal_taps_keeps_one_consumer(rec: Recorder) -> None:
    def tap(v: Any) -> None:
        rec(v, transforms=(), device=None)

    def f(x: Any) -> Any:
        return hcb.id_tap(tap, x)

    g = hcb.jit(f)
    known: set[int] = set()
    for n in range(1, 30):
        g(jnp.ones(n))
        known.add(len(runtime.registry))
    hcb.barrier_wait()
    assert len(known) == 1
    assert len(rec) == 29


def test_messages_for_unknown_consumers_are_counted_and_the_stream_goes_on(rec: Recorder) -> None:
    def lost(v: Any) -> None:
        raise AssertionError("must not be found")

    f = hcb.jit(lambda x: hcb.id_tap(lost, x))
    g = hcb.jit(lambda x: hcb.id_tap(rec, x))
    f(0.0)
    try:
        hcb.barrier_wait()
    except hcb.TapFunctionException as first:
        assert len(first.exceptions) == 1
    (consumer_id,) = [i for i, c in runtime.registry._consumers.items() if c.name.endswith("lost")]
    consumer = runtime.registry._consumers.pop(consumer_id)
    try:
        with pytest.raises(hcb.TapFunctionException) as info, hcb.outfeed_receiver() as rx:  # noqa: PT012
            for i in range(3):
                f(float(i))
                g(float(i))
    finally:
        runtime.registry._consumers[consumer_id] = consumer
    assert rec.floats() == [0.0, 1.0, 2.0]
    assert sum(s.unknown for s in rx.stats) == 3
    (error,) = info.value.exceptions
    assert isinstance(error, hcb.UnknownConsumerError)
    assert f"{consumer_id:#018x} (3)" in str(error)
    assert "keep the jitted function alive" in str(error)
    assert "3 message(s) for unknown consumers" in rx.summary()


def test_closures_with_separate_state_are_separate_consumers() -> None:
    def make() -> Any:
        n = 0

        def tap(x: Any) -> None:
            nonlocal n
            n += 1

        return tap, lambda: n

    (first, count_first), (second, count_second) = make(), make()

    def program(x: Any) -> Any:
        for tap in (first, second, second):
            hcb.id_tap(tap, x)
        return x

    hcb.jit(program)(1.0)
    hcb.barrier_wait()
    assert (count_first(), count_second()) == (1, 2)


def test_functions_that_only_look_alike_are_separate_consumers() -> None:
    seen: list[str] = []

    def make_class(name: str) -> Any:
        class Tap:
            def __init__(self, x: Any) -> None:
                seen.append(name)

        return Tap

    def make_tagged(tag: str) -> Any:
        def tap(x: Any) -> None:
            seen.append(tap.tag)  # type: ignore[attr-defined]

        tap.tag = tag  # type: ignore[attr-defined]
        return tap

    def make_executed(tag: str) -> Any:
        namespace: dict[str, Any] = {"__name__": "made_up", "seen": seen, "tag": tag}
        exec("def tap(x):\n    seen.append(tag)", namespace)
        return namespace["tap"]

    class Text(str):
        __slots__ = ("shown",)

    def show(x: Any, text: Any) -> None:
        seen.append(text.shown)

    texts = [Text("same"), Text("same")]
    texts[0].shown, texts[1].shown = "t1", "t2"  # type: ignore[misc]

    def program(x: Any) -> Any:
        for factory in (make_class, make_tagged, make_executed):
            for name in ("a", "b"):
                hcb.id_tap(factory(name), x)
        for text in texts:
            hcb.id_tap(show, x, text=text)
        return x

    hcb.jit(program)(1.0)
    hcb.barrier_wait()
    assert seen == ["a", "b"] * 3 + ["t1", "t2"]


def test_a_bound_builtin_method_is_one_consumer() -> None:
    seen: list[Any] = []
    f = hcb.jit(lambda x: hcb.id_tap(seen.append, x))
    known = set()
    for n in range(1, 6):
        f(jnp.ones(n))
        known.add(len(runtime.registry))
    hcb.barrier_wait()
    assert len(seen) == 5
    assert len(known) == 1


@pytest.mark.slow_variants
@pytest.mark.parametrize("kind", ["hcb.jit", "jax.jit", "grad", "scan", "eager"])
def test_a_tap_function_is_freed_with_its_program(kind: str) -> None:
    class Owner:
        def tap(self, x: Any) -> None:
            pass

    def use() -> weakref.ref[Owner]:
        owner = Owner()

        def f(x: Any) -> Any:
            return hcb.id_tap(owner.tap, x)

        if kind == "scan":
            jax.jit(lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0])(1.0)
        elif kind == "grad":
            jax.jit(jax.grad(f))(1.0)
        elif kind == "eager":
            f(1.0)
        else:
            (hcb.jit if kind == "hcb.jit" else jax.jit)(f)(1.0)
        return weakref.ref(owner)

    refs = [use() for _ in range(8)]
    if kind == "eager":  # the last 32 eager taps are kept
        for i in range(32):
            hcb.id_tap(lambda v, i: None, 1.0, i=i)
    hcb.barrier_wait()
    gc.collect()
    hcb.barrier_wait()  # forgets the consumers that the collection retired
    gc.collect()
    alive = sum(ref() is not None for ref in refs)
    assert alive <= 1  # JAX itself remembers the last program or two

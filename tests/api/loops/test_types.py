"""Loops with a bar, and those that can be stopped, have the types of JAX's loops."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import hostcallback as hcb

Loop = Callable[..., Any]


def tapped(x: Any) -> Any:
    return hcb.id_tap(lambda value: None, x, tap_tangents=False)


def fori(lower: Any, upper: Any, body: Any, value: Any, *, traced: bool = False) -> Callable[[Loop], Any]:
    """A program with `fori_loop`, whose bounds are traced or not."""
    if traced:
        return lambda loop: jax.jit(lambda lower, upper: loop(lower, upper, body, value))(lower, upper)
    return lambda loop: jax.jit(lambda: loop(lower, upper, body, value))()


def adds(i: Any, c: Any) -> Any:
    return c + i


FORI: dict[str, Callable[[Loop], Any]] = {
    f"{name}, {'traced' if traced else 'known'}": fori(*arguments, traced=traced)
    for name, arguments in {
        "a narrow value": (0, 5, adds, jnp.int8(0)),
        "a narrow factor": (0, 5, lambda i, c: c + i * jnp.uint8(100), jnp.float32(0)),
        "bfloat16": (0, 5, lambda i, c: c + i * jnp.bfloat16(2), jnp.bfloat16(0)),
        "a Python number": (0, 5, adds, 0),
        "narrow bounds": (jnp.int8(1), jnp.int8(4), adds, jnp.int16(0)),
        "one narrow bound": (0, jnp.int8(4), adds, 0),
        "numpy's bounds": (np.int32(1), np.int32(4), adds, jnp.int8(0)),
        "bounds of two types": (jnp.int8(1), jnp.int32(4), adds, 0),
        "booleans": (False, True, adds, 0),
        "numbers with a fraction": (0.0, 3.0, lambda i, c: c + 1, 0),
        "a value that becomes another": (0, 3, lambda i, c: c + 1.5, 1),
        "a tapped one": (0, 3, lambda i, c: tapped(c + 1.5), 1),
    }.items()
    for traced in (False, True)
}
FORI["elements of a vmap"] = lambda loop: jax.jit(jax.vmap(lambda upper: loop(0, upper, adds, jnp.int8(0))))(
    jnp.array([3, 5])
)
FORI["eager"] = lambda loop: loop(0, 3, adds, 0)

BODY = lambda c, x: ({"a": c["a"] + 1, "b": c["b"] + x}, c["b"])  # noqa: E731
SCAN: dict[str, Callable[[Loop], Any]] = {
    "a carry that becomes another": lambda loop: jax.jit(lambda: loop(BODY, {"a": 0, "b": 0}, jnp.arange(3.0)))(),
    "a tapped one": lambda loop: jax.jit(
        lambda: loop(lambda c, x: (tapped(c + x), x), 0, jnp.arange(3.0))
    )(),
    "unrolled": lambda loop: jax.jit(lambda: loop(lambda c, x: (c + x, c), 0, jnp.arange(4.0), unroll=2))(),
}  # fmt: skip
WHILE: dict[str, Callable[[Loop], Any]] = {
    "a value that becomes another": lambda loop: jax.jit(
        lambda: loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] + 1.5), (0, 1))
    )(),
    "a tapped one": lambda loop: jax.jit(
        lambda: loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, tapped(c[1] + 1.5)), (0, 1))
    )(),
}
CASES = [
    (lax.fori_loop, hcb.fori_loop, FORI),
    (lax.scan, hcb.scan, SCAN),
    (lax.while_loop, hcb.while_loop, WHILE),
]


@pytest.fixture(autouse=True)
def _no_request() -> Iterator[None]:
    hcb.clear_stop()
    yield
    hcb.barrier_wait()
    hcb.clear_stop()


def result(program: Callable[[Loop], Any], loop: Loop) -> Any:
    """Values and types, or what is raised."""
    try:
        out = program(loop)
    except TypeError as error:
        return str(error).splitlines()[0]
    return jax.tree.map(lambda leaf: (leaf.dtype, leaf.weak_type, leaf.tolist()), out)


@pytest.mark.slow_variants(every=3)
@pytest.mark.parametrize("stop", [False, True])
@pytest.mark.parametrize(
    ("theirs", "ours", "program"),
    [
        pytest.param(theirs, ours, program, id=f"{ours.__name__}-{name}")
        for theirs, ours, programs in CASES
        for name, program in programs.items()
    ],
)
def test_a_loop_has_the_types_and_values_of_jaxs(theirs: Loop, ours: Loop, program: Any, stop: bool) -> None:
    def stoppable(*arguments: Any, **options: Any) -> Any:
        *out, count = ours(*arguments, **options, stop=True, progress=False)
        assert count.ndim == 0
        return out[0] if len(out) == 1 else tuple(out)

    def with_bar(*arguments: Any, **options: Any) -> Any:
        return ours(*arguments, **options, progress="bar")

    assert result(program, stoppable if stop else with_bar) == result(program, theirs)


def counts(i: int, c: Any) -> Any:
    """A body that needs the value of what it gets."""
    return c + 1 if c < 2 else c * 2


UNJITTED: dict[str, tuple[Callable[[], Any], Callable[..., Any]]] = {
    "fori_loop": (
        lambda: lax.fori_loop(0, 4, counts, jnp.float32(0)),
        lambda **options: hcb.fori_loop(0, 4, counts, jnp.float32(0), **options),
    ),
    "scan": (
        lambda: lax.scan(lambda c, x: (counts(0, c), c + x), 0.0, jnp.arange(4.0)),
        lambda **options: hcb.scan(lambda c, x: (counts(0, c), c + x), 0.0, jnp.arange(4.0), **options),
    ),
    "reverse": (
        lambda: lax.scan(lambda c, x: (counts(0, c), c + x), 0.0, jnp.arange(4.0), reverse=True),
        lambda **options: hcb.scan(
            lambda c, x: (counts(0, c), c + x), 0.0, jnp.arange(4.0), reverse=True, **options
        ),
    ),
    "while_loop": (
        lambda: lax.while_loop(lambda c: c < 5, lambda c: counts(0, c), 0),
        lambda **options: hcb.while_loop(lambda c: c < 5, lambda c: counts(0, c), 0, **options),
    ),
    "while_loop in a vmap": (
        lambda: jax.vmap(lambda x: lax.while_loop(lambda c: c < 5, lambda c: c + x, x))(jnp.arange(1, 4)),
        lambda **options: jax.vmap(
            lambda x: hcb.while_loop(lambda c: c < 5, lambda c: c + x, x, **options)
        )(jnp.arange(1, 4)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("options", [{"progress": "bar"}, {"stop": True}], ids=["bar", "stop"])
@pytest.mark.parametrize("loop", UNJITTED)
def test_without_jit_steps_see_their_values(loop: str, options: dict[str, Any]) -> None:
    theirs, ours = UNJITTED[loop]
    with jax.disable_jit():
        expected, found = theirs(), ours(**options)
    hcb.barrier_wait()
    if "stop" in options:
        *found, count = found
        found = found[0] if len(found) == 1 else tuple(found)
        np.testing.assert_array_equal(
            count, {"while_loop": 4, "while_loop in a vmap": [4, 2, 1]}.get(loop, 4)
        )
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize(
    "options", [{"progress": "bar"}, {"stop": True, "progress": False}], ids=["bar", "stop"]
)
def test_without_jit_a_loop_may_have_no_steps(options: dict[str, Any]) -> None:
    with jax.disable_jit():
        found = hcb.fori_loop(3, 3, counts, 7, **options)
        assert found == ((7, 0) if "stop" in options else 7)
        with pytest.raises(ValueError, match="zero-length scan is not supported in disable_jit"):
            hcb.scan(lambda c, x: (c, x), 0, jnp.zeros(0), **options)


def test_without_jit_a_loop_is_stopped_after_the_step_that_runs() -> None:
    def step(c: Any, x: Any) -> Any:
        if c == 2:
            hcb.request_stop("enough")
        return c + 1, x

    with jax.disable_jit():
        carry, ys, count = hcb.scan(step, 0, jnp.arange(1000.0), stop=True, progress=False)
        assert 3 <= carry == count < 1000
        np.testing.assert_array_equal(ys, np.where(np.arange(1000) < count, np.arange(1000), 0))
        plain = lambda c, x: (c + 1, x)  # noqa: E731
        assert hcb.scan(plain, 0, jnp.arange(3.0), stop=True, progress=False)[2] == 0
        value, count = hcb.while_loop(lambda c: c < 5, lambda c: c + 1, 0, stop=True, progress=False)
        assert (value, count) == (0, 0)


TRACED: dict[str, Callable[[Callable[[Any], Any]], Any]] = {
    "checkpoint": lambda f: jax.checkpoint(f)(2.0),
    "gradient of a checkpoint": lambda f: jax.grad(jax.checkpoint(f))(2.0),
    "eval_shape": lambda f: jax.eval_shape(f, 2.0).shape,
    "cond in a vmap": lambda f: jax.vmap(lambda x: lax.cond(x > 0, f, lambda x: x, x))(jnp.arange(3.0)),
    "while_loop in a vmap": lambda f: jax.vmap(lambda x: lax.while_loop(lambda c: c < 50, f, x))(
        jnp.arange(3.0) + 2
    ),
}


@pytest.mark.slow_variants(every=3)
@pytest.mark.parametrize(
    "options", [{"progress": "bar"}, {"stop": True, "progress": False}], ids=["bar", "stop"]
)
@pytest.mark.parametrize("how", TRACED)
@pytest.mark.parametrize("loop", ["fori_loop", "scan"])
def test_without_jit_what_jax_traces_all_the_same_is_a_program(loop: str, how: str, options: Any) -> None:
    def theirs(x: Any) -> Any:
        return lax.fori_loop(0, 4, lambda i, c: c * x, x)

    def ours(x: Any) -> Any:
        if loop == "scan":
            return hcb.scan(lambda c, _: (c * x, None), x, None, 4, **options)[0]
        found = hcb.fori_loop(0, 4, lambda i, c: c * x, x, **options)
        return found[0] if "stop" in options else found

    with jax.disable_jit():
        np.testing.assert_allclose(TRACED[how](ours), TRACED[how](theirs), rtol=1e-6)


def split_one(key: Any) -> Any:
    return jax.random.split(key)[0]


KEY_LOOPS: dict[str, Callable[..., Any]] = {
    "a scan over keys": lambda loop, key: loop.scan(
        lambda total, key: (total + jax.random.normal(key), None), 0.0, jax.random.split(key, 3)
    )[0],
    "a scan that carries a key": lambda loop, key: jax.random.normal(
        loop.scan(lambda key, x: (split_one(key), x), key, jnp.arange(3.0))[0]
    ),
    "fori_loop": lambda loop, key: jax.random.normal(
        loop.fori_loop(0, 3, lambda i, key: split_one(key), key)
    ),
    "while_loop": lambda loop, key: jax.random.normal(
        loop.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, split_one(s[1])), (0, key))[1]
    ),
    "a key that is used twice": lambda loop, key: loop.fori_loop(
        0, 3, lambda i, x: x + jax.random.normal(key) + jax.random.normal(key), 0.0
    ),
}


class OursWithBars:
    """The loops of this package, with bars."""

    scan = staticmethod(functools.partial(hcb.scan, progress="keys"))
    fori_loop = staticmethod(functools.partial(hcb.fori_loop, progress="keys"))
    while_loop = staticmethod(functools.partial(hcb.while_loop, progress="keys"))


class OursWithStop:
    """The loops of this package, which can be stopped, without the number of their steps."""

    @staticmethod
    def scan(*args: Any) -> Any:
        return hcb.scan(*args, stop=True)[:2]

    @staticmethod
    def fori_loop(*args: Any) -> Any:
        return hcb.fori_loop(*args, stop=True)[0]

    @staticmethod
    def while_loop(*args: Any) -> Any:
        return hcb.while_loop(*args, stop=True)[0]


@pytest.mark.parametrize("ours", [OursWithBars, OursWithStop])
@pytest.mark.parametrize("loop", KEY_LOOPS)
def test_keys_are_used_as_in_jaxs_loops(ours: Any, loop: str, capfd: Any) -> None:
    def outcome(loops: Any) -> Any:
        try:
            with jax.debug_key_reuse(True):
                return float(jax.jit(lambda key: KEY_LOOPS[loop](loops, key))(jax.random.key(0)))
        except jax.errors.KeyReuseError:
            return "used twice"

    expected = outcome(lax)
    assert (expected == "used twice") == (loop == "a key that is used twice")
    assert outcome(ours) == expected

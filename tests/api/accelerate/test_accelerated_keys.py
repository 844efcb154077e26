"""Callbacks under `hcb.accelerate()` get typed PRNG keys as JAX's callbacks do: as uint32 arrays of their data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

import hostcallback as hcb
from accelerated import Calls, both, ran

SCALAR = jax.ShapeDtypeStruct((), np.dtype(np.float32))
ARRAYS: list[Literal["numpy", "jax"]] = ["numpy", "jax"]


def key() -> Any:
    return jax.random.key(7)


def keys() -> Any:
    return jax.random.split(key(), 3)


def returning(calls: Calls) -> Callable[..., Any]:
    def f(key: Any) -> Any:
        calls(key)
        return np.float32(1)

    return f


CALLBACKS: dict[str, Callable[[Calls, Any], Any]] = {
    "debug.print": lambda calls, k: jax.debug.print("{} {k}", k, k=k, ordered=True),
    "debug.callback": lambda calls, k: jax.debug.callback(calls, k, {"a": (k, 2.0)}, k=k, ordered=True),
    "io_callback": lambda calls, k: io_callback(calls, None, k, x=jnp.ones(2), ordered=True),
    "io_callback with results": lambda calls, k: io_callback(returning(calls), SCALAR, k, ordered=True),
}
TRANSFORMS: dict[str, tuple[Callable[[Any], Any], Callable[[], Any]]] = {
    "jit": (lambda f: f, key),
    "array of keys": (lambda f: f, keys),
    "another implementation": (lambda f: f, lambda: jax.random.key(7, impl="rbg")),
    "scan": (lambda f: lambda ks: lax.scan(lambda c, k: (c, f(k)), 0, ks)[1], keys),
    "grad": (lambda f: lambda k: jax.grad(lambda x: [f(k), x][1])(1.0), key),
    "vmap": (jax.vmap, keys),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("callback", CALLBACKS)
def test_keys_arrive_as_from_jax(callback: str, transform: str) -> None:
    if callback.startswith("io") and transform == "vmap":
        pytest.skip("JAX has no io_callback of keys under vmap")
    transformed, argument = TRANSFORMS[transform]

    def program(calls: Calls) -> Any:
        def f(k: Any) -> Any:
            CALLBACKS[callback](calls, k)
            return 0

        return jax.jit(transformed(f))(argument())

    jaxs, ours = both(program)
    assert ours == jaxs
    assert ours.calls or ours.lines


@pytest.mark.parametrize("callback", ["debug.callback", "io_callback", "io_callback with results"])
@pytest.mark.parametrize("arrays", ARRAYS)
def test_keys_are_arrays_of_their_data(callback: str, arrays: Literal["numpy", "jax"]) -> None:
    calls = Calls()

    def f(k: Any) -> Any:
        CALLBACKS[callback](calls, k)
        return jax.random.key_data(k)

    with hcb.accelerate(arrays=arrays):
        data = jax.block_until_ready(jax.jit(jax.vmap(f))(keys()))
        hcb.barrier_wait()
    got = [args[0] for args in calls.raw]
    assert all(isinstance(each, np.ndarray if arrays == "numpy" else jax.Array) for each in got)
    assert [(each.dtype, np.asarray(each).tolist()) for each in got] == [
        (np.uint32, d.tolist()) for d in data
    ]


def test_vmap_outside_of_jit_hands_over_keys_as_jax_does() -> None:
    def program(calls: Calls) -> Any:
        def f(k: Any) -> Any:
            jax.debug.print("{}", k, ordered=True)
            jax.debug.callback(lambda k: calls(str(k)), k, ordered=True)
            return 0

        return jax.vmap(f)(keys())

    jaxs, ours = both(program)
    assert ours == jaxs
    assert "key<fry>" in str(ours.lines)
    assert "key<fry>" in str(ours.calls)


def test_taps_of_hostcallback_still_get_keys() -> None:
    got: list[Any] = []
    with hcb.accelerate():
        ran(lambda calls: jax.jit(lambda k: [hcb.callback(got.append, k), 0][1])(key()))
    assert jax.dtypes.issubdtype(got[0].dtype, jax.dtypes.prng_key)

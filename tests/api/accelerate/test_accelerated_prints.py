"""`jax.debug.print` under `hcb.accelerate()` prints JAX's lines."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import hostcallback as hcb
from accelerated import Calls, both, ran

X = np.arange(6, dtype=np.float32).reshape(2, 3)
say = functools.partial(jax.debug.print, ordered=True)

TEXTS: dict[str, Callable[[Any], Any]] = {
    "by position and name": lambda x: say("x {} {x:}", x, x=x),
    "numbers and texts": lambda x: say("{} {:.3f} {} {s}", x[0, 0], x[0, 1], 2.5, s="text"),
    "containers": lambda x: say("{} {}", [x, (x,)], {"a": x}),
    "representations": lambda x: say("{!r}", x),
    "attributes and elements": lambda x: say("{x.shape} {y[0]}", x=x, y=x),
    "no placeholder": lambda x: say("hello"),
    "arguments behind the text": lambda x: say("hello", x, 3, skip_format_check=True),
    "escaped braces first": lambda x: say("{{x}} {}", x),
    "escaped braces later": lambda x: say("a {{x}} {}", x),
    "bfloat16": lambda x: say("{}", x.astype(jnp.bfloat16)),
    "int4": lambda x: say("{}", x.astype(jnp.int4)),
    "bool, int8, complex": lambda x: say("{} {} {}", x > 2, x.astype(jnp.int8), x + 1j),
    "many": lambda x: [say("{} {}", i, x[0, 1]) for i in range(5)],
}


def returning(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`f`, and then its argument."""

    def wrapped(x: Any) -> Any:
        f(x)
        return x

    return wrapped


@pytest.mark.parametrize("text", TEXTS)
def test_the_lines_are_jaxs(text: str) -> None:
    jaxs, ours = both(lambda calls: jax.jit(returning(TEXTS[text]))(X))
    assert ours == jaxs
    assert ours.lines


@pytest.mark.parametrize("in_axes", [0, 1])
def test_vmap_prints_its_elements_in_jaxs_order(in_axes: int) -> None:
    jaxs, ours = both(
        lambda calls: jax.jit(jax.vmap(returning(lambda r: say("{} {}", r, r.sum())), in_axes))(X)
    )
    assert ours.lines == jaxs.lines
    assert len(ours.lines) == X.shape[in_axes]


def test_nested_vmaps_print_their_elements_in_jaxs_order() -> None:
    def program(calls: Calls) -> Any:
        return jax.jit(jax.vmap(jax.vmap(returning(lambda v: say("{}", v))), 1))(X)

    jaxs, ours = both(program)
    assert ours.lines == jaxs.lines
    assert len(ours.lines) == 6


def test_values_vmap_does_not_batch_print_once() -> None:
    jaxs, ours = both(lambda calls: jax.jit(jax.vmap(returning(lambda r: say("const {}", 1.5))))(X))
    assert ours.lines == jaxs.lines == ["const 1.5"]


def test_a_scan_under_vmap_and_grad_prints_jaxs_lines() -> None:
    def f(row: Any) -> Any:
        def step(c: Any, v: Any) -> Any:
            say("{} {}", c, v)
            return c + v * v, None

        return lax.scan(step, jnp.float32(0), row)[0]

    jaxs, ours = both(lambda calls: jax.jit(jax.vmap(jax.grad(f)))(X))
    assert ours == jaxs
    assert len(ours.lines) == 6


def test_a_partitioned_program_prints_the_whole_array() -> None:
    mesh = Mesh(np.array(jax.devices()), ("d",))
    y = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, PartitionSpec("d")))
    jaxs, ours = both(lambda calls: jax.jit(returning(lambda x: jax.debug.print("{}", x)))(y))
    assert ours == jaxs


def test_print_options_of_the_trace_apply() -> None:
    program = jax.jit(returning(lambda x: say("{}", x / 3)))
    with hcb.accelerate(), np.printoptions(precision=2):
        program.lower(X)
    ours = ran(lambda calls: program(X))
    with np.printoptions(precision=2):
        assert ours.lines == str(X / 3).splitlines()


@pytest.mark.skipif(not hasattr(jax.debug, "log"), reason="jax.debug.log came with JAX 0.10")
def test_logs_are_jaxs(caplog: pytest.LogCaptureFixture) -> None:
    def program(calls: Calls) -> Any:
        return jax.jit(returning(lambda x: jax.debug.log("logged {}", x[0, 1])))(X)

    with caplog.at_level(logging.INFO):
        both(program)
    found = [r for r in caplog.records if r.getMessage() == "logged 1.0"]
    assert len(found) == 2
    assert len({(r.name, r.levelno, r.filename, r.lineno) for r in found}) == 1

"""`hcb.print` prints the same as `jax.debug.print`; both run here, and the tests compare their output."""

from __future__ import annotations

import collections
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from printing import Printed

import hostcallback as hcb
from transforming import Jit, no_jit

Point = collections.namedtuple("Point", "x y")


VALUES = {
    "float32": jnp.float32(1.1),
    "negative": jnp.float32(-0.0),
    "nan": jnp.float32(np.nan),
    "bfloat16": jnp.bfloat16(1.37),
    "float16": jnp.float16(1e-7),
    "float8": jnp.asarray(0.3, jnp.float8_e4m3fn),
    "int32": jnp.int32(-42),
    "uint8": jnp.uint8(200),
    "bool": jnp.asarray(True),
    "complex64": jnp.complex64(1.5 - 2j),
    "vector": jnp.linspace(0.0, 1.0, 7),
    "bools": jnp.array([True, False]),
    "bfloat16 matrix": jnp.eye(3, dtype=jnp.bfloat16) * 1.37,
    "wide": jnp.arange(40) * 12345,
    "large": jnp.arange(2000.0).reshape(2, 1000),
    "a mebibyte": jnp.arange(1 << 18, dtype=jnp.int32),
    "empty": jnp.zeros((0, 3)),
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_every_value_prints_as_jax_prints_it(jit: Jit, value: Any, printed: Printed) -> None:
    def program(print: Any, value: Any) -> None:
        def f(x: Any) -> Any:
            print("{}|{:}|{!s}|{!r}|{!a}|{x}", x, x, x, x, x, x=x)
            print("{}", x)
            print("{} {}", [x, (x, None)], {"a": x, "b": Point(x, "text")})
            return x

        jit(f)(value)

    assert printed.alike(program, value)


def test_elements_of_less_than_a_byte_print_their_value(printed: Printed) -> None:
    # Not compared: jax.debug.print of JAX 0.8 prints strided arrays from memory, together with adjacent bytes.
    assert printed.ours(
        lambda _: jax.jit(lambda x: hcb.print("{} {!r}", x, x))(jnp.asarray(-3, jnp.int4))
    ) == ("-3 Array(-3, dtype=int4)\n")


def test_a_key_prints_as_a_key(jit: Jit, printed: Printed) -> None:
    # jax.debug.print prints its data instead under jit.
    key = jax.random.key(7)
    assert printed.ours(lambda _: jit(lambda k: hcb.print("{} {k.shape}", k, k=k))(key)) == f"{key} ()\n"


SPECS = [
    "{:.2f}", "{:10.3e}|", "{:>12}|", "{:<12}|", "{:+}", "{:g}", "{:%}", "{:d}", "{:05d}", "{:x}", "{:,}", "{:^9b}",
    "{:{}}|",
]  # fmt: skip


@pytest.mark.parametrize("spec", SPECS)
def test_format_specifications_apply_to_scalars_as_jax_applies_them(
    jit: Jit, spec: str, printed: Printed
) -> None:
    integral = spec[-2] in "dxb"
    width = (8,) if "{}" in spec[1:] else ()

    def program(print: Any) -> None:
        value = jnp.int32(1234567) if integral else jnp.float32(1234.5678)
        jit(lambda x: print(spec, x, *width))(value)
        jit(jax.vmap(lambda x: print("v={v" + spec[1:] if not width else "v={v}", v=x)))(value[None])

    assert printed.alike(program)


def test_elements_attributes_and_conversions_match_jax_arrays(jit: Jit, printed: Printed) -> None:
    def program(print: Any) -> None:
        def f(x: Any, tree: Any) -> Any:
            print(
                "{x[0]} {x[1]!r} {x.shape} {x.dtype} {x.T} {0[a]} {0[b].y!r} {x.nbytes:>{w}}", tree, x=x, w=6
            )
            return x

        jit(f)(jnp.arange(3.0), {"a": jnp.int32(1), "b": Point(jnp.arange(2), jnp.zeros((2, 2)))})

    (first, second) = printed.alike(program)
    assert first.startswith("0.0 Array(1., dtype=float32) (3,) float32 [0. 1. 2.] 1 Array([[0., 0.],")
    assert second.endswith("    12")


def test_non_arrays_stay_on_the_host_and_print_unchanged(jit: Jit, printed: Printed) -> None:
    marker = object()

    def program(print: Any) -> None:
        print_all = "{} {!r} {} {} {} {name!r} {n:03d} {flag}"
        jit(
            lambda x: print(print_all, marker, "text", None, [len, x], b"bytes", name="name", n=7, flag=True)
        )(jnp.float32(1))

    assert printed.alike(program)


def test_objects_that_jax_refuses_print_too(printed: Printed) -> None:
    assert printed.ours(
        lambda print: jax.jit(lambda x: print("{} {} {}", x, {7}, np.array(["text"])))(1)
    ) == ("1 {7} ['text']\n")


def test_a_module_prints_as_jax_prints_it(jit: Jit, printed: Printed) -> None:
    linear = eqx.filter(eqx.nn.Linear(2, 3, key=jax.random.key(0)), eqx.is_array)
    printed.alike(lambda print: jit(lambda m: print("{} {m!r}", m.weight, m=m))(linear))


def test_a_text_without_arguments_prints_each_time(jit: Jit, printed: Printed) -> None:
    def program(print: Any) -> None:
        def step(x: Any, _: Any) -> Any:
            print("tick")
            print("")
            print("{{}}")
            return x + 1, None

        jit(lambda x: lax.scan(step, x, None, length=3)[0])(0)

    assert printed.alike(program) == ["tick", "", "{{}}"] * 3


def test_braces_that_are_escaped_before_a_placeholder_are_formatted(jit: Jit, printed: Printed) -> None:
    # jax.debug.print takes such a string for one without placeholders and prints "{{x}} = {} 1".
    assert printed.ours(lambda print: jit(lambda x: print("{{x}} = {}", x))(1)) == "{x} = 1\n"


def test_numpys_print_options_of_the_trace_apply(jit: Jit, printed: Printed) -> None:
    def program(print: Any) -> None:
        f = jit(lambda x: print("{} {!r} {!s} {:.5f}", x, x, x, x[0]))
        with np.printoptions(precision=2, suppress=True, threshold=3, edgeitems=1, linewidth=40):
            f(jnp.array([1.23456, 1e-7, 3.0, 4.0, 5.0]))
        if jit is not no_jit:
            f(jnp.array([9.87654, 1e-7, 3.0, 4.0, 5.0]))

    assert printed.alike(program)[0].startswith("[1.23 ... 5.  ]")


def test_print_options_of_the_trace_leave_the_process_options_alone(printed: Printed) -> None:
    before = np.get_printoptions()
    with np.printoptions(precision=1):
        first = jax.jit(lambda x: hcb.print("{}", x))
        assert printed.ours(lambda print: first(jnp.array([1.23]))) == "[1.2]\n"
    second = jax.jit(lambda x: hcb.print("{}", x))
    assert printed.ours(lambda print: second(jnp.array([1.23]))) == "[1.23]\n"
    assert np.get_printoptions() == before

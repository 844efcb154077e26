"""The drop-in's `id_print` prints the same text as host_callback 0.4.34 (with its legacy flag on).

Every expected text here is the output of that module for the same program.
"""

from __future__ import annotations

import collections
import io
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hostcallback import host_callback as hcb
from transforming import Jit

Pair = collections.namedtuple("Pair", ["left", "right"])

VALUES = [
    ("scalar", np.float32(3), "3.\n"),
    ("integer", np.int32(42), "42\n"),
    ("bool", np.bool_(True), "True\n"),
    ("complex", np.complex64(1 + 2j), "1.+2.j\n"),
    ("vector", np.arange(3, dtype=np.float32), "[0. 1. 2.]\n"),
    ("matrix", np.arange(6).reshape(2, 3), "[[0 1 2]\n [3 4 5]]\n"),
    ("empty tuple", (), "(  )\n"),
    ("empty containers", [[], {}, ()], "[ [  ] {  } (  ) ]\n"),
    ("none", None, "None\n"),
    ("tuple with none", (None, np.int32(1)), "( None 1 )\n"),
    ("no elements", (np.float32(1), np.ones((2, 0), np.float32)), "( 1. [] )\n"),
    ("named tuple", Pair(np.int32(1), np.int32(2)), "( 1 2 )\n"),
    ("nested", ([np.int32(1)], {"b": np.int32(2), "a": (np.int32(3),)}), "( [ 1 ] { a=( 3 ) b=2 } )\n"),
    ("dict with number keys", {10: np.int32(1), 2: np.int32(2)}, "{ 2=2 10=1 }\n"),
    ("matrix in a tuple", (np.int32(1), np.eye(2, dtype=np.float32)), "( 1 [[1. 0.]\n [0. 1.]] )\n"),
    (
        "too long for a line",
        {"weights": np.arange(20), "rest": (np.arange(12), [np.eye(2, dtype=np.int32), np.int32(1)])},
        "{ rest=( [ 0  1  2  3  4  5  6  7  8  9 10 11] [ [[1 0]\n [0 1]] 1 ] )\n"
        "  weights=[ 0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15 16 17 18 19] }\n",
    ),
    (
        "too long at two levels",
        [(np.arange(20), np.arange(20)), np.int32(1)],
        "[ ( [ 0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15 16 17 18 19]\n"
        "    [ 0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15 16 17 18 19] )\n"
        "  1 ]\n",
    ),
    (
        "exactly 80 columns",
        (np.arange(10), np.arange(10), np.arange(10), np.int32(1234567890)),
        "( [0 1 2 3 4 5 6 7 8 9] [0 1 2 3 4 5 6 7 8 9] [0 1 2 3 4 5 6 7 8 9] 1234567890 )\n",
    ),
    (
        "81 columns",
        (np.arange(10), np.arange(10), np.arange(10), np.int32(-1234567890)),
        "( [0 1 2 3 4 5 6 7 8 9]\n  [0 1 2 3 4 5 6 7 8 9]\n  [0 1 2 3 4 5 6 7 8 9]\n  -1234567890 )\n",
    ),
]


def printed(f: Callable[..., Any], *args: Any) -> str:
    """Text that `f(*args, stream)` prints to the stream."""
    out = io.StringIO()
    f(*args, out)
    hcb.barrier_wait()
    return out.getvalue()


@pytest.mark.parametrize(("value", "expected"), [pytest.param(v, text, id=name) for name, v, text in VALUES])
def test_a_value_prints_as_there(value: Any, expected: str, jit: Jit) -> None:
    assert printed(lambda out: jit(lambda x: hcb.id_print(x, output_stream=out))(value)) == expected


def test_keyword_arguments_print_first_and_sorted(jit: Jit) -> None:
    def f(out: io.StringIO) -> None:
        jit(lambda x: hcb.id_print(x, output_stream=out, what="x,x^2", step=3, a=(1, "b"), none=None))(1.0)

    assert printed(f) == "a: (1, 'b') none: None step: 3 what: x,x^2\n1.\n"


def test_the_device_prints_among_the_keyword_arguments(jit: Jit) -> None:
    def f(out: io.StringIO) -> None:
        jit(lambda x: hcb.id_print(x, output_stream=out, tap_with_device=True, what="x", a=1))(1.0)

    assert printed(f) == f"a: 1 device: {jax.devices()[0]} what: x\n1.\n"


def test_transforms_print_with_their_parameters_or_as_a_name() -> None:
    def f(out: io.StringIO) -> None:
        def tap(x: Any) -> Any:
            return hcb.id_print(3.0 * x, output_stream=out, what="3x", tap_with_device=True)

        jax.linear_transpose(tap, 1.0)(1.0)
        jax.vmap(tap)(jnp.arange(2.0))
        jax.vmap(jax.vmap(tap, in_axes=0), in_axes=1)(jnp.arange(2.0).reshape(1, 2))
        jax.vmap(lambda x: hcb.id_print((x, 1.0), output_stream=out))(jnp.arange(2.0))

    device = jax.devices()[0]
    assert printed(f) == (
        f"device: {device} transforms: ['transpose'] what: 3x\n1.\n"
        f"device: {device} transforms: [('batch', {{'batch_dims': (0,)}})] what: 3x\n[0. 3.]\n"
        f"device: {device} transforms: [('batch', {{'batch_dims': (0,)}}), ('batch', {{'batch_dims': (1,)}})]"
        " what: 3x\n[[0. 3.]]\n"
        "transforms: [('batch', {'batch_dims': (0, None)})]\n( [0. 1.] 1. )\n"
    )


@pytest.mark.parametrize(
    ("threshold", "length", "expected"),
    [
        (5, 10, "[0 1 2 ... 7 8 9]\n"),
        (10, 10, "[0 1 2 3 4 5 6 7 8 9]\n"),
        (None, 1001, "[   0    1    2 ...  998  999 1000]\n"),  # numpy's own threshold: 1000
    ],
)
def test_threshold_is_numpys(threshold: int | None, length: int, expected: str) -> None:
    def f(out: io.StringIO) -> None:
        hcb.id_print(jnp.arange(length), output_stream=out, threshold=threshold)

    assert printed(f) == expected


def test_without_a_threshold_numpys_own_prints_a_thousand_elements() -> None:
    assert "..." not in printed(lambda out: hcb.id_print(jnp.arange(1000), output_stream=out))


def test_threshold_holds_inside_pytrees() -> None:
    def f(out: io.StringIO) -> None:
        hcb.id_print({"a": jnp.arange(10), "b": [jnp.arange(4)]}, output_stream=out, threshold=4)

    assert printed(f) == "{ a=[0 1 2 ... 7 8 9] b=[ [0 1 2 3] ] }\n"


def test_every_device_of_a_pmap_prints_its_own() -> None:
    devices = jax.local_devices()[:2]

    def power3(x: Any, out: io.StringIO) -> Any:
        y = x * x
        _, y = hcb.id_print((x, y), what="x,x^2", output_stream=out, tap_with_device=True)
        return y * x

    def f(out: io.StringIO) -> None:
        results = jax.pmap(lambda x: power3(x, out), devices=devices)(np.array([3, 4], np.int32))
        assert results.tolist() == [27, 64]

    lines = printed(f).splitlines()
    assert sorted(zip(lines[0::2], lines[1::2], strict=True)) == [
        (f"device: {devices[0]} what: x,x^2", "( 3 9 )"),
        (f"device: {devices[1]} what: x,x^2", "( 4 16 )"),
    ]


def test_vmap_inside_a_pmap_prints_one_batch_per_device() -> None:
    devices = jax.local_devices()[:2]
    matrix = np.fromfunction(lambda i, j: 10 * i + j, (2, 3), dtype=np.int32)

    def f(out: io.StringIO) -> None:
        def tap(x: Any) -> Any:
            return hcb.id_print(x * 2, what="x * 2", output_stream=out, tap_with_device=True)

        jax.pmap(jax.vmap(tap), devices=devices)(matrix)

    lines = printed(f).splitlines()
    batch = "transforms: [('batch', {'batch_dims': (0,)})] what: x * 2"
    assert sorted(zip(lines[0::2], lines[1::2], strict=True)) == [
        (f"device: {devices[0]} {batch}", "[0 2 4]"),
        (f"device: {devices[1]} {batch}", "[20 22 24]"),
    ]


def test_without_a_stream_it_prints_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    hcb.id_print(jnp.float32(1), what="here")
    hcb.barrier_wait()
    assert capsys.readouterr().out == "what: here\n1.\n"


def test_result_is_returned_and_not_printed() -> None:
    returned = []

    def f(out: io.StringIO) -> None:
        @jax.jit
        def g(x: Any) -> Any:
            return hcb.id_print((x * 2.0, x * 3.0), result=x * 4.0, output_stream=out)

        returned.append(g(3.0))

    assert printed(f) == "( 6. 9. )\n"
    assert float(returned[0]) == 12.0

"""`id_print` prints what the 2020 original documents: sorted keyword arguments, then the value."""

from __future__ import annotations

import io
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import hostcallback as hcb
from threads import in_threads


def printed(f: Any, *args: Any) -> str:
    """Text that `f(*args, stream)` prints to the stream."""
    out = io.StringIO()
    f(*args, out)
    hcb.barrier_wait()
    return out.getvalue()


def test_keyword_arguments_are_sorted_and_come_first(jit: Any) -> None:
    def f(x: Any, out: io.StringIO) -> Any:
        return jit(lambda x: hcb.id_print(x, output_stream=out, zeta=1, alpha="a", mid=(1, 2)))(x)

    assert printed(f, jnp.arange(2)) == "alpha: a mid: (1, 2) zeta: 1\n[0 1]\n"


def test_pytrees_print_as_in_host_callback(jit: Any) -> None:
    def f(x: Any, out: io.StringIO) -> Any:
        return jit(lambda x: hcb.id_print((x, [x * 2, {"b": x, "a": x + 1}], None), output_stream=out))(x)

    assert printed(f, jnp.arange(2)) == "( [0 1] [ [0 2] { a=[1 2] b=[0 1] } ] None )\n"


def test_long_pytrees_break_into_lines() -> None:
    def f(out: io.StringIO) -> Any:
        return hcb.id_print([jnp.arange(24), jnp.eye(2)], output_stream=out)

    assert printed(f) == (
        "[ [ 0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15 16 17 18 19 20 21 22 23]\n  [[1. 0.]\n [0. 1.]] ]\n"
    )


def test_threshold_summarises_large_arrays() -> None:
    def f(out: io.StringIO) -> None:
        hcb.id_print(jnp.arange(10), output_stream=out, threshold=5)
        hcb.id_print(jnp.arange(1024), output_stream=out)
        hcb.id_print(jnp.arange(1025), output_stream=out)

    short, whole, summarised = (part for part in printed(f).replace("]\n", "]\n|").split("|")[:3])
    assert short == "[0 1 2 ... 7 8 9]\n"
    assert "..." not in whole
    assert "..." in summarised


def test_transforms_are_printed_among_the_keyword_arguments() -> None:
    def f(out: io.StringIO) -> None:
        jax.vmap(jax.grad(lambda x: hcb.id_print(x, output_stream=out, what="x") ** 2))(jnp.arange(2.0))

    assert printed(f).splitlines() == [
        "transforms: [('batch', {'batch_dims': (0,)})] what: x",
        "[0. 1.]",
        "transforms: ['jvp', 'transpose', ('batch', {'batch_dims': (0,)})] what: x",
        "[0. 2.]",
    ]


def test_without_a_stream_it_prints_to_the_current_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    f = hcb.jit(lambda x: hcb.id_print(x, what="here", result=x + 1))
    assert float(f(1.0)) == 2.0
    hcb.barrier_wait()
    assert capsys.readouterr().out == "what: here\n1.\n"


def test_a_stream_that_fails_is_reported_like_any_tap() -> None:
    class Closed:
        def write(self, text: str) -> None:
            raise OSError("disk full")

    hcb.id_print(1.0, output_stream=Closed())
    with pytest.raises(hcb.TapFunctionException) as info:
        hcb.barrier_wait()
    assert isinstance(info.value.exceptions[0], OSError)
    assert "test_id_print.py" in info.value.failures[0].source_line


def test_lines_of_one_message_stay_together_across_devices() -> None:
    class Stream:
        def __init__(self) -> None:
            self.lines: list[str] = []

        def write(self, text: str) -> None:
            self.lines += text.splitlines()

    stream = Stream()
    f = hcb.jit(lambda x: hcb.id_print(x, output_stream=stream, who="someone"))

    def work(number: int) -> None:
        for i in range(50):
            f(jax.device_put(i, jax.devices()[number]))

    in_threads(work, 4)
    hcb.barrier_wait()
    assert stream.lines[0::2] == ["who: someone"] * 200
    assert sorted(map(int, stream.lines[1::2])) == sorted(list(range(50)) * 4)

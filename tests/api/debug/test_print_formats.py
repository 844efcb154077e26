"""The options of `hcb.print`, and formats that do not fit the values."""

from __future__ import annotations

import io
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from printing import Printed

import hostcallback as hcb
from transforming import Jit


def test_the_two_call_form_takes_the_options_first(jit: Jit, printed: Printed) -> None:
    out = io.StringIO()
    printer = hcb.print(
        ordered=False, partitioned=True, skip_format_check=True, output_stream=out, name="mine"
    )
    assert printer("nothing") is None

    def f(x: Any) -> Any:
        # Options are names like any other in the second call.
        printer("{} {ordered} {name} {fmt} {output_stream}", x, ordered=x, name="n", fmt="f", output_stream=2)
        assert hcb.print("one call {x}", x=x, ordered=True) is None
        return x

    assert printed.ours(lambda _: jit(f)(1)) == "one call 1\n"
    assert out.getvalue() == "nothing\n1 1 n f 2\n"


def test_the_first_of_two_calls_refuses_unknown_options() -> None:
    with pytest.raises(
        TypeError,
        match=r"unexpected arguments in the two-call form: args=\(\) kwargs={'x': 1}.*test_print_formats.py:\d+",
    ):
        hcb.print(x=1)  # type: ignore[call-overload]


def test_skipping_the_format_check_lets_arguments_follow_the_text(jit: Jit, printed: Printed) -> None:
    def program(print: Any) -> None:
        jit(lambda x: print("values:", x, [x], skip_format_check=True))(jnp.arange(3))
        jit(lambda x: print("{} is enough", x, x, skip_format_check=True))(jnp.float32(1))

    assert printed.alike(program) == ["values: [0 1 2] [Array([0, 1, 2], dtype=int32)]", "1.0 is enough"]


MISTAKES = {
    "unused positional": (
        ("no placeholder", 1),
        {},
        r"Unused positional arguments to `hcb.print`: \[.* at .*test_print_formats.py",
    ),
    "unused keyword": (
        (f"an f-string {1.0}",),
        {"x": 1},
        r"Unused keyword arguments to `hcb.print`: \['x'\]. You may be passing an f-string \(i.e, `f\"\{x\}\"`\) into",
    ),
    "missing positional": (
        ("{} {}", 1),
        {},
        r"'\{\} \{\}' needs 2 positional arguments, and .* got 1:",
    ),
    "missing keyword": (
        ("{y}",),
        {"x": 1},
        r"'\{y\}' has a placeholder \{y\}, and hcb.print got 'x': pass y=",
    ),
    "unclosed": (("{", 1), {}, r"Single '\{' encountered"),
    "numbering": (("{} {0}", 1), {}, r"cannot switch from "),
    "attribute": (("{x.nothing}",), {"x": 1}, r"nothing"),
}


@pytest.mark.parametrize(("args", "kwargs", "words"), MISTAKES.values(), ids=MISTAKES)
def test_a_wrong_format_is_refused_as_jax_refuses_it_with_the_users_line(
    jit: Jit, args: Any, kwargs: Any, words: str
) -> None:
    fmt, *values = args
    with pytest.raises(Exception) as jaxs:  # noqa: PT011, any error of JAX is expected of ours
        jit(lambda values, kwargs: jax.debug.print(fmt, *values, **kwargs))(values, kwargs)
    with pytest.raises(type(jaxs.value), match=words) as info:
        jit(lambda values, kwargs: hcb.print(fmt, *values, **kwargs))(values, kwargs)
    assert "test_print_formats.py:" in "".join([str(info.value), *getattr(info.value, "__notes__", ())])


@pytest.mark.parametrize("fmt", [3.0, b"bytes", jnp.arange(2)])
def test_a_format_that_is_not_a_text_is_refused_with_the_cure(fmt: Any) -> None:
    with pytest.raises(
        TypeError,
        match=r"hcb.print takes a format string first, got .*'\{\}', x\), at .*test_print_formats.py",
    ):
        hcb.print(fmt)


def test_keyword_arguments_without_any_placeholder_are_refused_also_unchecked() -> None:
    with pytest.raises(ValueError, match=r"has no placeholders and hcb.print got keyword arguments \['x'\]"):
        hcb.print("text", x=1, skip_format_check=True)


def test_a_stream_that_cannot_write_is_refused() -> None:
    with pytest.raises(
        TypeError, match=r"needs a write\(str\) method, got str 'log.txt'.*test_print_formats.py"
    ):
        hcb.print(output_stream="log.txt")("text")  # type: ignore[call-overload]


def test_an_element_that_cannot_be_formatted_is_reported_and_the_others_print(
    jit: Jit, printed: Printed, capsys: pytest.CaptureFixture[str]
) -> None:
    class Picky:
        def __format__(self, spec: str) -> str:
            picky.count += 1
            if picky.count % 2:
                raise ValueError(f"count {picky.count}")
            return "fine"

    picky: Any = Picky()
    picky.count = 0
    jit(jax.vmap(lambda x: hcb.print("{} {}", x, picky)))(jnp.arange(4))
    with pytest.raises(hcb.TapFunctionException) as info:
        hcb.barrier_wait()
    assert capsys.readouterr().out == "1 fine\n3 fine\n"
    assert [str(failure.exception) for failure in info.value.failures] == ["count 1", "count 3"]
    assert [failure.tap.split("_")[0] for failure in info.value.failures] == ["print@test"] * 2
    assert "test_print_formats.py" in info.value.failures[0].source_line


def test_a_format_that_does_not_fit_the_value_is_reported_with_the_tap(printed: Printed) -> None:
    jax.jit(lambda x: hcb.print("{:d}", x, skip_format_check=True))(1.5)
    with pytest.raises(hcb.TapFunctionException) as info:
        hcb.barrier_wait()
    (error,) = info.value.exceptions
    assert isinstance(error, ValueError)
    assert "test_print_formats.py" in error.__notes__[0]


def test_prints_and_taps_keep_the_order_of_the_program(printed: Printed) -> None:
    @hcb.jit
    def f(x: Any) -> Any:
        def step(c: Any, _: Any) -> Any:
            hcb.print("a {}", c)
            hcb.id_print(c)
            hcb.print("b {}", c)
            return c + 1, None

        return lax.scan(step, x, None, length=20)[0]

    expected = [line for i in range(20) for line in (f"a {i}", f"{i}", f"b {i}")]
    assert printed.ours(lambda print: f(0)).splitlines() == expected

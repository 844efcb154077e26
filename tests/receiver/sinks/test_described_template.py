"""Templates of described taps: filled like `str.format`, restricted to the syntax of JAX's prints."""

from __future__ import annotations

import collections
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from hostcallback.receiver import limits
from hostcallback.receiver.sinks.described_template import fill, join, print_options
from hostcallback.receiver.wire.pytree import Node, Opaque

SECRET = "kept in the environment"
Pair = collections.namedtuple("Pair", "loss norm")

ARGS = (np.float32(1.5) * np.ones(()), np.arange(3), 7, "text", {"a": np.array(2)}, Pair(np.array(1), 2.5))
KWARGS = {"x": np.array(0.123456), "shape_of": np.zeros((2, 3)), "s": "abc"}


@pytest.mark.parametrize(
    "template",
    [
        "{} {}",
        "{0} {1} {0}",
        "{x:.3f}",
        "{0:000000012}",
        "{x!r:>20} {s:^9}",
        "{1!r} {1!s} {1!a}",
        "{shape_of.shape} {shape_of.ndim} {shape_of.size} {shape_of.dtype}",
        "{4[a]} {5.loss} {5[1]:.1f} {1[2]}",
        "{x:{w}.{p}f}",
        "{:{}}",
        "{{literal}} {s}",
        "no field",
        "",
    ],
)
def test_prints_are_filled_as_str_format_fills_them(template: str) -> None:
    args = ("ab", 5) if template == "{:{}}" else ARGS
    kwargs = {**KWARGS, "w": 12, "p": 2}
    assert fill(template, args, kwargs) == template.format(*args, **kwargs)


@pytest.mark.parametrize(
    "template",
    [
        "{0.ctypes.__class__.__init__.__globals__[sys].modules[os].environ}",
        "{0.__class__}",
        "{1.T}",
        "{1.ctypes}",
        "{s.__class__.__mro__}",
        "{x.dtype.type}",
        "{5._fields}",
        "{5.__class__}",
        "{5._asdict}",
        "{node.type_name}",
        "{node.__class__}",
        "{opaque.text.__class__}",
        "{4.keys}",
        "{s:{x.__class__}}",
        "{:>4000000000}",
        "{:.4000000000f}",
        "{x:.1001f}",
        "{s:{w}}",
        "{missing}",
        "{99}",
        "{99999999999999999999999}",
        "{1[9]}",
        "{1[99999999999999999999]}",
        "{} {0}",
        "{0} {}",
        "{x:{s:{w}}}",
        "{x!z}",
        "{",
        "}",
        "{x:" + "1" * 70 + "}",
        "{}" * (limits.TEMPLATE_FIELDS + 1),
        "x" * (limits.TEMPLATE_CHARS + 1),
    ],
)
def test_everything_else_is_refused_with_a_text(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HCB_SECRET", SECRET)
    kwargs = {**KWARGS, "w": 10**9, "node": Node("a.B", (1,)), "opaque": Opaque("o")}
    tracemalloc.start()
    try:
        text = fill(template, ARGS, kwargs)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert "is not filled: " in text
    assert SECRET not in text
    assert len(text) < 1000
    assert peak < 32 << 20


@pytest.mark.parametrize(
    ("template", "item"), [("{1[mean]}", "mean"), ("{5[norm]}", "norm"), ("{4[b]}", "b"), ("{4[0]}", "0")]
)
def test_an_item_that_an_argument_does_not_have_is_named(template: str, item: str) -> None:
    assert f"is not filled: there is no item {item!r}" in fill(template, ARGS, KWARGS)


@given(
    st.lists(
        st.sampled_from(
            ["{", "}", "0", "x", "s", ".", "[", "]", ":", "!", "r", ">", "9", "f", "__class__", "a", " "]
        ),
        max_size=30,
    ).map("".join)
)
@settings(max_examples=300, deadline=None)
def test_no_template_raises_or_shows_more_than_str_format(template: str) -> None:
    text = fill(template, ARGS, KWARGS)
    if "is not filled" not in text:
        assert text == template.format(*ARGS, **KWARGS)


def test_a_long_text_is_cut() -> None:
    text = fill("{s:>1000}" * limits.TEMPLATE_FIELDS * 1, (), {"s": "x" * (limits.TEXT_CHARS // 2)})
    assert limits.TEXT_CHARS < len(text) < limits.TEXT_CHARS + 100
    assert len(join("start", ["y" * limits.TEXT_CHARS] * 50)) < limits.TEXT_CHARS + 100


def test_an_array_that_numpy_would_not_summarize_is_shown_by_its_first_elements() -> None:
    wide = np.broadcast_to(np.int8(1), (7,) * 12)  # 13.8e9 elements, of which numpy would show 2.2e9
    assert fill("{}", (wide,), {}).startswith("first 8 of (7, 7, 7")


def test_print_options_are_checked_one_by_one() -> None:
    most = limits.FIELD_WIDTH
    text = "x" * 64
    limit = {
        "edgeitems": most,
        "precision": most,
        "linewidth": 1,
        "threshold": 0,
        "nanstr": text,
        "infstr": text,
    }
    for right in limit, {"precision": 0}:
        assert right.items() <= print_options(right).items()
    found = print_options({"precision": 3, "threshold": 2**63, "formatter": "os.system", "unknown": 1})
    assert found["precision"] == 3
    assert found["formatter"] is None
    assert "unknown" not in found
    for wrong in (
        {"precision": 10**9},
        {"edgeitems": most + 1},
        {"linewidth": 0},
        {"nanstr": "x" * 100},
        {"sign": "__"},
        {"threshold": 1.5},
    ):
        with pytest.raises(ValueError, match="print option"):
            print_options(wrong)


@pytest.mark.parametrize(("chars", "mark"), [(200, ""), (201, "...")])
def test_a_template_that_is_not_filled_is_shown_up_to_200_characters(chars: int, mark: str) -> None:
    text = fill("t" * (chars - 1) + "{", (), {})
    shown = ("t" * (chars - 1) + "{")[:200]
    assert text.startswith(f"(the template {shown + mark!r} is not filled: ")


def test_a_long_reason_is_shown_up_to_500_characters() -> None:
    class Wordy:
        def __format__(self, spec: str) -> str:
            raise KeyError(*"k" * 1000)

    reason = f"KeyError: {tuple('k' * 1000)}"
    assert fill("{}", (Wordy(),), {}) == f"(the template '{{}}' is not filled: {reason[:500]})"

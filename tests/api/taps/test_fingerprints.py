"""What tells two tap functions apart: their text, which is equal in all processes, and the objects that they hold."""

from __future__ import annotations

import enum
import functools
import math
import os
import types
from collections.abc import Callable
from typing import Any

import pytest

from hostcallback.tracing.leaves import Fingerprint


class Kind(enum.Enum):
    FIRST = 1
    SECOND = 2


def plain(value: Any, scale: int = 1) -> Any:
    return value in {"a", "b"} or value * scale


def test_functions_and_modules_that_a_name_finds_hold_no_object() -> None:
    named: list[Any] = [math.sqrt, print, os.path, math, int, Kind.FIRST, plain, None, 2.5]
    found = [Fingerprint(value) for value in named]
    assert len({each.text for each in found}) == len(named)
    assert all(not each.opaque for each in found)
    assert "['module', 'math']" in Fingerprint(math).text
    assert "['named', 'math', 'sqrt']" in Fingerprint(math.sqrt).text
    assert "['named', 'builtins', 'int']" in Fingerprint(int).text


def test_a_builtin_method_is_told_by_the_object_that_it_is_of() -> None:
    one: list[Any] = []
    other: list[Any] = []
    for first, again, different in (
        (one.append, one.append, other.append),
        ("a".upper, "a".upper, "b".upper),
        (one.append, one.append, one.extend),
    ):
        assert same(first, again)
        assert not same(first, different)
    assert "builtin method" in Fingerprint(one.append).text
    assert [id(held) for held in Fingerprint(one.append).opaque] == [id(one)]
    assert not Fingerprint("a".upper).opaque


def same(one: Any, other: Any) -> bool:
    """Whether two values have one fingerprint."""
    found, expected = Fingerprint(one), Fingerprint(other)
    return found.text == expected.text and [*map(id, found.opaque)] == [*map(id, expected.opaque)]


def test_a_class_or_builtin_that_its_name_does_not_find_is_told_by_the_object(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def local() -> type:
        return type("Local", (), {})

    one = local()
    assert Fingerprint(one).opaque == [one]
    assert not same(one, local())
    sqrt = math.sqrt
    monkeypatch.setattr(math, "sqrt", math.cbrt)
    assert Fingerprint(sqrt).opaque == [sqrt]


def test_a_function_is_told_by_its_code_defaults_and_cells() -> None:
    def over(start: int) -> Callable[[], int]:
        return lambda: start + 1

    def defaults(*values: Any) -> Callable[..., Any]:
        return types.FunctionType(plain.__code__, plain.__globals__, "plain", values)

    assert len(Fingerprint(over(1)).opaque) == 1
    assert Fingerprint(over(1)).text == Fingerprint(over(2)).text
    assert Fingerprint(defaults(1)).text == Fingerprint(defaults(1)).text != Fingerprint(defaults(2)).text
    first, second = (lambda: 1), (lambda: 2)
    assert Fingerprint(first).text != Fingerprint(second).text


def test_a_function_with_other_globals_or_attributes_holds_them() -> None:
    elsewhere = {**plain.__globals__}
    moved = types.FunctionType(plain.__code__, elsewhere, "plain")
    moved.__module__ = plain.__module__
    assert [id(held) for held in Fingerprint(moved).opaque] == [id(elsewhere)]

    def marked() -> None:
        pass

    assert not Fingerprint(marked).opaque
    marked.__wrapped__ = plain  # type: ignore[attr-defined]
    assert not Fingerprint(marked).opaque
    marked.limit = 3  # type: ignore[attr-defined]
    assert Fingerprint(marked).opaque == [marked]


def test_parts_of_methods_and_of_partial_functions_count() -> None:
    class Counts:
        def up(self) -> None:
            pass

        def down(self) -> None:
            pass

    one, other = Counts(), Counts()
    assert same(one.up, one.up)
    assert not same(one.up, one.down)
    assert not same(one.up, other.up)
    assert Fingerprint(one.up).opaque == [one]
    partial = functools.partial
    assert same(partial(plain, 1, scale=2), partial(plain, 1, scale=2))
    for different in (partial(plain, 2, scale=2), partial(plain, 1, scale=3), partial(same, 1, scale=2)):
        assert not same(partial(plain, 1, scale=2), different)
    assert not same(Kind.FIRST, Kind.SECOND)


@pytest.mark.parametrize(("depth", "held"), [(8, 0), (9, 1)])
def test_a_value_that_is_nested_too_deep_is_told_by_the_object(depth: int, held: int) -> None:
    value: Any = (math,)
    for _ in range(depth - 1):
        value = (value,)
    assert len(Fingerprint(value).opaque) == held


def test_a_container_that_may_change_is_told_by_the_object() -> None:
    value = [1]
    assert Fingerprint(value).opaque == [value]
    assert "['object', 'builtins', 'list']" in Fingerprint(value).text

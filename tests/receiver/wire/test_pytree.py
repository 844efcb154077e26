"""Pytrees are rebuilt from their descriptions; a wrong description is refused before a message needs it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgpack
import numpy as np
import pytest
from hypothesis import given, strategies as st

from hostcallback.receiver.wire.pytree import (
    FLOAT0,
    MAX_DEPTH,
    Description,
    Node,
    Opaque,
    describe_value,
    is_plain,
    unflatten_with,
)


class Described(NamedTuple):
    """A description, and the pytree that it describes with the numbers 0, 1, ... for arrays."""

    description: Description
    build: Any  # from an iterator of the arrays


PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(allow_nan=False),
    st.text(),
    st.binary(),
)


def leaves() -> st.SearchStrategy[Described]:
    return st.one_of(
        st.just(Described(["array"], next)),
        st.just(Described(["none"], lambda arrays: None)),
        st.lists(st.integers(0, 3), max_size=3).map(
            lambda shape: Described(["float0", shape], lambda arrays: np.zeros(shape, FLOAT0))
        ),
        PLAIN.map(lambda value: Described(describe_value(value), lambda arrays: value)),
        st.just(Described(describe_value(object), lambda arrays: Opaque("<class 'object'>"))),
    )


def containers(children: st.SearchStrategy[Described]) -> st.SearchStrategy[Described]:
    several = st.lists(children, max_size=4)
    keys = st.dictionaries(st.one_of(PLAIN, st.just(int)), children, max_size=4)
    return st.one_of(
        several.map(
            lambda items: Described(
                ["tuple", [i.description for i in items]],
                lambda arrays: tuple(i.build(arrays) for i in items),
            )
        ),
        several.map(
            lambda items: Described(
                ["list", [i.description for i in items]], lambda arrays: [i.build(arrays) for i in items]
            )
        ),
        several.map(
            lambda items: Described(
                ["node", "module.Class", [i.description for i in items]],
                lambda arrays: Node("module.Class", tuple(i.build(arrays) for i in items)),
            )
        ),
        keys.map(
            lambda items: Described(
                ["dict", [describe_value(key) for key in items], [i.description for i in items.values()]],
                lambda arrays: {
                    Opaque("<class 'int'>") if key is int else key: i.build(arrays)
                    for key, i in items.items()
                },
            )
        ),
    )


TREES = st.recursive(leaves(), containers, max_leaves=12)


def count_arrays(description: Description) -> int:
    if description == ["array"]:
        return 1
    if description[0] in ("tuple", "list", "dict", "node", "namedtuple"):
        return sum(map(count_arrays, description[-1]))
    return 0


def same(one: Any, other: Any) -> bool:
    """Equality that distinguishes types, and compares arrays."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return one.shape == other.shape and one.dtype == other.dtype
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return list(map(repr, one)) == list(map(repr, other)) and all(map(same, one.values(), other.values()))
    return bool(one == other)


@given(TREES)
def test_pytrees_come_back_through_msgpack(tree: Described) -> None:
    description = msgpack.unpackb(msgpack.packb(tree.description))
    unflatten = unflatten_with(description)
    count = count_arrays(tree.description)
    for offset in (0, 100):  # as often as messages come
        arrays = list(range(offset, offset + count))
        assert same(unflatten(arrays), tree.build(iter(arrays)))


def test_the_containers_of_the_program_come_back_as_they_were() -> None:
    description: Description = [
        "dict",
        [["value", "a"], ["value", 3], ["object", "<class 'int'>"]],
        [
            ["tuple", [["array"], ["none"], ["list", []]]],
            ["namedtuple", "Point", ["x", "y"], [["array"], ["value", "text"]]],
            ["node", "module.Module", [["array"], ["object", "<function f>"]]],
        ],
    ]
    value = unflatten_with(description)([1, 2, 3])
    point = value[3]
    assert value == {
        "a": (1, None, []),
        3: point,
        Opaque("<class 'int'>"): Node("module.Module", (3, Opaque("<function f>"))),
    }
    assert (type(point).__name__, point._fields, point.x, point.y) == ("Point", ("x", "y"), 2, "text")


@pytest.mark.parametrize(
    ("name", "fields", "expected"),
    [
        ("Pair[int]", ["a", "b"], ("namedtuple", ("a", "b"))),
        ("class", ["def", "a"], ("namedtuple", ("_0", "a"))),
        ("", ["_private", "x"], ("namedtuple", ("_0", "x"))),
        ("Same", ["x", "x"], ("Same", ("x", "_1"))),
    ],
)
def test_named_tuples_of_any_name_are_built(
    name: str, fields: list[str], expected: tuple[str, tuple[str, ...]]
) -> None:
    value = unflatten_with(["namedtuple", name, fields, [["array"], ["array"]]])([1, 2])
    assert (type(value).__name__, value._fields) == expected
    assert tuple(value) == (1, 2)


def test_lists_and_dicts_are_new_for_every_message() -> None:
    unflatten = unflatten_with(["list", [["dict", [["value", "x"]], [["array"]]], ["list", []]]])
    first, second = unflatten([1]), unflatten([1])
    first[0]["x"] = 7
    first[1].append(7)
    assert second == [{"x": 1}, []]


@pytest.mark.parametrize(
    ("description", "text"),
    [
        (None, "None does not describe a pytree node"),
        ("array", "'array' does not describe a pytree node"),
        ([], r"\[\] does not describe a pytree node"),
        ([["array"]], "expected a list that starts with its kind"),
        ([1], "starts with its kind"),
        (("array",), "starts with its kind"),
        (["set", []], "'set' is not a kind of pytree node, .*newer version"),
        (["array", 1], r"expected \['array'\]"),
        (["none", None], r"expected \['none'\]"),
        (["value"], r"expected \['value', object\]"),
        (["object", 3], r"expected \['object', str\]"),
        (["tuple"], r"expected \['tuple', list\]"),
        (["tuple", None], r"expected \['tuple', list\]"),
        (["tuple", {"a": 1}], r"expected \['tuple', list\]"),
        (["list", [], []], r"expected \['list', list\]"),
        (["dict", []], r"expected \['dict', list, list\]"),
        (["node", b"name", []], r"expected \['node', str, list\]"),
        (["namedtuple", "P", "xy", [["array"], ["array"]]], r"expected \['namedtuple', str, list, list\]"),
        (["namedtuple", "P", ["x", 1], [["array"], ["array"]]], "not names of fields"),
        (["namedtuple", "P", ["x"], []], "1 keys and 0 children"),
        (["dict", [], [["array"]]], "0 keys and 1 children"),
        (["dict", [["array"]], [["array"]]], "not describe a key of a dict"),
        (["dict", [["none"]], [["array"]]], "not describe a key of a dict"),
        (["dict", [["value", [1]]], [["array"]]], "not describe a key of a dict"),
        (["dict", [["value", 1], ["value", True]], [["array"], ["array"]]], "equal descriptions"),
        (["dict", [["object", "x"], ["object", "x"]], [["array"], ["array"]]], "equal descriptions"),
        (["dict", ["key"], [["array"]]], "'key' does not describe a pytree node"),
        (["float0", 3], r"expected \['float0', list\]"),
        (["float0", [-1]], r"\(-1,\) is not the shape of an array"),
        (["float0", ["a"]], "is not the shape of an array"),
        (["float0", [2**70]], "is not the shape of an array"),
        (["float0", [1] * 100], "is not the shape of an array"),
        (["tuple", [["list", [["nothing"]]]]], "'nothing' is not a kind"),
    ],
)
def test_a_wrong_description_is_refused_at_once(description: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        unflatten_with(description)


@pytest.mark.parametrize(
    ("description", "count", "others"),
    [
        (["array"], 1, [0, 2]),
        (["tuple", [["array"], ["list", [["array"]]]]], 2, [0, 1, 3]),
        (["none"], 0, [2]),
    ],
)
def test_a_message_with_too_few_or_too_many_arrays_is_refused(
    description: Description, count: int, others: Sequence[int]
) -> None:
    unflatten = unflatten_with(description)
    unflatten([0] * count)
    for number in others:
        with pytest.raises(ValueError, match=rf"with {number} array\(s\) came for a pytree of {count}"):
            unflatten([0] * number)


def test_a_pytree_without_arrays_passes_over_the_stand_in_of_its_message() -> None:
    unflatten = unflatten_with(["tuple", [["value", 1], ["none"]]])
    assert unflatten([]) == unflatten([np.zeros(0, np.uint8)]) == (1, None)


@pytest.mark.parametrize("kind", ["tuple", "list", "dict", "node"])
def test_deep_nesting_is_built_or_refused_but_never_exhausts_the_stack(kind: str) -> None:
    head = {"dict": [[["value", "k"]]], "node": ["m.C"]}.get(kind, [])

    def nested(depth: int) -> Description:
        description: Description = ["array"]
        for _ in range(depth):
            description = [kind, *head, [description]]
        return description

    value = unflatten_with(nested(MAX_DEPTH))([7])
    for _ in range(MAX_DEPTH):
        value = value["k"] if kind == "dict" else value.children[0] if kind == "node" else value[0]
    assert value == 7
    for depth in (MAX_DEPTH + 1, 10 * sys.getrecursionlimit()):
        with pytest.raises(ValueError, match=f"deeper than {MAX_DEPTH}"):
            unflatten_with(nested(depth))
    # msgpack packs every value of this strategy.
    assert msgpack.unpackb(msgpack.packb({"tree": nested(MAX_DEPTH)})) == {"tree": nested(MAX_DEPTH)}


KINDS = ["array", "float0", "value", "object", "none", "tuple", "list", "dict", "namedtuple", "node", "?"]
JUNK = st.recursive(
    st.one_of(PLAIN, st.sampled_from(KINDS), st.sampled_from(KINDS).map(lambda kind: [kind])),
    lambda items: st.one_of(
        st.lists(items, max_size=4),
        st.dictionaries(st.text(max_size=2), items, max_size=2),
        st.tuples(st.sampled_from(KINDS), items, items).map(list),
        st.tuples(st.sampled_from(KINDS), st.lists(items, max_size=3)).map(list),
    ),
    max_leaves=15,
)


@given(JUNK, st.integers(0, 5))
def test_any_msgpack_value_is_built_or_refused(junk: Any, count: int) -> None:
    description = msgpack.unpackb(msgpack.packb(junk))
    try:
        unflatten_with(description)([0] * count)
    except ValueError as error:
        assert str(error)


@given(st.binary(max_size=40))
def test_any_bytes_are_built_or_refused(data: bytes) -> None:
    unpacker = msgpack.Unpacker(strict_map_key=False)
    unpacker.feed(data)
    try:
        description = unpacker.unpack()
    except (ValueError, TypeError, msgpack.UnpackException):  # TypeError for maps with unhashable keys
        return
    with contextlib.suppress(ValueError):
        unflatten_with(description)([])


@given(st.recursive(PLAIN, lambda items: st.lists(items) | st.dictionaries(st.text(), items), max_leaves=8))
def test_plain_values_come_back_from_msgpack(value: Any) -> None:
    assert is_plain(value)
    assert same(msgpack.unpackb(msgpack.packb(value)), value)


def nest(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def endless() -> list[Any]:
    value: list[Any] = []
    value.append({"again": value})
    return value


@pytest.mark.parametrize(
    "value",
    [
        2**64,
        -(2**63) - 1,
        "\ud800",
        {"\ud800": 1},
        {1: 2},
        (1, 2),
        [(1,)],
        {"a": {1}},
        np.float32(1),
        True + 0j,
        bytearray(b"x"),
        len,
        nest(MAX_DEPTH + 1),
        endless(),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_values_msgpack_would_refuse_or_change_are_not_plain(value: Any) -> None:
    assert not is_plain(value)
    kind, text = describe_value(value)
    assert (kind, text) == ("object", repr(value))
    msgpack.packb(text)

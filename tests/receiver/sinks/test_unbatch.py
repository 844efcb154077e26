"""A batched value is split into its elements, in JAX's order, one failure at a time."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from hostcallback.receiver.errors import TapFailure
from hostcallback.receiver.failures.deferred_errors import DeferredErrors, MultipleFailures
from hostcallback.receiver.messages import Consumer, Message
from hostcallback.receiver.sinks.batches import LaneMask, elements, elements_of, for_each_element, masking
from hostcallback.receiver.wire.array_types import MAX_RANK


@st.composite
def batches(draw: st.DrawFn) -> Any:
    """(the arrays of each element by index, the batched arrays, the batchings): stacked vmap by vmap."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    shapes = draw(st.lists(st.lists(st.integers(0, 3), max_size=2), min_size=1, max_size=3))
    batched = [[draw(st.booleans()) for _ in shapes] for _ in sizes]
    for level in batched:  # vmap batches at least one array, otherwise there is no batch
        level[draw(st.integers(0, len(shapes) - 1))] = True
    arrays = [np.arange(np.prod(shape, dtype=int)).reshape(shape) for shape in shapes]
    expected = {
        index: [
            array + sum(10 ** (level + 2) * i for level, i in enumerate(index) if batched[level][leaf])
            for leaf, array in enumerate(arrays)
        ]
        for index in itertools.product(*map(range, sizes))
    }
    batchings = []
    for level, size in enumerate(sizes):
        dims = [
            draw(st.integers(0, a.ndim)) if b else None for a, b in zip(arrays, batched[level], strict=True)
        ]
        arrays = [
            array if dim is None else np.stack([array + 10 ** (level + 2) * i for i in range(size)], axis=dim)
            for array, dim in zip(arrays, dims, strict=True)
        ]
        batchings.append(dims)
    return expected, arrays, batchings


@given(batches())
def test_every_element_comes_back_the_innermost_vmap_slowest(batch: Any) -> None:
    expected, arrays, batchings = batch
    got = list(elements(arrays, batchings))
    assert [index[::-1] for index, _ in got] == list(expected)
    for (_, element), wanted in zip(got, expected.values(), strict=True):
        for array, value in zip(element, wanted, strict=True):
            assert isinstance(array, np.ndarray)
            assert array.dtype == value.dtype
            np.testing.assert_array_equal(array, value)


def test_elements_share_no_memory_with_each_other() -> None:
    arrays = [np.arange(3), np.ones(2)]
    taken = [element for _, element in elements(arrays, [(0, None)])]
    for one, other in itertools.combinations([*taken, arrays], 2):
        assert not any(np.shares_memory(a, b) for a, b in zip(one, other, strict=True))


def test_an_empty_batch_has_no_elements() -> None:
    assert list(elements([np.zeros((0, 2))], [(0,)])) == []


def test_whole_batches_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shapes \[\(2,\), \(4,\)\].*not one batch"):
        list(elements([np.zeros(2), np.zeros(4)], [(0, 0)]))


def test_of_shards_only_the_elements_that_all_of_them_have_are_taken() -> None:
    whole = np.arange(8)
    places = ((slice(2, 6),), (slice(4, 8),), ())
    arrays = [whole[2:6], 10 * whole[4:8], np.array(7)]
    found = list(elements(arrays, [(0, 0, None)], places))
    assert [(index, [int(a) for a in element]) for index, element in found] == [
        ((4,), [4, 40, 7]),
        ((5,), [5, 50, 7]),
    ]
    assert list(elements([whole[:2], whole[4:]], [(0, 0)], ((slice(0, 2),), (slice(4, 8),)))) == []


def test_a_failing_element_does_not_keep_the_others_from_being_consumed() -> None:
    seen = []

    def consume(arrays: list[Any]) -> None:
        seen.append(int(arrays[0]))
        if seen[-1] % 2:
            raise KeyError(seen[-1])

    message = Message(Consumer(1, "tap", "here:1 (f)", print), [np.arange(5)], 0, 0, 0, "cpu:0", None)
    with pytest.raises(MultipleFailures) as info:
        for_each_element(message, [(0,)], consume)
    assert seen == [0, 1, 2, 3, 4]
    assert [error.args for error in info.value.exceptions] == [(1,), (3,)]
    assert [error.__notes__ for error in info.value.exceptions] == [
        ["element 1 of the batch"],
        ["element 3 of the batch"],
    ]


def test_repeated_failures_are_deferred_as_several_failures_up_to_the_bound() -> None:
    deferred = DeferredErrors(max_kept=2)
    group = MultipleFailures("", [ValueError(1), KeyError(2), ValueError(3)])
    deferred.add_failure(TapFailure(group, "tap", "here:1 (f)", "cpu:0", 7))
    report = deferred.take()
    assert report is not None
    assert [(type(f.exception), f.seq) for f in report.failures] == [(ValueError, 7), (KeyError, 7)]
    assert report.suppressed == {"here:1 (f)": 1}
    assert str(report).startswith("3 tap function call(s) raised")


@pytest.mark.parametrize(
    "levels",
    [
        [],
        7,
        "no",
        [[]],
        [[0, 0], [0]],
        [[-1, 0]],
        [[True, 0]],
        [[0.0, 0]],
        [[MAX_RANK, 0]],
        [[0, None]],
        [[0, [0]]],
    ],
    ids=str,
)
def test_axes_of_a_mask_that_are_none_are_refused(levels: Any) -> None:
    with pytest.raises(ValueError, match="the axes of a mask are"):
        LaneMask.of((("mask", {"batch_dims": levels}),))


@pytest.mark.parametrize("levels", [[[0, 0]], [[None, MAX_RANK - 1]], [[0, None], [None, 1]]], ids=str)
def test_axes_of_a_mask_are_read(levels: Any) -> None:
    mask = LaneMask.of((("mask", {"batch_dims": levels}),))
    assert mask is not None
    assert mask.levels == tuple(map(tuple, levels))


class Texts:
    """A sink that keeps the elements that it gets, and shows them as texts."""

    def __init__(self, mark: str = "") -> None:
        self.mark = mark
        self.got: list[list[float]] = []

    def __call__(self, message: Message) -> None:
        self.got.append(message.arrays[0].tolist())

    def texts(self, message: Message) -> list[str]:
        return [f"{self.mark}{value}" for value in message.arrays[0]]

    def escaped(self) -> Texts:
        return Texts("escaped ")


def test_a_masked_sink_gets_and_shows_the_elements_that_take_part() -> None:
    sink = Texts()
    masked: Any = masking([("batch", {}), ("mask", {"batch_dims": [[0, 0]]})], sink)
    consumer = Consumer(1, "tap", "here.py:1 (f)", masked)

    def message(*takes_part: bool) -> Message:
        arrays = [np.array([1.0, 2.0, 3.0]), np.array(takes_part)]
        return Message(consumer, arrays, 0, 0, 1, "cpu:0", None)

    some, none = message(True, False, True), message(False, False, False)
    for each in (some, none):
        masked(each)
    assert sink.got == [[1.0, 3.0]]
    assert (masked.texts(some), masked.texts(none)) == (["1.0", "3.0"], [])
    assert masked.escaped().texts(some) == ["escaped 1.0", "escaped 3.0"]


def test_a_sink_without_a_mask_stays_and_one_without_texts_shows_none() -> None:
    sink = Texts()
    assert masking([("batch", {})], sink) is sink
    plain = masking([("mask", {"batch_dims": [[0, 0]]})], lambda message: None)
    assert not hasattr(plain, "texts")
    assert not hasattr(plain, "escaped")


@pytest.mark.parametrize("masked", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)], ids=str)
def test_elements_that_take_part_have_their_places_in_the_whole_batch(masked: tuple[int, ...]) -> None:
    sizes = (4, 3, 2)  # the innermost vmap first
    values = np.array([[[100 * o + 10 * m + i for i in range(4)] for m in range(3)] for o in range(2)])
    takes_part = np.arange(np.prod([sizes[level] for level in masked])) % 3 != 1
    transforms = [("mask", {"batch_dims": [[0, 0 if level in masked else None] for level in range(3)]})]
    mask = LaneMask.of(transforms)
    assert mask is not None
    shape = [sizes[level] for level in reversed(masked)]
    consumer = Consumer(1, "tap", "here.py:1 (f)", print, tuple(transforms))
    message = Message(consumer, [values, takes_part.reshape(shape)], 0, 0, 1, "cpu:0", None)
    taken = mask.apply(message)
    assert taken is not None
    # An element's index has the merged vmaps together, where the outermost of them is.
    order = [
        each
        for level in (2, 1, 0)
        if level not in masked[:-1]
        for each in (reversed(masked) if level == masked[-1] else [level])
    ]
    found = [*elements_of(taken, [[axis] for axis in mask.batch_dims(0)])]
    others = np.prod([size for level, size in enumerate(sizes) if level not in masked], dtype=int)
    assert len(found) == takes_part.sum() * others
    for index, (value,) in found:
        assert int(value) == sum(10**level * place for level, place in zip(order, index, strict=True))

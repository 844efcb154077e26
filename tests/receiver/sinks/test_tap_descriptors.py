"""Tap descriptors come back from their bytes; other bytes are refused, and nothing in them is trusted."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest
from exported_process import FORMAT, PRINT, TAP, Process, Recorder
from hypothesis import given, strategies as st

from hostcallback.receiver.errors import UnboundConsumerError
from hostcallback.receiver.sinks.call import SHARDS_ID, WHOLE_ID
from hostcallback.receiver.sinks.factory import Binding
from hostcallback.receiver.wire.tap_descriptor import KINDS, TapDescriptor

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda items: st.lists(items, max_size=3) | st.dictionaries(st.text(), items, max_size=3),
    max_leaves=5,
)


MAPS = st.dictionaries(st.text(max_size=5), PLAIN, max_size=3)


DIMS = st.lists(st.none() | st.integers(0, 3), max_size=3).map(tuple)


TRANSFORMS = st.lists(
    st.one_of(
        st.sampled_from([("jvp", {}), ("transpose", {})]),
        DIMS.map(lambda dims: ("batch", {"batch_dims": dims})),
    ),
    max_size=3,
).map(tuple)


DESCRIBED = st.builds(
    TapDescriptor,
    name=st.text(),
    source_line=st.text(),
    consumer_id=st.integers(0, 2**64 - 1),
    kind=st.sampled_from([*(kind.text for kind in KINDS), "later"]),
    params=MAPS,
    kwargs=MAPS,
    transforms=TRANSFORMS,
    tree=st.sampled_from([["array"], ["tuple", [["array"], ["none"]]], FORMAT.tree, TAP.tree]),
    shards=st.sampled_from([None, "all", "some"]),
    sharding=st.sampled_from(["global", "local"]),
)


@given(DESCRIBED)
def test_descriptions_come_back_from_their_bytes(described: TapDescriptor) -> None:
    packed = described.pack()
    assert packed.dtype == np.uint8
    assert packed.ndim == 1
    assert TapDescriptor.unpack(packed.tobytes()) == described


def tampered(**changes: Any) -> bytes:
    fields = msgpack.unpackb(TAP.pack().tobytes())
    fields.update(changes)
    return bytes(msgpack.packb(fields))


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "0 bytes are not a descriptor"),
        (b"\xc1", "not a descriptor"),
        (b"\x93\x01", "not a descriptor"),
        (msgpack.packb(1), "expected a map with name"),
        (msgpack.packb({}), "expected a map with name"),
        (msgpack.packb({1: 2}), "not a descriptor"),
        (tampered(more=1), "expected a map"),
        (TAP.pack().tobytes() + b"\0", "not a descriptor"),
        (TAP.pack().tobytes()[:-1], "not a descriptor"),
        (tampered(name=3), "name is a int"),
        (tampered(source_line=None), "source_line is a NoneType"),
        (tampered(consumer_id=-1), "consumer_id is -1"),
        (tampered(consumer_id=True), "consumer_id is True"),
        (tampered(params=[]), "params is a list"),
        (tampered(kwargs={b"a": 1}), "keys"),
        (tampered(transforms=[["jvp"]]), "transforms has"),
        (tampered(transforms=["jvp"]), "transforms has"),
        (tampered(transforms=[["jvp", 1]]), "transforms has"),
        (tampered(transforms={}), "transforms is a dict"),
        (tampered(tree=["what"]), "'what' is not a kind of pytree node"),
        (tampered(tree=[]), "does not describe a pytree node"),
        (tampered(shards="none"), "shards is 'none'"),
        (tampered(sharding="both"), "sharding 'both'"),
        (b"\x91" * 100_000, "not a descriptor"),
    ],
)
def test_a_wrong_description_is_refused(data: bytes, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        TapDescriptor.unpack(data)


@given(st.binary(max_size=60) | MAPS.map(lambda changes: tampered(**changes)))
def test_arbitrary_bytes_are_a_description_or_refused(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        assert TapDescriptor.unpack(TapDescriptor.unpack(data).pack().tobytes()) == TapDescriptor.unpack(data)


FIELDS = st.sampled_from(list(msgpack.unpackb(TAP.pack().tobytes())))


@pytest.mark.slow
@given(st.dictionaries(FIELDS, PLAIN, min_size=1), st.lists(st.integers(-2, 2), max_size=8))
def test_descriptions_from_the_wire_are_not_trusted(changes: dict[str, Any], numbers: list[int]) -> None:
    process = Process()
    description = np.frombuffer(tampered(**changes), np.uint8)
    for consumer_id in (WHOLE_ID, SHARDS_ID):
        for arrays in ([], [description], [np.array(numbers), description], [description, np.array(numbers)]):
            process.bring(consumer_id, [*arrays, np.zeros(2)])
            process.bring(consumer_id, arrays)
    report = process.report()
    assert report is not None
    for error in report.exceptions:
        assert isinstance(error, ValueError | UnboundConsumerError), error
    # And it goes on.
    recorder = Recorder()
    process.taps.bind("loss", Binding(recorder))
    process.emit(TAP, 1.0)
    assert recorder.calls == [({"x": 1.0}, {"run": 7})]
    assert process.report() is None


def test_a_malformed_message_is_reported_as_malformed(process: Process) -> None:
    process.bring(WHOLE_ID, [])
    process.bring(WHOLE_ID, [np.frombuffer(b"junk", np.uint8)])
    process.bring(SHARDS_ID, [np.zeros(4, np.int64)])
    process.emit(replace(PRINT, params={"threshold": 3, "with_device": 1}, kind="format"), 1.0)
    process.emit(TAP)
    process.taps.bind("loss", Binding(print))
    process.emit(TAP, 1.0, 2.0)
    report = process.report()
    assert report is not None
    texts = [str(error) for error in report.exceptions]
    for part, text in zip(
        [
            "without the description of its tap",
            "4 bytes are not a descriptor of a tap",
            "without its shard record or the description",
            "'shown' at train.py:12 (step) is described as of the kind 'format' with params that do not",
            "a message with 2 array(s) came for a pytree of 1",
            "1 messages of the exported tap 'loss'",
        ],
        texts,
        strict=True,
    ):
        assert part in text


@pytest.mark.parametrize(
    "tap",
    [
        replace(TAP, tree=["array", "more"]),
        replace(TAP, kwargs={"x": "\ud800"}),
        replace(TAP, kwargs={"x": object()}),
        replace(TAP, params={"threshold": np.int64(3)}),
        replace(TAP, shards="any"),
    ],
    ids=["tree", "text", "object", "number", "shards"],
)
def test_an_indescribable_tap_is_not_packed(tap: TapDescriptor) -> None:
    with pytest.raises(ValueError, match=r"the tap loss at train.py:12 \(step\) cannot be exported"):
        tap.pack()

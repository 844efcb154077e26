"""Units: names as tokens of subjects, messages by tap and back, and bytes that are none."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from types import SimpleNamespace

import msgpack
import numpy as np
import pytest
from hypothesis import given, strategies as st

from hostcallback.receiver.errors import BadStreamError
from hostcallback.receiver.remote.forwarding_protocol import StreamOffset
from hostcallback.receiver.remote.nats.connection import subject, token, untoken
from hostcallback.receiver.remote.nats.publication import Publication, gathered
from hostcallback.receiver.remote.nats.transport import NatsStream
from hostcallback.receiver.taplog.format.block import FrameBlock
from published_units import KEY, block_of, units


@given(st.text())
def test_every_name_is_a_token_and_comes_back(name: str) -> None:
    safe = token(name)
    assert re.fullmatch(r"[A-Za-z0-9_=-]+", safe)
    assert untoken(safe) == name or safe.startswith("=h")


@given(st.text(max_size=40), st.text(max_size=40))
def test_different_names_have_different_tokens(one: str, other: str) -> None:
    assert (token(one) == token(other)) == (one == other)


def test_long_names_have_short_tokens() -> None:
    assert token("é" * 1000) != token("é" * 1001)
    assert len(subject("run", 1, "é" * 1000)) < 100


@given(
    st.lists(st.integers(0, 70), min_size=1, max_size=30),
    st.integers(1, 4),
    st.sampled_from([128, 700, 1 << 20]),
)
def test_units_are_the_messages_by_tap(sizes: list[int], taps: int, max_bytes: int) -> None:
    block = block_of(sizes, taps)
    found = [Publication.decode(unit.encode()) for unit in units(block, taps, max_bytes)]
    assert {unit.parts for unit in found} == {len(found)}
    assert [unit.part for unit in found] == list(range(len(found)))
    assert len({unit.message_id for unit in found}) == len(found)
    for unit in found:
        assert unit.key == KEY
        assert set(unit.block.consumers) <= set(unit.described)
        assert unit.subject == f"taps.run.3.tap=2E{unit.block.consumers[0]}"
        assert unit.block.data.size <= max_bytes or len(unit.block) == 1
        assert unit.steps.tolist() == unit.block.seqs.tolist()
        assert unit.folded == ([(2, 5)] if 2 in unit.block.seqs else [])
    joined = FrameBlock.join([unit.block for unit in found])
    again = gathered(joined, np.argsort(joined.seqs, kind="stable"))
    assert again.data.tobytes() == block.data.tobytes()
    assert again.offsets.tolist() == block.offsets.tolist()


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(BadStreamError):
        Publication.decode(data)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("v", 2),
        ("stream", ["../run", 3, KEY.epoch]),
        ("stream", ["run", -1, KEY.epoch]),
        ("device", 5),
        ("steps", b""),
        ("offsets", np.array([0, 64], "<i8").tobytes()),
        ("frames", bytes(256)),
        ("described", [b"?"]),
        ("writer", None),
        ("lost", {"device": "x"}),
    ],
)
def test_units_that_do_not_hold_together_are_refused(name: str, value: object) -> None:
    fields = msgpack.unpackb(units(block_of([3, 4, 5]))[0].encode())
    fields[name] = value
    with pytest.raises(BadStreamError):
        Publication.decode(msgpack.packb(fields))


@given(st.integers(0, 10_000), st.integers(0, 255))
def test_a_changed_byte_never_raises_another_exception(place: int, value: int) -> None:
    data = bytearray(units(block_of([3, 4, 5]))[0].encode())
    data[place % len(data)] = value
    with contextlib.suppress(BadStreamError):
        Publication.decode(bytes(data))


def test_a_message_that_the_server_would_refuse_is_published_as_lost(tmp_path: Path) -> None:
    (unit,) = units(block_of([20_000]))
    nbytes = unit.block.data.size
    limits = SimpleNamespace(max_payload=nbytes)  # room for the frames, and none for what says whose they are
    stream = NatsStream(limits, tmp_path, KEY, StreamOffset(0, 0), lambda offset: None)  # type: ignore[arg-type]
    (sent,) = stream._fitting(unit)
    assert sent.lost is not None
    assert (sent.lost.first_seq, sent.lost.nbytes, len(sent.block)) == (0, nbytes, 0)
    assert f"{nbytes} bytes exceed the NATS server's limit" in sent.lost.reason

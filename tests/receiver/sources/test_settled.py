"""Threads that look often learn whether anything was emitted since all was delivered, with and without the library."""

from __future__ import annotations

import types
from collections.abc import Iterator

import numpy as np
import pytest

from hostcallback.receiver.native import bindings as native_library
from hostcallback.receiver.sources.queue import QueueSource
from hostcallback.receiver.sources.settled import Settled, settled
from hostcallback.receiver.wire.array_types import ArraySpec
from hostcallback.receiver.wire.frame import Flags, encode_prefix

X = np.float32(3)


@pytest.fixture(params=["native", "Python"])
def functions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Settled]:
    if request.param == "Python":
        monkeypatch.setattr(native_library, "available", lambda: False)
        settled.cache_clear()
    elif not native_library.available():
        pytest.skip("no native library")
    functions = settled()
    assert isinstance(functions.settle, types.MethodType) == (request.param == "Python")
    yield functions
    settled.cache_clear()


def test_a_message_of_a_queue_is_an_emission(functions: Settled) -> None:
    source = QueueSource(0)
    prefix = encode_prefix(7, Flags(0), [ArraySpec.of(X.dtype, X.shape)])
    functions.settle(functions.emissions())
    assert functions.is_settled()
    source.emit(prefix, [np.asarray(X)])
    assert not functions.is_settled()
    before = functions.emissions()
    source.emit(prefix, [np.asarray(X)])
    functions.settle(before)
    assert not functions.is_settled()
    functions.settle(functions.emissions())
    assert functions.is_settled()

"""A decoder remembers metadata within a bound."""

from __future__ import annotations

import numpy as np
import pytest
from wire_frames import SCALAR

from hostcallback.receiver.wire.decoder import Decoder
from hostcallback.receiver.wire.frame import decode_header, encode_frame


def test_a_decoder_forgets_the_oldest_metadata_and_goes_on() -> None:
    decoder = Decoder()
    for size in range(3000):
        assert decoder.decode(encode_frame([np.zeros(size, np.int8)], consumer_id=1))[-1][0].size == size
    assert len(decoder._known) == 1024  # the bound has no other observable effect than memory
    assert sum(map(len, decoder._known)) == decoder._known_bytes
    assert decoder.decode(SCALAR)[-1] == [1.5]


# Metadata of 69 bytes per array, so that few arrays make them long.
MANY_DIMENSIONS = np.zeros((1,) * 64, np.int8)


@pytest.mark.slow
def test_a_decoder_bounds_the_bytes_it_remembers() -> None:
    decoder = Decoder()
    for count in range(4000, 4006):  # 270 KiB each
        decoder.decode(encode_frame([MANY_DIMENSIONS] * count, consumer_id=1))
        assert 0 < sum(map(len, decoder._known)) == decoder._known_bytes <= 1 << 20


@pytest.mark.slow
def test_metadata_too_long_to_remember_still_decode() -> None:
    frame = encode_frame([MANY_DIMENSIONS] * 16000, consumer_id=1)
    assert decode_header(frame).meta_bytes > 1 << 20
    decoder = Decoder()
    for _ in range(2):
        assert len(decoder.decode(frame)[-1]) == 16000
    assert not decoder._known

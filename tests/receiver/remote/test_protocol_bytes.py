"""The bytes of the forwarding protocol are those of its version: an older process can send to a newer collector."""

from __future__ import annotations

from hostcallback.receiver.remote import forwarding_protocol as protocol
from hostcallback.receiver.remote.forwarding_protocol import SegmentSlice, StreamKey, StreamOffset

KEY = StreamKey("run", 3, "0123456789abcdef")
PLACE = StreamOffset(2, 0x1234)


def test_messages_have_the_bytes_of_version_1() -> None:
    assert protocol.VERSION == 1
    hello = b"\x84\xa7version\x01\xa3run\xa3run\xa7process\x03\xa5epoch\xb00123456789abcdef"
    assert protocol.encode_hello(KEY) == hello
    assert protocol.encode_position(PLACE) == b"\x92\x02\xcd\x12\x34"
    place = (2).to_bytes(8, "little") + (0x1234).to_bytes(8, "little")
    assert protocol.encode_place(PLACE) == place
    followed = KEY.folder.encode().ljust(112, b"\0") + place + b"data"
    assert protocol.encode_followed(KEY, SegmentSlice(PLACE, b"data")) == followed
    assert protocol.decode_followed(followed) == (KEY, PLACE, b"data")


def test_a_slice_that_is_as_long_as_a_position_is_sent_in_two_messages() -> None:
    data = bytes(range(protocol.POSITION_BYTES))
    assert protocol.encode_bytes(data) == (data[:8], data[8:])
    assert protocol.encode_bytes(data + b"\0") == (data + b"\0",)
    decoder = protocol.SliceDecoder()
    assert decoder.take(protocol.encode_place(PLACE)) is None
    taken = [decoder.take(message) for message in protocol.encode_bytes(data)]
    assert taken == [(PLACE, data[:8]), (StreamOffset(2, 0x1234 + 8), data[8:])]

"""The reference codec of the wire format that docs/wire-format.md specifies."""

from __future__ import annotations

from hostcallback.receiver.wire.decode import Decoded, Decoder, decode_frame
from hostcallback.receiver.wire.dtypes import pack_subbyte, unpack_subbyte
from hostcallback.receiver.wire.encode import encode_frame, encode_prefix, frame_from_prefix
from hostcallback.receiver.wire.errors import (
    CorruptFrameError,
    CorruptStreamError,
    TruncatedFrameError,
    UnsupportedDtypeError,
    UnsupportedVersionError,
    WireError,
)
from hostcallback.receiver.wire.header import (
    ALIGNMENT,
    HEADER,
    MAGIC,
    VERSION,
    Flags,
    Header,
    decode_header,
    encode_header,
)
from hostcallback.receiver.wire.metadata import (
    MAX_RANK,
    ArraySpec,
    decode_metadata,
    encode_metadata,
    payload_layout,
)
from hostcallback.receiver.wire.plan import Plan

__all__ = [
    "ALIGNMENT",
    "HEADER",
    "MAGIC",
    "MAX_RANK",
    "VERSION",
    "ArraySpec",
    "CorruptFrameError",
    "CorruptStreamError",
    "Decoded",
    "Decoder",
    "Flags",
    "Header",
    "Plan",
    "TruncatedFrameError",
    "UnsupportedDtypeError",
    "UnsupportedVersionError",
    "WireError",
    "decode_frame",
    "decode_header",
    "decode_metadata",
    "encode_frame",
    "encode_header",
    "encode_metadata",
    "encode_prefix",
    "frame_from_prefix",
    "pack_subbyte",
    "payload_layout",
    "unpack_subbyte",
]

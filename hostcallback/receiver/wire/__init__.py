"""The reference codec of the wire format that docs/wire-format.md specifies."""

from __future__ import annotations

from hostcallback.receiver.wire.codec import (
    Decoded,
    Decoder,
    Plan,
    decode_frame,
    encode_frame,
    encode_prefix,
    frame_from_prefix,
)
from hostcallback.receiver.wire.frame_layout import (
    ALIGNMENT,
    HEADER,
    MAGIC,
    VERSION,
    CorruptFrameError,
    CorruptStreamError,
    Flags,
    Header,
    TruncatedFrameError,
    UnsupportedDtypeError,
    UnsupportedVersionError,
    WireError,
    decode_header,
    encode_header,
    pack_subbyte,
    unpack_subbyte,
)
from hostcallback.receiver.wire.tap_descriptor import (
    MAX_RANK,
    ArraySpec,
    decode_metadata,
    encode_metadata,
    payload_layout,
)

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

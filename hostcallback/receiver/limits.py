"""The limits for data from outside this process: streams, tap logs, files, descriptions of taps.

Each size that such data states is compared with a limit here before anything is allocated or looped over.
`docs/security.md` lists the limits, their values and their reasons; a test compares the two.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Limit(NamedTuple):
    """One limit.

    Attributes:
        name: the constant's name.
        value: the largest size that is accepted.
        reason: what the limit protects, and what stays possible.
    """

    name: str
    value: int
    reason: str


LIMITS: list[Limit] = []
"""All limits, in the order of this module."""


def _limit(name: str, value: int, reason: str) -> int:
    LIMITS.append(Limit(name, value, reason))
    return value


TEMPLATE_CHARS: Final = _limit(
    "TEMPLATE_CHARS", 1 << 16, "characters of a described tap's format string; longer ones are not filled"
)
TEMPLATE_FIELDS: Final = _limit(
    "TEMPLATE_FIELDS", 1000, "replacement fields of a described tap's format string, nested ones included"
)
FIELD_WIDTH: Final = _limit(
    "FIELD_WIDTH",
    1000,
    "width and precision of a replacement field: each costs as many characters as it states",
)
TEXT_CHARS: Final = _limit(
    "TEXT_CHARS", 1 << 20, "characters of the text of one element of a described tap; the rest is cut"
)
MESSAGE_CHARS: Final = _limit(
    "MESSAGE_CHARS",
    1 << 24,
    "characters of all texts of one message of a described tap; the rest is left out",
)
TEXT_ELEMENTS: Final = _limit(
    "TEXT_ELEMENTS", 1 << 20, "elements of an array that a text shows; of a larger one it shows the first"
)
JSON_ELEMENTS: Final = _limit(
    "JSON_ELEMENTS", 1 << 24, "elements of an array that JSON has; of a larger one it has the first"
)
BATCH_ELEMENTS: Final = _limit(
    "BATCH_ELEMENTS",
    1 << 20,
    "elements of a batch, so lines of one message: an element may bring no bytes at all",
)
ARRAYS: Final = _limit(
    "ARRAYS", 1 << 18, "arrays of one message: each takes three bytes at least, and Python objects"
)
DESCRIPTION_BYTES: Final = _limit(
    "DESCRIPTION_BYTES",
    1 << 20,
    "bytes of the description of one tap, which becomes Python objects of 50 times that",
)
DESCRIPTIONS: Final = _limit(
    "DESCRIPTIONS", 1 << 14, "descriptions of taps in one segment of a log, and of one process in a collector"
)
DESCRIPTIONS_BYTES: Final = _limit(
    "DESCRIPTIONS_BYTES",
    1 << 24,
    "bytes of all descriptions in one segment of a log, and of one chunk of notes",
)
DESCRIPTIONS_KEPT: Final = _limit(
    "DESCRIPTIONS_KEPT",
    1 << 18,
    "descriptions that a collector has in memory, of all processes; beyond, it reads those of some again later",
)
FOLDED: Final = _limit(
    "FOLDED",
    1 << 20,
    "notes of coalesced failures in one segment of a log; further ones count as one failure each",
)
STREAMS: Final = _limit(
    "STREAMS",
    1 << 17,
    "streams that a collector has stored; each is a file and some state, also after it has ended",
)
STREAMS_KEPT: Final = _limit(
    "STREAMS_KEPT",
    1 << 12,
    "streams whose reading a collector has in memory; those that were idle for longest are opened again when they grow",
)
PENDING_BYTES: Final = _limit(
    "PENDING_BYTES",
    1 << 30,
    "bytes of values that wait in a collector for shards of other processes, of all runs; beyond, the oldest of the "
    "largest run are counted as incomplete",
)
COUNTED_NAMES: Final = _limit(
    "COUNTED_NAMES",
    10_000,
    "names of one counter, such as devices or reasons for losses; further ones are counted together",
)
REPORT_CHARS: Final = _limit(
    "REPORT_CHARS",
    1 << 14,
    "characters of the text of a described check that a collector keeps for its report",
)
REPORT_VALUES: Final = _limit(
    "REPORT_VALUES", 64, "values, and places in the program, of a described check in its report"
)
DEVICES: Final = _limit("DEVICES", 1 << 12, "devices that one segment of a log names")
LOGGER_CHARS: Final = _limit(
    "LOGGER_CHARS", 256, "characters of the name of a logger, which `logging` keeps until the process ends"
)
NAME_CHARS: Final = _limit(
    "NAME_CHARS", 1 << 12, "characters of the name of a tap, a device or a place in a program"
)
NESTING: Final = _limit(
    "NESTING",
    200,
    "depth of containers: pytrees, keyword arguments, files; far below the interpreter's stack",
)
COMPRESSED_RAW_BYTES: Final = _limit(
    "COMPRESSED_RAW_BYTES",
    1 << 28,
    "bytes of a compressed chunk once it is decompressed; larger chunks are stored as they are",
)
COMPRESSED_MESSAGES: Final = _limit(
    "COMPRESSED_MESSAGES", 1 << 20, "messages in a compressed chunk; chunks of more are stored as they are"
)
COMPRESSED_WINDOW_BYTES: Final = _limit(
    "COMPRESSED_WINDOW_BYTES", 1 << 23, "memory that a compressed chunk may ask its decompressor to keep"
)
CHUNK_BYTES: Final = _limit(
    "CHUNK_BYTES", 1 << 32, "bytes of one chunk of a stream; a chunk holds at least one whole message"
)
FILE_BYTES: Final = _limit("FILE_BYTES", 1 << 20, "bytes of a small file: a process's description")
RULE_FILE_BYTES: Final = _limit("RULE_FILE_BYTES", 1 << 17, "bytes of a file with rules of taps")
RULE_FILE_DOTS: Final = _limit(
    "RULE_FILE_DOTS",
    4,
    "dots outside of quotes in a line of such a file: TOML's reader takes quadratic memory for keys",
)
SOURCE_BYTES: Final = _limit(
    "SOURCE_BYTES", 1 << 22, "bytes of a Python file of which a described check shows a line"
)
CAPSULE_MEMBERS: Final = _limit(
    "CAPSULE_MEMBERS", 100_000, "members of a capsule, and inputs and shards that it lists"
)
CAPSULE_MANIFEST_BYTES: Final = _limit("CAPSULE_MANIFEST_BYTES", 1 << 26, "bytes of a capsule's manifest")
CAPSULE_MEMBER_BYTES: Final = _limit(
    "CAPSULE_MEMBER_BYTES", 1 << 31, "bytes of a capsule's program; inputs are mapped, and may be larger"
)
CAPSULE_TEXT_BYTES: Final = _limit("CAPSULE_TEXT_BYTES", 1 << 26, "bytes of a capsule's report and messages")
CAPSULE_DIMENSIONS: Final = _limit("CAPSULE_DIMENSIONS", 64, "dimensions of an input of a capsule")

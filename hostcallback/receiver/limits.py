"""The limits for data from outside this process: streams, tap logs, files, descriptions of taps.

Each size that such data states is compared with a limit here before anything is allocated or looped over.
`docs/security.md` lists the limits, their values and their reasons; a test compares the two.
"""

from typing import Final

TEMPLATE_CHARS: Final = 1 << 16
"""Characters of a described tap's format string; longer ones are not filled."""
TEMPLATE_FIELDS: Final = 1000
"""Replacement fields of a described tap's format string, nested ones included."""
FIELD_WIDTH: Final = 1000
"""Width and precision of a replacement field: each costs as many characters as it states."""
TEXT_CHARS: Final = 1 << 20
"""Characters of the text of one element of a described tap; the rest is cut."""
MESSAGE_CHARS: Final = 1 << 24
"""Characters of all texts of one message of a described tap; the rest is left out."""
TEXT_ELEMENTS: Final = 1 << 20
"""Elements of an array that a text shows; of a larger one it shows the first."""
JSON_ELEMENTS: Final = 1 << 24
"""Elements of an array that JSON has; of a larger one it has the first."""
BATCH_ELEMENTS: Final = 1 << 20
"""Elements of a batch, so lines of one message: an element may bring no bytes at all."""
ARRAYS: Final = 1 << 18
"""Arrays of one message: each takes three bytes at least, and Python objects."""
DESCRIPTION_BYTES: Final = 1 << 20
"""Bytes of the description of one tap, which becomes Python objects of 50 times that."""
DESCRIPTIONS: Final = 1 << 14
"""Descriptions of taps in one segment of a log, and of one process in a collector."""
DESCRIPTIONS_BYTES: Final = 1 << 24
"""Bytes of all descriptions in one segment of a log, and of one chunk of notes."""
DESCRIPTIONS_KEPT: Final = 1 << 18
"""Descriptions that a collector has in memory, of all processes; beyond, it reads those of some again
later."""
FOLDED: Final = 1 << 20
"""Notes of coalesced failures in one segment of a log; further ones count as one failure each."""
STREAMS: Final = 1 << 17
"""Streams that a collector has stored; each is a file and some state, also after it has ended."""
STREAMS_KEPT: Final = 1 << 12
"""Streams whose reading a collector has in memory; those that were idle for longest are opened again when
they grow."""
PENDING_BYTES: Final = 1 << 30
"""Bytes of values that wait in a collector for shards of other processes, of all runs; beyond, the oldest
of the largest run are counted as incomplete."""
COUNTED_NAMES: Final = 10_000
"""Names of one counter, such as devices or reasons for losses; further ones are counted together."""
REPORT_CHARS: Final = 1 << 14
"""Characters of the text of a described check that a collector keeps for its report."""
REPORT_VALUES: Final = 64
"""Values, and places in the program, of a described check in its report."""
DEVICES: Final = 1 << 12
"""Devices that one segment of a log names."""
LOGGER_CHARS: Final = 256
"""Characters of the name of a logger, which `logging` keeps until the process ends."""
NAME_CHARS: Final = 1 << 12
"""Characters of the name of a tap, a device or a place in a program."""
NESTING: Final = 200
"""Depth of containers: pytrees, keyword arguments, files; far below the interpreter's stack."""
COMPRESSED_RAW_BYTES: Final = 1 << 28
"""Bytes of a compressed chunk once it is decompressed; larger chunks are stored as they are."""
COMPRESSED_MESSAGES: Final = 1 << 20
"""Messages in a compressed chunk; chunks of more are stored as they are."""
COMPRESSED_WINDOW_BYTES: Final = 1 << 23
"""Memory that a compressed chunk may ask its decompressor to keep."""
CHUNK_BYTES: Final = 1 << 32
"""Bytes of one chunk of a stream; a chunk holds at least one whole message."""
FILE_BYTES: Final = 1 << 20
"""Bytes of a small file: a process's description."""
RULE_FILE_BYTES: Final = 1 << 17
"""Bytes of a file with rules of taps."""
RULE_FILE_DOTS: Final = 4
"""Dots outside of quotes in a line of such a file: TOML's reader takes quadratic memory for keys."""
SOURCE_BYTES: Final = 1 << 22
"""Bytes of a Python file of which a described check shows a line."""
CAPSULE_MEMBERS: Final = 100_000
"""Members of a capsule, and inputs and shards that it lists."""
CAPSULE_MANIFEST_BYTES: Final = 1 << 26
"""Bytes of a capsule's manifest."""
CAPSULE_MEMBER_BYTES: Final = 1 << 31
"""Bytes of a capsule's program; inputs are mapped, and may be larger."""
CAPSULE_TEXT_BYTES: Final = 1 << 26
"""Bytes of a capsule's report and messages."""
CAPSULE_DIMENSIONS: Final = 64
"""Dimensions of an input of a capsule."""

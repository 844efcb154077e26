"""Logs and flight files whose every text is hostile: escape sequences, line ends, bidi controls."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from hostcallback.receiver.taplog.format.layout import Lost
from hostcallback.receiver.taplog.writing.segment_writer import SegmentWriter
from hostcallback.receiver.wire.frame import Flags
from hostcallback.receiver.wire.tap_descriptor import TapDescriptor
from logged_frames import block_of, frame

FORGED = "FORGED"
HOSTILE = f"\x1b]0;owned\x07\x1b[2J\r\n{FORGED} line\u202etxt\u2028{FORGED}\x9b31m\x00\x08"
UNSAFE = frozenset("\x1b\x07\r\u202e\u2028\x9b\x00\x08")

_TAP = TapDescriptor(
    name=f"n{HOSTILE}",
    source_line=f"{HOSTILE}.py:12 (step{HOSTILE})",
    consumer_id=1,
    kind="tap",
    params={},
    kwargs={f"k{HOSTILE}": HOSTILE},
    transforms=((f"t{HOSTILE}", {f"p{HOSTILE}": HOSTILE}),),
    tree=["dict", [["value", f"d{HOSTILE}"], ["object", HOSTILE]], [["array"], ["value", HOSTILE]]],
    shards=None,
    sharding="global",
)
_FORMAT = replace(
    _TAP,
    consumer_id=2,
    kind="format",
    tree=["tuple", [["tuple", [["array"], ["value", HOSTILE]]], ["dict", [], []]]],
    params={"fmt": f"{HOSTILE} {{}} {{}}", "has_placeholders": True, "printoptions": {"nanstr": "\x1b[5m"}},
)
_REFUSED = replace(_FORMAT, consumer_id=3, params={**_FORMAT.params, "fmt": f"{{0.{HOSTILE}}}"})
_PRINT = replace(
    _TAP, consumer_id=4, kind="print", params={"threshold": 9}, tree=["node", HOSTILE, [["array"]]]
)
_CHECK = replace(
    _TAP,
    consumer_id=5,
    kind="check",
    tree=[
        "tuple",
        [["array"], ["tuple", [["array"]]], ["dict", [["value", f"a{HOSTILE}"]], [["object", HOSTILE]]]],
    ],
    params={
        "fmt": f"{HOSTILE} {{}}",
        "has_placeholders": True,
        "printoptions": {},
        "places": [[[[f"{HOSTILE}.py", 3, HOSTILE], [HOSTILE, 4, HOSTILE]], None]],
    },
)
_NONFINITE = replace(
    _TAP,
    consumer_id=6,
    kind="nonfinite",
    params={"program": HOSTILE},
)
_FOUND = replace(
    _TAP,
    consumer_id=9,
    kind="nonfinite",
    params={
        "found": {
            "operation": [HOSTILE, [HOSTILE, 3, HOSTILE], HOSTILE, [2], HOSTILE, False],
            **dict.fromkeys(("note", "step", "where", "device"), HOSTILE),
            "nan_count": 1, "inf_count": 0, "iteration": [1], "elements": [0], "call": 2, "values": {HOSTILE: HOSTILE},
        }
    },
)  # fmt: skip
_OTHER = replace(_TAP, consumer_id=7, kind=HOSTILE, tree=["namedtuple", HOSTILE, [HOSTILE], [["array"]]])
_MISFIT = replace(_TAP, consumer_id=8, kind="format", params={HOSTILE: HOSTILE})


def write_hostile_log(folder: Path, value: float = 1.5) -> Path:
    """Writes a log with one message of each kind of tap; returns its folder."""
    folder.mkdir(parents=True)
    info = {"host": f"h{HOSTILE}", "process": f"p{HOSTILE}", "job": HOSTILE}
    writer = SegmentWriter(folder / "20260101T000000.000000000Z-1-000001.hcblog", info=info)
    one, nan = np.float32(value), np.float32("nan")
    frames = [
        frame(_TAP, one, seq=0),
        frame(_FORMAT, nan, seq=1),
        frame(_REFUSED, one, seq=2),
        frame(_PRINT, one, seq=3),
        frame(_CHECK, np.bool_(False), one, seq=4, flags=Flags.CHECK),
        frame(_NONFINITE, np.bool_(False), seq=5, flags=Flags.CHECK),
        frame(_OTHER, one, seq=6),
        frame(_MISFIT, one, seq=7),
        frame(replace(_TAP, consumer_id=99), one, seq=8),
        frame(_TAP, one, one, one, seq=9),
        frame(_FOUND, np.bool_(False), seq=10, flags=Flags.CHECK),
    ]
    taps = [_TAP, _FORMAT, _REFUSED, _PRINT, _CHECK, _NONFINITE, _OTHER, _MISFIT, _FOUND]
    writer.frames(f"cpu:0{HOSTILE}", block_of(*frames), {tap.consumer_id: tap for tap in taps})
    writer.lost(Lost(f"cpu:0{HOSTILE}", 20, 30, 11, 0, 1_700_000_000 * 10**9, HOSTILE))
    writer.close()
    return folder


def write_hostile_flight(folder: Path) -> Path:
    """Writes a flight recorder's folder; returns it."""
    process = folder / f"1{HOSTILE}".replace("\x00", "").replace("/", "")
    process.mkdir(parents=True)
    (process / "process.json").write_text(
        json.dumps({"host": HOSTILE, "pid": 1, "started_ns": 1, "command": [HOSTILE, "x"]})
    )
    (process / "cpu.hcbring").write_bytes(b"\x1b[2Jno ring")
    return folder

"""Emits until it is killed: `python forwarding_program.py ADDRESS SPOOL FILE`. The file lists the flushed messages."""

from __future__ import annotations

import sys
from pathlib import Path

from collecting import Emitter, forwarder

address, spool, file = sys.argv[1:]
recorder = forwarder(address, Path(spool))
emitter = Emitter(recorder)
while True:
    emitter.losses(37)
    recorder.flush()
    Path(file).write_text(str(emitter.seq))

"""Many processes in one, each a stream: `python many_clients_program.py ADDRESS SPOOL FIRST COUNT MESSAGES`."""

from __future__ import annotations

import sys
from pathlib import Path

from collecting import Emitter, forwarder

address, spool = sys.argv[1:3]
first, count, messages = map(int, sys.argv[3:])
recorders = [
    forwarder(address, Path(spool), process_index=number, drain_sec=100.0)
    for number in range(first, first + count)
]
emitters = [Emitter(recorder) for recorder in recorders]
for _ in range(0, messages, 10):
    for emitter in emitters:
        emitter.losses(10)
for recorder in recorders:
    recorder.close()
assert not any(recorder.unsent_bytes for recorder in recorders)

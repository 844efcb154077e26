"""Writes a log from several threads until it is killed: `logging_program.py FOLDER COMPRESS`.

Prints the messages of each device that are in the file, as soon as they are.
"""

from __future__ import annotations

import sys
import threading
from itertools import count

import numpy as np

from hostcallback.receiver.taplog.writing.log_writer import LogWriter
from hostcallback.receiver.taplog.writing.rotation import LogOptions
from logged_frames import LOSS, NORM, block_of, frame, losses

DEVICES = 3


def main() -> None:
    """Writes until it is killed."""
    options = LogOptions(segment_bytes=60_000, compress=sys.argv[2] == "1")
    log = LogWriter(sys.argv[1], options)
    log.describe(LOSS)
    log.describe(NORM)
    noise = np.random.default_rng(0)
    say = threading.Lock()

    def write(device: int) -> None:
        seq = 0
        for turn in count():
            some = 1 + (turn * 7 + device) % 40
            if turn % 5 == 4:
                some = 1
                log.append(f"cpu:{device}", block_of(frame(NORM, noise.random(3_000), seq=seq)))
            else:
                log.append(f"cpu:{device}", losses(seq, some))
            seq += some
            log.flush()
            with say:
                print(device, seq, flush=True)

    threads = [threading.Thread(target=write, args=(device,), daemon=True) for device in range(DEVICES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


main()

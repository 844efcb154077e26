"""A ring that one process writes and another one reads, while a third changes its memory: the reader goes on.

`tests/receiver/native/ring/shared_ring_mutations.cc` does the same under the sanitizers.
"""

from __future__ import annotations

import mmap
import os
import random
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from checkout import python_path
from collecting import wait_for
from mutations import examples

pytestmark = pytest.mark.native_only

CAPACITY = 1 << 16
PAGE = 4096
WRITER = """
import ctypes, os, sys
import numpy as np
from hostcallback.receiver.native import bindings as native
from hostcallback.receiver.sources.ring import RingSource
from hostcallback.receiver.sources.ring_config import RingConfig
from hostcallback.receiver.wire import HEADER, decode_header, encode_frame

path, capacity = sys.argv[1], int(sys.argv[2])
library = native.load()
source = RingSource.open(4242, RingConfig(capacity_bytes=capacity, block_budget_bytes=1 << 20))
ring = library.hcb_ring_get(4242)
if library.hcb_ring_keep_in_file(ring, os.fsencode(path), b"cpu:7", 1 << 20):
    sys.exit("the ring could not be put into a file")
print("started", flush=True)
kinds = [[np.float32(1)], [np.zeros(300)], [np.int8(1), np.zeros((3, 5), np.int32)], [np.zeros(20_000)]]
number = 0
while True:
    arrays = [np.atleast_1d(array) for array in kinds[number % 3 if number % 16 else 3]]
    frame = encode_frame(arrays, consumer_id=number % 4, flags=0, seq=0, time_ns=0, run_id=1)
    nbytes = HEADER.size + (decode_header(frame).meta_bytes + 63) // 64 * 64
    prefix = bytes(frame[:nbytes])
    pointers = (ctypes.c_void_p * len(arrays))(*(array.ctypes.data for array in arrays))
    sizes = (ctypes.c_uint64 * len(arrays))(*(array.nbytes for array in arrays))
    library.hcb_ring_send(ring, prefix, nbytes, len(arrays), pointers, sizes, 0)
    number += 1
"""
READER = """
import logging, sys
from pathlib import Path
from hostcallback.receiver.failures.deferred_errors import OnError
from hostcallback.receiver.messages import Consumer
from hostcallback.receiver.messages import Registry
from hostcallback.receiver.runtime.device_receiver import DeviceReceiver
from hostcallback.receiver.runtime.dispatch.scope import Scope
from hostcallback.receiver.sources.ring import RingSource
from hostcallback.receiver.taplog.writing.recorder import record

logging.disable(logging.CRITICAL)
file, log = map(Path, sys.argv[1:])
registry, leases, seen = Registry(), [], []
for number in range(4):
    consumer = Consumer(number, f"tap{number}", "a.py:1 (f)", lambda message: seen.append(message.seq))
    leases.append(registry.lease(consumer))
total = 0
for line in sys.stdin:
    scope = Scope("apart", 100, on_error=OnError.WARN)
    scope.record_with(record(log))
    source = RingSource.attach(file)
    receiver = DeviceReceiver("cpu:7", "cpu:7", source, registry, scope, continues_from=0)
    print("reads", flush=True)
    sys.stdin.readline()
    receiver.stop(20, drain=False)
    scope.recorder.close()
    scope.deferred.take()
    total += len(seen)
    print("read", len(seen), flush=True)
    seen.clear()
"""


def change(memory: mmap.mmap, choose: random.Random) -> None:
    """Changes a number of the first page, a field of a frame's header, or any bytes."""
    value = choose.choice(
        [0, 1, 63, 64, CAPACITY, 1 << 31, (1 << 32) - 1, 1 << 62, (1 << 64) - 1, choose.getrandbits(64)]
    )
    kind = choose.randrange(4)
    if kind == 0:
        at = choose.choice([128, 192, 200, 208, 256, 264])
        head = struct.unpack_from("<Q", memory, 128)[0]
        value = (
            choose.choice([value, head + choose.randrange(-CAPACITY, CAPACITY), head & -64]) & (1 << 64) - 1
        )
    elif kind == 1:
        at = PAGE + choose.randrange(CAPACITY // 64) * 64 + choose.choice([0, 8, 16, 40, 44, 48, 56])
    elif kind == 2:
        at = PAGE + choose.randrange((len(memory) - PAGE) // 8 - 1) * 8
    else:
        at, value = PAGE + choose.randrange(CAPACITY - 8), choose.getrandbits(64)
    struct.pack_into("<Q", memory, at, value)


def filled(file: Path) -> bytes | None:
    """The ring's file, once its writer waits for room."""
    data = file.read_bytes()
    return data if struct.unpack_from("<Q", data, 128)[0] > CAPACITY // 2 else None


def test_a_reader_in_another_process_goes_on(tmp_path: Path) -> None:
    choose = random.Random(5)
    file = tmp_path / "cpu7.hcbring"
    environment = {**os.environ, "PYTHONPATH": python_path(), "OPENBLAS_NUM_THREADS": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
    with subprocess.Popen([sys.executable, "-c", WRITER, str(file), str(CAPACITY)], **pipes) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "started\n"
        whole = wait_for(lambda: filled(file), "a full ring")
        reader = subprocess.Popen([sys.executable, "-c", READER, str(file), str(tmp_path / "log")], **pipes)
        try:
            assert reader.stdin is not None
            assert reader.stdout is not None
            with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 0) as memory:
                messages = 0
                for _ in range(examples(100)):
                    memory[: len(whole)] = whole  # the writer fills it again
                    reader.stdin.write("go\n")
                    reader.stdin.flush()
                    assert reader.stdout.readline() == "reads\n", reader.wait(60)
                    for _ in range(100):
                        change(memory, choose)
                    reader.stdin.write("stop\n")
                    reader.stdin.flush()
                    said = reader.stdout.readline().split()
                    assert said, reader.wait(60)
                    messages += int(said[1])
            reader.stdin.close()
            assert reader.wait(60) == 0
            assert messages, "the reader must have delivered some messages"
        finally:
            writer.kill()
            reader.kill()
            for pipe in (reader.stdin, reader.stdout):
                if pipe is not None:
                    pipe.close()
            reader.wait()

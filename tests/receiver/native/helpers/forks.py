"""What programs that fork send and read: for the tests of rings in forked processes."""

from __future__ import annotations

import os
import sys

import numpy as np

from hostcallback.receiver.native import bindings as native
from hostcallback.receiver.wire.array_types import ArraySpec
from hostcallback.receiver.wire.decoder import Decoder
from hostcallback.receiver.wire.frame import encode_prefix


def send(library, device, payload):
    prefix = encode_prefix(1, 0, (ArraySpec.of(np.dtype(np.uint8), (len(payload),)),))
    array = np.frombuffer(payload, np.uint8)
    address = (native.c_void_p * 1)(array.ctypes.data)
    nbytes = (native.c_uint64 * 1)(len(payload))
    ring = library.hcb_ring_get(device)
    return library.hcb_ring_send(ring, prefix, len(prefix), 1, address, nbytes, 0)


def read_all(source, count):
    payloads = []
    while len(payloads) < count:
        batch = source.read(30)
        for memory, offset, external in batch.frames:
            _, _, seq, *_, (array,) = Decoder().decode(memory, offset, external)
            payloads.append((seq, array.tobytes()))
        batch.release()
    return payloads


def in_child(function):
    """Forks, calls a function in the child, and waits for the child, in which it must succeed."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            function()
            status = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stderr.flush()
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    assert status == 0, "the child failed"

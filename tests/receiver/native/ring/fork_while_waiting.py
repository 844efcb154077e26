"""Forks while a program's thread waits at its end for what was emitted. The child's programs wait, too."""

from __future__ import annotations

import ctypes
from pathlib import Path

from forks import in_child, read_all, send
from hostcallback.receiver.native import bindings as native
from hostcallback.receiver.sources.ring import RingSource

EXECUTE = 3
LIBC = ctypes.CDLL(None)


class CallFrame(ctypes.Structure):
    """The begin of XLA_FFI_CallFrame."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("api", ctypes.c_void_p),
        ("ctx", ctypes.c_void_p),
        ("stage", ctypes.c_int),
        ("rest", ctypes.c_byte * 512),
    ]


FRAME = CallFrame(struct_size=256, stage=EXECUTE)


def tasks():
    return {int(task.name) for task in Path("/proc/self/task").iterdir()}


def sleeps(task):
    return Path(f"/proc/self/task/{task}/stat").read_text().rpartition(") ")[2][0] == "S"


class ProgramEnd:
    """A thread of a program, which is none of Python's, at the program's end."""

    def __init__(self, library):
        before, self._thread = tasks(), ctypes.c_ulong()
        function = ctypes.cast(library.hcb_wait_for_output, ctypes.c_void_p)
        assert LIBC.pthread_create(ctypes.byref(self._thread), None, function, ctypes.byref(FRAME)) == 0
        while not any(map(sleeps, tasks() - before)):
            assert LIBC.pthread_tryjoin_np(self._thread, None) != 0, "the program did not wait"

    def join(self):
        assert LIBC.pthread_join(self._thread, None) == 0


def child(library, source):
    assert send(library, 0, b"child") == native.EMITTED
    own = ProgramEnd(library)
    assert read_all(source, 1) == [(0, b"child")]
    assert source.read(0) is None
    own.join()


def main():
    library = native.load()
    wait = native.Wait(lambda: None)
    library.hcb_buffer_waits(None, wait)
    source = RingSource.open(0)
    assert send(library, 0, b"parent") == native.EMITTED
    end = ProgramEnd(library)
    in_child(lambda: child(library, source))
    assert read_all(source, 1) == [(0, b"parent")]
    assert source.read(0) is None
    end.join()


if __name__ == "__main__":
    main()

"""Collectors in separate processes, forwarders without JAX, and stored messages: for the tests of forwarding."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from checkout import python_path
from hostcallback.receiver.messages import Message
from hostcallback.receiver.remote.forwarder import Forwarder
from hostcallback.receiver.remote.options import Forward
from hostcallback.receiver.taplog.format.layout import Damage, Lost
from hostcallback.receiver.taplog.reading.merge import LostNote
from hostcallback.receiver.taplog.reading.reader import LogReader
from hostcallback.receiver.taplog.writing.recorder import Recorder
from hostcallback.receiver.wire.tap_descriptor import TapDescriptor
from logged_frames import consumer_of
from ports import free_port
from python_process import start_python
from threads import WAIT_SEC, wait_for

LOSS = TapDescriptor(
    name="loss", source_line="/home/me/train.py:12 (step)", consumer_id=77, kind="tap", params={}, kwargs={},
    transforms=(), tree=["dict", [["value", "loss"], ["value", "step"]], [["array"], ["array"]]], shards=None,
    sharding="global",
)  # fmt: skip
TEXT = replace(
    LOSS, name="print", consumer_id=78, kind="format", source_line="/home/me/model.py:42 (step)",
    tree=["tuple", [["tuple", [["array"]]], ["dict", [["value", "step"]], [["array"]]]]],
    params={"fmt": "x = {} at {step}", "has_placeholders": True, "printoptions": np.get_printoptions()},
)  # fmt: skip
CHECK = replace(
    LOSS, name="positive", consumer_id=79, kind="check", source_line="/home/me/train.py:20 (step)",
    tree=["tuple", [["array"], ["tuple", [["array"]]], ["dict", [], []]]],
    params={"fmt": "x is {}", "has_placeholders": True, "printoptions": np.get_printoptions()},
)  # fmt: skip


class Emitter:
    """Emits messages of some taps, as a device does."""

    def __init__(self, recorder: Recorder, device: str = "cpu:0") -> None:
        self.recorder = recorder
        self.device = device
        self.seq = 0

    def emit(self, described: TapDescriptor, *arrays: Any) -> None:
        now = time.time_ns()
        arrays_ = [np.asarray(array) for array in arrays]
        self.recorder(Message(consumer_of(described), arrays_, self.seq, now, 5, self.device, None))
        self.seq += 1

    def losses(self, count: int) -> None:
        """This many messages of LOSS, whose loss and step are their numbers."""
        for _ in range(count):
            self.emit(LOSS, np.float32(self.seq), np.int32(self.seq))


class CollectorProcess:
    """`hcb collect`, which tests can kill and start again at the same address.

    Attributes:
        program: the Python program that acts as `hcb`.
        log: its folder.
        address: its listening address.
    """

    program: tuple[str, ...] = ("-m", "hostcallback.receiver.cli")

    def __init__(self, folder: Path, *arguments: str, port: int = 0) -> None:
        self.log = folder / "collected"
        self._arguments = arguments
        self._port = port or free_port()
        self.errors: list[str] = []
        self.lines: list[str] = []
        self.start()

    @property
    def address(self) -> str:
        return f"localhost:{self._port}"

    def start(self) -> None:
        """Starts it, at the port it had before."""
        given = (*self.command(), *self._arguments)
        self.process = start_python(
            "-u", *self.program, "collect", *given, stderr=subprocess.PIPE, PYTHONPATH=python_path()
        )
        self._threads = [
            threading.Thread(target=self._read, args=(stream, lines), daemon=True)
            for stream, lines in ((self.process.stdout, self.lines), (self.process.stderr, self.errors))
        ]
        before = len(self.errors)
        for thread in self._threads:
            thread.start()
        line = wait_for(
            lambda: (
                next((e for e in self.errors[before:] if "collecting " in e), None)
                or (self.process.poll() is not None and not self._threads[1].is_alive() and "ended")
            ),
            "a listening collector",
        )
        assert line != "ended", self.errors
        port = line.split("collecting ")[1].split()[1].rpartition(":")[2]
        self._port = int(port) if port.isdecimal() else 0

    def command(self) -> list[str]:
        """The address and the folder."""
        return ["--listen", f"localhost:{self._port}", "--log", str(self.log)]

    @staticmethod
    def _read(stream: Any, lines: list[str]) -> None:
        with stream:
            lines.extend(iter(stream.readline, ""))

    def kill(self) -> None:
        """As if by a crash."""
        self.process.kill()
        self._join()

    def stop(self) -> int:
        """As its user does; returns the status."""
        self.process.send_signal(signal.SIGTERM)
        return self._join()

    def _join(self) -> int:
        status = self.process.wait(WAIT_SEC)
        for thread in self._threads:
            thread.join(WAIT_SEC)
        return status

    def __enter__(self) -> CollectorProcess:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.kill()


def forwarder(address: str, spool: Path, **options: Any) -> Forwarder:
    """Forwards as process 0 of a run, by default."""
    index = options.pop("process_index", None)
    local = options.pop("local_devices", {"cpu:0": 0, "cpu:1": 1})
    return Forwarder(Forward(address, spool=spool, **options), process_index=index, local_devices=local)


def stored(log: Path, run: str = "run") -> tuple[dict[tuple[str, str], list[int]], list[Lost]]:
    """The numbers of the stored messages, by process and device, and the reported losses."""
    found: dict[tuple[str, str], list[int]] = {}
    lost: list[Lost] = []
    for record in LogReader(log / run).records():
        if isinstance(record, LostNote):
            lost.append(record.lost)
        elif isinstance(record, Damage):
            assert record.torn, record
        else:
            key = record.writer.process, record.message.device
            found.setdefault(key, []).append(record.message.seq)
    return found, lost


def all_stored(log: Path, run: str = "run") -> dict[tuple[str, str], list[int]]:
    """The numbers as `stored` has them; nothing was reported as lost."""
    found, lost = stored(log, run)
    assert not lost
    return found


def only(found: dict[tuple[str, str], list[int]]) -> Sequence[int]:
    """Of the only process and device there is."""
    assert len(found) == 1, found.keys()
    return next(iter(found.values()))


def responses(address: str, method: str, *messages: bytes, token: str = "") -> tuple[list[bytes], Any]:
    """The responses of a collector to the messages of a call, and the error at the end."""
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    found: list[bytes] = []
    with grpc.insecure_channel(address) as channel:
        try:
            for message in channel.stream_stream(method)(iter(messages), metadata=metadata, timeout=60):
                found.append(message)
        except grpc.RpcError as error:
            return found, error
    return found, None

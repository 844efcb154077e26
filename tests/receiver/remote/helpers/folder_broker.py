"""A small broker: a folder that processes and a collector share, `file:///path`. As a script: `hcb` with it.

A stream has a folder there, with a file for each slice, named after its position, and the file `stored`, in which the
collector writes the position up to which it has stored the stream.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from hostcallback.receiver.cli import main
from hostcallback.receiver.remote.brokers import BROKERS, Broker
from hostcallback.receiver.remote.collector.service import CollectFrom, CollectingService, Grown
from hostcallback.receiver.remote.collector.store import Store
from hostcallback.receiver.remote.forwarding_protocol import START, SegmentSlice, StreamKey, StreamOffset
from hostcallback.receiver.remote.options import Forward
from hostcallback.receiver.remote.sending.sender import OnAck, Transport

SCHEME = "file://"
LOOK_SEC = 0.02

FOLDER = Broker(
    name="folder",
    title="shared folder",
    schemes=("file",),
    example="file:///mnt/share",
    summary="take what processes write into a shared folder, file:///PATH",
    transport="folder_broker:make_transport",
    service="folder_broker:make_service",
)


def make_transport(options: Forward) -> Transport:
    return FolderTransport(Path(options.address.removeprefix(SCHEME)))


def make_service(source: CollectFrom, store: Store, on_grown: Grown) -> CollectingService:
    path = Path(source.url.removeprefix(SCHEME))
    if not path.is_absolute():
        raise ValueError(f"{source.url!r} names no absolute path, such as file:///mnt/share")
    return FolderCollector(path, source.run, store, on_grown)


def write(path: Path, data: bytes) -> None:
    """Writes a file that readers find whole or not at all."""
    partial = path.with_name(f".{path.name}")
    partial.write_bytes(data)
    os.replace(partial, path)


def position_in(path: Path) -> StreamOffset:
    """How far a stream is stored."""
    try:
        segment, offset = path.read_text().split()
    except FileNotFoundError:
        return START
    return StreamOffset(int(segment), int(offset))


class FolderTransport:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def connect(self, key: StreamKey, on_ack: OnAck) -> FolderStream:
        return FolderStream(self._folder / key.folder, on_ack)

    def close(self) -> None:
        pass


class FolderStream:
    def __init__(self, folder: Path, on_ack: OnAck) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._on_ack = on_ack
        self.stored = position_in(folder / "stored")

    def send(self, piece: SegmentSlice) -> None:
        write(self._folder / f"{piece.position.segment:06d}-{piece.position.offset:016d}", piece.data)

    def check(self) -> None:
        found = position_in(self._folder / "stored")
        if found != self.stored:
            self.stored = found
            self._on_ack(found)

    def close(self) -> None:
        pass


class FolderCollector:
    def __init__(self, folder: Path, run: str, store: Store, on_grown: Grown) -> None:
        self._folder = folder
        self._run = run
        self._store = store
        self._on_grown = on_grown
        self._told = threading.Event()

    @property
    def where(self) -> str:
        return f"from {SCHEME}{self._folder}"

    def end(self) -> None:
        self._told.set()

    def serve(self, on_ready: Callable[[], None]) -> None:
        on_ready()
        while not self._told.wait(LOOK_SEC):
            for folder in sorted(self._folder.glob("*~*~*")):
                key = StreamKey.of_folder(folder.name)
                if key is not None and self._run in ("", key.run):
                    self._take(key, folder)

    def _take(self, key: StreamKey, folder: Path) -> None:
        stream = self._store.open(key)
        for path in sorted(folder.glob("[0-9]*-[0-9]*")):
            segment, offset = map(int, path.name.split("-"))
            if stream.append(StreamOffset(segment, offset), path.read_bytes()):
                self._on_grown(key, stream.stored)
            write(folder / "stored", "{} {}".format(*stream.stored).encode())
            path.unlink()


if __name__ == "__main__":
    BROKERS.append(FOLDER)
    sys.exit(main())

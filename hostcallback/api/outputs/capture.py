"""`capture`: records the taps of a block in memory, as data; the base of sinks that open a receiver for themselves."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self, cast

from hostcallback.api.receiver import OutfeedReceiver, outfeed_receiver
from hostcallback.receiver import processes
from hostcallback.receiver.errors import DeviceClaimedError
from hostcallback.receiver.messages import Find
from hostcallback.receiver.sources.source import Batch
from hostcallback.receiver.taplog.columns.log_data import LogData, TapData, UnknownTapError, read
from hostcallback.receiver.taplog.writing.recorder import Recorder, record
from hostcallback.tracing.source_line import hide_frames, public

SHARED_MEMORY = Path("/dev/shm")
RUN = "capture"


class OwnReceiver:
    """A sink that is a context manager: a receiver for all devices delivers to it.

    Attributes:
        receiver_name: the name of that receiver.
        hint_if_claimed: what to do where another receiver is open.
    """

    receiver_name: ClassVar[str]
    hint_if_claimed: ClassVar[str]
    _receiver: OutfeedReceiver | None = None

    @hide_frames
    def __enter__(self) -> Self:
        """Opens a receiver for all devices, which delivers to this sink.

        Raises:
            DeviceClaimedError: another receiver is open: give it this sink.
        """
        self._receiver = outfeed_receiver(
            receiver_name=self.receiver_name, sinks=[cast("Callable[..., Any]", self)]
        )
        try:
            self._receiver.__enter__()
        except DeviceClaimedError as error:
            self._receiver = None
            error.add_note(self.hint_if_claimed)
            raise
        return self

    @hide_frames
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        """Waits for all messages of the block. Raises the exceptions of tap functions, as a receiver does."""
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.__exit__(kind, error, tb)


class Capture(OwnReceiver, Mapping[str, TapData]):
    """The taps that were captured, by name: see `hcb.read` for what it gives. Made by `capture`.

    A batch sink, too: `outfeed_receiver(sinks=[captured])`. Messages are in shared memory (`/dev/shm`) if there is
    some, else among the temporary files, until the object is gone or closed.

    Example:
        with hcb.capture() as captured:
            train()
        print(captured["loss"].to_numpy())
    """

    receiver_name: ClassVar[str] = "capture"
    hint_if_claimed: ClassVar[str] = (
        "Or capture through that receiver: outfeed_receiver(sinks=[taps := hcb.capture()])"
    )

    def __init__(self) -> None:
        """Makes the folder in memory."""
        memory = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None
        self._folder = tempfile.mkdtemp(prefix="hostcallback-capture-", dir=memory)
        self._remove = weakref.finalize(self, _remove, self._folder)
        self._remove.atexit = False  # the messages that are delivered at exit go into it
        _folders[self._folder] = os.getpid()
        self._recorder: Recorder = record(self._folder, run=RUN)

    def close(self) -> None:
        """Frees the memory now."""
        self._recorder.close()
        self._remove()

    def data(self) -> LogData:
        """The messages delivered so far. Wait for others with `hcb.barrier_wait()`."""
        self._recorder.flush()
        return read(self._folder)

    @hide_frames
    def __getitem__(self, name: str) -> TapData:
        """The tap of that name. Raises UnknownTapError, which lists what there is."""
        try:
            return self.data()[name]
        except UnknownTapError as error:
            if self._receiver is None:
                raise
            raise UnknownTapError(
                f"{error} The block has not ended, and messages may be under way: call hcb.barrier_wait() first"
            ) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.data())

    def __len__(self) -> int:
        return len(self.data())

    def __repr__(self) -> str:
        """The names of the taps."""
        return f"Capture({', '.join(map(repr, self))})"

    def _repr_html_(self) -> str:
        return self.data()._repr_html_()

    def record_batch(self, device: str, batch: Batch, find: Find, **numbers: Any) -> None:
        """Records a batch; see `BatchSink`."""
        self._recorder.record_batch(device, batch, find, **numbers)

    def lose(self, device: str, count: int, reason: str) -> None:
        """Notes lost messages; see `BatchSink`."""
        self._recorder.lose(device, count, reason)

    def write(self) -> None:
        """Writes what was collected; see `BatchSink`."""
        self._recorder.write()

    def flush(self) -> None:
        """Writes what was collected; see `BatchSink`."""
        self._recorder.flush()


_folders: dict[str, int] = {}
"""The folders that are there, with the process that made them."""


def _remove(folder: str) -> None:
    if _folders.pop(folder, 0) == os.getpid():  # a forked child has those of its parent, too
        shutil.rmtree(folder, ignore_errors=True)


def _remove_all() -> None:
    for folder in list(_folders):
        _remove(folder)


processes.at_end(_remove_all)


@public
def capture() -> Capture:
    """Returns a context manager that captures all taps of its block in memory, as columns by tap.

    The taps' functions run as without it. The captured messages can be read during the block (after
    `hcb.barrier_wait()`) and after it. If a receiver is open around the block, give it `sinks=[captured]` instead of
    the `with` statement, because a device has one receiver.

    Returns:
        A mapping of taps by name. A value has `to_pandas()`, `to_xarray()`, `to_arrow()`, `to_numpy()` and iteration.

    Raises:
        OSError: no folder can be made in `/dev/shm` or among the temporary files.
        DeviceClaimedError: (on entering) another receiver is open.
        TapFunctionException: (on leaving) has the exceptions of tap functions.

    Example:
        with hcb.capture() as taps:
            train()
        print(taps["loss"].to_pandas())
    """
    return Capture()

"""The client's side of `hcb tail --from`: stores the followed streams in a temporary folder, for a log reader."""

from __future__ import annotations

import itertools
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import grpc

from hostcallback.receiver.errors import BadStreamError, TransportError
from hostcallback.receiver.files import Closing
from hostcallback.receiver.remote import forwarding_protocol
from hostcallback.receiver.remote.options import Forward
from hostcallback.receiver.remote.sending.grpc_transport import GrpcTransport

ANSWER_SEC = 60.0


class RemoteLog(Closing):
    """The streams of a collector as a folder with a growing tap log.

    Attributes:
        folder: the folder.
    """

    def __init__(self, options: Forward, run: str) -> None:
        """Asks the collector at `options` for a run, or for the runs that match a pattern."""
        self._address = options.address
        self._temporary = tempfile.TemporaryDirectory(prefix="hostcallback-tail-")
        self.folder = Path(self._temporary.name)
        self._caught_up = threading.Event()
        self._error: TransportError | None = None
        self._transport = GrpcTransport(options)
        request = forwarding_protocol.encode_map(version=forwarding_protocol.VERSION, run=run)
        self._call = self._transport.call(forwarding_protocol.FOLLOW, iter([request]))
        self._thread = threading.Thread(target=self._receive, name="hostcallback-tail", daemon=True)
        self._thread.start()

    def wait(self, timeout_sec: float) -> None:
        """Waits until all data has arrived that the collector had at the start.

        Raises:
            TransportError: the collector cannot be reached, or refuses.
        """
        if not self._caught_up.wait(timeout_sec):
            raise TransportError(f"the collector at {self._address} did not answer in {timeout_sec:g} s")
        self.check()

    def check(self) -> None:
        """Raises TransportError if the connection has ended."""
        if self._error is not None:
            raise self._error

    def finished(self) -> list[Path]:
        """Segments that are complete: their streams have later ones."""
        found = sorted(self.folder.iterdir())
        return [path for path, later in itertools.pairwise(found) if path.name[:-14] == later.name[:-14]]

    def remove(self, paths: Sequence[Path]) -> None:
        """Removes segments that the caller has read."""
        for path in paths:
            path.unlink()

    def close(self) -> None:
        """Closes the connection and removes the folder."""
        self._call.cancel()
        # At most 5 s: a daemon thread that hangs in gRPC must not keep the command from ending.
        self._thread.join(5.0)
        self._transport.close()
        self._temporary.cleanup()

    def _receive(self) -> None:
        try:
            for message in self._call:
                if message:
                    self._take(message)
                else:
                    self._caught_up.set()
            self._error = TransportError(f"the collector at {self._address} has ended")
        except grpc.RpcError as error:
            self._error = self._transport.translated(error)
        except (BadStreamError, OSError) as error:
            self._error = TransportError(
                f"what the collector at {self._address} sends cannot be followed: {error}"
            )
        finally:
            self._caught_up.set()

    def _take(self, message: bytes) -> None:
        key, position, data = forwarding_protocol.decode_followed(message)
        path = self.folder / key.segment_name(position.segment)
        with path.open("ab") as file:
            if file.tell() != position.offset:
                raise BadStreamError(
                    f"{key} continues at {tuple(position)}, and {file.tell()} bytes of it are stored"
                )
            file.write(data)

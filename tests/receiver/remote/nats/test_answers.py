"""What happens in the sender if its acknowledgement fails on the thread of NATS's event loop."""

from __future__ import annotations

import concurrent.futures
from pathlib import Path
from typing import Any

import pytest

from hostcallback.receiver.errors import StreamRefusedError, TransportError
from hostcallback.receiver.remote.forwarding_protocol import StreamKey, StreamOffset
from hostcallback.receiver.remote.nats.transport import NatsStream


class _Connection:
    """A connection that is up."""

    max_payload = 1 << 20

    def check(self) -> None:
        pass


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (PermissionError(13, "Permission denied"), TransportError),
        (StreamRefusedError("not the collector of this stream"), StreamRefusedError),
    ],
)
def test_the_sender_learns_of_an_acknowledgement_that_fails(
    tmp_path: Path, raised: Exception, expected: type[Exception]
) -> None:
    def fail(position: StreamOffset) -> None:
        raise raised

    connection: Any = _Connection()
    stream = NatsStream(connection, tmp_path, StreamKey("run", 0, "0" * 16), StreamOffset(0, 0), fail)
    stream._on_way.append((StreamOffset(1, 8), 1))
    stream._published, stream._unanswered = 1, {0}
    answer: concurrent.futures.Future[Any] = concurrent.futures.Future()
    answer.add_done_callback(lambda done: stream._answered(0, done))
    answer.set_result(None)
    with pytest.raises(expected, match=str(raised.args[-1])):
        stream.check()

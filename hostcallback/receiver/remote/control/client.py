"""The client that controls processes through a collector: `hcb ctl --via`, `hcb top --via`."""

from __future__ import annotations

import queue
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import grpc

from hostcallback.receiver.control.protocol import ControlError, pack, unpack
from hostcallback.receiver.errors import BadStreamError, TransportError
from hostcallback.receiver.files import Closing
from hostcallback.receiver.remote.control.protocol import NO_CONTROL, Controlled, decode_told, encode_asking
from hostcallback.receiver.remote.control.rule_store import RuleSetting
from hostcallback.receiver.remote.forwarding_protocol import ASK
from hostcallback.receiver.remote.options import Forward
from hostcallback.receiver.remote.sending.grpc_transport import GrpcTransport
from hostcallback.receiver.text import foreign, printable


class ProcessAnswer(NamedTuple):
    """The answer of one process.

    Attributes:
        process: the process.
        result: its answer; None if it has none.
        error: its error; empty if it did not answer in time.
        kind: of the error, as in `hostcallback.receiver.control.protocol`.
    """

    process: Controlled
    result: Any = None
    error: str = ""
    kind: str = ""

    @property
    def is_silent(self) -> bool:
        """Whether the process did not answer in time."""
        return self.result is None and not self.error


@dataclass(slots=True)
class Answers:
    """The answers of all processes, and the rules that the collector remembers.

    Attributes:
        told: answers, sorted by run and process number.
        kept: rules that users have set through the collector, and that apply to later processes too.
    """

    told: list[ProcessAnswer] = field(default_factory=list)
    kept: list[RuleSetting] = field(default_factory=list)


class CollectorControl(Closing):
    """A connection to a collector that reaches its processes; a context manager. One thread."""

    def __init__(self, options: Forward, runs: str = "*") -> None:
        """Prepares the connection; it opens with the first command.

        Args:
            options: address, token and certificates of the collector.
            runs: the run whose processes are meant, or a pattern of runs.

        Raises:
            RemoteError: a file is not a certificate or a key.
            OSError: a file cannot be read.
        """
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._requests.put(encode_asking(runs))
        self._transport = GrpcTransport(options)
        self._call = self._transport.call(ASK, iter(self._requests.get, None))

    def ask(self, command: str, *, seconds: float, **arguments: Any) -> Answers:
        """Sends a command to all processes of the runs, and waits at most `seconds` for their answers.

        Raises:
            ControlError: the collector cannot do that; the text says why.
            TransportError: the collector cannot be reached, or refuses.
        """
        self._requests.put(pack({"command": command, "arguments": arguments, "seconds": seconds}))
        answers = Answers()
        try:
            for message in self._call:
                process, line = decode_told(message)
                if process is not None:
                    answers.told.append(_told(process, line))
                    continue
                answers.kept = _kept(unpack(line or b""))
                answers.told.sort(key=lambda told: told.process.instance)
                return answers
        except grpc.RpcError as error:
            raise self._transport.translated(error, unimplemented=NO_CONTROL) from None
        except BadStreamError as error:
            raise TransportError(
                f"the program at {self._transport.address} is not a collector: {error}"
            ) from error
        raise TransportError(f"the collector at {self._transport.address} has ended")

    def close(self) -> None:
        """Closes the connection."""
        self._requests.put(None)
        self._call.cancel()
        self._transport.close()


def _told(process: Controlled, line: bytes | None) -> ProcessAnswer:
    if line is None:
        return ProcessAnswer(process)
    try:
        found = unpack(line)
    except ControlError as error:
        return ProcessAnswer(process, error=printable(str(error)), kind="ControlError")
    if "error" in found or found.get("result") is None:
        return ProcessAnswer(
            process, error=foreign(found.get("error")) or "nothing", kind=str(found.get("kind"))
        )
    return ProcessAnswer(process, found["result"])


def _kept(found: dict[str, Any]) -> list[RuleSetting]:
    if "error" in found:
        raise ControlError(foreign(found["error"]))
    try:
        return [
            RuleSetting(_text(run), _text(pattern), _text(name), value)
            for run, pattern, name, value in found["result"]["kept"]
        ]
    except (LookupError, TypeError, ValueError) as error:
        raise BadStreamError(f"the collector sent invalid rules: {error}") from error


def _text(found: Any) -> str:
    return printable(str(found))

"""The side of those who control processes by way of a collector: `hcb ctl --via`, `hcb top --via`."""

from __future__ import annotations

import queue
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import grpc

from receiver.closing import Closing
from receiver.control.errors import ControlError
from receiver.control.protocol import pack, unpack
from receiver.remote.control.protocol import ASK, Controlled, decode_told, encode_asking
from receiver.remote.control.rule_store import RuleSetting
from receiver.remote.errors import BadStreamError, LinkError
from receiver.remote.options import Forward
from receiver.remote.protocol import SERVICE
from receiver.remote.sending.grpc_diagnostics import no_control
from receiver.remote.sending.grpc_transport import make_channel, metadata_of, translated
from receiver.taplog.render.json_value import printable


class ProcessAnswer(NamedTuple):
    """What one process answered.

    Attributes:
        process: which.
        result: what it answered; None if it did not.
        error: why not: its own words, or none if it did not answer in time.
        kind: of the error, as `receiver.control.protocol` has it.
    """

    process: Controlled
    result: Any = None
    error: str = ""
    kind: str = ""

    @property
    def is_silent(self) -> bool:
        """Whether it did not answer in time."""
        return self.result is None and not self.error


@dataclass(slots=True)
class Answers:
    """What all processes answered, and what the collector remembers.

    Attributes:
        told: by run and number.
        kept: what was said by way of it and holds for processes to come.
    """

    told: list[ProcessAnswer] = field(default_factory=list)
    kept: list[RuleSetting] = field(default_factory=list)


class CollectorControl(Closing):
    """A connection to a collector, whose processes it reaches; a context manager. One thread."""

    def __init__(self, options: Forward, runs: str = "*") -> None:
        """Connects when something is asked.

        Args:
            options: how the collector is to be reached.
            runs: the run whose processes are meant, or a pattern of runs.

        Raises:
            RemoteError: a file is no certificate or key.
            OSError: one cannot be read.
        """
        self._address = options.address
        self._tls = options.tls_ca is not None
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._requests.put(encode_asking(runs))
        self._channel = make_channel(options)
        method = self._channel.stream_stream(f"/{SERVICE}/{ASK}")
        self._call = method(iter(self._requests.get, None), metadata=metadata_of(options))

    def ask(self, command: str, *, seconds: float, **arguments: Any) -> Answers:
        """Asks all processes of the runs, and waits for their answers, for so many seconds at most.

        Raises:
            ControlError: the collector cannot do that; the text says why.
            LinkError: the collector cannot be reached, or does not want to.
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
            found: Any = error
            if found.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise LinkError(no_control(self._address)) from error
            raise translated(error, self._address, tls=self._tls) from error
        except BadStreamError as error:
            raise LinkError(f"there is no collector at {self._address}: {error}") from error
        raise LinkError(f"the collector at {self._address} has ended")

    def close(self) -> None:
        """Ends it."""
        self._requests.put(None)
        self._call.cancel()
        self._channel.close()


def _told(process: Controlled, line: bytes | None) -> ProcessAnswer:
    if line is None:
        return ProcessAnswer(process)
    try:
        found = unpack(line)
    except ControlError as error:
        return ProcessAnswer(process, error=printable(str(error)), kind="ControlError")
    if "error" in found or found.get("result") is None:
        return ProcessAnswer(
            process, error=printable(str(found.get("error") or "nothing")), kind=str(found.get("kind"))
        )
    return ProcessAnswer(process, found["result"])


def _kept(found: dict[str, Any]) -> list[RuleSetting]:
    if "error" in found:
        raise ControlError(printable(str(found["error"])))
    try:
        return [
            RuleSetting(_text(run), _text(pattern), _text(name), value)
            for run, pattern, name, value in found["result"]["kept"]
        ]
    except (LookupError, TypeError, ValueError) as error:
        raise BadStreamError(f"what it remembers makes no sense: {error}") from error


def _text(found: Any) -> str:
    return printable(str(found))

"""The collector's part in live control: relays requests to processes, and remembers the rules that users set."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc

from hostcallback.receiver.control.commands import shortened
from hostcallback.receiver.control.protocol import MAX_REQUEST, ControlError, pack, unpack
from hostcallback.receiver.errors import BadStreamError
from hostcallback.receiver.log import logger
from hostcallback.receiver.remote import forwarding_protocol
from hostcallback.receiver.remote.collector.access import (
    Access,
    Code,
    Limits,
    Refused,
    SlotLimiter,
    known,
    may,
)
from hostcallback.receiver.remote.control import protocol
from hostcallback.receiver.remote.control.rule_store import NAME, RuleStore, covers, overlap
from hostcallback.receiver.runtime.rules.rules import checked, checked_glob, settings_text

MAX_CLIENTS = 64
DEFAULT_SEC = 5.0
END_SEC = 2.0
"""Seconds for which an ended process session may still receive the messages in transit."""

TELL_SEC = 60.0
"""Seconds in which a client must receive all answers, in addition to the processes' time."""


MAX_UNANSWERED = 256
"""Limit of unanswered requests, beyond which a process is disconnected. When it reconnects it receives all rules."""

NOBODY = 0
"""Session number of the collector's own requests."""


class ProcessSession:
    """The session with one process. Runs in the collector's event loop.

    Attributes:
        process: the process.
        ended: resolved with the reason when the collector ends the session.
    """

    def __init__(self, process: protocol.Controlled) -> None:
        """The process has just connected."""
        self.process = process
        self.ended: asyncio.Future[Refused] = asyncio.get_running_loop().create_future()
        self._outgoing: asyncio.Queue[bytes | None] = asyncio.Queue()  # None ends it
        self._is_gone = False
        self._last = 0
        self._unanswered: dict[int, tuple[int, asyncio.Future[bytes | None]]] = {}
        self._sessions: Counter[int] = Counter()  # unanswered requests, by client session

    def request(self, session: int, line: bytes) -> asyncio.Future[bytes | None]:
        """Sends a request. The future gets the answer, or None when none can come any more."""
        future: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()
        if self.ended.done():
            future.set_result(None)
            return future
        self._last += 1
        self._unanswered[self._last] = session, future
        self._sessions[session] += 1
        self._outgoing.put_nowait(protocol.encode_request(session, self._last, line))
        if len(self._unanswered) > MAX_UNANSWERED:
            self.end(Code.RESOURCE_EXHAUSTED, "the process does not answer")
        return future

    def is_behind(self, session: int) -> bool:
        """Whether a client session has unanswered requests."""
        return bool(self._sessions[session])

    def close_session(self, session: int) -> None:
        """Ends a client session, and tells the process if it knows the session."""
        if session in self._sessions:
            del self._sessions[session]
            self._outgoing.put_nowait(protocol.encode_request(session, 0, b""))

    def end(self, code: object, text: str) -> None:
        """Has the collector end the session, with a status and a reason."""
        if not self.ended.done():
            self.ended.set_result(Refused(code, text))

    def gone(self) -> None:
        """Resolves all pending requests with None: the process has disconnected."""
        self.end(Code.UNAVAILABLE, "the process has disconnected")
        self._is_gone = True
        for _, future in self._unanswered.values():
            if not future.done():
                future.set_result(None)
        self._unanswered.clear()
        self._outgoing.put_nowait(None)

    async def send(self, context: Any) -> None:
        """Writes the requests to a call, until the process disconnects."""
        while (request := await self._outgoing.get()) is not None and not self._is_gone:
            await context.write(request)

    async def receive(self, answers: AsyncIterator[bytes]) -> None:
        """Takes the answers.

        Raises:
            BadStreamError: one is not an answer, or answers no pending request.
        """
        async for data in answers:
            number, line = protocol.decode_answer(data)
            session, future = self._unanswered.pop(number, (NOBODY, None))
            if future is None:
                raise BadStreamError(f"there is no request {number}")
            if session in self._sessions:
                self._sessions[session] -= 1
            if not future.done():
                future.set_result(line)


class _Session:
    # One controlling client: the runs that its token grants, and the runs that it asked for.

    def __init__(self, number: int, controls: Sequence[str], wanted: str) -> None:
        self.number = number
        self._controls = tuple(controls)
        self._wanted = wanted

    def includes(self, run: str) -> bool:
        return may(self._controls, run) and may((self._wanted,), run)

    def may_know_of(self, runs: str) -> bool:
        return overlap(runs, self._wanted) and any(overlap(runs, control) for control in self._controls)

    def runs(self) -> tuple[str, ...]:
        # The patterns of runs for which the client's rules are stored.
        if self._wanted == "*":
            return tuple(dict.fromkeys(self._controls))
        if any(covers(control, self._wanted) for control in self._controls):
            return (self._wanted,)
        raise ControlError(
            f"this token controls {', '.join(self._controls)}, not all of {self._wanted!r}: give --run one of these"
        )


class ControlService:
    """The gRPC methods for processes and for controlling clients. All of it runs in the collector's event loop."""

    def __init__(
        self, directory: Path, *, access: Access | None = None, limits: Limits | None = None
    ) -> None:
        """Reads the stored rules.

        Args:
            directory: the collector's folder.
            access: which clients may control, and which processes may be controlled.
            limits: on processes and clients.
        """
        self._path = directory / NAME
        self._kept = RuleStore.read(self._path)
        # Held while rules change, so that the file is written in the same order.
        self._saying = asyncio.Lock()
        self._links: dict[forwarding_protocol.StreamKey, ProcessSession] = {}
        self._sessions = itertools.count(NOBODY + 1)
        self._access = access or Access()
        self._limits = limits or Limits()
        self._processes = SlotLimiter(self._limits)
        self._clients = SlotLimiter(Limits(streams=MAX_CLIENTS, streams_per_peer=MAX_CLIENTS))

    def remembered(self) -> str:
        """Returns a line about the remembered rules, which processes get when they connect; empty without rules."""
        kept = self._kept.statements
        if not kept:
            return ""
        texts = [
            f"{s.pattern!r} {settings_text({s.field: s.value})}"
            + ("" if s.run == "*" else f" in runs {s.run!r}")
            for s in kept
        ]
        return (
            f"{len(kept)} remembered rule(s) apply to processes that connect: {shortened(texts)}; "
            "hcb ctl --via HOST:PORT '*' --reset removes them"
        )

    def handlers(self) -> Any:
        """Returns the handlers for `grpc.aio.Server.add_generic_rpc_handlers`."""
        return grpc.method_handlers_generic_handler(
            forwarding_protocol.SERVICE,
            {
                forwarding_protocol.CONTROL: grpc.stream_stream_rpc_method_handler(self._control),
                forwarding_protocol.ASK: grpc.stream_stream_rpc_method_handler(self._ask),
            },
        )

    async def _control(self, requests: AsyncIterator[bytes], context: Any) -> None:
        peer, link = context.peer(), None
        try:
            with self._processes.taken(peer):
                runs = known(self._access.runs_of(context.invocation_metadata() or ()))
                process = await self._first(requests, protocol.decode_process)
                if not may(runs, process.key.run):
                    raise Refused(
                        Code.PERMISSION_DENIED, f"this token does not grant the run {process.key.run}"
                    )
                link = ProcessSession(process)
                await self._serve(link, requests, context)
        except Refused as refused:
            logger.warning("control of %s at %s: %s", link.process if link else "a process", peer, refused)
            await context.abort(refused.code, str(refused))

    async def _serve(self, link: ProcessSession, requests: AsyncIterator[bytes], context: Any) -> None:
        # No await until the tasks start: rules that change meanwhile are either in the first request or in a later one.
        key = link.process.key
        older = self._links.pop(key, None)
        self._links[key] = link  # the last one, also if it replaces another
        if older is not None:
            older.end(Code.ABORTED, f"a newer connection of {link.process}")
        link.request(NOBODY, self._rules(link))
        sending = asyncio.ensure_future(link.send(context))
        receiving = asyncio.ensure_future(link.receive(requests))
        try:
            await asyncio.wait((sending, receiving, link.ended), return_when=asyncio.FIRST_COMPLETED)
            if link.ended.done():
                raise link.ended.result()
            for task in (receiving, sending):
                if task.done():
                    task.result()
        except BadStreamError as error:
            raise Refused(Code.INVALID_ARGUMENT, str(error)) from error
        finally:
            link.gone()
            if self._links.get(key) is link:
                del self._links[key]
            receiving.cancel()
            # gRPC loses the status of a call whose write is cancelled, so pending writes get time first.
            await asyncio.wait((sending,), timeout=END_SEC)
            sending.cancel()
            await asyncio.gather(sending, receiving, return_exceptions=True)

    async def _ask(self, requests: AsyncIterator[bytes], context: Any) -> None:
        peer = context.peer()
        try:
            with self._clients.taken(peer):
                controls = known(self._access.controls_of(context.invocation_metadata() or ()))
                if not controls:
                    raise Refused(
                        Code.PERMISSION_DENIED,
                        "this token may not control processes: grant it in the collector's token file, with a line "
                        "of the token, +control and runs",
                    )
                wanted = await self._first(requests, protocol.decode_asking)
                session = _Session(next(self._sessions), controls, wanted)
                try:
                    async for line in requests:
                        await self._answer(session, line, context)
                except BadStreamError as error:
                    raise Refused(Code.INVALID_ARGUMENT, str(error)) from error
                except TimeoutError:
                    raise Refused(Code.DEADLINE_EXCEEDED, "the client does not take its answers") from None
                finally:
                    for link in self._links.values():
                        link.close_session(session.number)
        except Refused as refused:
            logger.warning("%s may not control: %s", peer, refused)
            await context.abort(refused.code, str(refused))

    async def _first(self, requests: AsyncIterator[bytes], decode: Callable[[bytes], Any]) -> Any:
        try:
            async with asyncio.timeout(self._limits.hello_sec):
                return decode(await anext(aiter(requests)))
        except (TimeoutError, StopAsyncIteration):
            raise Refused(Code.DEADLINE_EXCEEDED, "the client did not send its first message") from None
        except BadStreamError as error:
            raise Refused(Code.INVALID_ARGUMENT, str(error)) from error

    async def _answer(self, session: _Session, line: bytes, context: Any) -> None:
        try:
            command, arguments, seconds = _request(line)
            if command == "rules":
                await self._say(session, arguments, context.peer())
        except (ControlError, ValueError) as error:
            response = {"error": str(error), "kind": type(error).__name__}
            await context.write(protocol.encode_told(None, pack(response)))
            return
        async with asyncio.timeout(seconds + TELL_SEC):
            await self._tell(session, command, arguments, seconds, context)
            kept = [s for s in self._kept.statements if session.may_know_of(s.run)]
            await context.write(protocol.encode_told(None, pack({"result": {"kept": kept}})))

    async def _tell(
        self, session: _Session, command: str, arguments: dict[str, Any], seconds: float, context: Any
    ) -> None:
        came: _Came = asyncio.Queue()
        waiting: dict[ProcessSession, None] = {}
        plain = pack({"command": command, "arguments": arguments})
        behind: list[ProcessSession] = []
        # Of a process with several streams, the session that was added last.
        links = {link.process.instance: link for link in self._links.values()}
        for instance in sorted(links):
            link = links[instance]
            if not session.includes(link.process.key.run):
                continue
            if command == "rules":
                future = link.request(session.number, self._rules(link, arguments))
            elif link.is_behind(session.number):  # it has not answered the last request: do not queue another
                behind.append(link)
                continue
            else:
                future = link.request(session.number, plain)
            waiting[link] = None
            future.add_done_callback(functools.partial(_came, came, link))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds) as limit:
                while waiting:
                    link, line = await came.get()
                    del waiting[link]
                    now = limit.when()
                    # The processes' time does not include the time that the client takes.
                    limit.reschedule(None)
                    await context.write(protocol.encode_told(link.process, line))
                    limit.reschedule(now)
        for link in (*waiting, *behind):
            await context.write(protocol.encode_told(link.process, None))

    async def _say(self, session: _Session, arguments: dict[str, Any], peer: str) -> None:
        # Stores the rules: in the file first, so that no process applies a rule that a restarted collector has
        # forgotten.
        pattern, settings = checked_glob(arguments.get("pattern")), arguments.get("settings", {})
        if not isinstance(settings, dict) or "when" in settings:
            raise ControlError(
                f"invalid settings {settings!r:.200}: expected fields and values, without predicates"
            )
        settings = {field: checked(field, value) for field, value in settings.items()}
        reset = bool(arguments.get("reset"))
        if not settings and not reset:
            return
        async with self._saying:
            kept = self._kept
            for run in session.runs():
                kept = kept.without(run, pattern) if reset else kept
                kept = kept.with_setting(run, pattern, settings)
            try:
                await asyncio.to_thread(kept.write, self._path)
            except OSError as error:
                raise ControlError(f"the collector cannot store the rules: {error.strerror}") from error
            self._kept = kept
        logger.info("%s sets rules of %r: reset=%s %r", peer, pattern, reset, settings)

    def _rules(self, link: ProcessSession, arguments: dict[str, Any] | None = None) -> bytes:
        said = {"said": self._kept.about(link.process.key.run)}
        return pack({"command": "rules", "arguments": {**(arguments or {}), **said}})


_Came = asyncio.Queue[tuple[ProcessSession, bytes | None]]


def _came(came: _Came, link: ProcessSession, future: asyncio.Future[bytes | None]) -> None:
    came.put_nowait((link, future.result()))


def _request(line: bytes) -> tuple[str, dict[str, Any], float]:
    if len(line) > MAX_REQUEST // 8:
        raise BadStreamError(f"a request has {len(line)} bytes, expected {MAX_REQUEST // 8} at most")
    found = unpack(line)
    command, arguments = found.get("command"), found.get("arguments", {})
    seconds = found.get("seconds", DEFAULT_SEC)
    if command not in protocol.COMMANDS or not isinstance(arguments, dict):
        raise ControlError(
            f"{command!r:.80} cannot be sent to processes through a collector, only {', '.join(protocol.COMMANDS)}"
        )
    if not isinstance(seconds, int | float) or not 0 < seconds <= protocol.MAX_SEC:
        raise ControlError(
            f"{seconds!r:.80} is not a time to wait, expected seconds, up to {protocol.MAX_SEC:g}"
        )
    return command, arguments, float(seconds)

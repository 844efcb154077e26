"""Control through a collector: the thread that answers in a process."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Mapping
from typing import Any

import grpc

from hostcallback.receiver.control.commands import PushedRules, process
from hostcallback.receiver.control.endpoints import endpoints
from hostcallback.receiver.control.protocol import Client, Handler, handle_request, pack
from hostcallback.receiver.errors import BadStreamError, StreamRefusedError, TransportError
from hostcallback.receiver.log import logger
from hostcallback.receiver.remote.control import protocol
from hostcallback.receiver.remote.forwarding_protocol import CONTROL, StreamKey
from hostcallback.receiver.remote.sending import grpc_transport, sender
from hostcallback.receiver.runtime.runtime import runtime

PAUSE_SEC = 0.01
"""Seconds between two requests, so that frequent requests do not slow the program down."""

MAX_SESSIONS = 64
MAX_ANSWERS = 16
TAKE_SEC = 10.0
"""Seconds after which the connection to a collector that takes no answers is given up."""


class ControlThread:
    """Answers requests until it is stopped, over one connection after another. No other thread waits for it."""

    def __init__(self, transport: grpc_transport.GrpcTransport, key: StreamKey) -> None:
        """Starts the thread.

        Args:
            transport: to the collector.
            key: this process's stream.
        """
        self._transport = transport
        self._key = key
        rules = PushedRules(runtime, f"the collector at {transport.address}, run {key.run}")
        self._handlers: Mapping[str, Handler] = {
            **{name: endpoints.handlers[name] for name in protocol.COMMANDS},
            "rules": rules,
        }
        self._back_off = sender.BackOff()
        self._stopped = threading.Event()
        self._call: Any = None
        self._thread = threading.Thread(target=self._run, name="hostcallback-forward-control", daemon=True)
        self._thread.start()

    def stop(self, timeout_sec: float = 2.0) -> None:
        """Ends the thread, and waits up to `timeout_sec` seconds for the request in progress."""
        self._stopped.set()
        call = self._call
        if call is not None:
            call.cancel()
        self._thread.join(timeout_sec)

    def _run(self) -> None:
        said = ""
        while not self._stopped.is_set():
            try:
                self._serve()
                wait_sec = self._back_off.next_sec()
            except StreamRefusedError as error:
                if str(error) != said:
                    logger.info("%s cannot be controlled through the collector: %s", self._key, error)
                said, wait_sec = str(error), sender.REFUSED_SEC
            except TransportError as error:
                logger.debug("control of %s through the collector: %s", self._key, error)
                wait_sec = self._back_off.next_sec()
            except Exception:  # the program must continue, and stay reachable
                logger.exception("control of %s through the collector failed", self._key)
                wait_sec = self._back_off.next_sec()
            self._stopped.wait(wait_sec)

    def _serve(self) -> None:
        answers: queue.Queue[bytes | None] = queue.Queue(MAX_ANSWERS)
        answers.put(protocol.encode_process(self._key, process()))
        sessions: dict[int, Client] = {}
        self._call = self._transport.call(CONTROL, iter(answers.get, None))
        try:
            if self._stopped.is_set():  # `stop` may have run before there was a call to cancel
                return
            for message in self._call:
                self._back_off.reset()
                session, number, line = protocol.decode_request(message)
                if line:
                    answers.put(
                        protocol.encode_answer(number, self._answer(sessions, session, line)),
                        timeout=TAKE_SEC,
                    )
                elif session in sessions:
                    sessions.pop(session).closed()
                self._stopped.wait(PAUSE_SEC)
        except grpc.RpcError as error:
            raise self._transport.translated(error, unimplemented=protocol.NO_CONTROL) from None
        except BadStreamError as error:
            raise TransportError(
                f"the collector at {self._transport.address} sent an invalid request: {error}"
            ) from error
        except queue.Full:
            raise TransportError(f"the collector at {self._transport.address} takes no answers") from None
        finally:
            self._call.cancel()
            # With a full queue gRPC takes answers instead of waiting, and the cancelled call ends it.
            with contextlib.suppress(queue.Full):
                answers.put_nowait(None)
            for client in sessions.values():
                client.closed()

    def _answer(self, sessions: dict[int, Client], session: int, line: bytes) -> bytes:
        client = sessions.get(session)
        if client is None:
            if len(sessions) >= MAX_SESSIONS:
                return pack({"error": "too many clients control this process", "kind": "ControlError"})
            client = sessions[session] = Client()
        try:
            found = handle_request(self._handlers, line, client)
        except OSError as error:
            found = pack({"error": str(error), "kind": "ControlError"})
        if len(found) > protocol.MAX_ANSWER:
            limit = protocol.MAX_ANSWER
            text = f"the answer has {len(found)} bytes, the limit is {limit}: use `hcb ctl` on that machine"
            return pack({"error": text, "kind": "ControlError"})
        return found

"""Who may use a collector, and how much: TLS, tokens, addresses, limits, and the error that refuses a client."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import hmac
import resource
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import grpc

from hostcallback.receiver.errors import RemoteError
from hostcallback.receiver.remote.credentials import read_tls_files

Code = grpc.StatusCode


class Refused(Exception):
    """Ends a call with a status.

    Attributes:
        code: the gRPC status.
    """

    def __init__(self, code: Any, text: str) -> None:
        """`text` is for the client's user, and for the collector's log."""
        super().__init__(text)
        self.code = code


CONTROL = "+control"
"""Stands in a token file before the runs whose processes a token may control. No run can have this name."""


@dataclass(frozen=True, slots=True)
class Access:
    """Which tokens may send, follow and control streams, and of which runs.

    Attributes:
        tokens: patterns of run names by token, for sending and following.
        controls: the same for controlling. If both are empty, the collector asks for no token.
    """

    tokens: dict[str, tuple[str, ...]] = field(default_factory=dict, repr=False)
    controls: dict[str, tuple[str, ...]] = field(default_factory=dict, repr=False)

    @classmethod
    def from_file(cls, path: str | Path) -> Access:
        """Reads a token file: each line has a token and the runs, or patterns of runs, that it grants; without, all.

        With `+control` before the runs, a line grants control of processes, otherwise sending and following. A token
        may have several lines.

        Raises:
            RemoteError: the file has no tokens or an invalid line, or other users may read it.
            OSError: it cannot be read.
        """
        path = Path(path)
        if path.stat().st_mode & 0o077:
            raise RemoteError(f"{path}: other users may read these tokens: chmod 600 {path}")
        tokens: dict[str, tuple[str, ...]] = {}
        controls: dict[str, tuple[str, ...]] = {}
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            token, *runs = words
            granted = tokens
            if runs and runs[0] == CONTROL:
                granted, runs = controls, runs[1:]
            # Which word it is, and not the word: it could be a token at the wrong place.
            first = len(words) - len(runs) + 1
            unknown = [place for place, run in enumerate(runs, first) if run.startswith("+")]
            if unknown:  # no run name begins with a plus
                raise RemoteError(
                    f"{path}, line {number}: word {unknown[0]} is not a run, expected a token, {CONTROL} or nothing, "
                    "and runs"
                )
            granted[token] = granted.get(token, ()) + (tuple(runs) or ("*",))
        if not tokens and not controls:
            raise RemoteError(f"{path}: no tokens, expected lines of a token and the runs that it grants")
        return cls(tokens, controls)

    def runs_of(self, metadata: Iterable[Any]) -> tuple[str, ...] | None:
        """Patterns of the runs that a caller may send and follow; None if its token is unknown."""
        return self._of(metadata, self.tokens)

    def controls_of(self, metadata: Iterable[Any]) -> tuple[str, ...] | None:
        """Patterns of the runs whose processes a caller may control; None if its token is unknown."""
        return self._of(metadata, self.controls)

    def _of(self, metadata: Iterable[Any], granted: dict[str, tuple[str, ...]]) -> tuple[str, ...] | None:
        if not self.tokens and not self.controls:
            return ("*",)
        given = next((str(value) for key, value in metadata if key == "authorization"), "")
        given = given.removeprefix("Bearer ").strip()
        found: tuple[str, ...] | None = None
        # Compares all tokens, in constant time each: the response time must not tell which one is close.
        for token in {**self.tokens, **self.controls}:
            if hmac.compare_digest(token.encode(), given.encode()):
                found = granted.get(token, ())
        return found


def known(runs: tuple[str, ...] | None) -> tuple[str, ...]:
    """Returns the patterns of a caller whose token is known.

    Raises:
        Refused: the token is unknown.
    """
    if runs is None:
        raise Refused(Code.UNAUTHENTICATED, "the collector does not know this token")
    return runs


def may(runs: tuple[str, ...], run: str) -> bool:
    """Whether any of the patterns matches a run."""
    return any(fnmatchcase(run, pattern) for pattern in runs)


def server_credentials(cert: str, key: str, ca: str | None) -> Any:
    """TLS credentials from these files; with `ca`, clients must present a certificate that it signed.

    Raises:
        RemoteError: a file is not a certificate or a key.
        OSError: a file cannot be read.
    """
    clients, chain, secret = read_tls_files(ca, cert, key)
    return grpc.ssl_server_credentials([(secret, chain)], clients, require_client_auth=ca is not None)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on clients.

    Attributes:
        streams: simultaneous streams of all clients.
        streams_per_peer: simultaneous streams of one address.
        bytes_per_sec: of one stream; 0 for no limit.
        hello_sec: seconds in which a client must send its first message; otherwise the collector refuses it.
        unannounced: simultaneous calls without a first message. They are no streams yet. Beyond it, the oldest call of
            the address with most of them is refused, so that such calls keep no other client out.
    """

    streams: int = 4096
    streams_per_peer: int = 1024
    bytes_per_sec: float = 0.0
    hello_sec: float = 10.0
    unannounced: int = 1024


class SlotLimiter:
    """Counts simultaneous calls, in total and per address. Runs in the collector's event loop."""

    def __init__(self, limits: Limits) -> None:
        """No call is counted yet; `limits` has the maximum numbers of streams."""
        self._limits = limits
        self._peers: Counter[str] = Counter()

    @contextlib.contextmanager
    def taken(self, peer: str) -> Iterator[None]:
        """Counts a call of a client, named as gRPC does, while the context is entered.

        Raises:
            Refused: a limit is reached.
        """
        host = peer.rpartition(":")[0]
        if self._peers.total() >= self._limits.streams or self._peers[host] >= self._limits.streams_per_peer:
            raise Refused(Code.RESOURCE_EXHAUSTED, "the collector's limit of simultaneous streams is reached")
        self._peers[host] += 1
        try:
            yield
        finally:
            self._peers[host] -= 1
            if not self._peers[host]:
                del self._peers[host]


class HelloLimiter:
    """Limits the calls that have not yet named the stream they send. Runs in the collector's event loop."""

    def __init__(self, limits: Limits) -> None:
        """No call waits; `limits` has the number and the time."""
        self._limits = limits
        self._waiting: dict[str, list[asyncio.Timeout]] = {}

    @contextlib.asynccontextmanager
    async def waiting(self, peer: str) -> AsyncIterator[None]:
        """Counts a call of a client, named as gRPC does, while the context is entered.

        Raises:
            TimeoutError: its time is over, or it had to make room for others.
        """
        host = peer.rpartition(":")[0]
        async with asyncio.timeout(self._limits.hello_sec) as limit:
            calls = self._waiting.setdefault(host, [])
            calls.append(limit)
            try:
                if sum(map(len, self._waiting.values())) > self._limits.unannounced:
                    oldest = max(self._waiting.values(), key=len).pop(0)
                    oldest.reschedule(asyncio.get_running_loop().time())
                yield
            finally:
                if limit in calls:
                    calls.remove(limit)
                if not calls and self._waiting.get(host) is calls:
                    del self._waiting[host]


class Rate:
    """Limits the rate of a stream. A stream may be ahead by at most one second's bytes."""

    def __init__(self, bytes_per_sec: float) -> None:
        """0 for no limit."""
        self._rate = bytes_per_sec
        self._due = 0.0

    def wait_sec(self, nbytes: int) -> float:
        """Counts received bytes, and returns the seconds to wait before more may be taken."""
        if not self._rate:
            return 0.0
        now = time.monotonic()
        self._due = max(self._due, now - 1.0) + nbytes / self._rate
        return max(0.0, self._due - now)


WANTED_FILES = 1 << 20
"""Wanted number of open files: two per stream, which exceeds the default limit of most systems."""

KEPT_BYTES = 64 << 20
"""Bytes of freed memory that each arena may keep."""

ARENAS = 2

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_MAX_MMAP_THRESHOLD = 32 << 20


def keep_freed_memory() -> None:
    """Tells glibc's allocator to keep freed memory, for the whole process. Does nothing with another allocator.

    By default the allocator returns the memory of each 1 MiB message to the kernel, and half of the time of receiving
    goes into faulting empty pages in for the next one.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_ARENA_MAX, ARENAS)
        mallopt(_M_MMAP_THRESHOLD, _MAX_MMAP_THRESHOLD)
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)


def allow_many_files() -> None:
    """Raises this process's limit of open files as far as the system allows."""
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_FILES if most == resource.RLIM_INFINITY else min(WANTED_FILES, most)
    if allowed != resource.RLIM_INFINITY and allowed < wanted:
        with contextlib.suppress(OSError, ValueError):  # macOS has another, lower limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))

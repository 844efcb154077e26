"""Who may talk to a collector: TLS, tokens, and where it listens without either."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import grpc

from receiver.remote.collector.refusal import Code, Refused
from receiver.remote.errors import RemoteError
from receiver.remote.tls import check_tls_files

CONTROL = "+control"
"""In a file of tokens, before the runs whose processes one may control. No run has such a name."""


@dataclass(frozen=True, slots=True)
class Access:
    """Who may send and follow streams, and control the processes that send them, of which runs.

    Attributes:
        tokens: patterns of names of runs by token, for sending and following;
        controls: for controlling. No token is asked for if neither has any.
    """

    tokens: dict[str, tuple[str, ...]] = field(default_factory=dict)
    controls: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def from_file(cls, path: str | Path) -> Access:
        """Reads tokens: lines of a token and the runs it is good for, or patterns of them; all if there are none.

        With `+control` before the runs, the line is about controlling processes, else about sending and following. A
        token may have several lines.

        Raises:
            RemoteError: the file has no tokens, or lines that make no sense, or others may read it.
            OSError: it cannot be read.
        """
        path = Path(path)
        if path.stat().st_mode & 0o077:
            raise RemoteError(f"{path}: others may read these tokens: chmod 600 {path}")
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
            unknown = [run for run in runs if run.startswith("+")]
            if unknown:  # no run is called so
                raise RemoteError(
                    f"{path}, line {number}: {unknown[0]} is no run, expected a token, {CONTROL} or nothing, and runs"
                )
            granted[token] = granted.get(token, ()) + (tuple(runs) or ("*",))
        if not tokens and not controls:
            raise RemoteError(f"{path}: no tokens, expected lines of a token and the runs it is good for")
        return cls(tokens, controls)

    def runs_of(self, metadata: Iterable[Any]) -> tuple[str, ...] | None:
        """Patterns of the runs that a caller may write and read; None if it is nobody that is known."""
        return self._of(metadata, self.tokens)

    def controls_of(self, metadata: Iterable[Any]) -> tuple[str, ...] | None:
        """Patterns of the runs whose processes a caller may control; None if it is nobody that is known."""
        return self._of(metadata, self.controls)

    def _of(self, metadata: Iterable[Any], granted: dict[str, tuple[str, ...]]) -> tuple[str, ...] | None:
        if not self.tokens and not self.controls:
            return ("*",)
        given = next((str(value) for key, value in metadata if key == "authorization"), "")
        given = given.removeprefix("Bearer ").strip()
        found: tuple[str, ...] | None = None
        for token in {**self.tokens, **self.controls}:  # all of them, so that time tells nothing
            if hmac.compare_digest(token.encode(), given.encode()):
                found = granted.get(token, ())
        return found


def known(runs: tuple[str, ...] | None) -> tuple[str, ...]:
    """The patterns, of a caller that is known.

    Raises:
        Refused: it is not.
    """
    if runs is None:
        raise Refused(Code.UNAUTHENTICATED, "the collector does not know this token")
    return runs


def may(runs: tuple[str, ...], run: str) -> bool:
    """Whether a run is among those that patterns name."""
    return any(fnmatchcase(run, pattern) for pattern in runs)


def server_credentials(cert: str, key: str, ca: str | None) -> Any:
    """TLS with these files; with `ca`, clients need a certificate by one of those.

    Raises:
        RemoteError: one is no certificate or key.
        OSError: one cannot be read.
    """
    check_tls_files(ca, cert, key)
    clients = None if ca is None else Path(ca).read_bytes()
    return grpc.ssl_server_credentials(
        [(Path(key).read_bytes(), Path(cert).read_bytes())], clients, require_client_auth=ca is not None
    )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False

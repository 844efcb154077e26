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

from receiver.remote.errors import RemoteError


@dataclass(frozen=True, slots=True)
class Access:
    """Who may send streams, and of which runs.

    Attributes:
        tokens: patterns of names of runs by token; empty if no token is asked for.
    """

    tokens: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def from_file(cls, path: str | Path) -> Access:
        """Reads tokens: a line for each, with the runs it is good for, or patterns of them; all if there are none.

        Raises:
            RemoteError: the file has no tokens, or others may read it.
            OSError: it cannot be read.
        """
        path = Path(path)
        if path.stat().st_mode & 0o077:
            raise RemoteError(f"{path}: others may read these tokens: chmod 600 {path}")
        tokens: dict[str, tuple[str, ...]] = {}
        for line in path.read_text(encoding="utf-8").splitlines():
            words = line.split()
            if words and not words[0].startswith("#"):
                tokens[words[0]] = tokens.get(words[0], ()) + (tuple(words[1:]) or ("*",))
        if not tokens:
            raise RemoteError(f"{path}: no tokens, expected lines of a token and the runs it is good for")
        return cls(tokens)

    def runs_of(self, metadata: Iterable[Any]) -> tuple[str, ...] | None:
        """Patterns of the runs that a caller may write and read; None if it is nobody that is known."""
        if not self.tokens:
            return ("*",)
        given = next((str(value) for key, value in metadata if key == "authorization"), "")
        given = given.removeprefix("Bearer ").strip()
        found: tuple[str, ...] | None = None
        for token, runs in self.tokens.items():  # all of them, so that time tells nothing
            if hmac.compare_digest(token.encode(), given.encode()):
                found = runs
        return found


def may(runs: tuple[str, ...], run: str) -> bool:
    """Whether a run is among those that patterns name."""
    return any(fnmatchcase(run, pattern) for pattern in runs)


def server_credentials(cert: str, key: str, ca: str | None) -> Any:
    """TLS with these files; with `ca`, clients need a certificate by one of those.

    Raises:
        OSError: one cannot be read.
    """
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

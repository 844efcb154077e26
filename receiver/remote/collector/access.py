"""Access to a collector: TLS, tokens, and the addresses at which it may listen without either."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import grpc

from hostcallback.receiver.remote.collector.refusal import Code, Refused
from hostcallback.receiver.remote.errors import RemoteError
from hostcallback.receiver.remote.tls import check_tls_files

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
    check_tls_files(ca, cert, key)
    clients = None if ca is None else Path(ca).read_bytes()
    return grpc.ssl_server_credentials(
        [(Path(key).read_bytes(), Path(cert).read_bytes())], clients, require_client_auth=ca is not None
    )

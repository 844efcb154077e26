"""Options of the OTLP exporter: the collector's address, TLS, and limits of the queue."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hostcallback.receiver.redaction import is_credential, is_printable, without_password
from hostcallback.receiver.remote.credentials import is_loopback, refuse_clear

DEFAULT_ENDPOINT = "localhost:4317"

_HEADER = re.compile(r"[a-z0-9_.-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class OtlpOptions:
    """The options of `otlp_exporter`, which documents them."""

    endpoint: str = DEFAULT_ENDPOINT
    insecure: bool = False
    tls_ca: str | os.PathLike[str] | None = None
    tls_cert: str | os.PathLike[str] | None = None
    tls_key: str | os.PathLike[str] | None = None
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    service_name: str = "hostcallback"
    resource: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    queue_messages: int = 20_000
    queue_bytes: int = 64 << 20
    batch_messages: int = 1_000
    flush_sec: float = 1.0
    timeout_sec: float = 10.0
    health_sec: float = 10.0
    drain_sec: float = 5.0

    def __post_init__(self) -> None:
        """Raises ValueError for an option out of range."""
        scheme, _, rest = self.endpoint.rpartition("://") if isinstance(self.endpoint, str) else ("", "", "")
        host, _, port = rest.rstrip("/").rpartition(":")
        if (
            scheme not in ("", "http", "https")
            or "@" in rest
            or not host
            or not port.isdecimal()
            or not 0 < int(port) < 65536
        ):
            shown = without_password(self.endpoint) if isinstance(self.endpoint, str) else self.endpoint
            raise ValueError(
                f"endpoint is {shown!r}, expected the host:port at which an OpenTelemetry Collector takes OTLP "
                f"over gRPC, such as {DEFAULT_ENDPOINT!r}, perhaps with http:// or https:// before it"
            )
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key belong together: give both, or neither")
        if self.insecure and (self.tls_ca is not None or self.tls_cert is not None or scheme == "https"):
            raise ValueError("insecure=True excludes certificates and https://: give one or the other")
        for name in ("queue_messages", "queue_bytes", "batch_messages"):
            _positive(name, getattr(self, name), int)
        for name in ("flush_sec", "timeout_sec", "health_sec"):
            _positive(name, getattr(self, name), int | float)
        if not isinstance(self.drain_sec, int | float) or not 0 <= self.drain_sec < float("inf"):
            raise ValueError(f"drain_sec is {self.drain_sec!r}, expected a number of seconds, 0 or more")
        for key, value in self.headers.items():
            if not _HEADER.fullmatch(key) or not is_printable(value):
                raise ValueError(
                    f"headers has {key!r}: expected names of lower-case letters, digits, '-', '_' and '.', and texts "
                    "of printable ASCII characters (the text is not shown here)"
                )
        if not self.insecure and not self.is_secure and any(map(is_credential, self.headers)):
            host = self.address.rpartition(":")[0]
            refuse_clear(host, self.address, "token in headers", cure="use https://, or give tls_ca")

    @property
    def address(self) -> str:
        """The address as `host:port`."""
        return self.endpoint.rpartition("://")[2].rstrip("/")

    @property
    def is_secure(self) -> bool:
        """Whether TLS is used: yes, unless the options disable it or the address is this machine."""
        if self.insecure or self.endpoint.startswith("http://"):
            return False
        if self.tls_ca is not None or self.tls_cert is not None or self.endpoint.startswith("https://"):
            return True
        return not is_loopback(self.address.rpartition(":")[0])


def _positive(name: str, value: Any, kind: Any) -> None:
    if not isinstance(value, kind) or isinstance(value, bool) or not 0 < value < float("inf"):
        what = "whole number of at least 1" if kind is int else "number of seconds above 0"
        raise ValueError(f"{name} is {value!r}, expected a {what}")

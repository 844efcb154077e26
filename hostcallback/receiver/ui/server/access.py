"""Who may ask the server: the token, the checks of Host and Origin, and the headers of each answer."""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hostcallback.receiver.ui.server.connections import HAS_TOKEN

MAX_QUERY = 64 << 10
"""Bytes of a query."""

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors {frames}"
)
"""The page loads nothing from elsewhere, and runs no scripts but its own files."""


def new_token() -> str:
    """A random token of 256 bits."""
    return secrets.token_urlsafe(32)


class Access:
    """Middleware that refuses questions which come without the token, and requests for other servers.

    The files of the page are everybody's. The page sends the token of its address, once, to `/api/session`, and gets a
    secret that only this server takes; browsers keep it for this host and port alone, unlike a cookie. Whatever else
    is below `/api/` needs the token or that secret in the header Authorization.

    Attributes:
        token: what a client has to present.
        session: what the page presents in its place. It does not tell the token, and lasts as long as that.
    """

    def __init__(
        self,
        app: ASGIApp,
        token: str,
        *,
        port: int,
        hosts: Collection[str],
        is_open: bool,
        tls: bool,
        framed: bool,
    ) -> None:
        """Makes it.

        Args:
            app: what it protects.
            token: what a client has to present.
            port: of the server.
            hosts: names by which this server may be addressed, besides loopback addresses.
            is_open: whether it listens beyond this machine; then numeric addresses are accepted, too.
            tls: whether it is reached by https.
            framed: whether other pages, such as notebooks of this machine, may show the page in a frame.
        """
        self._app = app
        self.token = token
        self.session = hmac.new(token.encode(), f"session {port}".encode(), "sha256").hexdigest()
        self._hosts = {"localhost", "127.0.0.1", "::1", *(name.lower() for name in hosts)}
        self._is_open = is_open
        self._scheme = "https" if tls else "http"
        local = "http://localhost:* http://127.0.0.1:* https://localhost:* https://127.0.0.1:*"
        self._policy = POLICY.format(frames=f"'self' {local}" if framed else "'none'")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request, or hands it on."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        answer = self._refusal(scope, headers)
        secured = self._secured(send)
        await (answer or self._app)(scope, receive, secured)

    def _refusal(self, scope: Scope, headers: Headers) -> Response | None:
        host = headers.get("host", "")
        if not self._is_own(host):
            return _error(
                421, f"the request is for the host {host[:200]!r}, expected localhost, or a name that was given with "
                "--host or --allow-host"
            )  # fmt: skip
        if len(scope["query_string"]) > MAX_QUERY:
            return _error(
                414, f"the query has {len(scope['query_string'])} bytes, expected at most {MAX_QUERY}"
            )
        if not scope["path"].startswith("/api/"):
            return None
        given = headers.get("authorization", "")
        starts = scope["path"] == "/api/session"
        if not _is_bearer(given, self.token) and (starts or not _is_bearer(given, self.session)):
            return _error(
                401, "no valid token came with this request: open the address that hcb ui printed last"
            )
        scope[HAS_TOKEN] = True
        own = f"{self._scheme}://{host}"
        origin = headers.get("origin", own)  # none: no browser, which sends one with each POST
        if scope["method"] not in ("GET", "HEAD") and origin != own:
            return _error(403, f"the request comes from {origin[:200]!r}, not from the page")
        return JSONResponse({"session": self.session}) if starts else None

    def _is_own(self, host: str) -> bool:
        name = _name(host)
        if name in self._hosts:
            return True
        if not self._is_open:
            return False
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in (socket.gethostname().lower(), socket.getfqdn().lower())
        return True

    def _secured(self, send: Send) -> Send:
        async def secured(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["Content-Security-Policy"] = self._policy
                headers["X-Content-Type-Options"] = "nosniff"
                headers["Referrer-Policy"] = "no-referrer"
                headers["Cross-Origin-Resource-Policy"] = "same-origin"
                headers["Cache-Control"] = "no-store"
            await send(message)

        return secured


def _is_bearer(header: str, secret: str) -> bool:
    scheme, _, given = header.partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(
        given.strip().encode("utf-8", "replace"), secret.encode()
    )


def _error(status: int, text: str) -> Response:
    return JSONResponse({"error": text}, status)


def _name(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()

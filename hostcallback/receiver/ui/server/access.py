"""Who may ask the server: the token, the checks of Host and Origin, and the headers of each answer."""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
from collections.abc import Collection
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
    """Middleware that refuses requests that come neither from the page nor from a client with the token.

    Attributes:
        token: what a client has to present.
        cookie: name of the cookie that holds it; with the port, because cookies are shared between ports.
    """

    def __init__(
        self, app: ASGIApp, token: str, *, hosts: Collection[str], is_open: bool, tls: bool, framed: bool
    ) -> None:
        """Makes it.

        Args:
            app: what it protects.
            token: what a client has to present.
            hosts: names by which this server may be addressed, besides loopback addresses.
            is_open: whether it listens beyond this machine; then numeric addresses are accepted, too.
            tls: whether it is reached by https.
            framed: whether other pages, such as notebooks of this machine, may show the page in a frame.
        """
        self._app = app
        self.token = token
        self.cookie = "hcb_ui"
        self._hosts = {"localhost", "127.0.0.1", "::1", *(name.lower() for name in hosts)}
        self._is_open = is_open
        self._scheme = "https" if tls else "http"
        self._framed = framed
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
        cookie = f"{self.cookie}_{_port(host)}"
        given = (
            parse_qs(scope["query_string"].decode("latin-1"), max_num_fields=1000) if _is_start(scope) else {}
        )
        if given.get("token"):
            if not self._is_token(given["token"][0]):
                return _error(
                    401, "the token of this address is wrong: take the address that hcb ui printed last"
                )
            found = RedirectResponse("/", status_code=303)
            found.set_cookie(
                cookie, self.token, httponly=True, samesite="strict", secure=self._scheme == "https", path="/"
            )
            if self._framed:
                # In a frame of a page of another site. Only browsers that take the attributes store it.
                found.headers.append(
                    "set-cookie",
                    f"{cookie}_frame={self.token}; HttpOnly; Secure; SameSite=None; Partitioned; Path=/",
                )
            return found
        by_header = self._is_bearer(headers)
        cookies = [cookie, f"{cookie}_frame"] if self._framed else [cookie]
        has_cookie = any(self._is_token(_cookie(headers.get("cookie", ""), name)) for name in cookies)
        if not by_header and not has_cookie:
            problem = "no valid token came with this request: open the address that hcb ui printed"
            return PlainTextResponse(f"{problem}\n", 401) if _is_start(scope) else _error(401, problem)
        if scope["method"] not in ("GET", "HEAD") and not self._is_same_origin(headers, host, by_header):
            return _error(
                403,
                f"the request comes from {headers.get('origin', '(no origin)')[:200]!r}, not from the page",
            )
        return None

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

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode("utf-8", "replace"), self.token.encode())

    def _is_bearer(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and self._is_token(given.strip())

    def _is_same_origin(self, headers: Headers, host: str, by_header: bool) -> bool:
        origin = headers.get("origin")
        if origin is None:  # no browser: one sends it with each POST
            return by_header
        return origin == f"{self._scheme}://{host}"

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


def _is_start(scope: Scope) -> bool:
    return bool(scope["method"] == "GET" and scope["path"] == "/")


def _error(status: int, text: str) -> Response:
    return JSONResponse({"error": text}, status)


def _name(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def _port(host: str) -> str:
    port = host.rpartition(":")[2]
    return port if port.isdecimal() else "0"


def _cookie(header: str, name: str) -> str:
    try:
        found = SimpleCookie(header).get(name)
    except CookieError:
        return ""
    return "" if found is None else found.value

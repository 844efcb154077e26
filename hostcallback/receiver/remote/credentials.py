"""A client's token, password, certificate and key: checked before use, and kept out of texts."""

from __future__ import annotations

import ipaddress
import os
import ssl
from pathlib import Path

from hostcallback.receiver.errors import RemoteError
from hostcallback.receiver.text import is_printable


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_token(token: object) -> None:
    """Raises ValueError, without the token, if it cannot be sent."""
    if not is_printable(token):
        raise ValueError(
            "token (or HOSTCALLBACK_TOKEN) is not a text of printable ASCII characters: correct it (the token is not "
            "shown here)"
        )


def refuse_clear(host: str, shown: str, secret: str, *, cure: str) -> None:
    """Refuses to send a secret without TLS to another machine.

    Args:
        host: where it would go.
        shown: the address for the message, without a password.
        secret: what it is, such as "token".
        cure: how to use TLS.

    Raises:
        ValueError: the host is not this machine.
    """
    if not is_loopback(host):
        raise ValueError(
            f"the {secret} would go to {shown} in clear, where others on the network can read it: {cure}; or, if the "
            "network is trusted, give insecure=True (--insecure)"
        )


File = str | os.PathLike[str]


def read_tls_files(
    ca: File | None, cert: File | None, key: File | None
) -> tuple[bytes | None, bytes | None, bytes | None]:
    """Reads and checks the files of authorities' certificates, a certificate and its key. None skips a file.

    Raises:
        RemoteError: a file is not what it should be.
        OSError: a file cannot be read.
    """
    # First, since an error of reading names the file, unlike ssl's.
    authorities, chain, secret = (
        None if path is None else Path(path).read_bytes() for path in (ca, cert, key)
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if ca is not None:
        try:
            context.load_verify_locations(ca)
        except ssl.SSLError as error:
            raise RemoteError(f"{os.fspath(ca)}: not certificates of authorities, expected PEM") from error
    if cert is not None and key is not None:
        try:
            context.load_cert_chain(cert, key, password="")
        except (ssl.SSLError, ValueError) as error:
            raise RemoteError(
                f"{os.fspath(cert)} and {os.fspath(key)} are not a certificate and its key, expected PEM, and a key "
                "without a password"
            ) from error
    return authorities, chain, secret

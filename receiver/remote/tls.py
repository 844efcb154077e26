"""Checks files with certificates and keys before they are used, which says more than a connection that fails."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

from receiver.remote.errors import RemoteError

File = str | os.PathLike[str]


def check_tls_files(ca: File | None, cert: File | None, key: File | None) -> None:
    """Looks whether they are what they should be: authorities' certificates, one's own, and its key. None is no file.

    Raises:
        RemoteError: one is not.
        OSError: one cannot be read.
    """
    for path in (ca, cert, key):
        if path is not None:
            Path(path).read_bytes()  # raises what names the file, which ssl does not
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if ca is not None:
        try:
            context.load_verify_locations(ca)
        except ssl.SSLError as error:
            raise RemoteError(f"{os.fspath(ca)}: no certificates of authorities, expected PEM") from error
    if cert is None or key is None:
        return
    try:
        context.load_cert_chain(cert, key, password="")
    except (ssl.SSLError, ValueError) as error:
        raise RemoteError(
            f"{os.fspath(cert)} and {os.fspath(key)} are no certificate and its key, expected PEM, and a key that no "
            "password protects"
        ) from error

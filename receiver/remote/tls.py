"""Checks certificate and key files before use, because a failed connection does not name the wrong file."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

from hostcallback.receiver.remote.errors import RemoteError

File = str | os.PathLike[str]


def check_tls_files(ca: File | None, cert: File | None, key: File | None) -> None:
    """Checks the files of authorities' certificates, of a client's certificate, and of its key. None skips a file.

    Raises:
        RemoteError: a file is not what it should be.
        OSError: a file cannot be read.
    """
    for path in (ca, cert, key):
        if path is not None:
            Path(path).read_bytes()  # raises an error that names the file, unlike ssl's
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if ca is not None:
        try:
            context.load_verify_locations(ca)
        except ssl.SSLError as error:
            raise RemoteError(f"{os.fspath(ca)}: not certificates of authorities, expected PEM") from error
    if cert is None or key is None:
        return
    try:
        context.load_cert_chain(cert, key, password="")
    except (ssl.SSLError, ValueError) as error:
        raise RemoteError(
            f"{os.fspath(cert)} and {os.fspath(key)} are not a certificate and its key, expected PEM, and a key "
            "without a password"
        ) from error

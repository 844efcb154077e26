"""NATS subjects `taps.RUN.PROCESS.TAG`, with an escaping that allows any name."""

from __future__ import annotations

import hashlib
import re

PREFIX = "taps"
ALL = f"{PREFIX}.>"

MAX_TOKEN = 256

_UNSAFE = re.compile(rb"[^A-Za-z0-9_-]")
_ESCAPED = re.compile(rb"=([0-9A-F]{2})")


def token(name: str) -> str:
    """Escapes a name as one token of a subject: a byte that is not a letter, digit, `-` or `_` is `=` and two digits.
    `untoken` reverses it. A name whose token is longer than 256 characters becomes `=h` and a hash, irreversibly.
    """
    safe = _UNSAFE.sub(lambda found: b"=%02X" % found[0][0], name.encode(errors="surrogatepass")).decode()
    if len(safe) > MAX_TOKEN:
        digest = hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=16).hexdigest()
        return f"=h{digest}"
    return safe or "="


def untoken(token: str) -> str:
    """Reverses `token`."""
    if token == "=":
        return ""
    data = _ESCAPED.sub(lambda found: bytes.fromhex(found[1].decode()), token.encode())
    return data.decode(errors="surrogatepass")


def subject(run: str, process: int, tag: str) -> str:
    """Subject of the messages of one tap in one process."""
    return f"{PREFIX}.{token(run)}.{process}.{token(tag)}"


def subject_of_run(run: str) -> str:
    """Subject of all messages of a run; of all runs if `run` is empty."""
    return f"{PREFIX}.{token(run)}.>" if run else ALL

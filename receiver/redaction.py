"""Keeps passwords and tokens out of texts: representations, errors, logs, and what other programs are told."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

_BETWEEN = re.compile(r",(?=\s*[A-Za-z][A-Za-z0-9+.-]*://)")

_CREDENTIAL = re.compile(r"auth|token|secret|password|cookie|key", re.IGNORECASE)


def without_password(url: str) -> str:
    """A URL, or several with commas between, without users and passwords, for messages.

    A password may hold any characters, also those that should have been escaped: of each URL, everything up to the last
    "@" is left out.
    """
    return ",".join(_without(part) for part in _BETWEEN.split(url))


def _without(url: str) -> str:
    if "@" not in url:
        return url
    scheme, separator, rest = url.partition("://")
    if not separator:
        return url.rpartition("@")[2]
    return scheme + separator + rest.rpartition("@")[2]


def command_line(arguments: list[str]) -> list[str]:
    """The arguments of a command, without the users and passwords of URLs."""
    return [without_password(word) if "://" in word else word for word in arguments]


def is_credential(header: str) -> bool:
    """Whether a header's name says that its value is secret."""
    return _CREDENTIAL.search(header) is not None


def is_printable(secret: object) -> bool:
    """Whether a secret can be sent in a header. Libraries repeat one that cannot in the text of their error."""
    return isinstance(secret, str) and secret.isascii() and secret.isprintable()


def representation(options: Any, *, urls: tuple[str, ...], secrets: tuple[str, ...]) -> str:
    """The `repr` of a dataclass, with the fields `urls` without passwords, and with the fields `secrets` hidden."""
    shown = []
    for field in fields(options):
        value = getattr(options, field.name)
        if field.name in secrets and value:
            shown.append(f"{field.name}=<hidden>")
            continue
        text = repr(without_password(value) if isinstance(value, str) else value)
        shown.append(f"{field.name}={text if field.name in urls else repr(value)}")
    return f"{type(options).__name__}({', '.join(shown)})"

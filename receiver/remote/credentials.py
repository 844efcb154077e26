"""Checks that a client's token or password goes neither in clear over a network, nor into the text of an error."""

from __future__ import annotations

import ipaddress

from hostcallback.receiver.redaction import is_printable


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

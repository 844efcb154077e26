"""Says what is probably wrong where gRPC cannot connect, and what to do."""

from __future__ import annotations

import socket
from collections.abc import Callable

_Says = Callable[[str, bool], str]
"""From the address, and whether TLS is spoken."""


def _nobody(address: str, tls: bool) -> str:
    if _listens(address):  # at another address of that host than the last one, of which gRPC tells
        return _no_collector(address, tls)
    return f"nobody listens at {address}: start `hcb collect` there, or correct the address"


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=1.0):
            return True
    except (OSError, ValueError):
        return False


def _no_host(address: str, tls: bool) -> str:
    return f"this machine knows no host of the name in {address}: correct the address"


def _silent(address: str, tls: bool) -> str:
    return f"what listens at {address} says nothing: is it a collector, and not stopped?"


def _no_collector(address: str, tls: bool) -> str:
    if tls:
        return f"what listens at {address} is no collector: correct the address"
    return f"what listens at {address} is no collector, or one with TLS: correct the address, or give tls_ca"


def _no_tls(address: str, tls: bool) -> str:
    return f"what listens at {address} speaks no TLS: leave out tls_ca, or give the collector --tls-cert and --tls-key"


def _bad_certificate(address: str, tls: bool) -> str:
    return (
        f"the certificate that is shown at {address} is not good: it must be valid now, signed by one in tls_ca, "
        "and for the host in the address"
    )


def _hung_up(address: str, tls: bool) -> str:
    if tls:
        return (
            f"what listens at {address} hung up: does it want a client's certificate (tls_cert, tls_key) that is valid "
            "and signed by its --tls-ca?"
        )
    return f"what listens at {address} hung up: it may want TLS (give tls_ca)"


def _bad_files(address: str, tls: bool) -> str:
    return "tls_ca, tls_cert or tls_key cannot be used: expected PEM files, and the key of that certificate"


_KNOWN: tuple[tuple[str, _Says], ...] = (
    ("Connection refused", _nobody),
    ("Domain name not found", _no_host),
    ("DNS resolution failed", _no_host),
    ("errors resolving", _no_host),
    ("before receiving SETTINGS", _silent),
    ("Expected SETTINGS frame", _no_collector),
    ("Failed parsing HTTP/2", _no_collector),
    ("Method not found", _no_collector),
    ("WRONG_VERSION_NUMBER", _no_tls),
    ("CERTIFICATE_VERIFY_FAILED", _bad_certificate),
    ("Hostname Verification", _bad_certificate),
    ("create security handshaker", _bad_files),
    ("Socket closed", _hung_up),
    ("Connection reset", _hung_up),
)
"""What gRPC's texts have in them, the first that fits counts."""


def no_control(address: str) -> str:
    """Of a collector that knows nothing of live control."""
    return (
        f"the collector at {address} has nobody control processes: it was started with --no-control, or is of an older "
        "version"
    )


def explain_grpc_error(details: str, address: str, *, tls: bool) -> str:
    """What is wrong and what helps, before gRPC's own words; these alone if nothing is known of them.

    Args:
        details: what gRPC says.
        address: that was tried.
        tls: whether TLS was.
    """
    for text, says in _KNOWN:
        if text in details and text != details:  # else it was connected, and that ended
            return f"{says(address, tls)} ({details})"
    return details

"""Explains gRPC's connection errors: the likely cause, and the cure."""

from __future__ import annotations

import socket
from collections.abc import Callable

_Says = Callable[[str, bool], str]
"""Returns an explanation for an address; the flag tells whether TLS is used."""


def _nobody(address: str, tls: bool) -> str:
    if _listens(address):  # the error is of the last address of a host that has several: another one answers
        return _no_collector(address, tls)
    return (
        f"connection refused at {address}: no collector is listening. Start `hcb collect` there or correct the "
        "address"
    )


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        # At most 1 s: this runs in the sender's thread, for a text.
        with socket.create_connection((host.strip("[]"), int(port)), timeout=1.0):
            return True
    except (OSError, ValueError):
        return False


def _no_host(address: str, tls: bool) -> str:
    return f"this machine cannot resolve the host name in {address}: correct the address"


def _silent(address: str, tls: bool) -> str:
    return f"the program that listens at {address} does not answer: is it a collector, and not stopped?"


def _no_collector(address: str, tls: bool) -> str:
    if tls:
        return f"the program that listens at {address} is not a collector: correct the address"
    return (
        f"the program that listens at {address} is not a collector, or one with TLS: correct the address, or give "
        "tls_ca"
    )


def _no_tls(address: str, tls: bool) -> str:
    return (
        f"the program that listens at {address} does not use TLS: leave out tls_ca, or give the collector --tls-cert "
        "and --tls-key"
    )


def _bad_certificate(address: str, tls: bool) -> str:
    return (
        f"the certificate of the server at {address} is invalid: it must be valid now, signed by a certificate in "
        "tls_ca, and issued for the host in the address"
    )


def _hung_up(address: str, tls: bool) -> str:
    if tls:
        return (
            f"the program that listens at {address} closed the connection: does it require a client certificate "
            "(tls_cert, tls_key) that is valid and signed by its --tls-ca?"
        )
    return f"the program that listens at {address} closed the connection: it may require TLS (give tls_ca)"


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
"""Parts of gRPC's error texts; the first that matches counts."""


def no_control(address: str) -> str:
    """Explains that a collector does not implement live control."""
    return (
        f"the collector at {address} does not relay control requests: it was started with --no-control, or is of an "
        "older version"
    )


def explain_grpc_error(details: str, address: str, *, tls: bool) -> str:
    """Returns cause and cure before gRPC's own text; only that text if the error is unknown.

    Args:
        details: gRPC's text.
        address: the collector's.
        tls: whether TLS was used.
    """
    for text, says in _KNOWN:
        if text in details and text != details:  # the text alone means that an established connection broke
            return f"{says(address, tls)} ({details})"
    return details

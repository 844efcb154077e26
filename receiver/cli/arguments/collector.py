"""The command-line options for reaching a collector."""

from __future__ import annotations

import argparse
from typing import Any

from hostcallback.receiver.cli import CommandError
from hostcallback.receiver.remote.options import Forward


def add_reaching(group: Any, *, runs: str = "of this run, or a pattern", default: str | None = "*") -> None:
    """Adds the options to a parser or an argument group: the runs, with their help and default, and TLS."""
    group.add_argument("--run", dest="of_run", metavar="RUN", default=default, help=runs)
    group.add_argument("--tls-ca", metavar="FILE", help="certificates that verify the collector's")
    group.add_argument("--tls-cert", metavar="FILE", help="this client's certificate")
    group.add_argument(
        "--tls-key", metavar="FILE", help="its key (the token is read from HOSTCALLBACK_TOKEN)"
    )
    group.add_argument(
        "--insecure", action="store_true", help="send the token to another machine also without TLS"
    )


def reaching(address: str, arguments: argparse.Namespace) -> Forward:
    """Returns the options for the collector at an address.

    Raises:
        CommandError: the address or an option is invalid.
    """
    try:
        found = Forward(
            address, tls_ca=arguments.tls_ca, tls_cert=arguments.tls_cert, tls_key=arguments.tls_key,
            insecure=arguments.insecure,
        )  # fmt: skip
    except ValueError as error:
        raise CommandError(str(error)) from error
    if found.scheme:
        raise CommandError(
            f"{found.shown_address} is a {found.broker.title}, and this needs a collector to which processes "
            "forward directly: give the HOST:PORT of hcb collect --listen"
        )
    return found

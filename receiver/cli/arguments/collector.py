"""The options by which commands reach a collector."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from receiver.cli import CommandError

if TYPE_CHECKING:
    from receiver.remote.options import Forward


def add_reaching(group: Any) -> None:
    """Adds them to a parser or a group of one: which runs, TLS."""
    group.add_argument("--run", dest="of_run", metavar="RUN", default="*", help="of this run, or a pattern")
    group.add_argument("--tls-ca", metavar="FILE", help="check the collector's certificate by these")
    group.add_argument("--tls-cert", metavar="FILE", help="the certificate that it is to check")
    group.add_argument("--tls-key", metavar="FILE", help="its key (a token is taken from HOSTCALLBACK_TOKEN)")


def reaching(address: str, arguments: argparse.Namespace) -> Forward:
    """How the collector at an address is to be reached.

    Raises:
        CommandError: the address or the options make no sense.
    """
    from receiver.remote.options import Forward

    try:
        found = Forward(
            address, tls_ca=arguments.tls_ca, tls_cert=arguments.tls_cert, tls_key=arguments.tls_key
        )
    except ValueError as error:
        raise CommandError(str(error)) from error
    if found.is_nats:
        raise CommandError(
            f"{found.shown_address} is a NATS server, and this needs a collector that processes forward to directly: "
            "give the HOST:PORT of hcb collect --listen"
        )
    return found

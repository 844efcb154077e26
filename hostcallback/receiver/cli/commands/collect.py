"""`hcb collect`: receives the messages that many processes forward, stores them, and shows them."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import grp
import logging
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hostcallback.receiver import environment
from hostcallback.receiver.cli import USAGE, CommandError
from hostcallback.receiver.cli.output.messages import make_safe
from hostcallback.receiver.files import PRIVATE, Permissions
from hostcallback.receiver.log import logger
from hostcallback.receiver.messages import Sink
from hostcallback.receiver.remote.brokers import BROKERS, Broker, load
from hostcallback.receiver.sinks.scalars import scalars_into
from hostcallback.receiver.text import printable, printable_report

if TYPE_CHECKING:
    from hostcallback.receiver.remote.collector.service import CollectingService
    from hostcallback.receiver.remote.collector.store import Store
    from hostcallback.receiver.remote.delivery.delivery import Delivery
    from hostcallback.receiver.ui.server.serving import UiServer

PATIENCE_SEC = 0.5
"""Seconds after which a collector that ends tells that it still delivers messages."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    add = parser.add_argument
    add(
        "--listen",
        metavar="HOST:PORT",
        help="address for processes to forward to; port 0 for any free one",
    )
    for broker in BROKERS:
        add(f"--{broker.name}", metavar="URL", help=broker.summary)
        add(f"--{broker.name}-run", default="", metavar="RUN", help="fetch only this run (default all)")
        add(f"--{broker.name}-ca", metavar="FILE", help=f"certificates that verify the {broker.title}'s")
    add(
        "--log",
        required=True,
        metavar="DIR",
        help="store messages there, in a tap log per run, before they are acknowledged",
    )
    add(
        "--consumers",
        metavar="FILE",
        help="a .py file: TAPS = {name or pattern: function}, SINKS = [sink, ...]",
    )
    add(
        "--group",
        metavar="NAME",
        help="let this group read what is stored (default: only the collector's user)",
    )
    add(
        "--metrics",
        metavar="FILE",
        help="write the scalars of messages to this file: CSV if it ends in .csv, else JSON; a later start with the "
        "same --log appends",
    )
    add(
        "--otlp",
        metavar="HOST:PORT",
        help="export to an OpenTelemetry Collector; http:// before it disables TLS beyond this machine",
    )
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument(
        "--print-all", action="store_true", help="print every message, not only those of printing taps"
    )
    shown.add_argument("--quiet", action="store_true", help="print no messages")
    add(
        "--shards",
        action="store_true",
        help="deliver the shards of programs of several processes one by one; do not assemble them",
    )
    add(
        "--wait",
        type=float,
        default=300.0,
        metavar="SEC",
        help="a process far ahead waits until those behind have sent nothing for SEC seconds (default 300)",
    )
    add("--ui", action="store_true", help="also show the stored messages on a page for browsers, see hcb ui")
    add(
        "--ui-port",
        type=int,
        default=0,
        metavar="N",
        help="port of the page on this machine (default: any free one)",
    )
    add("--fsync", action="store_true", help="acknowledge messages only when they are on the disk")
    group = parser.add_argument_group("access")
    group.add_argument("--tls-cert", metavar="FILE", help="the collector's certificate, PEM")
    group.add_argument("--tls-key", metavar="FILE", help="its key")
    group.add_argument("--tls-ca", metavar="FILE", help="require client certificates signed by one of these")
    group.add_argument(
        "--token-file",
        metavar="FILE",
        help="lines of a token, +control if it is for `hcb ctl --via`, and the runs that it grants (default all)",
    )
    group.add_argument(
        "--no-control", action="store_true", help="disable live control through this collector"
    )
    group.add_argument(
        "--insecure",
        action="store_true",
        help="listen beyond this machine, or send a token to a broker there, without TLS",
    )
    group.add_argument(
        "--max-streams", type=int, metavar="N", help="simultaneous streams (default in docs/security.md)"
    )
    group.add_argument(
        "--max-rate",
        type=float,
        default=0.0,
        metavar="B",
        help="bytes per second and stream (default unlimited)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    # Here, because modules outside of receiver/remote/ can be imported without grpc.
    from hostcallback.receiver.remote.collector.access import allow_many_files, keep_freed_memory
    from hostcallback.receiver.remote.collector.service import run_until_told
    from hostcallback.receiver.remote.collector.store import Store
    from hostcallback.receiver.remote.delivery.delivery import Delivery

    misuse = _misuse(arguments)
    if misuse:
        print(f"hcb: {misuse}", file=sys.stderr)
        return USAGE
    # Files of certificates, tokens and consumers are read before anything is made, so that their errors leave nothing.
    listen = _prepare_listening(arguments)
    bind, sinks = _consumers(arguments.consumers)
    _log_to_stderr()
    make_safe()
    keep_freed_memory()
    allow_many_files()
    permissions = PRIVATE if arguments.group is None else _permissions_of(arguments.group)
    with contextlib.ExitStack() as stack:
        metrics = None
        if arguments.metrics is not None:
            # Created here, because a writer would create it with the default permissions.
            with contextlib.suppress(FileExistsError):
                os.close(permissions.create(Path(arguments.metrics), os.O_WRONLY))
            metrics = stack.enter_context(scalars_into(arguments.metrics, devices=True, resumes=True))
        if arguments.otlp is not None:
            from hostcallback.receiver.remote.otlp.exporter import otlp

            sinks = [*sinks, stack.enter_context(otlp(arguments.otlp))]
        store = Store(arguments.log, fsync=arguments.fsync, permissions=permissions)
        stack.callback(store.close)
        delivery = Delivery(
            store, bind=bind, sinks=sinks, prints=not arguments.quiet, everything=arguments.print_all,
            shards=arguments.shards, patience_sec=arguments.wait, metrics=metrics,
        )  # fmt: skip
        services = _services(arguments, store, delivery)
        if arguments.listen is not None:
            services.append(listen(store, delivery))

        if arguments.ui:
            stack.callback(_show_page(arguments.log, arguments.ui_port).close)

        def tell(service: CollectingService) -> None:
            print(f"hcb: collecting {service.where} into {arguments.log}", file=sys.stderr, flush=True)

        run_until_told(services, tell)
        _finish(delivery)
    return 0


def _show_page(log: str, port: int) -> UiServer:
    from hostcallback.receiver.cli.commands.ui import needs_packages

    needs_packages()
    from hostcallback.receiver.ui.server.serving import Listening, serve_logs

    server = serve_logs([log], Listening(port=port))
    print(f"hcb: the page is at {server.address}", file=sys.stderr, flush=True)
    return server


def _finish(delivery: Delivery) -> None:
    if not delivery.wait_idle(PATIENCE_SEC):
        print(
            "hcb: delivering the remaining stored messages. Press Ctrl-C again to exit now; the rest is delivered "
            "at the next start",
            file=sys.stderr,
            flush=True,
        )
    delivery.close()
    sys.stdout.flush()
    for check in delivery.failed_checks():
        print(printable_report(check.report()), file=sys.stderr)


def _misuse(arguments: argparse.Namespace) -> str:
    if arguments.listen is None and all(_url(arguments, broker) is None for broker in BROKERS):
        ways = ", or ".join(["--listen HOST:PORT", *(f"--{broker.name} URL" for broker in BROKERS)])
        several = "both" if len(BROKERS) == 1 else "several of them"
        return f"collect: give {ways}, or {several}"
    host, colon, port = _address(arguments)
    if not colon or not host or not port.isdecimal() or int(port) > 65_535:
        return f"--listen {arguments.listen!r}: expected HOST:PORT, such as localhost:7070, with a port up to 65535"
    return ""


def _address(arguments: argparse.Namespace) -> tuple[str, str, str]:
    host, colon, port = (arguments.listen or "localhost:0").rpartition(":")
    return host, colon, port


def _prepare_listening(arguments: argparse.Namespace) -> Callable[[Store, Delivery], CollectingService]:
    """Checks who may connect, and returns the function that makes the server of `--listen`."""
    from hostcallback.receiver.remote.collector.access import Access, Limits, server_credentials
    from hostcallback.receiver.remote.collector.service import Collector, CollectorServer
    from hostcallback.receiver.remote.control.relay import ControlService

    _check_exposure(arguments)
    credentials = None
    if arguments.tls_cert is not None:
        credentials = server_credentials(arguments.tls_cert, arguments.tls_key, arguments.tls_ca)
    access = Access() if arguments.token_file is None else Access.from_file(arguments.token_file)

    def listen(store: Store, delivery: Delivery) -> CollectingService:
        limits = Limits(bytes_per_sec=arguments.max_rate)
        if arguments.max_streams is not None:
            limits = dataclasses.replace(limits, streams=arguments.max_streams)
        collector = Collector(store, access=access, limits=limits, on_grown=delivery.grown)
        control = ControlService(store.directory, access=access, limits=limits)
        if not arguments.no_control and control.remembered():
            print(f"hcb: {printable(control.remembered())}", file=sys.stderr, flush=True)
        handlers = () if arguments.no_control else (control.handlers(),)
        return CollectorServer(collector, arguments.listen, credentials, handlers=handlers)

    return listen


def _check_exposure(arguments: argparse.Namespace) -> None:
    from hostcallback.receiver.remote.credentials import is_loopback

    if (arguments.tls_cert is None) != (arguments.tls_key is None):
        raise CommandError("--tls-cert and --tls-key belong together: give both, or neither")
    if arguments.tls_ca is not None and arguments.tls_cert is None:
        raise CommandError(
            "--tls-ca requires client certificates, which needs TLS: give --tls-cert and --tls-key"
        )
    is_local = is_loopback(_address(arguments)[0])
    if arguments.tls_cert is None and not is_local and not arguments.insecure:
        raise CommandError(
            f"--listen {arguments.listen}: other machines can reach this address, and any program could write there: "
            "give --tls-cert and --tls-key, or --insecure if the network is trusted"
        )
    if arguments.listen and arguments.token_file is None and not arguments.no_control and not is_local:
        print(
            "hcb: any program that can connect there can also control the taps of all processes: give --token-file, "
            "or --no-control",
            file=sys.stderr,
        )


def _url(arguments: argparse.Namespace, broker: Broker) -> str | None:
    url: str | None = getattr(arguments, broker.name)
    return url


def _services(arguments: argparse.Namespace, store: Store, delivery: Delivery) -> list[CollectingService]:
    from hostcallback.receiver.remote.collector.service import CollectFrom

    found = []
    for broker in BROKERS:
        url = _url(arguments, broker)
        if url is None:
            continue
        run, tls_ca = getattr(arguments, f"{broker.name}_run"), getattr(arguments, f"{broker.name}_ca")
        source = CollectFrom(
            url=url, run=run, token=environment.TOKEN.read(), tls_ca=tls_ca, insecure=arguments.insecure
        )
        try:
            found.append(load(broker.service)(source, store, delivery.grown))
        except ValueError as error:
            raise CommandError(f"--{broker.name}: {error}") from error
    return found


def _permissions_of(group: str) -> Permissions:
    try:
        found = int(group) if group.isdecimal() else grp.getgrnam(group).gr_gid
    except KeyError:
        raise CommandError(f"--group {group}: this machine has no such group") from None
    if os.geteuid() != 0 and found not in {os.getegid(), *os.getgroups()}:
        raise CommandError(f"--group {group}: this user is not in the group")
    return Permissions(0o640, found)


def _consumers(path: str | None) -> tuple[dict[str, Callable[..., Any]], Sequence[Sink]]:
    if path is None:
        return {}, []
    try:
        found = runpy.run_path(path)
    except Exception as error:
        raise CommandError(f"--consumers {path}: {type(error).__name__}: {error}") from error
    taps, sinks = found.get("TAPS", {}), found.get("SINKS", [])
    good = isinstance(taps, dict) and all(
        isinstance(name, str) and callable(func) for name, func in taps.items()
    )
    if not good or not isinstance(sinks, Sequence) or not all(map(callable, sinks)) or not (taps or sinks):
        raise CommandError(
            f"--consumers {Path(path).name}: expected TAPS = {{name or pattern of taps: function}}, or "
            "SINKS = [sink, ...]"
        )
    return taps, sinks


def _log_to_stderr() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("hcb: %(message)s"))
    logger.addHandler(handler)
    logger.propagate = False

"""`hcb ui`: shows live taps, errors, devices and runs on a page in a browser."""

from __future__ import annotations

import argparse
import contextlib
import html
import os
import sys
import tempfile
import threading
import webbrowser
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from hostcallback.receiver.cli import CommandError
from hostcallback.receiver.cli.arguments import add_reaching, port, reaching

if TYPE_CHECKING:
    from hostcallback.receiver.ui.live.processes import LiveSource
    from hostcallback.receiver.ui.server.serving import Listening, UiServer

EXAMPLES = """\
The page is served on this machine alone, and only to clients with the printed address: it contains a random
token. To look at it from another machine, forward the port: ssh -L 8000:127.0.0.1:8000 HOST.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    add = parser.add_argument
    add(
        "source", nargs="*", metavar="LOG|PID",
        help="folders with tap logs, or segments of them, which may grow; ids of running processes (`hcb ctl` lists "
        "them), which are shown with the logs that they record",
    )  # fmt: skip
    add("--control", action="store_true", help="let the page set rules: switch taps, rates, truncation")
    add_serving(parser)
    group = parser.add_argument_group("or the processes that forward to a collector")
    group.add_argument("--from", dest="collector", metavar="HOST:PORT", help="the collector")
    add_reaching(group, prefix="from")
    parser.set_defaults(parser=parser)


def add_serving(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments about the server."""
    group = parser.add_argument_group("the server")
    add = group.add_argument
    add("--host", default="127.0.0.1", metavar="ADDR", help="address to listen at (default 127.0.0.1)")
    add("--port", type=port, default=0, metavar="N", help="port (default: any free one)")
    add(
        "--allow-host", action="append", default=[], metavar="NAME", help="a name of this machine in browsers"
    )
    add(
        "--token-file",
        metavar="FILE",
        help="the token is the first line of this file (default: a random one)",
    )
    add("--tls-cert", metavar="FILE", help="the server's certificate, PEM")
    add("--tls-key", metavar="FILE", help="its key")
    add("--insecure", action="store_true", help="listen beyond this machine without TLS")
    add(
        "--framed",
        action="store_true",
        help="let pages of this machine, such as notebooks, show it in a frame",
    )
    add(
        "--until-eof",
        action="store_true",
        help="end when the standard input does, as with the program that started it",
    )
    add("--no-browser", action="store_true", help="do not open a browser")


def needs_packages() -> None:
    """Looks for the packages of the server.

    Raises:
        CommandError: one is missing; the text says how to install it.
    """
    try:
        import uvicorn  # noqa: F401
        from starlette.applications import Starlette  # noqa: F401
    except ImportError as error:
        raise CommandError(
            f"hcb ui needs the packages starlette and uvicorn: pip install 'hostcallback[ui]' ({error})"
        ) from error


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    needs_packages()
    from hostcallback.receiver.ui.index.log_index import LogIndex
    from hostcallback.receiver.ui.live.processes import LiveProcesses
    from hostcallback.receiver.ui.server.page_data import PageData
    from hostcallback.receiver.ui.server.serving import UiServer

    if not arguments.source and not arguments.collector:
        arguments.parser.error(
            "give a LOG, the PID of a running process, or a collector with --from HOST:PORT"
        )
    listening = _listening(arguments)
    sources = _live(arguments)
    live = LiveProcesses(sources)
    try:
        logs = [item for item in arguments.source if not _is_pid(item)]
        copies = [log for source in sources for log in source.logs()]
        data = PageData(LogIndex([*logs, *copies]), logs, live=live, control=arguments.control)
    except BaseException:
        live.close()
        raise
    try:
        server = UiServer(data, listening)
    except BaseException:
        data.close()
        raise

    if arguments.until_eof:
        threading.Thread(target=_stop_at_eof, args=(server,), daemon=True).start()

    with contextlib.ExitStack() as at_end:

        def tell() -> None:
            print(server.address, flush=True)
            if not arguments.no_browser and sys.stdout.isatty():
                webbrowser.open(at_end.enter_context(_redirect(server.address)).as_uri())

        server.run(tell)
    return 0


@contextlib.contextmanager
def _redirect(address: str) -> Iterator[Path]:
    # Every user of the machine can read the command line of a browser. It gets the name of a file that leads to the
    # address, which only this user can read, as Jupyter's.
    descriptor, name = tempfile.mkstemp(".html", "hcb-ui-")
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            url = html.escape(address, quote=True)
            file.write(
                f'<!doctype html><meta http-equiv="refresh" content="0; url={url}"><a href="{url}">ui</a>\n'
            )
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


def _stop_at_eof(server: UiServer) -> None:
    sys.stdin.read()
    server.stop()


def _live(arguments: argparse.Namespace) -> list[LiveSource]:
    found: list[LiveSource] = []
    try:
        for item in filter(_is_pid, arguments.source):
            from hostcallback.receiver.ui.live.processes import ProcessSource

            found.append(ProcessSource(int(item)))
        if arguments.collector is not None:
            # Here, because grpc takes long to import.
            from hostcallback.receiver.ui.live.source import CollectorSource

            reached = reaching(arguments.collector, arguments, prefix="from")
            found.append(CollectorSource(reached, arguments.of_run))
    except BaseException:
        for source in found:
            source.close()
        raise
    return found


def _is_pid(item: str) -> bool:
    return item.isascii() and item.isdecimal() and not Path(item).exists()


def _listening(arguments: argparse.Namespace) -> Listening:
    from hostcallback.receiver.ui.server.serving import Listening, is_loopback

    if (arguments.tls_cert is None) != (arguments.tls_key is None):
        raise CommandError("--tls-cert and --tls-key belong together: give both, or none")
    if arguments.tls_cert is None and not arguments.insecure and not is_loopback(arguments.host):
        raise CommandError(
            f"--host {arguments.host} is reached from other machines: give --tls-cert and --tls-key, or --insecure"
        )
    token = "" if arguments.token_file is None else _token(arguments.token_file)
    return Listening(
        arguments.host,
        arguments.port,
        tuple(arguments.allow_host),
        token,
        arguments.tls_cert,
        arguments.tls_key,
        arguments.framed,
    )


def _token(file: str) -> str:
    if os.stat(file).st_mode & 0o077:
        raise CommandError(f"{file}: other users may read this token: chmod 600 {file}")
    token = Path(file).read_text(encoding="utf-8").partition("\n")[0].strip()
    if len(token) < 16:
        raise CommandError(f"{file}: the token has {len(token)} characters, expected at least 16")
    return token

"""`hcb attach`: shows what the taps of a running process print."""

from __future__ import annotations

import argparse
import select
import signal
import sys
from types import FrameType

from hostcallback.receiver.cli.reader_process.reader import RingReader
from hostcallback.receiver.control.client import ControlClient
from hostcallback.receiver.failures.deferred_errors import OnError
from hostcallback.receiver.processes import stays_alive
from hostcallback.receiver.runtime.isolated.ipc import ReaderConfig
from hostcallback.receiver.runtime.isolated.options import ReaderOptions
from hostcallback.receiver.text import printable


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument(
        "pid", type=int, metavar="PID", help="of a process on this machine (`hcb ctl` lists them)"
    )
    parser.add_argument("--record", metavar="LOG", help="also record it in a tap log in this folder")


def run(arguments: argparse.Namespace) -> int:
    """Shows messages until Ctrl-C, or until the process ends."""
    stopped = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        stopped = True

    with ControlClient(arguments.pid) as client:
        said = client.ask("attach")
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, stop)
        order = ReaderConfig(
            said["folder"],
            said["pid"],
            list(said["devices"].items()),
            ReaderOptions(arguments.record),
            on_error=OnError.WARN,
        )
        reader = RingReader(order)
        print(
            f"attached to {arguments.pid}: {printable(', '.join(said['devices']))}; Ctrl-C detaches",
            file=sys.stderr,
        )
        ended = False
        while not stopped and not ended:
            ready, _, _ = select.select([client.socket], [], [], 0.2)
            ended = bool(ready)
        if ended and not stays_alive(arguments.pid):
            reader.drain_after_parent_death()
            print(f"process {arguments.pid} has ended", file=sys.stderr)
        else:
            reader.finish()
    return 0

"""`ui`: shows the page of `hcb ui` in a notebook."""

from __future__ import annotations

import html
import os
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Sequence

from hostcallback.receiver.control.endpoints import endpoints
from hostcallback.receiver.errors import HostCallbackError
from hostcallback.receiver.files import Closing, paths_of
from hostcallback.tracing.source_line import public

Log = str | os.PathLike[str]

HEIGHT = 720
"""Pixels of the page in a notebook."""

END_SEC = 10.0


class Ui(Closing):
    """A page that a child process serves to browsers of this machine. Made by `ui`; a context manager.

    In a notebook it is shown in a frame. The server ends with `close`, or with this process.

    Attributes:
        address: of the page, with the random token that lets a browser in.

    Example:
        with hcb.ui("run/taps") as page:
            print(page.address)
    """

    def __init__(self, process: subprocess.Popen[str], address: str, height: int) -> None:
        """Called by `ui`."""
        self.address = address
        self._height = height
        self._process = process
        self._end = weakref.finalize(self, _end, process)

    def close(self) -> None:
        """Ends the server."""
        self._end()

    def __repr__(self) -> str:
        """The address."""
        return f"Ui({self.address!r})"

    def _repr_html_(self) -> str:
        address = html.escape(self.address, quote=True)
        frame = f'<iframe src="{address}" width="100%" height="{self._height}" style="border:1px solid #8884"></iframe>'
        return f'{frame}\n<p><a href="{address}" target="_blank" rel="noreferrer">open this page in a tab</a></p>'


@public
def ui(log: Log | Sequence[Log] | None = None, *, control: bool = True, height: int = HEIGHT) -> Ui:
    """Shows live taps, errors, devices and runs on a page: in a notebook in a frame, elsewhere at its `address`.

    A child process reads the logs and serves the page, so that this process does no work for it, except that it counts
    the messages of each tap while the page is open. Needs the packages of `hostcallback[ui]`.

    Args:
        log: folder of a tap log, or several; None for this process, with the logs that it records.
        control: whether the page may set rules of this process's taps: switch them off, limit their rate. Ignored with
            `log`.
        height: of the frame in a notebook, in pixels.

    Raises:
        HostCallbackError: a package is missing, a log does not exist, or the control socket of this process is off.

    Example:
        with hcb.outfeed_receiver(record="run/taps"):
            train()
        hcb.ui("run/taps")
    """
    if log is None:
        endpoints.start()
        if endpoints.socket_path is None:
            raise HostCallbackError(
                "hcb.ui: this process has no control socket (HOSTCALLBACK_CONTROL_SOCKET=0?): give the folder of a log"
            )
        given = [str(os.getpid()), *(["--control"] if control else [])]
    else:
        given = [
            os.fspath(each)
            for each in paths_of(log, "the folder of a tap log, or several: hcb.ui('run/taps')")
        ]
    command = [
        sys.executable,
        "-m",
        "hostcallback.receiver.cli",
        "ui",
        "--no-browser",
        "--framed",
        "--until-eof",
    ]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [*command, *given], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )  # fmt: skip
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        if not address:
            _end(process)
            errors.seek(0)
            problem = errors.read().strip() or "its server has ended"
            raise HostCallbackError(f"hcb.ui: {problem.removeprefix('hcb: ')}")
    return Ui(process, address, height)


def _end(process: subprocess.Popen[str]) -> None:
    # The server ends with its standard input.
    with process:
        if process.stdin is not None:
            process.stdin.close()
        try:
            process.wait(END_SEC)
        except subprocess.TimeoutExpired:
            process.kill()

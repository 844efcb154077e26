"""The two endpoints by which users control a running process: its rule file and its control socket."""

from __future__ import annotations

import atexit
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from hostcallback.receiver import environment, processes
from hostcallback.receiver.control.commands import commands
from hostcallback.receiver.control.protocol import ControlError, RuleFileError
from hostcallback.receiver.control.server import ControlServer
from hostcallback.receiver.log import logger
from hostcallback.receiver.runtime.runtime import Runtime, runtime

if TYPE_CHECKING:
    from hostcallback.receiver.control.rule_file import RuleFile


class ControlEndpoints:
    """The rule file and the control socket of a process. Any thread.

    Attributes:
        handlers: of this process's commands, by command.
    """

    def __init__(self, runtime: Runtime) -> None:
        """Nothing is opened until `start`."""
        self._runtime = runtime
        self._lock = threading.Lock()  # protects everything below
        self._started = False
        self._file: RuleFile | None = None
        self._server: ControlServer | None = None
        self._followed: Path | None = None  # the parent's file, for a forked child to follow
        self.handlers = commands(runtime)

    @property
    def socket_path(self) -> Path | None:
        """Path of the control socket; None while none is open."""
        return None if self._server is None else self._server.path

    def start(self) -> None:
        """Opens the endpoints that the environment asks for, once. Failures are logged.

        Receivers call it when they start.
        """
        with self._lock:
            if self._started:
                return
            # Before the endpoints are opened: one that fails is logged once, not at every compilation.
            self._started = True
            path = self._followed or environment.CONTROL_FILE.read()
            if path is not None and self._file is None:
                self._follow(path)
            try:
                has_socket = environment.CONTROL_SOCKET.read()
            except ValueError as error:
                logger.warning("%s", error)
            else:
                if has_socket:
                    self._open_socket()

    def _open_socket(self) -> None:
        try:
            self._server = ControlServer(self.handlers)
        except (ControlError, OSError) as error:
            logger.warning("`hcb ctl` and `hcb top` cannot reach this process: %s", error)
        else:
            atexit.register(self._server.stop)

    def watch(self, path: Path | None, poll_sec: float | None = None) -> None:
        """Follows the rule file `path` from now on, in place of the previous one; None follows none.

        Raises:
            RuleFileError: the file's content is invalid; it is followed nevertheless.
        """
        with self._lock:
            self._followed = None
            if self._file is not None:
                self._file.stop()
                self._file = None
            if path is None:
                return
            problem = self._follow(path, poll_sec).problem
            if problem:
                raise RuleFileError(problem)

    def _follow(self, path: Path, poll_sec: float | None = None) -> RuleFile:
        from hostcallback.receiver.control import rule_file  # here, because few processes have one

        file = rule_file.RuleFile(
            path, self._runtime.rule_table, self._runtime.registry, poll_sec or rule_file.POLL_SEC
        )
        self._file = file
        file.start()
        return file

    def close(self) -> None:
        """Closes both endpoints; `start` opens them again."""
        with self._lock:
            if self._server is not None:
                atexit.unregister(self._server.stop)
                self._server.stop()
                self._server = None
            if self._file is not None:
                self._file.stop()
                self._file = None
            self._started = False

    def after_fork_in_child(self) -> None:
        """Drops the parent's endpoints in a forked child: it has no threads and must not answer for its parent.

        The child's own receivers call `start`, which opens the child's endpoints.
        """
        # A new lock: a thread of the parent may have held the old one.
        self._lock = threading.Lock()
        if self._server is not None:
            atexit.unregister(self._server.stop)
            self._server.forget()
        self._followed = None if self._file is None else self._file.path
        self._server = None
        self._file = None
        self._started = False


endpoints = ControlEndpoints(runtime)
"""The endpoints of this process."""

processes.in_child(processes.Stage.CONTROL, endpoints.after_fork_in_child)

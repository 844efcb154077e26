"""The running processes that forward to a collector, as a source of the page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hostcallback.receiver.control.protocol import ControlError
from hostcallback.receiver.errors import TransportError
from hostcallback.receiver.remote.options import Forward

if TYPE_CHECKING:
    from hostcallback.receiver.remote.control.client import CollectorControl


class LiveProcess(NamedTuple):
    """A process that answered.

    Attributes:
        host: name of its machine.
        pid: its process id there.
        run: name of its run; empty if unknown.
        figures: its answer to the command `figures`, see `hostcallback.receiver.control.commands`.
    """

    host: str
    pid: int
    run: str
    figures: dict[str, Any]


def is_process(found: Any) -> bool:
    """Whether an answer from another process is well-formed: has the fields that the page shows."""
    try:
        numbers = [found["time"], *(tap[name] for tap in found["taps"] for name in TAP_NUMBERS)]
        numbers += [device[name] for device in found["devices"] for name in DEVICE_NUMBERS]
        texts = [device["device"] for device in found["devices"]]
        texts += [tap[name] for tap in found["taps"] for name in ("name", "source_line", "rules")]
    except (LookupError, TypeError):
        return False
    return all(type(number) in (int, float) for number in numbers) and all(
        type(item) is str for item in texts
    )


TAP_NUMBERS = "messages", "bytes", "failed", "tap_sec", "suppressed"
DEVICE_NUMBERS = "emitted", "dropped", "queued", "queued_bytes", "waiting"


ASK_SEC = 2.0


class CollectorSource:
    """A collector. One thread at a time.

    Attributes:
        kind: "collector".
        name: its address.
    """

    kind = "collector"

    def __init__(self, options: Forward, runs: str = "*") -> None:
        """Starts to copy the messages of the runs that match a pattern into a temporary folder.

        Raises:
            TransportError: the collector cannot be reached, or refuses.
        """
        # Here, because grpc takes long to import.
        from hostcallback.receiver.remote.follow_client import ANSWER_SEC, RemoteLog

        self.name = options.address
        self._options, self._runs = options, runs
        self._control: CollectorControl | None = None
        self._can_control = True
        self._log = RemoteLog(options, runs)
        try:
            self._log.wait(ANSWER_SEC)
        except BaseException:
            self._log.close()
            raise

    def logs(self) -> list[Path]:
        """The folder with the copy."""
        return [self._log.folder]

    def ask(self) -> list[LiveProcess]:
        """Asks all processes for their metrics; those that do not answer in two seconds are left out."""
        self._log.check()
        if not self._can_control:
            return []
        try:
            told = self._asked().ask("figures", seconds=ASK_SEC, failures=True).told
        except (
            ControlError,
            TransportError,
        ):  # it was started with --no-control, or the token does not grant it
            self._can_control = False
            self.rest()
            return []
        return [
            LiveProcess(one.process.host, one.process.pid, one.process.key.run, one.result)
            for one in told
            if is_process(one.result)
        ]

    def tell(self, command: str, run: str, **arguments: Any) -> list[Any]:
        """Sends a command to all processes of a run; returns the results. Rules are also for those that start later."""
        with self._new(run or self._runs) as control:
            told = control.ask(command, seconds=ASK_SEC, **arguments).told
        results = [one.result for one in told if one.result is not None]
        failed = [f"{one.process}: {one.error}" for one in told if one.error and one.kind != "NoSuchTapError"]
        if failed and not results:
            raise ControlError(failed[0])
        return results

    def has_ended(self) -> bool:
        """Whether no process will ever answer again: a collector may have new ones."""
        return False

    def rest(self) -> None:
        """Closes the connection for metrics, at which the processes stop counting."""
        if self._control is not None:
            self._control.close()
            self._control = None

    def close(self) -> None:
        """Closes all connections and removes the copy."""
        self.rest()
        self._log.close()

    def _asked(self) -> CollectorControl:
        if self._control is None:
            self._control = self._new(self._runs)
        return self._control

    def _new(self, runs: str) -> CollectorControl:
        from hostcallback.receiver.remote.control.client import CollectorControl

        return CollectorControl(self._options, runs)

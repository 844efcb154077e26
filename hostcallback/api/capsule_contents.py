"""What capsules say of failures and of the process, and the capsules of failures that belong to no known step."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import sys
import threading
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax

from hostcallback.receiver import text
from hostcallback.receiver.capsule.file_format import MESSAGES, REPORT, SUFFIX, CapsuleWriter, Failure
from hostcallback.receiver.errors import TapFailure
from hostcallback.receiver.failures.check_report import FailedCheck
from hostcallback.receiver.log import logger
from hostcallback.receiver.runtime.runtime import Runtime, runtime

PACKAGES = ("hostcallback", "jax", "jaxlib", "numpy", "ml_dtypes", "flax", "equinox", "optax")
"""Packages whose versions a capsule has."""

VARIABLES = ("JAX_", "XLA_", "HOSTCALLBACK_", "CUDA_VISIBLE_DEVICES")
"""Beginnings of the names of the variables that a capsule has. Others may be secret."""

LAST_MESSAGES = 1000
"""Number of messages of the log that a capsule has."""

SHOWN_ELEMENTS = 1024
"""Elements of each of their arrays that a capsule has; the log has all."""


def about_this_process() -> dict[str, Any]:
    """Describes this process for the manifest of a capsule."""
    devices = jax.devices()
    return {
        "created_ns": time.time_ns(),
        "versions": {"python": platform.python_version(), **_versions()},
        "platform": devices[0].platform,
        "devices": [{"id": device.id, "kind": device.device_kind} for device in devices],
        "process": {"index": jax.process_index(), "count": jax.process_count()},
        "system": platform.platform(),
        "x64": bool(_setting("jax_enable_x64")),
        "matmul_precision": str(_setting("jax_default_matmul_precision") or ""),
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(VARIABLES) and not text.is_credential(name) and not _has_address(name, value)
        },
    }


def _has_address(name: str, value: str) -> bool:
    # Of other machines: `JAX_COORDINATOR_ADDRESS`, a URL, or `host:7070`, also in a list.
    return "ADDRESS" in name or "://" in value or _ADDRESS.search(value) is not None


_ADDRESS = re.compile(r"(?:^|[\s,;=@])[^\s,;=@:]+:\d{1,5}(?=$|[\s,;/])")


def _setting(name: str) -> Any:
    return getattr(jax.config, name)  # without a type in JAX's annotations


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        if name in sys.modules or name == "jaxlib":
            with contextlib.suppress(PackageNotFoundError):  # on the path, and not installed
                found[name] = version(name)
    return found


def last_messages(runtime: Runtime) -> tuple[str, str]:
    """Returns the last messages of the receivers' logs as lines of JSON, or why there are none."""
    recorders = {receiver.scope.recorder for receiver in runtime.receivers()} - {None}
    if not recorders:
        return "", "no receiver records (outfeed_receiver(record=...))"
    from hostcallback.receiver.taplog.reading.follow import Follower
    from hostcallback.receiver.taplog.reading.logged_message import LoggedMessage
    from hostcallback.receiver.taplog.reading.selection import Selection
    from hostcallback.receiver.taplog.render import as_dict
    from hostcallback.receiver.wire.truncation import head

    lines: list[str] = []
    for recorder in recorders:
        assert recorder is not None
        recorder.flush()
        for item in Follower([recorder.directory], Selection(), wait=True).last(LAST_MESSAGES):
            if isinstance(item, LoggedMessage):
                arrays = [head(array, SHOWN_ELEMENTS) for array in item.message.arrays]
                shown = item._replace(message=item.message._replace(arrays=arrays))
                lines.append(json.dumps(as_dict(shown)))
    return "\n".join(lines), "the log has none"


MOST = 3
"""Number of capsules that a receiver writes."""

NO_STEP = "no step is known: wrap it, step = hcb.capsule(step), and the capsule has them"


class FailureCapsules:
    """Writes a capsule with the report of the first failure of each line, at once. Receiver threads.

    The program and its inputs are not in it, because the receiver does not have them.
    """

    def __init__(self, directory: Path, name: str, line: str) -> None:
        """Writes nothing yet.

        Args:
            directory: folder of the capsules, made when it is needed.
            name: of the receiver.
            line: where the receiver was made.
        """
        self._directory = directory
        self._name = name or "receiver"
        self._line = line
        self._lock = threading.Lock()  # protects the set, from the devices' threads
        self._lines: set[tuple[str, str]] = set()

    def __call__(self, failure: FailedCheck | TapFailure) -> None:
        """Writes the capsule of a failure if it is its line's first one. Does not raise."""
        found = described(failure)
        with self._lock:
            line = (found.kind, found.source_line)
            if line in self._lines or len(self._lines) == MOST:
                return
            self._lines.add(line)
            number = len(self._lines) - 1
        path = capsule_path(self._directory, self._name, number)
        try:
            self._write(path, failure, found)
        except Exception as error:  # the program goes on, and its failure is reported anyhow
            log_unwritten(path, found.name, error)
            return
        logger.error(
            "%s %s failed (%s); its report is in a capsule: hcb reproduce --show %s",
            found.kind, found.name, found.text, path,
        )  # fmt: skip

    def _write(self, path: Path, failure: FailedCheck | TapFailure, found: Failure) -> None:
        writer = CapsuleWriter(path, 0)
        try:
            writer.left_out += [f"the program: {NO_STEP}", f"the inputs: {NO_STEP}"]
            add_report(writer, failure)
            about = {"name": self._name, "of": "receiver", "line": self._line}
            writer.finish({**about, **about_this_process()}, found)
        finally:
            writer.discard()


def log_unwritten(path: Path, name: str, error: Exception) -> None:
    """Logs that the capsule of `name` could not be written; with a traceback if the file system is not the reason."""
    if isinstance(error, OSError):
        logger.error(
            "the capsule %s of %s could not be written: %s: give a folder that you may write to and that has room",
            path, name, error.strerror or error,
        )  # fmt: skip
    else:
        logger.error("the capsule %s of %s could not be written", path, name, exc_info=error)


def add_report(writer: CapsuleWriter, failure: FailedCheck | TapFailure, more: str = "") -> None:
    """Adds the failure's report, the entries of `more`, and the last messages or the reason why there are none.

    Raises:
        OSError: they cannot be written.
    """
    writer.add(REPORT, f"{report_of(failure)}{more}".encode())
    messages, why_not = last_messages(runtime)
    if messages:
        writer.add(MESSAGES, messages.encode())
    else:
        writer.left_out.append(f"the last messages: {why_not}")


def capsule_path(directory: Path, name: str, number: int) -> Path:
    """Returns a path for a new capsule, which no other process of the program chooses.

    Args:
        directory: its folder.
        name: of the step or the receiver.
        number: of the failure.
    """
    index = f"-p{jax.process_index()}" if jax.process_count() > 1 else ""
    stem = "{}-{}{}-{}".format(re.sub(r"\W+", "_", name), number, index, os.getpid())
    path, copy = directory / f"{stem}{SUFFIX}", 1
    while path.exists():  # of an earlier process with this id, such as one before the restart of a container
        copy += 1
        path = directory / f"{stem}-{copy}{SUFFIX}"
    return path


def described(failure: FailedCheck | TapFailure) -> Failure:
    """What a capsule says about a failure."""
    if isinstance(failure, TapFailure):
        error = failure.exception
        text = f"{type(error).__name__}: {error}"
        return Failure("tap exception", failure.tap, failure.source_line, text, failure.device)
    kind, text = ("nonfinite" if is_nonfinite(failure) else "check"), failure.explanation.text
    if kind == "nonfinite":  # the number of the call is another one when it is seen again
        text = re.sub(r", call \d+ of [^,]*$", "", text)
    return Failure(kind, failure.name, failure.source_line, text, str(failure.first.device))


def is_nonfinite(failure: FailedCheck | TapFailure) -> bool:
    """Whether an operation had a NaN or an infinite value."""
    return isinstance(failure, FailedCheck) and failure.is_nonfinite


def report_of(failure: FailedCheck | TapFailure) -> str:
    """The report as the user sees it."""
    if isinstance(failure, FailedCheck):
        return failure.report()
    return f"{described(failure).text}\n  raised by {failure.describe()}"

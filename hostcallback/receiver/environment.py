"""All environment variables of the package: their names, valid values and current values.

Only this module reads variables whose name begins with `HOSTCALLBACK_`.
`python tools/documents/environment.py` writes `docs/environment.md` from `VARIABLES`.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")

VARIABLES: list[Variable[Any]] = []
"""All variables, in the order of this module: sorted by name."""


class Variable(Generic[Value]):
    """One environment variable. Reading it costs one look-up; nothing is cached.

    Attributes:
        name: name of the variable.
        expected: description of the valid values, for error messages and the documentation.
        default: description of the value if it is unset or empty, for the documentation.
        purpose: one sentence on its effect.
    """

    __slots__ = ("_parse", "default", "expected", "name", "purpose")

    def __init__(
        self, name: str, parse: Callable[[str], Value], *, expected: str, default: str, purpose: str
    ) -> None:
        """Declares a variable. `parse` makes the value of a text, which may be empty, or raises ValueError."""
        self.name = name
        self.expected = expected
        self.default = default
        self.purpose = purpose
        self._parse = parse
        VARIABLES.append(self)

    def __str__(self) -> str:
        """Returns its name, for messages."""
        return self.name

    def text(self) -> str:
        """Returns its text without white space at both ends; an empty text if it is unset."""
        return os.environ.get(self.name, "").strip()

    def read(self) -> Value:
        """Returns its value, or the default: an empty text, None, or True for a switch.

        Raises:
            ValueError: its text is not valid.
        """
        text = self.text()
        try:
            return self._parse(text)
        except ValueError as error:
            cure = f" {error}" if str(error) else f": expected {self.expected}"
            raise ValueError(f"{self.name}={text!r}{cure}") from None


def _path(text: str) -> Path | None:
    return Path(text) if text else None


def _choice(*choices: str) -> Callable[[str], str]:
    return functools.partial(_one_of, choices)


def _one_of(choices: tuple[str, ...], text: str) -> str:
    choice = text.lower()
    if choice and choice not in choices:
        raise ValueError
    return choice


def _switch(text: str) -> bool:
    if text not in ("", "0", "1"):
        raise ValueError
    return text != "0"


def _nbytes(text: str) -> int | None:
    if text and (not text.isdecimal() or int(text) < 1):
        raise ValueError
    return int(text) if text else None


def _level(text: str) -> int | None:
    if not text:
        return None
    levels = logging.getLevelNamesMapping()
    level = int(text) if text.isdigit() else levels.get(text.upper())
    if level is None:
        raise ValueError(f"is not a logging level: use one of {', '.join(levels)}, or a number")
    return level


ACCELERATE = Variable(
    "HOSTCALLBACK_ACCELERATE",
    _choice("0", "1", "verbose"),
    expected=(
        "1 (callbacks of JAX's go through hostcallback), verbose (the same, and tells of each on standard error) or 0 "
        "(the default)"
    ),
    default="0",
    purpose="Calls `hcb.accelerate()` when hostcallback is imported.",
)
BLOCK_BUDGET_BYTES = Variable(
    "HOSTCALLBACK_BLOCK_BUDGET_BYTES",
    _nbytes,
    expected="a number of bytes, at least 1",
    default="64 MiB",
    purpose="Bounds the bytes that a device may queue in arrays above 64 KiB.",
)
BUILD_NATIVE = Variable(
    "HOSTCALLBACK_BUILD_NATIVE",
    _switch,
    expected="1 (the default) or 0 (no native library is compiled)",
    default="1",
    purpose="Decides, while the package is being installed, whether the native library is compiled.",
)
CAPSULES = Variable(
    "HOSTCALLBACK_CAPSULES",
    _path,
    expected="the path of a folder",
    default="no capsules",
    purpose="Opens `hcb.capsule(folder, nonfinite=True, all_threads=True)` for the process when hostcallback and JAX "
    "are imported.",
)
CONTROL_DIR = Variable(
    "HOSTCALLBACK_CONTROL_DIR",
    _path,
    expected="a folder",
    default="`$XDG_RUNTIME_DIR/hostcallback`, or `/tmp/hostcallback-UID`",
    purpose="Holds the control sockets of this user's processes, in its folder `hostcallback-UID`.",
)
CONTROL_FILE = Variable(
    "HOSTCALLBACK_CONTROL_FILE",
    _path,
    expected="a TOML file",
    default="none",
    purpose="Holds rules for taps; the process watches the file.",
)
CONTROL_SOCKET = Variable(
    "HOSTCALLBACK_CONTROL_SOCKET",
    _switch,
    expected="1 (the default) or 0, for no control socket",
    default="1",
    purpose="Decides whether a process opens a socket for `hcb ctl` and `hcb top`.",
)
CUDA_LIBRARY = Variable(
    "HOSTCALLBACK_CUDA_LIBRARY",
    _path,
    expected="a file",
    default="`libcuda.so.1`",
    purpose="Is loaded as the driver of NVIDIA GPUs.",
)
EXIT_STATUS = Variable(
    "HOSTCALLBACK_EXIT_STATUS",
    _switch,
    expected="0, 1 or nothing",
    default="1",
    purpose="With 0, failures of taps and checks that no barrier or receiver raised leave the exit status as it is.",
)
FAST_DISPATCH = Variable(
    "HOSTCALLBACK_FAST_DISPATCH",
    _switch,
    expected="1 (the default) or 0 (JAX's own dispatch of effects)",
    default="1",
    purpose="Decides whether programs with taps are dispatched as fast as programs without.",
)
FLIGHT_RECORDER = Variable(
    "HOSTCALLBACK_FLIGHT_RECORDER",
    _path,
    expected="a folder",
    default="none",
    purpose="Keeps the last messages of each device, for `hcb recover`.",
)
LOG_LEVEL = Variable(
    "HOSTCALLBACK_LOG_LEVEL",
    _level,
    expected="a level of the module `logging`, such as DEBUG, or a number",
    default="that of the root logger",
    purpose="Sets the level of the logger `hostcallback`.",
)
OBSERVE = Variable(
    "HOSTCALLBACK_OBSERVE",
    str,
    expected="selections, separated by commas, as `where=` of `hcb.observe` has them",
    default="none",
    purpose="Opens `hcb.observe(where=[...], all_threads=True)` for the process when hostcallback and JAX are "
    "imported.",
)
RING_BYTES = Variable(
    "HOSTCALLBACK_RING_BYTES",
    _nbytes,
    expected="a number of bytes, at least 1",
    default="8 MiB",
    purpose="Bounds the bytes that a device may queue in small messages.",
)
ROCM_LIBRARY = Variable(
    "HOSTCALLBACK_ROCM_LIBRARY",
    _path,
    expected="a file",
    default="`libamdhip64.so`",
    purpose="Is loaded as the driver of AMD GPUs.",
)
RUN = Variable(
    "HOSTCALLBACK_RUN",
    str,
    expected="up to 64 letters, digits, '.', '-' and '_', beginning with a letter or digit",
    default="a name that no other run has, of program, user and time",
    purpose="Names the run in logs, spools and at collectors, over all its processes. A later start continues it.",
)
TAP_TANGENTS = Variable(
    "HOSTCALLBACK_TAP_TANGENTS",
    _switch,
    expected="0, 1 or nothing",
    default="1",
    purpose="Decides whether tangents and cotangents are tapped, for taps that do not set `tap_tangents`.",
)
TOKEN = Variable(
    "HOSTCALLBACK_TOKEN",
    str,
    expected="a secret",
    default="none",
    purpose="Is the bearer token for a collector, or the token of a NATS server.",
)
TRANSPORT = Variable(
    "HOSTCALLBACK_TRANSPORT",
    _choice("native", "callback"),
    expected="'native', 'callback' or nothing",
    default="`native` if the native library can be loaded, else `callback`",
    purpose="Selects the native transport or Python callbacks.",
)
WATCH = Variable(
    "HOSTCALLBACK_WATCH",
    _choice("0", "1"),
    expected="1 or 0",
    default="0",
    purpose="With 1, opens `hcb.watch_nonfinite(all_threads=True)` for the process when hostcallback and JAX are "
    "imported.",
)

GPU_LIBRARIES = {"cuda": CUDA_LIBRARY, "rocm": ROCM_LIBRARY}
"""The variables with the driver libraries, by GPU platform."""

"""All environment variables of the package: their names, valid values and current values.

Only this module reads variables whose name begins with `HOSTCALLBACK_`.
`python tools/documents/environment.py` writes `docs/environment.md` from `VARIABLES`.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")


class Variable(Generic[Value]):
    """One environment variable. Reading it costs one look-up; nothing is cached.

    Attributes:
        name: name of the variable.
        expected: description of the valid values, for error messages and the documentation.
        default: description of the value if it is unset or empty, for the documentation.
        purpose: one sentence on its effect.
    """

    __slots__ = ("default", "expected", "name", "purpose")

    def __init__(self, name: str, *, expected: str, default: str, purpose: str) -> None:
        """Declares a variable; see the attributes."""
        self.name = name
        self.expected = expected
        self.default = default
        self.purpose = purpose

    def __str__(self) -> str:
        """Returns its name, for messages."""
        return self.name

    def text(self) -> str:
        """Returns its text without white space at both ends; an empty text if it is unset."""
        return os.environ.get(self.name, "").strip()

    def read(self) -> Value:
        """Returns its value, or the default.

        Raises:
            ValueError: its text is not valid.
        """
        raise NotImplementedError

    def wrong(self, text: str) -> ValueError:
        """Returns the error for a text that is not valid."""
        return ValueError(f"{self.name}={text!r}: expected {self.expected}")


class TextVariable(Variable[str]):
    """A variable that holds any text."""

    __slots__ = ()

    def read(self) -> str:
        """Returns the text; an empty one if it is unset."""
        return self.text()


class PathVariable(Variable[Path | None]):
    """A variable that names a file or a folder."""

    __slots__ = ()

    def read(self) -> Path | None:
        """Returns the path; None if it is unset."""
        text = self.text()
        return Path(text) if text else None


class ChoiceVariable(Variable[str]):
    """A variable that holds one of a few words, in upper or lower case."""

    __slots__ = ("choices",)

    def __init__(
        self, name: str, choices: tuple[str, ...], *, expected: str, default: str, purpose: str
    ) -> None:
        """Declares a variable whose valid texts are `choices`."""
        super().__init__(name, expected=expected, default=default, purpose=purpose)
        self.choices = choices

    def read(self) -> str:
        """Returns one of the choices; an empty text if it is unset. See `Variable.read`."""
        text = self.text()
        choice = text.lower()
        if choice and choice not in self.choices:
            raise self.wrong(text)
        return choice


class SwitchVariable(Variable[bool]):
    """A variable that is 1 by default and turns something off with 0."""

    __slots__ = ()

    def read(self) -> bool:
        """Returns whether it is on. See `Variable.read`."""
        text = self.text()
        if text in ("", "1"):
            return True
        if text == "0":
            return False
        raise self.wrong(text)


class BytesVariable(Variable[int | None]):
    """A variable that holds a number of bytes."""

    __slots__ = ()

    def read(self) -> int | None:
        """Returns the number; None if it is unset. See `Variable.read`."""
        text = self.text()
        if not text:
            return None
        if not text.isdecimal() or int(text) < 1:
            raise self.wrong(text)
        return int(text)


class LevelVariable(Variable[int | None]):
    """A variable that holds a level of the module `logging`."""

    __slots__ = ()

    def read(self) -> int | None:
        """Returns the level as a number; None if it is unset. See `Variable.read`."""
        text = self.text()
        if not text:
            return None
        levels = logging.getLevelNamesMapping()
        level = int(text) if text.isdigit() else levels.get(text.upper())
        if level is None:
            raise ValueError(
                f"{self.name}={text!r} is not a logging level: use one of {', '.join(levels)}, or a number"
            )
        return level


ACCELERATE = ChoiceVariable(
    "HOSTCALLBACK_ACCELERATE",
    ("0", "1", "verbose"),
    expected=(
        "1 (callbacks of JAX's go through hostcallback), verbose (the same, and tells of each on standard error) or 0 "
        "(the default)"
    ),
    default="0",
    purpose="Calls `hcb.accelerate()` when hostcallback is imported.",
)
BLOCK_BUDGET_BYTES = BytesVariable(
    "HOSTCALLBACK_BLOCK_BUDGET_BYTES",
    expected="a number of bytes, at least 1",
    default="64 MiB",
    purpose="Bounds the bytes that a device may queue in arrays above 64 KiB.",
)
BUILD_NATIVE = SwitchVariable(
    "HOSTCALLBACK_BUILD_NATIVE",
    expected="1 (the default) or 0 (no native library is compiled)",
    default="1",
    purpose="Decides, while the package is being installed, whether the native library is compiled.",
)
CAPSULES = PathVariable(
    "HOSTCALLBACK_CAPSULES",
    expected="the path of a folder",
    default="no capsules",
    purpose="Opens `hcb.capsule(folder, nonfinite=True, all_threads=True)` for the process when hostcallback and JAX "
    "are imported.",
)
CONTROL_DIR = PathVariable(
    "HOSTCALLBACK_CONTROL_DIR",
    expected="a folder",
    default="`$XDG_RUNTIME_DIR/hostcallback`, or `/tmp/hostcallback-UID`",
    purpose="Holds the control sockets of this user's processes, in its folder `hostcallback-UID`.",
)
CONTROL_FILE = PathVariable(
    "HOSTCALLBACK_CONTROL_FILE",
    expected="a TOML file",
    default="none",
    purpose="Holds rules for taps; the process watches the file.",
)
CONTROL_SOCKET = SwitchVariable(
    "HOSTCALLBACK_CONTROL_SOCKET",
    expected="1 (the default) or 0, for no control socket",
    default="1",
    purpose="Decides whether a process opens a socket for `hcb ctl` and `hcb top`.",
)
CUDA_LIBRARY = PathVariable(
    "HOSTCALLBACK_CUDA_LIBRARY",
    expected="a file",
    default="`libcuda.so.1`",
    purpose="Is loaded as the driver of NVIDIA GPUs.",
)
EXIT_STATUS = SwitchVariable(
    "HOSTCALLBACK_EXIT_STATUS",
    expected="0, 1 or nothing",
    default="1",
    purpose="With 0, failures of taps and checks that no barrier or receiver raised leave the exit status as it is.",
)
FAST_DISPATCH = SwitchVariable(
    "HOSTCALLBACK_FAST_DISPATCH",
    expected="1 (the default) or 0 (JAX's own dispatch of effects)",
    default="1",
    purpose="Decides whether programs with taps are dispatched as fast as programs without.",
)
FLIGHT_RECORDER = PathVariable(
    "HOSTCALLBACK_FLIGHT_RECORDER",
    expected="a folder",
    default="none",
    purpose="Keeps the last messages of each device, for `hcb recover`.",
)
LOG_LEVEL = LevelVariable(
    "HOSTCALLBACK_LOG_LEVEL",
    expected="a level of the module `logging`, such as DEBUG, or a number",
    default="that of the root logger",
    purpose="Sets the level of the logger `hostcallback`.",
)
OBSERVE = TextVariable(
    "HOSTCALLBACK_OBSERVE",
    expected="selections, separated by commas, as `where=` of `hcb.observe` has them",
    default="none",
    purpose="Opens `hcb.observe(where=[...], all_threads=True)` for the process when hostcallback and JAX are "
    "imported.",
)
RING_BYTES = BytesVariable(
    "HOSTCALLBACK_RING_BYTES",
    expected="a number of bytes, at least 1",
    default="8 MiB",
    purpose="Bounds the bytes that a device may queue in small messages.",
)
ROCM_LIBRARY = PathVariable(
    "HOSTCALLBACK_ROCM_LIBRARY",
    expected="a file",
    default="`libamdhip64.so`",
    purpose="Is loaded as the driver of AMD GPUs.",
)
RUN = TextVariable(
    "HOSTCALLBACK_RUN",
    expected="up to 64 letters, digits, '.', '-' and '_', beginning with a letter or digit",
    default="a name that no other run has, of program, user and time",
    purpose="Names the run in logs, spools and at collectors, over all its processes. A later start continues it.",
)
TAP_TANGENTS = SwitchVariable(
    "HOSTCALLBACK_TAP_TANGENTS",
    expected="0, 1 or nothing",
    default="1",
    purpose="Decides whether tangents and cotangents are tapped, for taps that do not set `tap_tangents`.",
)
TOKEN = TextVariable(
    "HOSTCALLBACK_TOKEN",
    expected="a secret",
    default="none",
    purpose="Is the bearer token for a collector, or the token of a NATS server.",
)
TRANSPORT = ChoiceVariable(
    "HOSTCALLBACK_TRANSPORT",
    ("native", "callback"),
    expected="'native', 'callback' or nothing",
    default="`native` if the native library can be loaded, else `callback`",
    purpose="Selects the native transport or Python callbacks.",
)
WATCH = ChoiceVariable(
    "HOSTCALLBACK_WATCH",
    ("0", "1"),
    expected="1 or 0",
    default="0",
    purpose="With 1, opens `hcb.watch_nonfinite(all_threads=True)` for the process when hostcallback and JAX are "
    "imported.",
)

VARIABLES: tuple[Variable[Any], ...] = (
    ACCELERATE,
    BLOCK_BUDGET_BYTES,
    BUILD_NATIVE,
    CAPSULES,
    CONTROL_DIR,
    CONTROL_FILE,
    CONTROL_SOCKET,
    CUDA_LIBRARY,
    EXIT_STATUS,
    FAST_DISPATCH,
    FLIGHT_RECORDER,
    LOG_LEVEL,
    OBSERVE,
    RING_BYTES,
    ROCM_LIBRARY,
    RUN,
    TAP_TANGENTS,
    TOKEN,
    TRANSPORT,
    WATCH,
)
"""All variables, sorted by name."""

GPU_LIBRARIES = {"cuda": CUDA_LIBRARY, "rocm": ROCM_LIBRARY}
"""The variables with the driver libraries, by GPU platform."""

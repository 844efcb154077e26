"""The options of a tap that are common to all kinds of taps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hostcallback.receiver import environment
from hostcallback.receiver.failures.call_site import CallSite
from hostcallback.receiver.wire import tap_descriptor
from hostcallback.receiver.wire.tap_descriptor import PROCESSES, TapKind
from hostcallback.tracing.retention import callable_name
from hostcallback.tracing.source_line import place_name, user_source_line

SHARDINGS = ("global", "local")


@dataclass(frozen=True, slots=True)
class TapOptions:
    """Options of a tap that are common to all kinds of taps.

    Attributes:
        name: name of the tap in reports.
        ordered: whether its messages keep program order on each device.
        tap_tangents: whether tangents and cotangents are tapped too; None for the process's default.
        sharding: "global" or "local"; see `id_tap`.
        device_index: index of the program's device that is reported as the origin of an assembled array.
        tap_transposed: whether a tap in linear code taps the cotangents if that code is transposed; None for the value
            of `tap_tangents`.
        keep_objects: whether arrays that JAX cannot put on a device (of texts, for example) stay on the host, like all
            leaves that are not arrays; by default they are refused.
        kind: the kind of the tap.
        params: parameters for the sink of that kind; plain data.
        without_devices: ids of this process's devices on which a check is off.
        place: the call site, for kinds whose reports show it.
        processes: "first", "all" or None; see `id_tap`.
        awaited: whether a program that runs on the thread that dispatches it ends only when the message is delivered.
    """

    name: str
    ordered: bool = True
    tap_tangents: bool | None = None
    sharding: str = "global"
    device_index: int = 0
    tap_transposed: bool | None = None
    keep_objects: bool = False
    kind: TapKind = tap_descriptor.TAP
    params: Mapping[str, Any] = field(default_factory=dict)
    without_devices: tuple[int, ...] = ()
    place: CallSite | None = None
    processes: str | None = None
    awaited: bool = False

    def __post_init__(self) -> None:
        """Checks the arguments, which come from users.

        Raises:
            TypeError: the name is not a text, or a switch is not a bool.
            ValueError: `sharding` is neither "global" nor "local", or `processes` is none of those above.
        """
        if not isinstance(self.name, str):
            raise TypeError(
                f"a tap's name is a text, got {type(self.name).__name__} {self.name!r}: name='loss', at "
                f"{user_source_line()}"
            )
        check_switch("ordered", self.ordered)
        for switch in ("tap_tangents", "tap_transposed"):
            check_switch(switch, getattr(self, switch), or_none=True)
        if self.sharding not in SHARDINGS:
            raise ValueError(
                f"sharding={self.sharding!r}, expected 'global' (the tap gets the whole array) or 'local' (each "
                f"device's shard), at {user_source_line()}"
            )
        if self.processes is not None and self.processes not in PROCESSES:
            raise ValueError(
                f"processes={self.processes!r}, expected 'first' (only the first process has output), 'all' (each "
                f"process has its own), or None (as jax.debug.print), at {user_source_line()}"
            )

    def resolved(self) -> TapOptions:
        """Returns a copy in which `tap_tangents` and `tap_transposed` are not None."""
        tangents = environment.TAP_TANGENTS.read() if self.tap_tangents is None else self.tap_tangents
        transposed = tangents if self.tap_transposed is None else self.tap_transposed
        return replace(self, tap_tangents=tangents, tap_transposed=transposed)


def check_switch(name: str, value: Any, *, or_none: bool = False) -> None:
    """Checks an argument that switches something on or off.

    Raises:
        TypeError: it is neither True nor False (nor None, with `or_none`).
    """
    if not isinstance(value, bool | np.bool_) and not (or_none and value is None):
        expected = "True, False or None" if or_none else "True or False"
        raise TypeError(f"{name}={value!r}, expected {expected}, at {user_source_line()}")


def default_name(func: Callable[..., Any]) -> str:
    """Returns the name of a tap without `name=`: that of its function; a lambda is named after the user's line."""
    name = callable_name(func)
    return place_name("lambda") if name.endswith("<lambda>") else name


def callback_options(name: str, ordered: bool, partitioned: bool, processes: str | None = None) -> TapOptions:
    """Returns the options of a tap that works like JAX's callbacks: primals only; other leaves stay on the host."""
    sharding = "local" if partitioned else "global"
    check_switch("partitioned", partitioned)
    return TapOptions(
        name, ordered, tap_tangents=False, sharding=sharding, keep_objects=True, processes=processes
    )

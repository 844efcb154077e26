"""How a tap is emitted, whatever its messages are for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hostcallback.receiver import environment
from hostcallback.receiver.messages.call_site import CallSite
from hostcallback.receiver.wire import tap_kind
from hostcallback.receiver.wire.tap_kind import TapKind

SHARDINGS = ("global", "local")


@dataclass(frozen=True, slots=True)
class TapOptions:
    """How a tap is emitted, whatever its messages are for.

    Attributes:
        name: what the tap is called in reports.
        ordered: whether its messages keep program order on each device.
        tap_tangents: whether tangents and cotangents are tapped too; None for the process's default.
        sharding: "global" or "local"; see `id_tap`.
        device_index: which of the program's devices an array assembled from its shards is said to come from.
        tap_transposed: whether a tap in linear code taps the cotangents where that code is transposed; None for what
            `tap_tangents` says.
        keep_objects: whether arrays that JAX cannot put on a device (of texts, say) stay on the host, as every leaf
            does that is no array; by default they are refused.
        kind: what the tap's messages are for.
        params: what a sink of that kind needs; plain data.
        without_devices: ids of this process's devices on which a check does not check.
        place: where it is traced, for those whose reports show that.
    """

    name: str
    ordered: bool = True
    tap_tangents: bool | None = None
    sharding: str = "global"
    device_index: int = 0
    tap_transposed: bool | None = None
    keep_objects: bool = False
    kind: TapKind = tap_kind.TAP
    params: Mapping[str, Any] = field(default_factory=dict)
    without_devices: tuple[int, ...] = ()
    place: CallSite | None = None

    def __post_init__(self) -> None:
        """Checks what comes from users.

        Raises:
            TypeError: the name is no text.
            ValueError: `sharding` is neither "global" nor "local".
        """
        if not isinstance(self.name, str):
            raise TypeError(f"a tap's name is a text, got {type(self.name).__name__} {self.name!r}")
        if self.sharding not in SHARDINGS:
            raise ValueError(
                f"sharding={self.sharding!r}, expected 'global' (the tap gets the whole array) or 'local' (each "
                "device's shard)"
            )

    def resolved(self) -> TapOptions:
        """The same with `tap_tangents` and `tap_transposed` decided."""
        tangents = environment.TAP_TANGENTS.read() if self.tap_tangents is None else self.tap_tangents
        transposed = tangents if self.tap_transposed is None else self.tap_transposed
        return replace(self, tap_tangents=tangents, tap_transposed=transposed)


def callback_options(name: str, ordered: bool, partitioned: bool) -> TapOptions:
    """The options of what works as JAX's own callbacks do: primals only, and what is no array stays on the host."""
    sharding = "local" if partitioned else "global"
    return TapOptions(name, bool(ordered), tap_tangents=False, sharding=sharding, keep_objects=True)

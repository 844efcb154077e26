"""Sizes of a device's ring, and the policy for emissions that find no room."""

from __future__ import annotations

from dataclasses import dataclass

from hostcallback.receiver import environment
from hostcallback.receiver.native import bindings as native
from hostcallback.receiver.sources.back_pressure import BackPressure


@dataclass(frozen=True, slots=True)
class RingConfig(BackPressure):
    """Sizes of a device's ring, and the policy for emissions that find no room.

    Attributes:
        capacity_bytes: memory of the ring, rounded up to a power of two; fixed once the ring exists.
        external_threshold_bytes: larger payloads travel outside the ring; fixed once the ring exists.
        block_budget_bytes: limit for payload bytes outside the ring that the reader has not taken; a single payload
            may exceed it if no other is queued.
    """

    capacity_bytes: int = 8 << 20
    external_threshold_bytes: int = 64 << 10
    block_budget_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        """Raises ValueError for sizes that the native library would misread."""
        BackPressure.__post_init__(self)
        for name in ("capacity_bytes", "external_threshold_bytes", "block_budget_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least 1")

    @classmethod
    def from_environment(cls) -> RingConfig:
        """Returns the defaults with the sizes of `HOSTCALLBACK_RING_BYTES` and `HOSTCALLBACK_BLOCK_BUDGET_BYTES`.

        Raises:
            ValueError: one of them is not a positive whole number.
        """
        default = cls()
        return cls(
            capacity_bytes=environment.RING_BYTES.read() or default.capacity_bytes,
            block_budget_bytes=environment.BLOCK_BUDGET_BYTES.read() or default.block_budget_bytes,
        )

    def native(self) -> native.Config:
        """Returns the configuration as the native library's structure."""
        wait_sec, steps, sample_every = self.admission
        return native.Config(
            self.capacity_bytes,
            self.external_threshold_bytes,
            self.block_budget_bytes,
            0 if wait_sec is None else round(wait_sec * 1e9) or -1,
            steps,
            sample_every,
        )

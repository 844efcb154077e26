"""Chooses the devices of a receiver from the arguments of `outfeed_receiver`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import jax


def choose_devices(backends: Sequence[str] | None, devices: Sequence[jax.Device] | None) -> list[jax.Device]:
    """Returns the given devices, the local devices of some backends, or by default those of all backends in use.

    Raises:
        ValueError: both arguments are given, or a device or backend is not one of this process.
    """
    if backends is not None and devices is not None:
        raise ValueError(
            f"outfeed_receiver got both devices={list(devices)!r} and backends={list(backends)!r}: give one of them"
        )
    if devices is not None:
        chosen = list(devices) if isinstance(devices, Iterable) else [devices]
        wrong = [d for d in chosen if not isinstance(d, jax.Device)]
        if wrong:
            raise ValueError(
                f"devices takes a list of jax.Device, got {devices!r}: such as jax.local_devices()[:2]"
            )
        foreign = [d for d in chosen if d.process_index != jax.process_index()]
        if foreign:
            raise ValueError(
                f"outfeed_receiver got devices of other processes: {foreign}; a process receives from its own "
                "devices: use jax.local_devices()"
            )
    elif backends is not None:
        if isinstance(backends, str):
            raise ValueError(
                f"backends takes a list of platform names, got the string {backends!r}: [{backends!r}]"
            )
        chosen = []
        for backend in backends:
            try:
                chosen += jax.local_devices(backend=backend)
            except RuntimeError as error:
                raise ValueError(
                    f"unknown backend {backend!r}: this process has {jax.default_backend()!r} ({error})"
                ) from error
    else:
        chosen = jax.local_devices()
        # Programs for the CPU run in a GPU's process too (`jax.jit(..., backend="cpu")`, `compute_on`, data
        # pipelines), and their taps would otherwise reach the default receiver, outside of this block's
        # errors and counts.
        if chosen and chosen[0].platform != "cpu":
            chosen += jax.local_devices(backend="cpu")
    if not chosen:
        raise ValueError("outfeed_receiver got no devices: give devices= or backends= that this process has")
    return list(dict.fromkeys(chosen))

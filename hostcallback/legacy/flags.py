"""The configuration flags of `jax.experimental.host_callback`, which JAX has removed and programs still set."""

from __future__ import annotations

from typing import Any

from hostcallback import _jax_compat as compat
from hostcallback.receiver.log import logger

INLINE = compat.define_flag(
    "jax_host_callback_inline",
    False,
    "Taps of the drop-in module that are outside of jit and of every transformation run on the calling thread.",
    lambda value: None,
)


def _accept(name: str, default: bool | int, why: str) -> None:
    def say(value: Any) -> None:
        if value != default:
            logger.info("%s=%s has no effect: %s", name, value, why)

    compat.define_flag(name, default, f"Has no effect: {why}.", say)


_accept(
    "jax_host_callback_max_queue_byte_size",
    256_000_000,
    "HOSTCALLBACK_RING_BYTES and HOSTCALLBACK_BLOCK_BUDGET_BYTES bound what a device may have queued",
)
_accept("jax_host_callback_outfeed", False, "no transport uses XLA's outfeed")
_accept("jax_host_callback_legacy", False, "taps always do what that module's documentation says")

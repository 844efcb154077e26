"""The custom calls of exported programs: which they are, and what is said where JAX refuses them."""

from __future__ import annotations

from hostcallback import _jax_compat as compat
from hostcallback.lifecycle import receivers as transport
from hostcallback.lowering import partition

TARGETS = (
    transport.FFI_TARGET,
    transport.FFI_SHARD_TARGET,
    transport.FFI_CLOCK_TARGET,
    partition.CALL_NAME,
)
"""Of taps and progress bars. A program with calls (`hcb.call`) cannot be exported."""


def _explain(target: str, place: str) -> str:
    what = "reads the clock for a progress bar" if target == transport.FFI_CLOCK_TARGET else "has a tap"
    return (
        f"jax.export got a program that {what}{place and f' at {place}'}, and no permission for the custom call "
        f"{target}: pass disabled_checks=hcb.export_checks() to jax.export.export. The process that runs the program "
        "imports hostcallback, and gives taps with functions theirs by hcb.bind"
    )


compat.explain_refused_export(TARGETS, _explain)

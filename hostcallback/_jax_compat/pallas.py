"""Primitives of Pallas that run kernels, and the programs of those kernels."""

from __future__ import annotations

from typing import Any

from hostcallback._jax_compat.jaxprs import open_jaxpr

KERNEL_PRIMITIVES = [
    ("jax._src.pallas.pallas_call", "pallas_call_p"),  # 0.8 to 0.12
    ("jax._src.pallas.core", "core_map_p"),  # until 0.11
    ("jax._src.pallas.mpmd", "mpmd_map_p"),  # from 0.10 on; before, core_map_p becomes pallas_call_p
]
"""Modules, imported with Pallas, and their primitives that run kernels."""


def kernel_jaxprs(params: dict[str, Any]) -> list[Any]:
    """The kernels of an equation of such a primitive, and the index maps of their blocks (0.8 to 0.12)."""
    blocks = getattr(params.get("grid_mapping"), "block_mappings", ())
    kernels = params["jaxprs"] if "jaxprs" in params else (params["jaxpr"],)
    return [*kernels, *(open_jaxpr(block.index_map_jaxpr)[0] for block in blocks)]

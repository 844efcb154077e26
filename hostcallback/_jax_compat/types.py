"""JAX's types of programs and their parts, for annotations and `isinstance`.

`jax.extend.core` has most of them too; why it is not imported says `tracing`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from jax._src import core as _core, effects as _effects  # 0.8 to 0.12
from jax._src.interpreters import mlir as _mlir
from jax._src.lib.mlir import ir as _ir

if TYPE_CHECKING:
    ClosedJaxpr: TypeAlias = _core.ClosedJaxpr
    Tracer: TypeAlias = _core.Tracer[Any]
    IrValue: TypeAlias = _ir.Value[Any]
else:
    ClosedJaxpr = getattr(_core, "ClosedJaxpr", _core.Jaxpr)  # from 0.12 on one class for both
    Tracer = _core.Tracer  # generic in some versions only
    IrValue = _ir.Value  # as above; the value of a variable where its program is lowered

Jaxpr = _core.Jaxpr
AnyJaxpr: TypeAlias = Jaxpr | ClosedJaxpr
JaxprEqn = _core.JaxprEqn
Var = _core.Var
Literal = _core.Literal
Atom: TypeAlias = _core.Var | _core.Literal
Primitive = _core.Primitive
LoweringRuleContext = _mlir.LoweringRuleContext
Effect = _effects.Effect
Aval: TypeAlias = Any
"""The type of a value. JAX's base class, by which it annotates most of them, says nothing of shape and dtype."""


def aval_of(atom: Atom) -> Aval:
    """The type of a variable or literal."""
    return atom.aval


def widened(dtype: Any) -> np.dtype[Any]:
    """The dtype in which a value reaches a Python callback: whole bytes, every value kept."""
    name = np.dtype(dtype).name
    if name.startswith("float4"):
        return np.dtype(np.float32)
    if name in ("int1", "int2", "int4"):
        return np.dtype(np.int8)
    return np.dtype(np.uint8 if name in ("uint1", "uint2", "uint4") else dtype)

"""JAX's types of programs and their parts, for annotations and `isinstance`.

`jax.extend.core` has most of them too; why it is not imported says `tracing`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from jax._src import core as _core  # 0.8 to 0.12

Jaxpr = _core.Jaxpr
ClosedJaxpr = _core.ClosedJaxpr  # from 0.12 on the same class as Jaxpr
AnyJaxpr: TypeAlias = _core.Jaxpr | _core.ClosedJaxpr
JaxprEqn = _core.JaxprEqn
Var = _core.Var
Literal = _core.Literal
Atom: TypeAlias = _core.Var | _core.Literal
Primitive = _core.Primitive
Aval: TypeAlias = Any
"""The type of a value. JAX's base class, by which it annotates most of them, says nothing of shape and dtype."""

if TYPE_CHECKING:
    Tracer: TypeAlias = _core.Tracer[Any]
else:  # generic in some versions only
    Tracer = _core.Tracer

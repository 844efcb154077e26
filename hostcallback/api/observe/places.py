"""Describes an equation of a traced program for a selection: its scope, source lines, primitive and direction."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hostcallback import _jax_compat as compat
from hostcallback.tracing.source_line import SourceLine, first_user_line

Frames = tuple[tuple[str, int, str], ...]
"""(file, line, function) of each frame that JAX recorded, innermost first."""

_TRANSFORM = re.compile(r"\b[a-z_]+\((?=[^()]*\)|[a-z_]+\()|\)")
_RECOMPUTED = "rematted_computation"
_NOT_SCOPES = {_RECOMPUTED, "checkpoint"}


@dataclass(frozen=True)
class Site:
    """One equation of an observed function, as a selection sees it.

    Attributes:
        primitive: the name of JAX's primitive, such as `dot_general`.
        scope: the names of the named scopes around it, outermost first.
        frames: (file, line, function) of the user's frames, innermost first.
        function: the name of the jitted or custom-derivative function that the equation calls; "" if it calls none.
        backward: whether it is part of a backward pass.
        shapes: the shapes of its results.
        dtypes: the dtypes of its results.

    Example:
        step = jax.jit(hcb.observe(train_step, where=lambda site: site.primitive == "dot_general"))
    """

    primitive: str
    scope: tuple[str, ...]
    frames: Frames
    function: str
    backward: bool
    shapes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[Any, ...] = ()

    @property
    def source_line(self) -> SourceLine | None:
        """The user's line; None if JAX does not know it."""
        return first_user_line(self.frames)


@dataclass(frozen=True)
class Surroundings:
    """What is known about the equations around a program: their scopes, their frames, and whether they are backward."""

    scope: tuple[str, ...] = ()
    frames: Frames = field(default=())
    backward: bool = False

    def inside(self, site: Site) -> Surroundings:
        """The surroundings of a program that the equation of this site holds."""
        return replace(self, scope=site.scope, frames=site.frames, backward=site.backward)


def site_of(equation: Any, around: Surroundings) -> Site:
    """Describes an equation in its surroundings."""
    stack = str(equation.source_info.name_stack)
    backward = around.backward or "transpose(" in stack
    frames = tuple(compat.equation_frames(equation))
    return Site(
        equation.primitive.name,
        (*around.scope, *scope_of(stack)),
        (*frames, *around.frames),
        _function_of(equation),
        backward,
        tuple(getattr(v.aval, "shape", ()) for v in equation.outvars),
        tuple(getattr(v.aval, "dtype", None) for v in equation.outvars),
    )


def is_recomputed(equation: Any) -> bool:
    """Whether `jax.checkpoint` put the equation into a backward pass to compute a value a second time."""
    return _RECOMPUTED in str(equation.source_info.name_stack)


def scope_of(stack: str) -> tuple[str, ...]:
    """The scopes in a name stack as JAX prints it, such as `transpose(jvp(loss))/attention`."""
    parts = [p for p in _TRANSFORM.sub("", stack).split("/") if p and p not in _NOT_SCOPES]
    half = len(parts) // 2
    # The backward pass of a checkpoint has its scopes twice: `transpose(jvp(layer))/jvp(layer)`.
    if "transpose(" in stack and half and parts[:half] == parts[half:]:
        parts = parts[:half]
    return tuple(parts)


def _function_of(equation: Any) -> str:
    params = equation.params
    name = params.get("name")
    if isinstance(name, str):
        return name
    if "custom" in equation.primitive.name:
        jaxpr = compat.open_jaxpr(params.get("call_jaxpr"))[0]
        info = getattr(jaxpr, "debug_info", None)
        return str(getattr(info, "func_name", "") or "").split(" ")[0].rpartition(".")[2]
    return ""


def programs_of(equation: Any) -> Sequence[tuple[Any, list[Any]]]:
    """The programs that an equation holds, each with the operands of the equation that are its inputs, in order."""
    params, operands = equation.params, list(equation.invars)
    name = equation.primitive.name
    if name == "while":
        first = params["cond_nconsts"]
        return [(params["body_jaxpr"], operands[first:])]
    if name == "cond":
        return [(branch, operands[1:]) for branch in params["branches"]]
    found = [params[key] for key in ("jaxpr", "call_jaxpr") if hasattr(params.get(key), "eqns")]
    if not found:  # primitives such as custom_linear_solve, whose programs have other inputs
        values = [
            v for value in params.values() for v in (value if isinstance(value, tuple | list) else [value])
        ]
        return [(value, []) for value in values if hasattr(value, "eqns")]
    return [(jaxpr, operands) for jaxpr in found]

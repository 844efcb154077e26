"""Named scopes in the name stacks that JAX prints, such as `transpose(jvp(loss))/attention`, and our marks in them."""

from __future__ import annotations

import re
from collections.abc import Sequence

MARK = "hostcallback-"
"""How the scopes begin with which X-ray marks equations."""

OWN = f"{MARK}own"
"""The scope of the equations that X-ray adds."""

_MARKS = re.compile(rf"{MARK}\d+")
_TRANSFORM = re.compile(r"\b[a-z_]+\((?=[^()]*\)|[a-z_]+\()|\)")
_RECOMPUTED = "rematted_computation"
_NOT_SCOPES = {_RECOMPUTED, "checkpoint"}


def mark(number: int) -> str:
    """Returns the name of a scope that marks equations."""
    return f"{MARK}{number}"


def marks_in(stack: str) -> Sequence[str]:
    """Returns the marks in a name stack, outermost first."""
    return _MARKS.findall(stack)


def is_own(stack: str) -> bool:
    """Whether X-ray has added the equation with that name stack."""
    return OWN in stack


def is_backward(stack: str) -> bool:
    """Whether an equation with that name stack is part of a backward pass."""
    return "transpose(" in stack


def is_recomputed(stack: str) -> bool:
    """Whether `jax.checkpoint` put the equation into a backward pass to compute a value a second time."""
    return _RECOMPUTED in stack


def scope_of(stack: str) -> tuple[str, ...]:
    """Returns the named scopes in a name stack, without the names of transformations and our marks."""
    parts = [
        p
        for p in _TRANSFORM.sub("", stack).split("/")
        if p and p not in _NOT_SCOPES and not p.startswith(MARK)
    ]
    half = len(parts) // 2
    # The backward pass of a checkpoint has its scopes twice: `transpose(jvp(layer))/jvp(layer)`.
    if is_backward(stack) and half and parts[:half] == parts[half:]:
        parts = parts[:half]
    return tuple(parts)

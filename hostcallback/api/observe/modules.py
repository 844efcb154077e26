"""Finds the equations of a module (equinox, nnx) from the paths of the parameters that they use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.extend.core import Literal

from hostcallback import _jax_compat as compat
from hostcallback.api.observe.places import Site, programs_of
from hostcallback.api.observe.where import match_path


@dataclass(frozen=True)
class Labelled:
    """An equation of a program, with its number in the program and the label of the place to which it belongs."""

    number: int
    equation: Any
    site: Site
    recomputed: bool
    label: str | None

    def reads(self) -> list[Any]:
        """The variables that it reads."""
        return [atom for atom in self.equation.invars if not isinstance(atom, Literal)]


class Modules:
    """The parameters of selected modules among the values of one program: by variable, the label of the module."""

    def __init__(self, pattern: str, labels: Mapping[Any, str]) -> None:
        self._pattern = pattern
        self._labels = dict(labels)
        self._updates: set[Any] = set()

    @classmethod
    def of_paths(cls, pattern: str, variables: Sequence[Any], paths: Sequence[tuple[str, ...]]) -> Modules:
        """The modules of a function's arguments, whose paths are in the same order as the variables."""
        pairs = ((v, match_path(pattern, path[:-1])) for v, path in zip(variables, paths, strict=True))
        return cls(pattern, {v: label for v, label in pairs if label is not None})

    def inside(self, jaxpr: Any, operands: Sequence[Any]) -> Modules:
        """The modules in a program that an equation holds."""
        jaxpr, _ = compat.open_jaxpr(jaxpr)
        pairs = zip(jaxpr.invars, operands, strict=False) if len(jaxpr.invars) == len(operands) else ()
        labels = {v: self._of(atom) for v, atom in pairs}
        return Modules(self._pattern, {v: label for v, label in labels.items() if label is not None})

    def visit(self, equation: Any, site: Site) -> str | None:
        """The label of the module to which an equation belongs; visits must be in the order of the program."""
        atoms = [atom for atom in equation.invars if not isinstance(atom, Literal)]
        # What comes after a backward pass, such as the step of an optimiser, uses parameters but is no module.
        if site.backward or any(atom in self._updates for atom in atoms):
            self._updates.update(equation.outvars)
            return None
        labels = dict.fromkeys(label for atom in atoms if (label := self._of(atom)) is not None)
        if not labels:
            return None
        label = next(iter(labels))
        only_parameters = all(self._of(atom) is not None for atom in atoms)
        if only_parameters:
            self._labels.update(dict.fromkeys(equation.outvars, label))
            return None
        if len(labels) > 1 or (programs_of(equation) and not _is_small(equation)):
            return None
        return label

    def with_backward(self, equations: Sequence[Labelled]) -> list[Labelled]:
        """Adds the label of a module to the equations of its backward pass: they use its parameters and its values.

        Where nothing but gradients of parameters is computed, they are those that use what the module was given.
        """
        owners = dict(self._labels)
        entered: dict[Any, str] = {}
        for one in equations:
            if one.label is not None:
                owners.update(dict.fromkeys(one.equation.outvars, one.label))
                entered.update(dict.fromkeys(one.reads(), one.label))
        result = [self._backward(one, owners) for one in equations]
        with_backward = {one.label for one in result if one.site.backward}
        only_entered = {
            v: label for v, label in entered.items() if v not in owners and label not in with_backward
        }
        return [self._backward(one, only_entered) for one in result]

    def _backward(self, one: Labelled, owners: Mapping[Any, str]) -> Labelled:
        if one.label is not None or not one.site.backward or one.recomputed:
            return one
        label = next((owners[atom] for atom in one.reads() if atom in owners), None)
        return replace(one, label=label) if label is not None else one

    def _of(self, atom: Any) -> str | None:
        return None if isinstance(atom, Literal) else self._labels.get(atom)


def _is_small(equation: Any) -> bool:
    # A jitted function of one module, such as that of an einsum, is a part of the module.
    return equation.primitive.name in ("jit", "pjit", "custom_jvp_call", "custom_vjp_call")

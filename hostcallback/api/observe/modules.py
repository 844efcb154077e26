"""Finds the equations of a module (equinox, nnx) from the paths of the parameters that they use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.extend.core import Literal

from hostcallback import _jax_compat as compat
from hostcallback.api.observe.places import Site, match_path
from hostcallback.lowering.evaluator import structure_of


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


Origins = dict[Any, set[str | None]]
"""By the origin of an operation, the labels of the modules that it is part of, or None: several in a loop of Python."""


class Modules:
    """The parameters of selected modules among the values of one program: by variable, the label of the module."""

    def __init__(self, pattern: str, labels: Mapping[Any, str]) -> None:
        self._pattern = pattern
        self._labels = dict(labels)
        self._updates: set[Any] = set()

    @classmethod
    def of_paths(cls, pattern: str, variables: Sequence[Any], paths: Sequence[tuple[str, ...]]) -> Modules:
        """The modules of a function's arguments, whose paths are in the same order as the variables.

        The name of the argument may be left out of the pattern, and then is not in the label.
        """
        labels = {}
        for variable, path in zip(variables, paths, strict=True):
            label = match_path(pattern, path[1:-1]) or match_path(pattern, path[:-1])
            if label is not None:
                labels[variable] = label
        return cls(pattern, labels)

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
        if len(labels) > 1 or _is_large(equation):
            return None
        return label

    def with_backward(self, equations: Sequence[Labelled], origins: Origins) -> list[Labelled]:
        """Adds the label of a module to the equations of its backward pass.

        These have the origin of an operation of the module, or use its parameters and values. Where nothing but
        gradients of parameters is computed, they are those that use what the module was given.
        """
        owners = dict(self._labels)
        entered: dict[Any, str] = {}
        multiplied: dict[Any, str] = {}
        for one in equations:
            if one.label is not None:
                owners.update(dict.fromkeys(one.equation.outvars, one.label))
                entered.update(dict.fromkeys(one.reads(), one.label))
                if one.site.primitive in _BILINEAR and not one.site.backward:
                    multiplied.update({v: one.label for v in one.reads() if v not in self._labels})
        # A gradient of weights is the product of a cotangent with what the module was given, which another one made.
        of_products = {**owners, **multiplied}

        def labelled(one: Labelled) -> Labelled:
            if one.label is not None or not one.site.backward or one.recomputed or _is_large(one.equation):
                return one
            known = origins.get(compat.equation_origin(one.equation), set())
            if len(known) == 1:
                return replace(one, label=next(iter(known)))
            return self._backward(one, of_products if one.site.primitive in _BILINEAR else owners)

        result = [labelled(one) for one in equations]
        with_backward = {one.label for one in result if one.site.backward}
        only_entered = {
            v: label for v, label in entered.items() if v not in owners and label not in with_backward
        }
        return [self._backward(one, only_entered) for one in result]

    def _backward(self, one: Labelled, owners: Mapping[Any, str]) -> Labelled:
        if one.label is not None or not one.site.backward or one.recomputed or _is_large(one.equation):
            return one
        label = next((owners[atom] for atom in one.reads() if atom in owners), None)
        return replace(one, label=label) if label is not None else one

    def _of(self, atom: Any) -> str | None:
        return None if isinstance(atom, Literal) else self._labels.get(atom)


_BILINEAR = ("dot_general", "conv_general_dilated", "ragged_dot_general")


def _is_large(equation: Any) -> bool:
    # A jitted function of one module, such as that of an einsum, is a part of the module; other programs are entered.
    structure = structure_of(equation)
    return structure is not None and structure.kind != "call"

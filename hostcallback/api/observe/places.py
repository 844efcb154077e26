"""Describes the equations of a program (scope, source lines, primitive, direction), and selects them by `where=`.

The equations of a module (equinox, nnx) are found from the paths of the parameters that they use.
"""

from __future__ import annotations

import difflib
import fnmatch
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hostcallback import _jax_compat as compat
from hostcallback.lowering.equations import REMATS, structure_of, variables
from hostcallback.lowering.xray import UserError
from hostcallback.tracing import source_line
from hostcallback.tracing.source_line import SourceLine, called_name, first_user_line, user_source_line

Frames = tuple[tuple[str, int, str], ...]
"""(file, line, function) of each frame that JAX recorded, innermost first."""


@dataclass(frozen=True)
class Site:
    """One equation of an observed function, as a selection sees it.

    Attributes:
        primitive: the name of JAX's primitive, such as `dot_general`.
        scope: the names of the named scopes around it, outermost first.
        frames: (file, line, function) of the user's frames, innermost first.
        function: the name of the jitted or custom-derivative function that the equation calls; "" if it calls none.
        backward: whether it is part of a backward pass.
        calls: what the calls around it in the user's code are of, outermost first: `self.linear(x)` is of `linear`.
        shapes: the shapes of its results.
        dtypes: the dtypes of its results.
        spans: for each `hcb.span` around it, the number of the names in `scope` up to its own.

    Example:
        step = jax.jit(hcb.observe(train_step, where=lambda site: site.primitive == "dot_general"))
    """

    primitive: str
    scope: tuple[str, ...]
    frames: Frames
    function: str
    backward: bool
    calls: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[Any, ...] = ()
    spans: tuple[int, ...] = ()

    @property
    def source_line(self) -> SourceLine | None:
        """The user's line; None if JAX does not know it."""
        return first_user_line(self.frames)


OUTSIDE = Site("", (), (), "", False)
"""What is around a whole program."""


def site_of(equation: compat.JaxprEqn, around: Site) -> Site:
    """Describes an equation of a program that the equation of another site holds."""
    stack = str(equation.source_info.name_stack)
    calls = [called_name(code, offset) for code, offset in compat.equation_origin(equation)]
    is_twice = around.backward and equation.primitive.name in REMATS
    return Site(
        equation.primitive.name,
        (*around.scope, *source_line.scope_of(stack, is_twice=is_twice)),
        (*compat.equation_frames(equation), *around.frames),
        _function_of(equation),
        around.backward or source_line.is_backward(stack),
        (*around.calls, *(part for call in reversed(calls) for part in call)),
        tuple(getattr(v.aval, "shape", ()) for v in equation.outvars),
        tuple(getattr(v.aval, "dtype", None) for v in equation.outvars),
        (
            *around.spans,
            *(len(around.scope) + count for count in source_line.spans_of(stack, is_twice=is_twice)),
        ),
    )


def _function_of(equation: compat.JaxprEqn) -> str:
    params = equation.params
    name = params.get("name")
    if isinstance(name, str):
        return name
    if "custom" in equation.primitive.name:
        jaxpr = compat.open_jaxpr(params.get("call_jaxpr"))[0]
        info = getattr(jaxpr, "debug_info", None)
        return str(getattr(info, "func_name", "") or "").split(" ")[0].rpartition(".")[2]
    return ""


# ---- Selections ------------------------------------------------------------------------------------------------------

CARRY = "scan carry"
SPAN = "hcb.span"
KINDS = ("scope", "module", "jit", "function", "primitive", "file", "call")


@dataclass(frozen=True)
class Selection:
    """One kind of place and what it is called.

    Attributes:
        kind: one of `KINDS`, "carry", "span" or "predicate".
        text: the glob; for a predicate, its name.
        depth: of a span, the number of spans around it.
        predicate: a function of a `Site`, for a predicate.
    """

    kind: str
    text: str
    predicate: Callable[[Site], bool] | None = None
    depth: int = 0

    def label(self, site: Site) -> str | None:
        """The label of the region to which an equation belongs; None if it is not selected."""
        if self.kind in ("scope", "call"):
            return match_path(self.text, site.scope if self.kind == "scope" else site.calls)
        if self.kind == "jit":
            return (
                self._own(site) if site.function and fnmatch.fnmatchcase(site.function, self.text) else None
            )
        if self.kind == "primitive":
            return self._own(site) if fnmatch.fnmatchcase(site.primitive, self.text) else None
        if self.kind == "predicate" and self.predicate is not None:
            return self._own(site) if _holds(self.predicate, site) else None
        if self.kind == "function":
            return next((f for _, _, f in _named(site) if fnmatch.fnmatchcase(f, self.text)), None)
        if self.kind == "span":
            return "/".join(site.scope[: site.spans[self.depth]]) if len(site.spans) > self.depth else None
        return self._line(site) if self.kind == "file" else None

    @property
    def is_region(self) -> bool:
        """Whether all equations with one label form one place, whose outputs are tapped."""
        return self.kind in ("scope", "module", "function", "file", "call")

    def has(self, name: str) -> bool:
        """Whether a scope, module, function, call or primitive of that name is such a place."""
        if self.kind in ("scope", "module", "call"):
            return match_path(self.text, name.split("/")) is not None
        return self.kind in ("jit", "function", "primitive") and fnmatch.fnmatchcase(name, self.text)

    def _own(self, site: Site) -> str:
        name = site.function if self.kind == "jit" else site.primitive
        if site.scope:
            return "/".join((*site.scope, name))
        line = site.source_line
        return f"{name}@{line.function.rpartition('.')[2]}:{line.line}" if line else name

    def _line(self, site: Site) -> str | None:
        file, _, number = self.text.rpartition(":") if re.search(r":\d+$", self.text) else (self.text, "", "")
        for path, line, _ in site.frames:
            if f"/{path}".endswith(f"/{file}") and (not number or line == int(number)):
                return f"{file}:{line}"
        return None


def _holds(predicate: Callable[[Site], bool], site: Site) -> bool:
    try:
        return bool(predicate(site))
    except Exception as error:
        name = getattr(predicate, "__name__", repr(predicate))
        raise UserError(
            f"hcb.observe: where={name} raised {type(error).__name__}: {error}, for {site}"
        ) from error


def _named(site: Site) -> Iterable[tuple[str, int, str]]:
    return ((file, line, function.rpartition(".")[2]) for file, line, function in site.frames)


def match_path(pattern: str, path: Sequence[str]) -> str | None:
    """The shortest prefix of a path whose last parts match a glob (`encoder/*/attention`); None if there is none."""
    wanted = pattern.strip("/").split("/")
    path = [part for name in path for part in name.split("/")]  # haiku has `mlp/~/linear_0` as one name
    for end in range(1, len(path) + 1):
        for begin in range(end):
            if _parts_match(wanted, path[begin:end]):
                return "/".join(path[:end])
    return None


def match_whole_path(pattern: str, path: Sequence[str]) -> str | None:
    """The path, if all of it or of its end matches a glob (`params/*/kernel`, `layers[2].weight`); else None.

    The name of the argument, the first part, may be left out, and then is not in what is returned.
    """
    plain = re.sub(r"\[['\"]?([^\]'\"]*)['\"]?\]", r"/\1", pattern)
    for text in dict.fromkeys((pattern, plain, plain.replace(".", "/"))):
        wanted = text.strip("/").split("/")
        for begin in (1, 0, *range(2, len(path))):
            parts = [part for name in path[begin:] for part in name.split("/")]
            if parts and _parts_match(wanted, parts):
                return "/".join(path[min(begin, 1) :])
    return None


def _parts_match(wanted: Sequence[str], parts: Sequence[str]) -> bool:
    if not wanted:
        return not parts
    if wanted[0] == "**":
        return any(_parts_match(wanted[1:], parts[i:]) for i in range(len(parts) + 1))
    return bool(parts) and fnmatch.fnmatchcase(parts[0], wanted[0]) and _parts_match(wanted[1:], parts[1:])


_EXPECTED = (
    "a scope or module path ('encoder/*/attention'), a line ('model.py:42'), a function ('block'), a primitive "
    f"('dot_general'), '{CARRY}', a function of a site, or a list of these"
)


def read_where(where: Any) -> list[list[Selection]]:
    """Reads `where`: for each of its items, the selections to try, of which the first that matches counts.

    Raises:
        TypeError: there is none, or an item is neither a text nor a function.
        ValueError: an item is empty.
    """
    if where is None:
        raise TypeError(
            f"hcb.observe needs where=, the places that it taps: {_EXPECTED}, as in hcb.observe(step, where="
            f"'encoder/*'), at {user_source_line()}"
        )
    items = list(where) if isinstance(where, list | tuple | set | frozenset) else [where]
    if not items:
        raise ValueError(f"hcb.observe: where is empty: where='encoder/*', at {user_source_line()}")
    return [_read(item) for item in items]


def _read(item: Any) -> list[Selection]:
    if callable(item):
        return [Selection("predicate", getattr(item, "__name__", repr(item)), item)]
    if not isinstance(item, str):
        raise TypeError(
            f"hcb.observe: where has {item!r} of type {type(item).__name__}, expected {_EXPECTED}, at "
            f"{user_source_line()}"
        )
    if not item.strip("/ "):
        raise ValueError(f"hcb.observe: where has the empty text {item!r}, at {user_source_line()}")
    if item == CARRY:
        return [Selection("carry", item)]
    kind, colon, rest = item.partition(":")
    if colon and kind in KINDS and rest:
        return [Selection(kind, rest), *([Selection("call", rest)] if kind == "module" else [])]
    if re.search(r"\.py(:\d+)?$", item):
        return [Selection("file", item)]
    return [Selection(kind, item) for kind in KINDS if kind != "file"]


def near(text: str, names: Iterable[str], count: int = 8) -> list[str]:
    """The names sorted by similarity to a text; names that are not similar come last."""
    known = list(dict.fromkeys(names))
    near = difflib.get_close_matches(text, known, n=count, cutoff=0.3)
    return [*near, *(name for name in known if name not in near)][:count]


# ---- Modules ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Labelled:
    """An equation of a program, and the label of the place to which it belongs."""

    equation: compat.JaxprEqn
    site: Site
    recomputed: bool
    label: str | None

    @functools.cached_property
    def origin(self) -> tuple[Any, ...]:
        """Where it was traced; see `compat.equation_origin`."""
        return compat.equation_origin(self.equation)

    @property
    def direction(self) -> str:
        """One of "forward", "backward" and "recomputed"; the last is in a backward pass, too."""
        return "recomputed" if self.recomputed else "backward" if self.site.backward else "forward"

    def reads(self) -> list[compat.Var]:
        """The variables that it reads."""
        return variables(self.equation.invars)


Origins = dict[Any, set[str | None]]
"""By the origin of an operation, the labels of the modules that it is part of, or None: several in a loop of Python."""


class Modules:
    """The parameters of selected modules among the values of one program: by variable, the label of the module."""

    def __init__(self, labels: Mapping[compat.Var, str]) -> None:
        self._labels = dict(labels)
        self._updates: set[compat.Var] = set()

    @classmethod
    def of_paths(
        cls, pattern: str, inputs: Sequence[compat.Var], paths: Sequence[tuple[str, ...]]
    ) -> Modules:
        """The modules of a function's arguments, whose paths are in the same order as the inputs.

        The name of the argument may be left out of the pattern, and then is not in the label.
        """
        labels = {}
        for variable, path in zip(inputs, paths, strict=True):
            label = match_path(pattern, path[1:-1]) or match_path(pattern, path[:-1])
            if label is not None:
                labels[variable] = label
        return cls(labels)

    def inside(self, jaxpr: compat.AnyJaxpr, operands: Sequence[compat.Atom]) -> Modules:
        """The modules in a program that an equation holds."""
        jaxpr, _ = compat.open_jaxpr(jaxpr)
        if len(jaxpr.invars) != len(operands):
            return Modules({})
        pairs = zip(jaxpr.invars, operands, strict=True)
        known = [
            (v, atom) for v, atom in pairs if not isinstance(atom, compat.Literal) and atom in self._labels
        ]
        return Modules({variable: self._labels[atom] for variable, atom in known})

    def visit(self, equation: compat.JaxprEqn, site: Site, recomputed: bool) -> str | None:
        """The label of the module to which an equation belongs; visits must be in the order of the program."""
        atoms = variables(equation.invars)
        # What comes after a backward pass, such as the step of an optimiser, uses parameters but is no module.
        if (site.backward and not recomputed) or any(atom in self._updates for atom in atoms):
            self._updates.update(equation.outvars)
            return None
        labels = dict.fromkeys(self._labels[atom] for atom in atoms if atom in self._labels)
        if not labels:
            return None
        label = next(iter(labels))
        only_parameters = all(atom in self._labels for atom in atoms)
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
        entered: dict[compat.Var, str] = {}
        multiplied: dict[compat.Var, str] = {}
        for one in equations:
            if one.label is not None:
                owners.update(dict.fromkeys(one.equation.outvars, one.label))
                entered.update(dict.fromkeys(one.reads(), one.label))
                if one.site.primitive in _BILINEAR and one.direction != "backward":
                    multiplied.update({v: one.label for v in one.reads() if v not in self._labels})
        # A gradient of weights is the product of a cotangent with what the module was given, which another one made.
        of_products = {**owners, **multiplied}

        result = [
            _labelled(one, of_products if one.site.primitive in _BILINEAR else owners, origins)
            for one in equations
        ]
        result = _with_origins(result, origins)
        with_backward = {one.label for one in result if one.direction == "backward"}
        only_entered = {
            v: label for v, label in entered.items() if v not in owners and label not in with_backward
        }
        return [_labelled(one, only_entered, {}) for one in result]


_BILINEAR = ("dot_general", "conv_general_dilated", "ragged_dot_general")


def _labelled(one: Labelled, owners: Mapping[compat.Var, str], origins: Origins) -> Labelled:
    if one.label is not None or not one.site.backward or one.recomputed or _is_large(one.equation):
        return one
    known = origins.get(compat.equation_origin(one.equation), set())
    of_reads = (owners[variable] for variable in one.reads() if variable in owners)
    return replace(one, label=next(iter(known if len(known) == 1 else of_reads), None))


def _with_origins(equations: Sequence[Labelled], origins: Origins) -> list[Labelled]:
    # An operation that several modules run is of the one whose backward pass uses its result.
    used_by: dict[compat.Var, set[str | None]] = {}
    result = []
    for one in reversed(equations):
        if one.site.backward and one.label is None and not one.recomputed and not _is_large(one.equation):
            known = origins.get(compat.equation_origin(one.equation), set())
            users = set().union(*(used_by.get(v, ()) for v in one.equation.outvars)) & known
            one = replace(one, label=users.pop() if len(users) == 1 else None)
        if one.site.backward and one.label is not None:
            for variable in one.reads():
                used_by.setdefault(variable, set()).add(one.label)
        result.append(one)
    return result[::-1]


def _is_large(equation: compat.JaxprEqn) -> bool:
    # A jitted function of one module, such as that of an einsum, is a part of the module; other programs are entered.
    return structure_of(equation).kind not in ("", "call")

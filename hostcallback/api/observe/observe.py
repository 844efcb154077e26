"""`observe`: taps in a function at the places that a selection names."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np

from hostcallback import _jax_compat as compat
from hostcallback.api.observe.collect import Collector
from hostcallback.api.observe.modules import Modules
from hostcallback.api.observe.places import Surroundings, programs_of
from hostcallback.api.observe.plan import Around, Found, Plan, Planner
from hostcallback.api.observe.report import sender_of
from hostcallback.api.observe.statistics import check_statistics, measure
from hostcallback.api.observe.where import Selection, nearest, read_where
from hostcallback.api.public import public
from hostcallback.tracing.source_line import place_name, user_source_line

P = ParamSpec("P")
R = TypeVar("R")

WHAT_OF = ("output", "input", "grad")


@public
def observe(
    fun: Callable[P, R],
    *,
    where: Any,
    what: str | Sequence[str] = "statistics",
    what_of: str | Sequence[str] = "output",
    tap_func: Callable[..., Any] | None = None,
    name: str | None = None,
    ordered: bool = True,
) -> Callable[P, R]:
    """Returns `fun` with taps at the places that `where` selects, without a change of its code.

    All values of one run of `fun` arrive in one message: an ordered dict by label, such as `encoder/0/attention`. In a
    `scan` each array has a leading axis of iterations, in a `shard_map` one of devices. The iterations of a
    `while_loop` are separate messages, and so are cotangents if code around the observed function differentiates it; of
    a training step that calls `jax.grad` itself, the cotangents are in the one message.

    `fun` is traced, as by `jax.jit`. The results are those of `fun`; docs/observe.md says where XLA may round them
    differently. Nothing is sent twice under `jax.checkpoint`.

    Args:
        fun: a function of pytrees. Leaves that are not arrays are passed to it unchanged.
        where: what to tap. A text is tried as each of these in order, and the first that matches counts; a prefix such
            as `primitive:` says which is meant. A list is a union.

            - `"encoder/*/attention"`: named scopes, at any depth (`scope:`). `*` is one part, `**` any number of parts.
            - `"layers/0"`: equinox and nnx modules, by the path of their parameters in the arguments (`module:`).
            - `"block"`: jitted functions and those with custom derivatives (`jit:`), then all functions (`function:`).
            - `"dot_general"`: each operation of a primitive (`primitive:`).
            - `"model.py:42"`, `"model.py"`: a source line or file.
            - `"scan carry"`: the carry of each loop after each iteration.
            - a function of a `Site` (primitive, scope, frames, function, backward), which returns whether to tap it.
        what: "statistics" (mean, std, min, max, norm, zeros, nonfinite), a list of these and of "histogram", all
            reduced on the device to float32 scalars (docs/observe.md), or "value".
        what_of: "output" (what leaves the place), "input" (what enters it), "grad" (the cotangents of what leaves it),
            or a list of these. Labels of the others than "output" begin with `input ` or `grad `.
        tap_func: called as `tap_func(values)` with numpy arrays, on a receiver thread as in `id_tap`. By default a
            table is printed. `hcb.metrics` sends the values to the receiver's writers as `label/statistic`.
        name: name of the tap in reports and in `hcb.taps`; by default that of its line, as in `observe@train:42`.
        ordered: as in `id_tap`.

    Returns:
        A function with the signature of `fun`, which works with and without `jit`, `grad`, `vmap` and `scan`.

    Raises:
        TypeError: `fun` is not callable, or an argument has another type.
        ValueError: an argument has another value; when the function is traced, `where` matches nothing.

    Example:
        step = jax.jit(hcb.observe(train_step, where="layers/*", what_of=["output", "grad"], tap_func=hcb.metrics))
    """
    if not callable(fun):
        raise TypeError(
            f"hcb.observe takes a function, got {type(fun).__name__} {fun!r}: observe(f, where=...)(x), not "
            f"observe(f(x), where=...), at {user_source_line()}"
        )
    if tap_func is not None and not callable(tap_func):
        raise TypeError(
            f"hcb.observe: tap_func is {tap_func!r}, expected a function, at {user_source_line()}"
        )
    items, statistics, directions = read_where(where), check_statistics(what), _directions(what_of)
    send = sender_of(tap_func, name or place_name("observe"), ordered)

    @functools.wraps(fun)
    def observed(*args: P.args, **kwargs: P.kwargs) -> R:
        program, found, plan = _Program(fun, args, kwargs), Found(), Plan()
        # If the function has no backward pass, its cotangents come from code around it.
        grad = "grad" if program.has_backward else "outer grad"
        for direction in directions:
            for item in items:
                plan.add(_plan_item(item, grad if direction == "grad" else direction, program, found))
        outer = set() if program.has_backward else {k for k in found.labels if k.startswith("grad ")}
        collector = Collector(functools.partial(measure, names=statistics), send, outer)
        value: R = program.run(plan, collector, send, list(found.labels))
        return value

    return observed


def _directions(what_of: Any) -> list[str]:
    directions = [what_of] if isinstance(what_of, str) else list(what_of)
    for direction in directions:
        if direction not in WHAT_OF:
            raise ValueError(
                f"hcb.observe: what_of is {direction!r}, expected {', '.join(map(repr, WHAT_OF))}, or a list of these, "
                f"at {user_source_line()}"
            )
    return directions


class _Program:
    """A call of a function, traced."""

    def __init__(self, fun: Callable[..., Any], args: Any, kwargs: Any) -> None:
        paths, tree = jax.tree_util.tree_flatten_with_path((args, kwargs))
        parts = [part for _, part in paths]
        places = [i for i, part in enumerate(parts) if _is_array(part)]
        self.arrays = [parts[i] for i in places]
        self.paths = [tuple(_key(entry) for entry in paths[i][0][2:]) for i in places]

        def of_arrays(*arrays: Any) -> list[Any]:
            filled = list(parts)
            for i, array in zip(places, arrays, strict=True):
                filled[i] = array
            inner_args, inner_kwargs = jax.tree.unflatten(tree, filled)
            self._results, self._tree = jax.tree.flatten(fun(*inner_args, **inner_kwargs))
            return [result for result in self._results if isinstance(result, jax.core.Tracer)]

        self.closed = jax.make_jaxpr(of_arrays)(*self.arrays)
        jaxpr = compat.open_jaxpr(self.closed)[0]
        self.variables = list(jaxpr.invars)
        self.has_backward = _has_backward(jaxpr)

    def plan(self, selection: Selection, what_of: str, found: Found) -> Plan:
        """Plans the taps of one selection."""
        modules = Modules.of_paths(selection.text, self.variables, self.paths)
        needed = [True] * len(compat.open_jaxpr(self.closed)[0].outvars)
        return Planner(selection, what_of, found).plan(self.closed, Around(Surroundings(), modules, needed))

    def run(
        self, plan: Plan, collector: Collector, send: Callable[[Any], None], labels: Sequence[str]
    ) -> Any:
        """Evaluates the program with its taps, and sends one message."""
        outs, records = collector.evaluate(self.closed, plan, self.arrays)
        if records:
            send({label: records[label] for label in labels if label in records})
        left = iter(outs)
        filled = [next(left) if isinstance(r, jax.core.Tracer) else r for r in self._results]
        return jax.tree.unflatten(self._tree, filled)


def _is_array(value: Any) -> bool:
    is_array = isinstance(value, jax.Array | np.ndarray | np.generic)
    return is_array and getattr(value, "dtype", None) != np.object_


def _key(entry: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry)


def _has_backward(jaxpr: Any) -> bool:
    jaxpr, _ = compat.open_jaxpr(jaxpr)
    return any(
        "transpose(" in str(e.source_info.name_stack) or any(_has_backward(p) for p, _ in programs_of(e))
        for e in jaxpr.eqns
    )


# ---- Selections that match nothing -----------------------------------------------------------------------------------


def _plan_item(item: Sequence[Selection], what_of: str, program: _Program, found: Found) -> Plan:
    """Plans the taps of one item of `where`: of the first of its selections that matches."""
    for selection in item:
        if plan := program.plan(selection, what_of, found):
            return plan
    text = item[0].text
    if found.not_entered:
        places = ", ".join(f"{s.function or s.primitive} at {s.source_line}" for s in found.not_entered)
        raise ValueError(
            f"hcb.observe: where={text!r} matches only inside of operations that cannot be rewritten: {places}; "
            f"select their results with where='primitive:...', at {user_source_line()}"
        )
    kinds = [s.kind for s in item]
    names = [name for kind in kinds for name in found.names.get(kind, ())]
    if "module" in kinds:
        names += ["/".join(path[:-1]) for path in program.paths if len(path) > 1]
    others = "\n".join(f"    {name}" for name in nearest(text, names))
    hint = f"; the nearest that it has:\n{others}" if others else ""
    cotangents = " in its backward pass" if what_of == "grad" else ""
    raise ValueError(
        f"hcb.observe: where={text!r} matches no {what_of} of the observed function{cotangents}, at "
        f"{user_source_line()}{hint}"
    )

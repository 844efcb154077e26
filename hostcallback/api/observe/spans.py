"""`what="time"`: the places that are timed, the messages of their times, and `span`, which names places."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import jax
import jax.numpy as jnp

from hostcallback import _jax_compat as compat
from hostcallback._jax_compat.types import AnyJaxpr
from hostcallback.api.observe.places import Labelled
from hostcallback.api.observe.plan import Around, Found, Planner
from hostcallback.api.outputs.metrics import metrics
from hostcallback.lowering import xray
from hostcallback.lowering.equations import Position, equations_in, structure_of
from hostcallback.lowering.evaluator import Records
from hostcallback.primitives.tap import bind_tap
from hostcallback.receiver.sinks.factory import Binding
from hostcallback.receiver.sinks.time_rows import ITERATION
from hostcallback.receiver.sinks.times import DEVICE, SECONDS, START
from hostcallback.receiver.wire.tap_descriptor import TIME
from hostcallback.tracing import source_line
from hostcallback.tracing.source_line import SourceLine, public, user_source_line
from hostcallback.tracing.tap_spec import TapOptions

Key = tuple[int, ...]
"""The key of the position of a program, and the id of an equation of it."""

SPANS = "spans"
"""In the notes of a context that measures all spans: its `Entered`."""

MAX_ENTERED = 1000
"""Number of names of spans that a block notes, to say which of them have no time."""

_AXES = {"scan": ITERATION, "shard_map": DEVICE}


class Spans:
    """The places of a program that are timed.

    Attributes:
        devices: of the program.
        places: by equation, the names of the places that it belongs to, outermost first.
        axes: by name, what the axes of its times are, outermost first.
        lines: by name, a line of the place; not of what is differentiated or computed again in a backward pass.
        are_in_shard_map: whether the program is for several devices, and all places are in a shard_map.
    """

    def __init__(self, devices: int) -> None:
        """There are none yet."""
        self.devices = devices
        self.places: dict[Key, tuple[str, ...]] = {}
        self.axes: dict[str, list[str]] = {}
        self.lines: dict[str, SourceLine | None] = {}
        self.are_in_shard_map = devices > 1
        self._names: dict[tuple[str, Key], str] = {}

    def plan(
        self, planner: Planner, program: AnyJaxpr, around: Around, found: Found, path: Key = ()
    ) -> dict[Key, str]:
        """Finds the equations of one selection; returns their places."""
        jaxpr, _ = compat.open_jaxpr(program)
        result: dict[Key, str] = {}
        for one in planner.labelled(jaxpr, around):
            structure = structure_of(one.equation)
            # The backward pass of a checkpoint is recomputation and more.
            is_whole = not (structure.kind == "remat" and one.site.backward)
            if one.label is not None and is_whole:
                key = (*around.position.key, id(one.equation))
                result[key] = self._name(one, around.position, path, found)
                continue
            inner: dict[Key, str] = {}
            for i, (each, operands) in enumerate(structure.programs):
                into = path if structure.kind in ("call", "remat") else (*path, id(one.equation), i)
                inner.update(self.plan(planner, each, around.inside(one, each, operands), found, into))
            if structure.is_open:
                result.update(inner)
            elif inner:
                found.not_entered.append(one.site)
        return result

    def _name(self, one: Labelled, position: Position, path: Key, found: Found) -> str:
        # The times of one loop or of one branch, or outside of these, have one name.
        name = _named(one)
        if (name, path) not in self._names:
            self._names[name, path] = found.new_label(name)
            self.axes[self._names[name, path]] = self.axes_at(position)
            self.are_in_shard_map &= not self.is_divided(position)
            if one.direction == "forward":
                self.lines[self._names[name, path]] = one.site.source_line
        return self._names[name, path]

    def axes_at(self, position: Position) -> list[str]:
        """The axes of what is recorded at a position, outermost first."""
        kinds = [structure_of(each).kind for each in position.equations]
        # Each iteration of a while loop sends its own records.
        last = max((i + 1 for i, kind in enumerate(kinds) if kind == "while"), default=0)
        axes = [_AXES[kind] for kind in kinds[last:] if kind in _AXES]
        return [*axes, DEVICE] if self.is_divided(position) else axes

    def is_divided(self, position: Position) -> bool:
        """Whether the compiler divides what is at a position among devices."""
        return self.devices > 1 and "shard_map" not in [
            structure_of(each).kind for each in position.equations
        ]

    def names(self) -> set[str]:
        """The names of the spans and other parts of which places are."""
        found = {name.removeprefix("backward ").removeprefix("recomputed ") for name, _ in self._names}
        return {part for name in found for part in name.split("/")}

    def add(self, places: Mapping[Key, str]) -> None:
        """Adds the places of one selection. Of two selections the one with more equations is around the other."""
        for key, name in places.items():
            self.places[key] = (*self.places.get(key, ()), name)

    def __bool__(self) -> bool:
        return bool(self.places)


def _named(one: Labelled) -> str:
    return str(one.label) if one.direction == "forward" else f"{one.direction} {one.label}"


def in_conditions(program: AnyJaxpr) -> set[str]:
    """The names of the spans in the conditions of the while loops of a program, which have no time."""
    found: set[str] = set()
    for loop, _ in equations_in(program):
        if structure_of(loop).kind != "while":
            continue
        condition = loop.params["cond_jaxpr"]
        for equation, _ in equations_in(condition):
            stack = str(equation.source_info.name_stack)
            scope = source_line.scope_of(stack)
            found.update(scope[count - 1] for count in source_line.spans_of(stack))
        found |= in_conditions(condition)
    return found


# ---- Messages --------------------------------------------------------------------------------------------------------


def sender_of_times(
    tap_func: Callable[..., Any] | None, name: str, ordered: bool, spans: Spans
) -> Callable[[Records], None]:
    """Returns a function that sends the records of a `Timer` in one message."""

    def send(records: Records) -> None:
        if tap_func is metrics:
            metrics(_metrics(records, spans), name=name, ordered=ordered)
            return
        times = {
            place: {SECONDS: jnp.stack(one[SECONDS], -1), START: jnp.stack(one[START], -2)}
            for place, one in records.items()
        }
        # In the order of the program: dicts are sorted on their way.
        params = {"axes": {place: axes for place, axes in spans.axes.items() if place in times}}
        options = TapOptions(name, ordered, tap_tangents=False, kind=TIME, params=params)
        bind_tap(times, (), {}, Binding(tap_func), identity=("time", tap_func, repr(params)), options=options)

    return send


def _metrics(records: Records, spans: Spans) -> dict[str, Any]:
    # The seconds of a call; of several devices their mean and the longest.
    found: dict[str, Any] = {}
    for place, times in records.items():
        axes = spans.axes[place]
        iterations = tuple(i for i, axis in enumerate(axes) if axis == ITERATION)
        of_call = jnp.nansum(sum(times[SECONDS]), iterations)
        found[f"time/{place}"] = jnp.mean(of_call)
        if DEVICE in axes:
            found[f"time/{place}/slowest"] = jnp.max(of_call)
    return found


# ---- Spans -----------------------------------------------------------------------------------------------------------


class Entered:
    """The first `MAX_ENTERED` spans that are entered in a block. Any thread.

    Attributes:
        lines: by name, the line that entered it first.
        are_all: whether there were no others.
    """

    def __init__(self) -> None:
        """There are none yet."""
        self.lines: dict[str, SourceLine] = {}
        self.are_all = True

    def add(self, name: str) -> None:
        """Adds a span that the calling thread enters."""
        if name in self.lines:
            return
        if len(self.lines) < MAX_ENTERED:
            self.lines[name] = user_source_line()
        else:
            self.are_all = False


@public
def span(name: str) -> AbstractContextManager[None]:
    """Names the operations that are traced in a `with` block, for `hcb.observe(what="time")`, which measures them.

    It is a named scope. It adds no operation, and costs nothing where no time is measured.

    Args:
        name: a text without `/` and brackets. Spans may be nested: the inner one is called `outer/inner`.

    Raises:
        TypeError: the name is not a text.
        ValueError: it is empty, or has one of these characters.

    Example:
        with hcb.span("attention"):
            x = x + jnp.tanh(x)
    """
    if not isinstance(name, str):
        raise TypeError(
            f"hcb.span takes a name, got {name!r:.80}: with hcb.span('attention'), at {user_source_line()}"
        )
    if not name.strip() or set(name) & set("/()"):
        raise ValueError(
            f"hcb.span: the name is {name!r:.80}, expected a text without slashes and brackets, at {user_source_line()}"
        )
    for context in xray.open_contexts():
        if SPANS in context.notes:
            context.notes[SPANS].add(name)
    return _scopes(name)


@contextmanager
def _scopes(name: str) -> Iterator[None]:
    with jax.named_scope(source_line.SPAN), jax.named_scope(name):
        yield

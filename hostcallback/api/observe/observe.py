"""`observe`: taps in programs at the places that a selection names, without a change of the code."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, ParamSpec, TypedDict, TypeVar, Unpack, overload

import jax

from hostcallback import _jax_compat as compat
from hostcallback.api.barrier import wait_for_taps
from hostcallback.api.observe.parameters import plan_parameters
from hostcallback.api.observe.places import CARRY, OUTSIDE, SPAN, Modules, Selection, Site, near, read_where
from hostcallback.api.observe.plan import Around, Found, Plan, Planner
from hostcallback.api.observe.readings import Timer
from hostcallback.api.observe.report import check_statistics, measure, sender_of
from hostcallback.api.observe.spans import MAX_ENTERED, SPANS, Entered, Spans, in_conditions, sender_of_times
from hostcallback.api.outputs.metrics import metrics
from hostcallback.lowering.equations import OUTERMOST, Position
from hostcallback.lowering.evaluator import Evaluator, Records
from hostcallback.lowering.xray import Context, Program, UserError, Xray
from hostcallback.receiver.errors import ReentrantWaitError, TapTimeoutError
from hostcallback.receiver.failures.steps import Occurrence
from hostcallback.receiver.log import logger
from hostcallback.receiver.runtime.runtime import runtime
from hostcallback.receiver.sinks.times import new_tables
from hostcallback.tracing import arguments, source_line
from hostcallback.tracing.source_line import place_name, public, user_source_line
from hostcallback.tracing.tap_spec import name_or

P = ParamSpec("P")
R = TypeVar("R")

PARAMETERS = ("param", "param grad", "update")
WHAT_OF = ("output", "input", "grad", *PARAMETERS)
_ALL_SPANS = ((Selection("span", SPAN),),)
MAX_WAIT_SEC = 10.0
"""Seconds of one invocation of a tap after which the end of a block does not wait for the table of times."""
MAX_NOT_ENTERED = 8
"""Number of operations that an error names because they cannot be rewritten."""
MAX_UNTIMED = 5
"""Number of places that a warning names because they have no time."""


class Options(TypedDict, total=False):
    """The options of `observe`, for type checkers."""

    where: Any
    what: str | Sequence[str]
    what_of: str | Sequence[str]
    tap_func: Callable[..., Any] | None
    name: str | None
    ordered: bool
    all_threads: bool


@overload
def observe(fun: None = None, **options: Unpack[Options]) -> Context: ...
@overload
def observe(fun: Callable[P, R], **options: Unpack[Options]) -> Callable[P, R]: ...
@public
def observe(
    fun: Callable[P, R] | None = None,
    *,
    where: Any = None,
    what: str | Sequence[str] = "statistics",
    what_of: str | Sequence[str] = "output",
    tap_func: Callable[..., Any] | None = None,
    name: str | None = None,
    ordered: bool = True,
    all_threads: bool = False,
) -> Context | Callable[P, R]:
    """Taps the places that `where` selects in each program that is called in a `with` block, or by `fun`.

    `with hcb.observe(where=...):` is for every jitted program that is called in the block, whichever framework's jit it
    is of. `hcb.observe(fun, where=...)` is `fun`, called in such a block; inside of a trace, as in
    `jax.jit(hcb.observe(fun, ...))`, it is for the operations of `fun` in the program that is traced.

    Programs get their taps where JAX lowers them. The function itself is called by its jit only; it is traced once more
    for the block. Results are those of the program without taps; docs/observe.md says where XLA may round them
    differently. A function that is not jitted is seen as the programs that JAX runs for it: one for each operation.

    All values of one run of a program arrive in one message: an ordered dict by label, such as `encoder/0/attention`.
    In a `scan` each array has a leading axis of iterations, in a `shard_map` one of devices. The iterations of a
    `while_loop` are separate messages. Nothing is sent twice under `jax.checkpoint`.

    Args:
        fun: a function, jitted or not; None for a context.
        where: what to tap. A text is tried as each of these in order, and the first that matches counts; a prefix such
            as `primitive:` says which is meant. A list is a union.

            - `"encoder/*/attention"`: named scopes, at any depth (`scope:`). `*` is one part, `**` any number of parts.
            - `"layers/0"`: equinox and nnx modules, by the path of their parameters in the arguments (`module:`).
            - `"block"`: jitted functions and those with custom derivatives (`jit:`), then all functions (`function:`).
            - `"dot_general"`: each operation of a primitive (`primitive:`).
            - `"model.py:42"`, `"model.py"`: a source line or file.
            - `"linear"`: what is called so, as in `self.linear(x)`, where nothing else has the name (`call:`).
            - `"scan carry"`: the carry of each loop after each iteration.
            - a function of a `Site` (primitive, scope, frames, function, backward), which returns whether to tap it.

            For `what_of="param"` and the like, texts are globs of paths: `"params/*/kernel"`, `"layers[2].weight"`.
            With `what="time"` it may be left out: then each `hcb.span` is measured. A carry takes no time.
        what: "statistics" (mean, std, min, max, norm, zeros, nonfinite), a list of these and of "histogram", all
            reduced on the device to float32 scalars (docs/observe.md), or "value"; or "time" (docs/time.md), for which
            the device reads its clock where the inputs of a place are there, and where its results and what its taps
            send are. Its values are `seconds` (float32) and `start_ns` (int64, Unix time) of each place and of the
            whole `program`.
        what_of: "output" (what leaves the place), "input" (what enters it), "grad" (the cotangents of what leaves it);
            "param" (the parameters by path), "param grad" (their gradients), "update" (new minus old parameter, with
            the statistic `ratio` of the norms of update and parameter); or a list of these. Labels of the others than
            "output" and "param" begin with `input `, `grad `, `param grad `, `update `.
        tap_func: called as `tap_func(values)` with numpy arrays, on a receiver thread as in `id_tap`. By default a
            table is printed, of times one for all calls at the end of the block and of the receiver. `hcb.metrics`
            sends the values to the receiver's writers as `label/statistic`, seconds as `time/label`.
        name: name of the tap in reports and in `hcb.taps`; by default that of its line, as in `observe@train:42`.
        ordered: as in `id_tap`.
        all_threads: whether the block is for programs that other threads call, too, except those that tap functions
            run.

    Returns:
        A context manager, which may be entered again, and is also a decorator; with `fun`, a function with its
        signature.

    Raises:
        TypeError: `fun` is not callable, a generator function or async, or an argument has another type.
        ValueError: an argument has another value; at the end of the block, or when `fun` is lowered, `where` matches
            nothing in any program.
        NotImplementedError: (later) times of a program on a GPU or TPU.

    Example:
        with hcb.observe(where="layers/*", what=["norm"], tap_func=lambda values: print(dict(values))):
            train()
    """
    if fun is not None and not callable(fun):
        raise TypeError(
            f"hcb.observe takes a function, got {type(fun).__name__} {fun!r}: observe(f, where=...)(x), not "
            f"observe(f(x), where=...), at {user_source_line()}"
        )
    arguments.refuse_compiled("observe", fun)
    if tap_func is not None and not callable(tap_func):
        raise TypeError(
            f"hcb.observe: tap_func is {tap_func!r}, expected a function, at {user_source_line()}"
        )
    directions = [what_of] if isinstance(what_of, str) else list(what_of)
    if wrong := [direction for direction in directions if direction not in WHAT_OF]:
        raise ValueError(
            f"hcb.observe: what_of is {wrong[0]!r}, expected {', '.join(map(repr, WHAT_OF))}, or a list of these, "
            f"at {user_source_line()}"
        )
    is_timed = what == "time"
    statistics = None if is_timed else check_statistics(what)
    if tap_func is metrics and statistics is not None and "histogram" in statistics:
        raise ValueError(
            "hcb.observe: a histogram cannot be sent by tap_func=hcb.metrics: take another tap_func, or leave "
            f"'histogram' out of what, at {user_source_line()}"
        )
    if is_timed and what_of != "output":
        raise ValueError(
            f'hcb.observe: what="time" measures operations, and takes no what_of, got {what_of!r}, at '
            f"{user_source_line()}"
        )
    items = _ALL_SPANS if is_timed and where is None else tuple(map(tuple, read_where(where)))
    if is_timed and any(selection.kind == "carry" for item in items for selection in item):
        raise ValueError(
            f"hcb.observe: where={CARRY!r} selects values, and what=\"time\" measures operations: put hcb.span('step') "
            f"around the body of the loop, and leave where out, at {user_source_line()}"
        )
    xray = (Timed if is_timed else Observe)(
        items=items,
        statistics=statistics,
        directions=tuple(directions),
        tap_func=tap_func,
        name=name_or(name, place_name, "time" if is_timed else "observe"),
        ordered=ordered,
    )
    context = Context(xray, all_threads=all_threads)
    if items == _ALL_SPANS:
        context.notes[SPANS] = Entered()
    return context if fun is None else context.wrap(fun)


@dataclass(frozen=True)
class Observe(Xray):
    """What `observe` does to programs; the attributes are its arguments, as read."""

    made_by: ClassVar[str] = "hcb.observe"

    items: tuple[tuple[Selection, ...], ...]
    statistics: tuple[str, ...] | None
    directions: tuple[str, ...]
    tap_func: Callable[..., Any] | None
    name: str
    ordered: bool
    notes: _Notes = field(default_factory=lambda: _Notes(), compare=False)

    def rewrite(self, program: Program, context: Context) -> compat.ClosedJaxpr | None:
        """Taps what is selected in this program; see `Xray`."""
        found, plan = Found(), Plan()
        missed: list[_Asked] = []
        for direction in self.directions:
            for item in self.items:
                if part := _plan_item(item, direction, program, found):
                    plan.add(part)
                    self.notes.hits.add((direction, item))
                else:
                    missed.append((direction, item))
        self.notes.add(program, found, missed)
        # A wrapper in a trace has one program only.
        if program.mark and not self.notes.hits:
            raise UserError(self.notes.error(missed, f"of {program.function}", user_source_line()))
        if not plan:
            return None
        names, devices = self.statistics, program.devices
        send = sender_of(self.tap_func, self.name, self.ordered, names)
        measured = functools.partial(measure, names=names, devices=devices)
        collector = _Collector(plan, measured, send)

        def run(*values: jax.Array) -> list[jax.Array]:
            outs, records = collector.evaluate(program.tapped, values)
            with jax.named_scope(source_line.OWN):
                for label, update in plan.parameters.items():
                    records[label] = update(values, outs, measured)
                if records:
                    send({label: records[label] for label in found.labels if label in records})
            return outs

        return program.run(run)

    def unmatched(self, at: object) -> str | None:
        """The error about selections that matched nothing, with the place that has them; None if there are none."""
        missed, count = self.notes.missed(), self.notes.programs
        return self.notes.error(missed, f"of {count} program{'s' * (count != 1)}", at) if missed else None

    def left(self, context: Context, function: str | None) -> None:
        """Raises ValueError for selections that matched nothing; warns if no program was compiled. See `Xray`."""
        if error := self.unmatched(user_source_line()):
            raise ValueError(error) from None
        if function is None and not context.seen and not self.notes.hits:
            logger.warning(
                "%s saw no program: nothing was compiled in the block. Functions that were compiled ahead of time "
                "(lower().compile()) before the block keep their programs",
                self.name,
            )


@dataclass(frozen=True)
class Timed(Observe):
    """What `observe(what="time")` does to programs."""

    order: ClassVar[int] = 5  # what other taps compute is no part of a place

    def rewrite(self, program: Program, context: Context) -> compat.ClosedJaxpr | None:
        """Reads the clock at the edges of what is selected in this program; see `Xray`."""
        found, spans = Found(), Spans(program.devices)
        missed: list[_Asked] = []
        selected = []
        for item in self.items:
            if places := self._places(item, program, found, spans):
                selected += places
                self.notes.hits.add(("operation", item))
            else:
                missed.append(("operation", item))
        self.notes.add(program, found, missed)
        self.notes.spans |= spans.names()
        self.notes.in_conditions |= in_conditions(program.tapped)
        if program.mark and not self.notes.hits:
            raise UserError(self.notes.error(missed, f"of {program.function}", user_source_line()))
        if not selected:
            return None
        for each in sorted(selected, key=len, reverse=True):
            spans.add(each)
        send = sender_of_times(self.tap_func, self.name, self.ordered, spans)
        timer = Timer(spans, send)

        def run(*values: jax.Array) -> list[jax.Array]:
            outs, records = timer.evaluate(program.tapped, values)
            timer.of_iteration(records)
            untimed = {place: line for place, line in spans.lines.items() if place not in timer.timed}
            self.notes.warn_untimed(self.name, untimed, NOT_COMPUTED)
            return outs

        return program.run(run)

    def _places(
        self, item: Sequence[Selection], program: Program, found: Found, spans: Spans
    ) -> list[dict[tuple[int, ...], str]]:
        # Of the first selection of an item that matches; of spans those of each depth.
        result = []
        for selection in item:
            while places := spans.plan(*_planner_of(selection, "output", program, found), found):
                result.append(places)
                if selection.kind != "span":
                    break
                selection = replace(selection, depth=selection.depth + 1)
            if result:
                break
        return result

    def left(self, context: Context, function: str | None) -> None:
        """Prints what was measured in a block, once all of it has arrived. See `Xray`."""
        super().left(context, function)
        if entered := context.notes.get(SPANS):
            context.notes[SPANS] = Entered()
            lines = {name: line for name, line in dict(entered.lines).items() if name not in self.notes.spans}
            in_conditions = {name: lines.pop(name) for name in self.notes.in_conditions & lines.keys()}
            self.notes.warn_untimed(self.name, in_conditions, IN_CONDITION)
            self.notes.warn_untimed(self.name, lines, NOT_COMPUTED, are_all=entered.are_all)
        if function is None and self.tap_func is None:
            with contextlib.suppress(TapTimeoutError, ReentrantWaitError):
                wait_for_taps(stall_sec=MAX_WAIT_SEC)
            for text in new_tables(self.name, _logged_steps):
                print(text)


def _logged_steps(messages: Sequence[Occurrence]) -> dict[Occurrence, int]:
    scopes = runtime.current_scopes()
    return {each: step for scope in scopes for each, step in scope.deferred.steps_of(messages).items()}


class _Collector(Evaluator):
    """Evaluates a program, and measures the values of a plan."""

    def __init__(self, plan: Plan, measure: Callable[[Any], Any], send: Callable[[Records], None]) -> None:
        self._taps = plan.taps
        self._entered = {key[:end] for key in plan.taps for end in range(1, len(key) + 1)}
        self._measure = measure
        self._send = send

    def enters(self, equation: compat.JaxprEqn, position: Position) -> bool:
        return (*position.key, id(equation)) in self._entered

    def given(
        self, jaxpr: compat.Jaxpr, values: Sequence[jax.Array], position: Position, records: Records
    ) -> None:
        self._record((*jaxpr.constvars, *jaxpr.invars), values, position, records)

    def made(
        self,
        equation: compat.JaxprEqn,
        values: list[jax.Array],
        outs: Sequence[jax.Array],
        position: Position,
        records: Records,
    ) -> None:
        self._record(equation.outvars, outs, position, records)

    def of_iteration(self, records: Records) -> Records:
        with jax.named_scope(source_line.OWN):
            if records:
                self._send(records)
        return {}

    def _record(
        self,
        variables: Sequence[compat.Var],
        values: Sequence[jax.Array],
        position: Position,
        records: Records,
    ) -> None:
        taps = self._taps.get(position.key, {})
        for variable, value in zip(variables, values, strict=True):
            labels = taps.get(variable, ())
            with jax.named_scope(source_line.OWN):
                records.update({label: self._measure(value) for label in labels})


def _plan_item(item: Sequence[Selection], what_of: str, program: Program, found: Found) -> Plan:
    """Plans the taps of one item of `where`: of the first of its selections that matches."""
    if what_of in PARAMETERS:
        return plan_parameters(item[0].text, what_of, program, found)
    for selection in item:
        planner, jaxpr, around = _planner_of(selection, what_of, program, found)
        if plan := planner.plan(jaxpr, around):
            return plan
    return Plan()


def _planner_of(
    selection: Selection, what_of: str, program: Program, found: Found
) -> tuple[Planner, compat.Jaxpr, Around]:
    jaxpr, _ = compat.open_jaxpr(program.tapped)
    modules = Modules.of_paths(selection.text, jaxpr.invars, program.paths)
    around = Around(OUTSIDE, OUTERMOST, modules, [True] * len(jaxpr.outvars))
    planner = Planner(selection, what_of, found, program.mark)
    planner.prepare(jaxpr, around)
    return planner, jaxpr, around


# ---- Selections that match nothing -----------------------------------------------------------------------------------

_Asked = tuple[str, tuple[Selection, ...]]
"""One of `what_of`, and one item of `where`."""


NOT_COMPUTED = "no array of numbers that a compiled program needs for its results or taps is computed there"
EMPTY = {
    "output": "no array of numbers leaves it, other than for a backward pass or where one computes it again",
    "input": "no array of numbers enters it, other than where a backward pass computes it again",
    "grad": "no cotangent enters its backward pass that is computed and is of its outputs alone: nothing there is "
    "differentiated, or its only cotangent is a constant, as the 1 of a loss",
}
IN_CONDITION = "places in the condition of a while_loop have no time"


class _Notes:
    """What the programs of an X-ray had, for as long as the jit caches keep them. Any thread.

    Attributes:
        programs: number of programs.
        hits: what matched in one of them.
        spans: the names of the spans that did.
        in_conditions: the names of those in the condition of a while loop, which have no time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # protects what is not public
        self.programs = 0
        self.hits: set[_Asked] = set()
        self.spans: set[str] = set()
        self.in_conditions: set[str] = set()
        self._untimed: dict[tuple[str, object], None] = {}
        self._missed: dict[_Asked, None] = {}
        self._names: dict[str, dict[str, None]] = {}
        self._not_entered: list[Site] = []

    def add(self, program: Program, found: Found, missed: Sequence[_Asked]) -> None:
        """Adds what was found in a program, and what matched nothing there."""
        modules = dict.fromkeys("/".join(path[1:-1]) for path in program.paths if len(path) > 2)
        params = dict.fromkeys("/".join(path) for path in program.paths if path)
        with self._lock:
            self.programs += 1
            self._missed.update(dict.fromkeys(missed))
            for kind, names in {**found.names, "module": modules, "param": params}.items():
                self._names.setdefault(kind, {}).update(names)
            self._not_entered = [*self._not_entered, *found.not_entered][:MAX_NOT_ENTERED]

    def warn_untimed(
        self, tap: str, lines: Mapping[str, object], reason: str, *, are_all: bool = True
    ) -> None:
        """Warns once of the places at some lines that they have no time: of all in one warning."""
        with self._lock:
            new = [place for place in lines.items() if place not in self._untimed]
            self._untimed.update(dict.fromkeys(new))
            while len(self._untimed) > MAX_ENTERED:
                del self._untimed[next(iter(self._untimed))]
        if not new:
            return
        count = "" if len(new) == 1 else f"{len(new):,}{'' if are_all else ' or more'} places: "
        named = "; ".join(f"{name!r}, at {line}" for name, line in new[:MAX_UNTIMED])
        others = "; and others" if len(new) > MAX_UNTIMED else ""
        logger.warning("%s has no time of %s%s%s: %s", tap, count, named, others, reason)

    def missed(self) -> list[_Asked]:
        """What matched nothing in any program."""
        with self._lock:
            return [asked for asked in self._missed if asked not in self.hits]

    def error(self, missed: Sequence[_Asked], of_what: str, at: object) -> str:
        """The error about the first of what matched nothing; `at` is the place that has the selection."""
        what_of, item = missed[0]
        text = item[0].text
        if item[0].kind == "span" and self.in_conditions:
            return (
                f'hcb.observe(what="time"): all that hcb.span names {of_what} is in the condition of a while_loop, and '
                f"{IN_CONDITION}: name parts elsewhere, or give where='layers/*', at {at}"
            )
        if item[0].kind == "span":
            return (
                f'hcb.observe(what="time") without where= measures what hcb.span names, and found none {of_what}: '
                f"name parts, with hcb.span('attention'): ..., or give where='layers/*', at {at}"
            )
        if self._not_entered:
            places = ", ".join(f"{s.function or s.primitive} at {s.source_line}" for s in self._not_entered)
            return (
                f"hcb.observe: where={text!r} matches only inside of operations that cannot be rewritten: {places}; "
                f"select their results with where='primitive:...', at {at}"
            )
        kinds = ["param"] if what_of in PARAMETERS else [selection.kind for selection in item]
        names = [name for kind in kinds for name in self._names.get(kind, ())]
        others = "\n".join(f"    {name}" for name in near(text, names))
        hint = f"; the nearest that there are:\n{others}" if others else ""
        if what_of in EMPTY and any(
            each.has(name) for each in item for name in self._names.get(each.kind, ())
        ):
            hint = f". There is such a place, but {EMPTY[what_of]}"
        cotangents = " in a backward pass" if what_of == "grad" else ""
        return f"hcb.observe: where={text!r} matches no {what_of} {of_what}{cotangents}, at {at}{hint}"

"""Loops that emit a message about every 0.1 s, and that end early on request, at no cost for the steps between.

A loop is two: an inner one runs steps until a number that the outer one chose, without any question. The outer one
then reads a clock, emits a message if it is time, and chooses how many steps will take about a millisecond. A scan
that is differentiated must stay a scan: there each step compares its number, which costs 0.07 us.

A loop that can be stopped reads a cell where it looks at the clock, more often. All devices of a launch must end
after the same step, so in programs of several devices it looks after every step.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from hostcallback import _jax_compat as compat
from hostcallback._jax_compat.types import Aval, ClosedJaxpr
from hostcallback.primitives.batched_predicates import any_lane, select_lanes, unused_keys
from hostcallback.primitives.device_ops import read_clock
from hostcallback.receiver.sinks.progress.bars import Phase
from hostcallback.tracing.source_line import PACED

INTERVAL_US = 100_000
"""Microseconds between two messages."""

STOP_LOOKS = 2
"""Looks of a loop that can be stopped in the time between two of a loop with a bar: on CPUs 0.5 ms between two."""

STOP_US = 2_000
"""Microseconds that are at most between two of these, where the clock is read through Python."""


class Messages(NamedTuple):
    """Emits the messages of a loop.

    Attributes:
        send: called with the phase, the number of steps that have run, and the values to send.
        postfix: returns the values to send, from the values of the loop.
    """

    send: Callable[[Phase, Any, Mapping[str, Any]], None]
    postfix: Callable[..., Mapping[str, Any]]


class Looks(NamedTuple):
    """What a loop does where it looks at the clock.

    Attributes:
        messages: emitted when it is time; None for none.
        stop: returns whether the loop ends here, called with the number of steps that have run; None if it never does.
        mark: called where a loop with `stop` begins, and, with False, where it ends.
    """

    messages: Messages | None
    stop: Callable[[Any], Any] | None = None
    mark: Callable[[bool], None] = lambda begins: None

    def send(self, phase: Phase, step: Any, *values: Any) -> None:
        """Sends a message with what is shown of the values of the loop, if it has messages."""
        if self.stop is not None and phase is not Phase.UPDATE:
            self.mark(phase is Phase.BEGIN)
        if self.messages is not None:
            self.messages.send(phase, step, self.messages.postfix(*values) if values else {})

    def first(self) -> _Pace:
        """The pace at the beginning."""
        now, _ = self._read_clock(_count(0))
        return _Pace(_count(1), _count(0), now, now, self._stops(_count(0)))

    def _read_clock(self, step: Any) -> Any:
        return read_clock(step, alike=self.stop is not None, timed=self.messages is not None)

    def _stops(self, step: Any) -> Any:
        return () if self.stop is None else self.stop(step)

    def look(self, pace: _Pace, at: Any, step: Any, values: Callable[[], tuple[Any, ...]]) -> _Pace:
        """Looks at the clock, at step `at`, and returns the new pace.

        If it is time, sends a message about `step` with what is shown of `values()`. `step` is a result of the steps
        that ran: XLA would else look, and read the request to stop, while they run, or before.
        """
        pace, due = _look(pace, at, self._read_clock(step), self._stops(step))
        if self.messages is not None:
            send_if(due, lambda: self.send(Phase.UPDATE, step, *values()))
        return pace


class _LooksInPython:
    """The looks of a loop that runs in Python, step by step: at most a tenth of its time."""

    def __init__(self, looks: Looks) -> None:
        self._looks = looks
        self._pace = looks.first()
        self._due = 0.0

    @property
    def is_stopped(self) -> bool:
        stopped = self._pace.stopped
        return not isinstance(stopped, tuple) and bool(stopped)

    def after(self, step: int, *values: Any) -> None:
        begin = time.perf_counter()
        if begin >= self._due:
            self._pace = self._looks.look(self._pace, _count(step), _count(step), lambda: values)
            end = time.perf_counter()
            self._due = end + 9 * (end - begin)


class _Pace(NamedTuple):
    # When to look at the clock next, in steps; the step and the time of the last look; the time of the last message;
    # whether the loop ends, or () if it cannot be stopped.
    next: Any
    step: Any
    looked_us: Any
    sent_us: Any
    stopped: Any

    def goes_on(self, holds: Any) -> Any:
        return holds if isinstance(self.stopped, tuple) else ~self.stopped & holds


def _look(pace: _Pace, step: Any, reading: Any, stopped: Any) -> tuple[_Pace, Any]:
    # Returns the new pace and whether a message is due. Times wrap around, their differences do not.
    now, least_us = reading
    if not isinstance(stopped, tuple):
        least_us = jnp.minimum(least_us // np.uint32(STOP_LOOKS), np.uint32(STOP_US))
    # At least 1, because a clock of microseconds may stand still between two looks.
    steps, took_us = step - pace.step, jnp.maximum(now - pace.looked_us, np.uint32(1))
    size = steps.astype(np.float32) * (least_us.astype(np.float32) / took_us.astype(np.float32))
    # It grows slowly, because the first steps may be faster than the others.
    size = jnp.clip(size.astype(steps.dtype), 1, 2 * steps)
    due = now - pace.sent_us >= np.uint32(INTERVAL_US)
    return _Pace(step + size, step, now, jnp.where(due, now, pace.sent_us), stopped), due


def _count(number: int) -> Any:
    return jnp.asarray(number, jax.dtypes.canonicalize_dtype(np.int64))


def _runs_in_python() -> bool:
    """Whether steps run one by one: `jax.disable_jit` is in force, and the loop is not traced all the same."""
    return compat.is_jit_disabled() and not compat.is_staging()


def as_one_program(loop: Callable[..., Any], *arguments: Any) -> Any:
    """Returns `loop(*arguments)`, jitted where its operations would run one by one.

    The loops of `jax.lax` are one operation each, so that eager ones work under a transfer guard, too.
    """
    return loop(*arguments) if compat.is_staging() else jax.jit(loop)(*arguments)


class While(NamedTuple):
    """A `lax.while_loop` that emits messages. Elements of a vmap may end at different steps."""

    condition: Callable[[Any], Any]
    body: Callable[[Any], Any]
    looks: Looks
    jaxs: Callable[[Any], Any]
    """The loop without messages, which raises what JAX says of a wrong body, with the user's names."""

    def run(self, init: Any) -> Any:
        """Runs the loop; returns its last value and the number of its steps."""
        return as_one_program(self._run, init)

    def _run(self, init: Any) -> Any:
        self.looks.send(Phase.BEGIN, 0)
        if _runs_in_python():
            # In a vmap, JAX's is a loop of a program, too.
            with contextlib.suppress(jax.errors.ConcretizationTypeError):
                return self._in_python(init)
        traced = jax.make_jaxpr(self.condition)(init)
        if [(aval.shape, aval.dtype) for aval in traced.out_avals] != [((), np.dtype(bool))]:
            self.jaxs(init)
        body, value = jax.make_jaxpr(self.body, return_shape=True)(init)
        if not _keeps_types(body, init, value):
            jax.eval_shape(self.jaxs, init)
            init = _typed_as_results(init, jax.eval_shape(self._plain, init))
        if traced.effects:  # it must run once per step, and below it runs twice
            loop = self._with_condition_in_value()
            (_, value), count = loop._steps((jnp.asarray(self.condition(init)), init), has_taps=True)
            return value, count
        return self._steps(init, has_taps=bool(body.effects))

    def _in_python(self, init: Any) -> Any:
        value = jax.tree.map(jnp.asarray, init)
        looks, count = _LooksInPython(self.looks), 0
        while self.condition(value) and not looks.is_stopped:
            value, count = self.body(value), count + 1
            looks.after(count, value)
        self.looks.send(Phase.END, count, value)
        return value, _count(count)

    def _plain(self, init: Any) -> Any:
        return lax.while_loop(self.condition, self.body, init)

    def _with_condition_in_value(self) -> While:
        def both(state: Any) -> Any:
            value = self.body(state[1])
            return self.condition(value), value

        messages = self.looks.messages
        if messages is None:
            return self._replace(condition=lambda state: state[0], body=both)
        only_value = messages._replace(postfix=lambda state: messages.postfix(state[1]))
        looks = self.looks._replace(messages=only_value)
        return self._replace(condition=lambda state: state[0], body=both, looks=looks)

    def _steps(self, init: Any, *, has_taps: bool) -> Any:
        condition, body, looks, _ = self

        def goes_on(state: Any) -> Any:
            end, step, value = state
            return any_lane((step < end) & condition(value))

        def one(state: Any) -> Any:
            end, step, value = state
            going = condition(value)  # without a vmap and taps nothing uses it, and it is left out
            # Taps are in a branch, so that vmap masks them as in any branch: elements that have ended send nothing.
            new = lax.cond(going, body, lambda value: value, value) if has_taps else body(value)
            return end, *select_lanes(going, (step + 1, new), (step, value))

        def several(state: Any) -> Any:
            pace, step, value = state
            # All elements that have not ended are at the same step.
            with jax.named_scope(f"{PACED}1"):
                end, step, value = lax.while_loop(goes_on, one, (pace.next, step, value))
            return looks.look(pace, end, step, lambda: (value,)), step, value

        state = (looks.first(), _count(0), init)
        with jax.named_scope(PACED):
            _, step, value = lax.while_loop(
                lambda state: state[0].goes_on(any_lane(condition(state[2]))), several, state
            )
        looks.send(Phase.END, step, value)
        return value, step


def send_if(due: Any, send: Callable[[], None]) -> None:
    """Sends a message behind a branch."""
    lax.cond(due, send, lambda: None)


class Scan(NamedTuple):
    """A `lax.scan` of `length` steps with `options` that looks at the clock."""

    f: Callable[[Any, Any], tuple[Any, Any]]
    length: int
    looks: Looks
    options: dict[str, Any]
    jaxs: Callable[[Any, Any], Any]
    """As of `While`."""

    def run(self, init: Any, xs: Any) -> tuple[Any, Any, Any]:
        """Runs the scan; returns its last carry, its outputs, and the number of its steps."""
        done: tuple[Any, Any, Any] = as_one_program(self._run, init, xs)
        return done

    def _run(self, init: Any, xs: Any) -> tuple[Any, Any, Any]:
        if _runs_in_python():
            return self._in_python(init, xs)
        self.looks.send(Phase.BEGIN, 0)
        blocks = _Blocks.of(self, init, xs) if self.options.get("unroll", 1) == 1 else None
        if blocks is None:
            jax.eval_shape(self.jaxs, init, xs)
            if self.looks.stop is not None:
                init = self._promoted(init, xs)
            carry, ys, count = self.asking(init, xs)
        else:
            carry, ys, count = blocks.run(init, xs)
        shown = (carry, jax.tree.map(lambda y: y[self._last(count)], ys)) if self.length else ()
        self.looks.send(Phase.END, count, *shown)
        return carry, ys, count

    def _in_python(self, carry: Any, xs: Any) -> tuple[Any, Any, Any]:
        # As JAX's with jit disabled: the steps see their values.
        self.looks.send(Phase.BEGIN, 0)
        if not self.length:
            self.jaxs(carry, xs)  # JAX refuses it, since it does not know the types of the outputs
            self.looks.send(Phase.END, 0)
            return carry, None, _count(0)
        looks, ys, count = _LooksInPython(self.looks), [], 0
        places = range(self.length)[:: -1 if self.options.get("reverse") else 1]
        for place in places:
            if looks.is_stopped:
                break
            carry, y = self.f(carry, jax.tree.map(lambda leaf, place=place: leaf[place], xs))
            ys.append(y)
            count += 1
            looks.after(count, carry, y)
        if not ys:
            x = jax.tree.map(lambda leaf: leaf[0], xs)
            y = jax.tree.map(lambda y: jnp.zeros(y.shape, y.dtype), jax.eval_shape(self.f, carry, x)[1])
        self.looks.send(Phase.END, count, carry, y)
        ys += [jax.tree.map(jnp.zeros_like, y)] * (self.length - count)
        in_order = ys[::-1] if self.options.get("reverse") else ys
        return carry, jax.tree.map(lambda *leaves: jnp.stack(leaves), *in_order), _count(count)

    def _promoted(self, init: Any, xs: Any) -> Any:
        # Needed by a step that is left out, which returns the carry as it is.
        def last(init: Any, xs: Any) -> Any:
            return lax.scan(self.f, init, xs, self.length, **self.options)[0]

        return _typed_as_results(init, jax.eval_shape(last, init, xs))

    def _last(self, count: Any) -> Any:
        is_reverse = self.options.get("reverse")
        if self.looks.stop is None:
            return 0 if is_reverse else -1
        return jnp.maximum(self.length - count, 0) if is_reverse else jnp.maximum(count - 1, 0)

    def asking(self, init: Any, xs: Any) -> tuple[Any, Any, Any]:
        """Runs the steps as one loop, in which each step asks whether it is time for a look at the clock."""
        looks = self.looks

        def step(state: Any, x: Any) -> tuple[Any, Any]:
            pace, number, carry = state
            carry, y = self.f(carry, x)
            number = number + 1
            # Messages take no part in derivatives: without this, each look would be differentiated as well.
            shown = jax.tree.map(lax.stop_gradient, (carry, y))
            pace = lax.cond(
                number >= pace.next,
                lambda pace: looks.look(pace, number, number, lambda: shown),
                lambda pace: pace,
                pace,
            )
            return (pace, number, carry), y

        def unless_stopped(state: Any, x: Any) -> tuple[Any, Any]:
            ys = jax.eval_shape(step, state, x)[1]
            skip = lambda state, x: (state, jax.tree.map(lambda y: jnp.zeros(y.shape, y.dtype), ys))  # noqa: E731
            done: tuple[Any, Any] = lax.cond(state[0].stopped, skip, step, state, x)
            return done

        first = (looks.first(), _count(0), init)
        body = step if looks.stop is None else unless_stopped
        (_, count, carry), ys = lax.scan(body, first, xs, self.length, **self.options)
        return carry, ys, count


class _Blocks:
    """A scan as two nested loops, and as an asking scan where it is differentiated."""

    def __init__(self, scan: Scan, closed: ClosedJaxpr, trees: Any) -> None:
        self._scan = scan
        self._program, self._constants = compat.constants_to_inputs(closed)
        self._carry_tree, self._out_tree = trees
        self._y_avals = closed.out_avals[self._carry_tree.num_leaves :]

    @classmethod
    def of(cls, scan: Scan, init: Any, xs: Any) -> _Blocks | None:
        """Returns the loops; None for a scan that must stay JAX's own, or that JAX refuses."""
        if not scan.length:
            return None
        x = jax.tree.map(lambda leaf: leaf[0], unused_keys(xs))  # it would use the first key
        try:
            closed, out = jax.make_jaxpr(scan.f, return_shape=True)(init, x)
            carry = out[0]
        except (TypeError, ValueError, IndexError):
            return None  # JAX's own scan raises it again, or is more lenient
        avals = [*closed.in_avals, *closed.out_avals, *map(jax.typeof, closed.consts)]
        if not _keeps_types(closed, init, carry) or not all(map(_is_plain, avals)):
            return None
        return cls(scan, closed, (jax.tree.structure(init), jax.tree.structure(out)))

    def run(self, init: Any, xs: Any) -> tuple[Any, Any, Any]:
        """Runs the scan; returns its last carry, its outputs, and the number of its steps."""
        fast = jax.custom_jvp(self._run)
        fast.defjvp(self._run_differentiated, symbolic_zeros=True)
        carry, ys, count = unused_keys(
            fast(self._constants, [*map(jnp.asarray, jax.tree.leaves(init))], jax.tree.leaves(xs))
        )
        ys = [_typed_as(leaf, aval) for leaf, aval in zip(ys, self._y_avals, strict=True)]
        return jax.tree.unflatten(self._carry_tree, carry), self._ys(ys), count

    def _ys(self, leaves: Sequence[jax.Array]) -> Any:
        tree = jax.tree_util.treedef_children(self._out_tree)[1]
        return jax.tree.unflatten(tree, leaves)

    def _step(
        self, constants: Sequence[jax.Array], carry: Sequence[jax.Array], x: Sequence[Any]
    ) -> tuple[Any, Any]:
        outs = compat.eval_jaxpr(self._program, *constants, *carry, *x)
        return outs[: len(carry)], outs[len(carry) :]

    def _looks(self) -> Looks:
        # Those of the scan, with what is shown of the leaves of its values.
        messages = self._scan.looks.messages
        if messages is None:
            return self._scan.looks

        def postfix(carry: Sequence[jax.Array], y: Sequence[Any]) -> Mapping[str, Any]:
            return messages.postfix(jax.tree.unflatten(self._carry_tree, carry), self._ys(y))

        return self._scan.looks._replace(messages=messages._replace(postfix=postfix))

    def _index(self, step: Any) -> Any:
        return self._scan.length - 1 - step if self._scan.options.get("reverse") else step

    def _run(self, constants: Any, init: Any, xs: Any) -> Any:
        length, looks = self._scan.length, self._looks()

        def one(state: Any) -> Any:
            step, carry, ys = state
            index = self._index(step)
            x = [lax.dynamic_index_in_dim(leaf, index, keepdims=False) for leaf in xs]
            carry, y = self._step(constants, carry, x)
            ys = [
                lax.dynamic_update_index_in_dim(all_y, leaf, index, 0)
                for all_y, leaf in zip(ys, y, strict=True)
            ]
            return step + 1, carry, ys

        def several(state: Any) -> Any:
            pace, step, *carried = state
            end = jnp.minimum(pace.next, length)
            with jax.named_scope(f"{PACED}0"):
                step, carry, ys = lax.while_loop(lambda state: state[0] < end, one, (step, *carried))

            def shown() -> tuple[Any, Any]:
                last = self._index(end - 1)
                return carry, [lax.dynamic_index_in_dim(leaf, last, keepdims=False) for leaf in ys]

            return looks.look(pace, end, step, shown), end, carry, ys

        ys = [
            compat.vary_over(compat.varying_axes([aval]), jnp.zeros((length, *aval.shape), aval.dtype))
            for aval in self._y_avals
        ]
        state = (looks.first(), _count(0), init, ys)
        with jax.named_scope(PACED):
            _, count, carry, ys = lax.while_loop(
                lambda state: state[0].goes_on(state[1] < length), several, state
            )
        return carry, ys, count

    def _run_differentiated(self, primals: Any, tangents: Any) -> Any:
        flat, tree = jax.tree.flatten(primals)
        moving = jax.tree.leaves(tangents, is_leaf=lambda leaf: isinstance(leaf, SymbolicZero))
        moved = [i for i, tangent in enumerate(moving) if not isinstance(tangent, SymbolicZero)]
        looks = self._looks()

        def asking(*values: jax.Array) -> Any:
            whole = list(flat)
            for i, value in zip(moved, values, strict=True):
                whole[i] = value
            constants, init, xs = jax.tree.unflatten(tree, whole)
            step = functools.partial(self._step, constants)
            return self._scan._replace(f=step, looks=looks).asking(init, xs)

        return jax.jvp(asking, [flat[i] for i in moved], [moving[i] for i in moved])


def _typed_as(value: jax.Array, aval: Aval) -> Any:
    # What was stored in a buffer is not weakly typed any more; the outputs of JAX's scan are.
    return compat.weakly_typed(value) if aval.weak_type else value


def _typed_as_results(init: Any, results: Any) -> Any:
    # The first values of a loop with the types that JAX's loop gives them, where they are Python's numbers and its body
    # returns others.
    def typed(leaf: Any, aval: Any) -> Any:
        if jnp.result_type(leaf) == aval.dtype:
            return leaf
        leaf = jnp.asarray(leaf).astype(aval.dtype)
        return compat.weakly_typed(leaf) if aval.weak_type else leaf

    return jax.tree.map(typed, init, results)


def _keeps_types(traced: ClosedJaxpr, init: Any, carry: Any) -> bool:
    # Whether the body of a loop, which was traced, returns a carry of the type that it takes.
    count = len(jax.tree.leaves(init))
    if jax.tree.structure(carry) != jax.tree.structure(init):  # type: ignore[operator]
        return False
    return [*map(_type_of, traced.in_avals[:count])] == [*map(_type_of, traced.out_avals[:count])]


def _type_of(aval: Aval) -> tuple[Any, ...]:
    return aval.shape, aval.dtype, compat.varying_axes([aval])


def _is_plain(aval: Aval) -> bool:
    # Not a reference, a key, or an array whose type says how it is sharded: buffers of those are JAX's business.
    if not isinstance(aval, jax.core.ShapedArray) or not jax.dtypes.issubdtype(aval.dtype, np.generic):
        return False
    return all(axis is None for axis in aval.sharding.spec)

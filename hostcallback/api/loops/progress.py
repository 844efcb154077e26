"""Progress bars: `progress` for any loop, and JAX's loops with a bar of their own."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from hostcallback import _jax_compat as compat
from hostcallback.api.loops.stopping import count_loop, read_stop
from hostcallback.api.watch.watch import watch_nonfinite
from hostcallback.primitives.batched_predicates import any_lane
from hostcallback.primitives.cells import processes_of
from hostcallback.primitives.paced_loops import Looks, Messages, Scan, While, as_one_program, send_if
from hostcallback.primitives.tap import bind_tap
from hostcallback.receiver.sinks.factory import Binding
from hostcallback.receiver.sinks.progress.bars import Phase
from hostcallback.receiver.wire import tap_descriptor
from hostcallback.tracing.leaves import scalar_of
from hostcallback.tracing.source_line import SourceLine, public, user_source_line
from hostcallback.tracing.tap_spec import TapOptions, checked_count

DISPLAYS = ("tqdm", "rich")

Stop: TypeAlias = bool | Literal["processes"]
"""Whether a loop ends on request; "processes": all processes of its program after the same step."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What the bar of a loop shows, for `progress=` of `hcb.scan`, `hcb.fori_loop` and `hcb.while_loop`.

    Attributes:
        desc: the text before the bar. `hcb.taps[desc]` selects the bar's messages; without a text, the name is
            "progress".
        total: number of steps, for a `while_loop`, which does not know its number; the loop's own by default. A wrong
            number does no harm: the bar then ends early, or counts on without one.
        postfix: returns the values to show after the bar, a dict of scalars. Of a scan it is called as
            `postfix(carry, y)`, of the other loops as `postfix(value)`, both with the results of a step. It is traced,
            and runs ten times a second, not in every step. It must not communicate between devices (`lax.psum`).
        unit: what is counted.
        display: "tqdm" (`tqdm.auto`: in notebooks a widget) or "rich".
        leave: whether the bar stays on the screen when its loop has ended. Bars of inner loops never stay.
        initial: number of steps that were done before, traced or not: a loop that goes on at step 700 of 1000 begins
            there with `initial=700`, and `total` is then 1000 by default. The rate is that of this loop's steps.

    Raises:
        TypeError: an attribute has another type.
        ValueError: `display` has another value, or `total` or `initial` is negative.

    Example:
        bar = hcb.Progress("sum", postfix=lambda total, _: {"total": total})
        total, _ = hcb.scan(lambda total, value: (total + value, None), jnp.float32(0), x, progress=bar)
    """

    desc: str | None = None
    total: int | None = None
    postfix: Callable[..., Mapping[str, Any]] | None = None
    unit: str = "it"
    display: str = "tqdm"
    leave: bool = True
    initial: int = 0

    def __post_init__(self) -> None:
        """Checks the attributes, which come from users."""
        for name, value in (("desc", self.desc or ""), ("unit", self.unit)):
            if not isinstance(value, str):
                raise TypeError(
                    f"{name} of a Progress is a text, got {type(value).__name__} {value!r}: hcb.Progress('train')"
                )
        if self.postfix is not None and not callable(self.postfix):
            raise TypeError(
                f"postfix of a Progress is a function that returns a dict, got {self.postfix!r}: as in "
                "lambda carry, y: {'loss': y}"
            )
        for name, count in (("total", self.total), ("initial", self.initial)):
            if name == "initial" or count is not None:
                object.__setattr__(self, name, checked_count(f"{name} of a Progress", count))
        if self.display not in DISPLAYS:
            raise ValueError(f"display is {self.display!r}, expected 'tqdm' or 'rich'")


Progress.__init__ = public(Progress.__init__)  # type: ignore[method-assign]


def chosen(progress: Any) -> Progress | None:
    """Returns the bar for a value of `progress=`; None for no bar.

    Raises:
        TypeError: it is neither a bool, a text, a `Progress` nor None.
        ModuleNotFoundError: the library that shows the bar is missing.
    """
    if progress is None or progress is False:
        return None
    bar = Progress() if progress is True else Progress(progress) if isinstance(progress, str) else progress
    if not isinstance(bar, Progress):
        raise TypeError(
            f"progress is {type(progress).__name__} {progress!r}, expected True, a description, or "
            f"hcb.Progress('train', postfix=...), at {user_source_line()}"
        )
    check_installed(bar.display)
    return bar


def check_installed(display: str) -> None:
    """Raises ModuleNotFoundError with the command to install the library that shows a bar, if it is missing."""
    if importlib.util.find_spec(display) is None:
        extra = "progress" if display == "tqdm" else "top"
        raise ModuleNotFoundError(
            f"a progress bar needs {display}, which is not installed: pip install 'hostcallback[{extra}]'",
            name=display,
        )


def _looks(
    bar: Progress | None,
    total: Any,
    view: Callable[..., tuple[Any, ...]] = lambda *values: values,
    *,
    stop: Stop,
) -> Looks:
    """Returns what one loop does where it looks at the clock.

    Args:
        bar: what its bar shows; None for no bar.
        stop: whether it ends at a request to stop.
        total: number of steps of the loop, traced or not; None if it is not known.
        view: returns the arguments of the user's `postfix`, from the values of the loop.
    """
    line = user_source_line()  # here: the messages may be traced at several lines
    looks = Looks(None)
    if stop:
        stops = functools.partial(read_stop, str(line), processes_of("stop", stop, True, line))
        looks = Looks(None, stops, functools.partial(count_loop, str(line)))
    if bar is None:
        return looks
    if compat.in_partially_manual_region():
        raise NotImplementedError(
            f"the loop at {line} has a bar, and is in a shard_map over some axes of its mesh only, where a program "
            "cannot read a clock yet: pass progress=False, and for a bar call hcb.progress in its body"
        )
    key, shown, before = str(line), bar, bar.initial

    def send(phase: Phase, step: Any, postfix: Mapping[str, Any]) -> None:
        # The sum is traced here: JAX does not tell that the trace around the loop goes on.
        announced = shown.total if shown.total is not None or total is None else total + before
        _emit(phase, step + before, announced, postfix, shown, key)

    def postfix(*values: Any) -> Mapping[str, Any]:
        if shown.postfix is None:
            return {}
        given = without_gradient(view(*values))
        try:
            inspect.signature(shown.postfix).bind(*given)
        except TypeError as error:
            names = "(carry, y)" if len(given) == 2 else "(value)"
            raise TypeError(f"postfix of this loop is called as postfix{names}: {error}, at {line}") from None
        except ValueError:  # it has no signature
            pass
        found = shown.postfix(*given)
        if not isinstance(found, Mapping) or not all(isinstance(key, str) for key in found):
            raise TypeError(
                f"postfix returned {found!r}, expected a dict such as {{'loss': loss}}, at {line}"
            )
        return found

    return looks._replace(messages=Messages(send, postfix))


def _emit(
    phase: Phase,
    step: Any,
    total: Any,
    postfix: Mapping[str, Any],
    progress: Progress,
    key: str,
    *,
    own_rate: float = 0.0,
) -> None:
    """Binds the tap of one message of a bar; see `receiver.sinks.progress.bars.Step`.

    Args:
        phase: of the loop.
        step: number of steps that have run.
        total: number of steps of the loop; None if it is not known.
        postfix: the values behind the bar.
        progress: what the bar shows.
        key: loops with the same key on a device share a bar.
        own_rate: largest number of messages per second; 0 for no limit.
    """
    shown = {name: scalar_of(value) for name, value in postfix.items()}
    arg = np.int32(phase), _count(step), _count(-1 if total is None else total), shown
    params = {
        "key": key, "desc": progress.desc, "unit": progress.unit, "display": progress.display, "leave": progress.leave,
        "own_rate": own_rate,
    }  # fmt: skip
    options = TapOptions(
        progress.desc or "progress", tap_tangents=False, tap_transposed=False, sharding="local",
        kind=tap_descriptor.PROGRESS, params=params,
    )  # fmt: skip
    bind_tap(arg, (), {}, Binding(), identity=("progress", *params.values()), options=options)


def _count(number: Any) -> Any:
    dtype = jax.dtypes.canonicalize_dtype(np.int64)
    return jnp.asarray(number).astype(dtype)


def without_gradient(tree: Any) -> Any:
    """Returns a tree of values through which no gradient flows."""
    return jax.tree.map(jax.lax.stop_gradient, tree)


@public
def scan(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    *,
    progress: bool | str | Progress | None = True,
    watch: bool = False,
    stop: Stop = False,
    **options: Any,
) -> Any:
    """`jax.lax.scan` with a progress bar, which moves ten times a second, however fast the steps are.

    The device looks at a clock, not at a number of steps. The loop costs at most a few percent more for steps of a
    microsecond. The last step is always shown. Works under every transformation. Each device of a `shard_map` has a
    bar, a program that the compiler partitions has one; under `vmap` all elements share one. docs/progress.md has more.

    Args:
        f: as in `jax.lax.scan`.
        init: as in `jax.lax.scan`.
        xs: as in `jax.lax.scan`.
        length: as in `jax.lax.scan`.
        reverse: as in `jax.lax.scan`.
        unroll: as in `jax.lax.scan`. With another value than 1, each step asks whether it is time for a message.
        progress: True, the text before the bar, a `Progress`, or False for `jax.lax.scan` itself.
        watch: whether to find the operation, and the iteration, that made the first NaN or infinity, as
            `watch_nonfinite` does; needs `progress=False`.
        stop: whether the loop ends early at a request to stop (`request_stop`, Ctrl-C and others), after the iteration
            that runs, or, where iterations are short, 0.5 ms later. All devices of the process end after the same one.
            "processes": so do those of all processes of the program, by a collective after each iteration.
        **options: other arguments of `jax.lax.scan`.

    Returns:
        The last carry and the stacked outputs; with `stop` also the number of iterations that ran, a traced integer.
        Then the carry is that of the last iteration that ran, and the outputs of those that did not run are zeros.

    Raises:
        ModuleNotFoundError: tqdm, or the library of `Progress.display`, is not installed.
        TypeError: `progress` is something else; or as `jax.lax.scan`.
        ValueError: `watch` is set together with `progress` or `stop`, or `stop` is something else.
        NotImplementedError: a loop with a bar is in a `shard_map` over some axes of its mesh only. Later: a loop with
            `stop=True` runs on devices of several processes.

    Example:
        total, _ = hcb.scan(lambda total, value: (total + value, None), jnp.float32(0), x, progress="sum")
    """
    if watch:
        if progress is not False and progress is not None:
            raise ValueError(
                f"hcb.scan(watch=True) shows no bar: add progress=False, at {user_source_line()}"
            )
        if stop:
            raise ValueError(
                f"hcb.scan(watch=True) cannot be stopped: leave stop=True out, at {user_source_line()}"
            )
        return watch_nonfinite(lax.scan)(f, init, xs, length, reverse, unroll, **options)
    bar = chosen(progress)
    steps = None if bar is None and not stop else _length(xs, length)
    unknown = options.keys() - inspect.signature(lax.scan).parameters
    if steps is None or unknown or not callable(f):  # with a wrong length, option or function, JAX raises
        return lax.scan(f, init, xs, length, reverse, unroll, **options)
    looks = _looks(bar, steps, stop=stop)
    pairs = _returning_pairs(f, user_source_line())
    settings = {"reverse": reverse, "unroll": unroll, **options}

    def jaxs(init: Any, xs: Any) -> Any:
        return lax.scan(pairs, init, xs, length, **settings)

    carry, ys, count = Scan(pairs, steps, looks, settings, jaxs).run(init, xs)
    return (carry, ys, count) if stop else (carry, ys)


def _returning_pairs(f: Callable[..., Any], line: SourceLine) -> Callable[..., tuple[Any, Any]]:
    @functools.wraps(f)
    def step(carry: Any, x: Any) -> tuple[Any, Any]:
        out = f(carry, x)
        if not isinstance(out, tuple | list) or len(out) != 2:
            raise TypeError(
                f"the body of hcb.scan returned {out!r:.80}, expected a pair (carry, y), at {line}"
            )
        carry, y = out
        return carry, y

    return step


def _length(xs: Any, length: int | None) -> int | None:
    try:
        lengths = {np.shape(leaf)[0] for leaf in jax.tree.leaves(xs)}
        lengths |= set() if length is None else {operator.index(length)}
    except (TypeError, IndexError, ValueError):
        return None
    return lengths.pop() if len(lengths) == 1 else None


@public
def fori_loop(
    lower: Any,
    upper: Any,
    body_fun: Callable[[Any, Any], Any],
    init_val: Any,
    *,
    unroll: int | bool | None = None,
    progress: bool | str | Progress | None = True,
    stop: Stop = False,
) -> Any:
    """`jax.lax.fori_loop` with a progress bar; see `scan`.

    The bounds may be traced. Under `vmap`, elements with different bounds have a bar each.

    Args:
        lower: as in `jax.lax.fori_loop`.
        upper: as in `jax.lax.fori_loop`.
        body_fun: as in `jax.lax.fori_loop`.
        init_val: as in `jax.lax.fori_loop`.
        unroll: as in `jax.lax.fori_loop`.
        progress: as in `scan`.
        stop: as in `scan`.

    Returns:
        The value after the last step; with `stop` also the number of steps that ran.

    Raises:
        ModuleNotFoundError: as `scan`.
        TypeError: as `scan`; or as `jax.lax.fori_loop`.
        NotImplementedError: as `scan`.

    Example:
        x = hcb.fori_loop(0, 1000, lambda i, x: jnp.cos(x), x, progress="iterate")
    """
    bar = chosen(progress)
    if bar is None and not stop:
        return lax.fori_loop(lower, upper, body_fun, init_val, unroll=unroll)
    with jax.disable_jit(False):  # JAX raises what it says of wrong bounds
        jax.eval_shape(lambda: lax.fori_loop(lower, upper, lambda i, value: value, 0, unroll=unroll))
    try:
        first, last = int(lower), int(upper)
    except (TypeError, jax.errors.JAXTypeError, compat.InconclusiveDimensionOperation):
        loop = functools.partial(_traced_fori_loop, body_fun=body_fun, bar=bar, stop=stop)
        value, count = as_one_program(loop, lower, upper, init_val)
        return (value, count) if stop else value

    def step(carry: Any, _: Any) -> Any:
        index, value = carry
        return (index + 1, body_fun(index, value)), None

    steps = max(last - first, 0)
    looks = _looks(bar, steps, view=lambda carry, y: (carry[1],), stop=stop)

    def jaxs(init: Any, _: Any) -> Any:
        return lax.fori_loop(lower, upper, body_fun, init[1], unroll=unroll)

    def run(value: Any) -> Any:
        # The number of a step is weakly typed, as JAX's: `i * x` has the type of `x`.
        made = Scan(step, steps, looks, {"unroll": unroll or 1}, jaxs)
        (_, value), _, count = made.run((first, value), None)
        return value, count

    value, count = as_one_program(run, init_val)
    return (value, count) if stop else value


def _traced_fori_loop(
    lower: Any,
    upper: Any,
    init_val: Any,
    *,
    body_fun: Callable[[Any, Any], Any],
    bar: Progress | None,
    stop: Stop,
) -> Any:
    dtype = jnp.result_type(lower, upper)
    # Not with the type as an argument: a weakly typed bound stays one, as JAX's.
    lower, upper = (
        jnp.asarray(b) if jnp.result_type(b) == dtype else jnp.asarray(b, dtype) for b in (lower, upper)
    )
    looks = _looks(bar, jnp.maximum(upper - lower, 0), view=lambda carry: (carry[1],), stop=stop)

    def step(carry: Any) -> Any:
        index, value = carry
        return index + 1, body_fun(index, value)

    def jaxs(init: Any) -> Any:
        return lax.fori_loop(lower, upper, body_fun, init[1])

    (_, value), count = While(lambda carry: carry[0] < upper, step, looks, jaxs).run((lower, init_val))
    return value, count


@public
def while_loop(
    cond_fun: Callable[[Any], Any],
    body_fun: Callable[[Any], Any],
    init_val: Any,
    *,
    progress: bool | str | Progress | None = True,
    stop: Stop = False,
) -> Any:
    """`jax.lax.while_loop` with a progress bar that counts steps; see `scan`.

    The bar has no end unless `Progress(total=...)` gives one. Under `vmap`, elements that end at different steps have a
    bar each.

    Args:
        cond_fun: as in `jax.lax.while_loop`.
        body_fun: as in `jax.lax.while_loop`.
        init_val: as in `jax.lax.while_loop`.
        progress: as in `scan`.
        stop: as in `scan`.

    Returns:
        The value for which `cond_fun` is false; with `stop` the last value, and the number of steps that ran.

    Raises:
        ModuleNotFoundError: as `scan`.
        TypeError: as `scan`; or as `jax.lax.while_loop`.
        NotImplementedError: as `scan`.

    Example:
        least = hcb.while_loop(lambda value: value > 1e-6, lambda value: value / 2, 1.0, progress="halve")
    """
    bar = chosen(progress)
    if bar is None and not stop:
        return lax.while_loop(cond_fun, body_fun, init_val)

    def jaxs(init: Any) -> Any:
        return lax.while_loop(cond_fun, body_fun, init)

    value, count = While(cond_fun, body_fun, _looks(bar, None, stop=stop), jaxs).run(init_val)
    return (value, count) if stop else value


RATE = 10.0
"""Messages per second."""


@public
def progress(total: Any, *, step: Any, desc: str | None = None, unit: str = "it", **postfix: Any) -> None:
    """Moves a progress bar, from any traced loop.

    Sends at most ten messages a second, and the one of the last step always. Each step asks the host whether it is
    time. `hcb.scan` and the like cost less, and show their last step whatever its number. Calls of one
    line share a bar.

    Args:
        total: number of steps, traced or not; None if it is not known. If it is wrong, or None, the bar ends at the
            next `barrier_wait`, and shows the last step a tenth of a second later.
        step: the number of this step, an integer, from 0 on.
        desc: the text before the bar.
        unit: what is counted.
        **postfix: values to show behind the bar, by name: scalars, traced or not.

    Raises:
        TypeError: `step` or `total` is no integer, or `desc` no text.
        ValueError: `total` is negative.
        ModuleNotFoundError: tqdm is not installed.

    Example:
        def body(i, x):
            hcb.progress(1000, step=i, desc="iterate", x=x)
            return jnp.cos(x)

        x = jax.lax.fori_loop(0, 1000, body, 1.0)
    """
    bar = Progress(desc, unit=unit)
    check_installed(bar.display)
    if total is not None:
        total = checked_count("total of hcb.progress", total)
    step = checked_count("step of hcb.progress", step)
    key, shown = str(user_source_line()), without_gradient(postfix)
    done = jnp.asarray(step) + 1
    _emit(Phase.UPDATE, done, total, shown, bar, key, own_rate=RATE)
    if total is not None:
        # Elements of a vmap may be at different steps: a condition per element would send in each step.
        send_if(any_lane(done == total), lambda: _emit(Phase.END, done, total, shown, bar, key))

"""`metrics`: sends named values of a step to the writers of a receiver."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hostcallback.primitives.tap import bind_tap
from hostcallback.receiver.messages import NAME as STEP
from hostcallback.receiver.sinks.factory import Binding
from hostcallback.receiver.sinks.metric_writers import reduction
from hostcallback.receiver.wire import tap_descriptor
from hostcallback.tracing import arguments, leaves, tap_spec
from hostcallback.tracing.source_line import place_name, public, user_source_line

MAX_BINS = 10_000
CHANNELS = (1, 3, 4)


@dataclass(frozen=True, slots=True)
class MetricForm:
    """A value of `metrics` with its form. Made by `histogram`, `image` and `text`.

    Attributes:
        form: "histogram", "image" or "text".
        arrays: what is sent.
        params: plain data for the receiver.
    """

    form: str
    arrays: Any
    params: tuple[Any, ...] = ()


@public
def histogram(values: Any, *, bins: int = reduction.BINS) -> MetricForm:
    """Returns a histogram for `metrics`: of all elements, of all vmap lanes and devices, and of `every` steps.

    The array is sent whole, and the receiver or the writer counts its elements. NaN and infinite elements are left out.

    Args:
        values: an array of any shape and a real dtype.
        bins: number of bins, 1 to 10,000. Writers that choose bins themselves (wandb, aim) do not use it.

    Raises:
        TypeError: `values` is not an array of real numbers.
        ValueError: `bins` is out of range.

    Example:
        hcb.metrics({"loss": loss, "grads": hcb.histogram(grads)}, step=step)
    """
    if type(bins) is not int or not 1 <= bins <= MAX_BINS:
        raise ValueError(
            f"hcb.histogram: bins is {bins!r}, expected a whole number from 1 to {MAX_BINS}, at {user_source_line()}"
        )
    _real("hcb.histogram", values)
    return MetricForm(reduction.HISTOGRAM, values, (bins,))


@public
def image(pixels: Any) -> MetricForm:
    """Marks a value as an image for `metrics`. Of several vmap lanes, steps or devices only the last image is kept.

    Args:
        pixels: shape (height, width) or (height, width, channels), with 1, 3 or 4 channels. Integers are from 0 to
            255, floating-point numbers from 0 to 1; what is beyond is clipped.

    Raises:
        TypeError: `pixels` is not an array of real numbers.
        ValueError: it has another shape.

    Example:
        hcb.metrics({"sample": hcb.image(decoded[0])}, step=step)
    """
    _real("hcb.image", pixels)
    shape = np.shape(pixels)
    if len(shape) not in (2, 3) or (len(shape) == 3 and shape[2] not in CHANNELS):
        raise ValueError(
            f"hcb.image: pixels has the shape {shape}, expected (height, width) or (height, width, channels) with 1, 3 "
            f"or 4 channels; jnp.moveaxis(x, 0, -1) moves leading channels, at {user_source_line()}"
        )
    return MetricForm(reduction.IMAGE, pixels)


@public
def text(fmt: str, *args: Any) -> MetricForm:
    """Makes a text for `metrics`. Of several vmap lanes, steps or devices only the last text is kept.

    Args:
        fmt: a text, or a format string as of `hcb.print`.
        *args: arrays or numbers for its placeholders, traced or not.

    Raises:
        TypeError: `fmt` is not a text.
        ValueError: an argument has no placeholder.
        IndexError: a placeholder has no argument.

    Example:
        hcb.metrics({"note": hcb.text("best so far: {:.3f}", best)}, step=step)
    """
    if not isinstance(fmt, str):
        raise TypeError(
            f"hcb.text takes a text or a format string, got {type(fmt).__name__} {fmt!r:.80}: hcb.text('{{}}', x), at "
            f"{user_source_line()}"
        )
    if args:
        args, _ = arguments.with_scalars(fmt, args, {})
        arguments.check_format("hcb.text", fmt, args, {})
        return MetricForm(reduction.TEXT, list(args), (fmt,))
    return MetricForm(reduction.TEXT, [], (fmt.replace("{", "{{").replace("}", "}}"),))


def _real(what: str, value: Any) -> None:
    if not is_real(value):
        raise TypeError(
            f"{what} takes an array of real numbers, got {type(value).__name__} {value!r:.80}, at "
            f"{user_source_line()}"
        )


def is_real(value: Any) -> bool:
    """Whether a value is a number or an array, traced or not, of a real dtype."""
    if isinstance(value, bool | int | float):
        return True
    dtype = getattr(value, "dtype", None)
    if dtype is None or not hasattr(value, "shape"):
        return False
    return bool(dtype == np.bool_ or jnp.issubdtype(dtype, np.floating) or jnp.issubdtype(dtype, np.integer))


@public
def metrics(
    values: Mapping[str, Any],
    *,
    step: Any = None,
    reduce: str | Mapping[str, str] = reduction.DEFAULT_REDUCTION,
    every: int = 1,
    ordered: bool = True,
    name: str | None = None,
    processes: str | None = None,
) -> None:
    """Sends named values of one step, which `outfeed_receiver(writers=[...])` writes. Never blocks the device.

    Works inside and outside of traced code, like `id_tap`. Without a receiver that has writers nothing is written;
    recorders, forwarders and `capture` get the message in any case. Writers run on threads of their own.

    A record is what the writers get. It covers one step, or `every` steps. All vmap lanes and all devices of this
    process that send the same step are reduced to one value, once, on the receiver. Under jvp and grad the primals are
    sent, and no tangents.

    Args:
        values: a dict of values by name. Dicts and other pytrees in it have names such as `grads/w`. A value is a
            number or a traced scalar of a real dtype, `hcb.histogram(x)`, `hcb.image(x)`, `hcb.text(...)`, or a text.
        step: the step, an integer, traced or not. Without it, the messages of each device are numbered from 0.
        reduce: how steps, lanes and devices become one number: "mean" (the default), "last" (the last lane of the last
            device), "max", "min", "sum", "histogram" (the numbers are written as a histogram), or "each" (lanes and
            devices are metrics of their own, such as `loss/3`, of the last step); or a dict of these by name, in which
            the others get "mean". NaN stays NaN.
        every: number of steps that a record covers: steps k*every to k*every + every - 1. It has the last of them as
            its step.
        ordered: as in `id_tap`.
        name: name of the tap, in rules and logs; by default that of its line, as in `metrics@train_step:42`. It is no
            part of the names of metrics.
        processes: as in `id_tap`.

    Raises:
        TypeError: `values` is not a mapping, or a value has no real dtype.
        ValueError: a value is an array that has dimensions, `reduce` or `every` has another value, a name is used
            twice, or `step` is given twice.

    Example:
        def train_step(state, batch):
            ...
            hcb.metrics({"loss": loss, "acc": acc}, step=state.step)

        with hcb.outfeed_receiver(writers=[hcb.tensorboard("runs/1"), hcb.csv("m.csv")]):
            train()
    """
    if not isinstance(values, Mapping):
        raise TypeError(
            f"hcb.metrics takes a dict of values by name, got {type(values).__name__}: hcb.metrics({{'loss': loss}}), "
            f"at {user_source_line()}"
        )
    if type(every) is not int or not 1 <= every < 2**31:
        raise ValueError(
            f"hcb.metrics: every is {every!r}, expected a whole number of steps, 1 or more, at {user_source_line()}"
        )
    sent, forms = _split(values)
    if step is not None:
        if STEP in sent or STEP in forms:
            raise ValueError(
                f"hcb.metrics: the step is given twice, as step= and as a value named 'step', at {user_source_line()}"
            )
        sent[STEP] = _number_of(step)
    if STEP in sent:
        tap_spec.check_step("hcb.metrics", sent[STEP])
    params = {"batched": True, "forms": forms, "reduce": _reductions(reduce, {*sent, *forms}), "every": every}
    options = tap_spec.TapOptions(
        tap_spec.name_or(name, place_name, "metrics"),
        ordered,
        tap_tangents=False,
        kind=tap_descriptor.METRICS,
        params=params,
        processes=processes,
    )
    bind_tap(sent, (), {}, Binding(), identity=("metrics", repr(params)), options=options)


def _split(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    # The arrays to send, by name, and the forms of those that are no scalars.
    found, _ = jax.tree_util.tree_flatten_with_path(
        dict(values), is_leaf=lambda leaf: isinstance(leaf, MetricForm) or leaves.stands_for_scalar(leaf)
    )
    sent: dict[str, Any] = {}
    forms: dict[str, list[Any]] = {}
    for name, value in values.items():
        if value is None:
            raise TypeError(
                f"hcb.metrics: {name!r} is None, expected a value: leave the name out, at {user_source_line()}"
            )
    for path, leaf in found:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        value = text(leaf) if isinstance(leaf, str) else _number_of(leaf)
        if name in sent or name in forms:
            raise ValueError(f"hcb.metrics: two values have the name {name!r}, at {user_source_line()}")
        if not isinstance(value, MetricForm):
            _check_scalar(name, value)
            sent[name] = value
            continue
        forms[name] = [value.form, *value.params]
        if not isinstance(value.arrays, list) or value.arrays:
            sent[name] = value.arrays
    return sent, forms


def _number_of(value: Any) -> Any:
    # A member of an enum of numbers would stay on the host, as other enums do.
    if isinstance(value, enum.Enum) and isinstance(value, int | float):
        return int(value) if isinstance(value, int) else float(value)
    return leaves.scalar_of(value)


def _check_scalar(name: str, value: Any) -> None:
    where = f"at {user_source_line()}"
    if not is_real(value):
        raise TypeError(
            f"hcb.metrics: {name!r} is {type(value).__name__} {value!r:.80}, expected a real number, hcb.histogram(x), "
            f"hcb.image(x), hcb.text(...) or a text, {where}"
        )
    if np.shape(value):
        raise ValueError(
            f"hcb.metrics: {name!r} has the shape {np.shape(value)}, expected a scalar: take hcb.histogram(x), "
            f"hcb.image(x), or reduce it first, such as x.mean(), {where}"
        )


def _reductions(reduce: str | Mapping[str, str], names: set[str]) -> dict[str, str]:
    wanted = {"": reduce} if isinstance(reduce, str) else dict(reduce)
    for name, how in wanted.items():
        if how not in reduction.REDUCTIONS:
            raise ValueError(
                f"hcb.metrics: reduce is {how!r}, expected one of {', '.join(map(repr, reduction.REDUCTIONS))}, at "
                f"{user_source_line()}"
            )
        if name and name not in names:
            raise ValueError(
                f"hcb.metrics: reduce names {name!r}, expected one of {', '.join(sorted(names))}, at "
                f"{user_source_line()}"
            )
    return wanted

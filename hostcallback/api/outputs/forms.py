"""The forms of metrics that are no numbers: `histogram`, `image` and `text`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from hostcallback.api.public import public
from hostcallback.receiver.sinks.metric_writers.tap_layout import BINS, HISTOGRAM, IMAGE, TEXT
from hostcallback.tracing.format_check import check_format
from hostcallback.tracing.source_line import user_source_line

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
def histogram(values: Any, *, bins: int = BINS) -> MetricForm:
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
    return MetricForm(HISTOGRAM, values, (bins,))


@public
def image(pixels: Any) -> MetricForm:
    """Returns an image for `metrics`. Of several vmap lanes, steps or devices the last one's is kept.

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
    return MetricForm(IMAGE, pixels)


@public
def text(fmt: str, *args: Any) -> MetricForm:
    """Returns a text for `metrics`. Of several vmap lanes, steps or devices the last one's is kept.

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
        check_format("hcb.text", fmt, args, {})
        return MetricForm(TEXT, list(args), (fmt,))
    return MetricForm(TEXT, [], (fmt.replace("{", "{{").replace("}", "}}"),))


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

"""Statistics of a value, reduced on its device; the message with all statistics of one run, and its table."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hostcallback import _jax_compat as compat
from hostcallback.api.outputs.metrics import metrics
from hostcallback.api.tap import id_tap
from hostcallback.primitives import device_ops
from hostcallback.tracing.source_line import user_source_line

MAX_METRICS = 128
"""Number of iterations or devices of which each is a separate metric."""


# ---- Statistics ------------------------------------------------------------------------------------------------------

HISTOGRAM_EXPONENTS = range(-40, 24)
"""The bins of `histogram`: bin i counts magnitudes from 2**(i - 40) up to twice that; the outer bins have the rest."""

DEFAULT = device_ops.STATISTICS
STATISTICS = (*DEFAULT, "histogram")
SHARES = "shares"
"""The name of the statistics of a value's shares, in records that are not sent yet."""


def check_statistics(what: Any) -> tuple[str, ...] | None:
    """Returns the names of statistics; None for the value itself.

    Raises:
        ValueError: a name is none of a statistic.
        TypeError: `what` is neither a text nor a sequence of texts.
    """
    if isinstance(what, str):
        if what == "value":
            return None
        what = DEFAULT if what == "statistics" else (what,)
    is_list = isinstance(what, Sequence) and all(isinstance(name, str) for name in what) and what
    wrong = [name for name in what if name not in STATISTICS] if is_list else [what]
    if wrong:
        raise (ValueError if is_list else TypeError)(
            f"hcb.observe: what has {wrong[0]!r}, expected 'value', 'statistics', 'time', or a list of "
            f"{', '.join(STATISTICS)}, at {user_source_line()}"
        )
    return tuple(dict.fromkeys(what))


def can_measure(aval: compat.Aval) -> bool:
    """Whether a value of that type is an array of numbers that has elements."""
    dtype = getattr(aval, "dtype", None)
    if not isinstance(aval, jax.core.ShapedArray) or dtype is None:
        return False
    real = jnp.issubdtype(dtype, np.number) or jnp.issubdtype(dtype, np.bool_)
    return bool(real) and 0 not in aval.shape


def measure(value: jax.Array, names: tuple[str, ...] | None, devices: int) -> Any:
    """Returns the record of a value: itself, or a dict of float32 scalars (the histogram is int32 of 64 bins).

    Of a value that the compiler divides among devices it has, under `SHARES`, the statistics of their shares; `merged`
    makes scalars of those of all values by one exchange among the devices.
    """
    value = jax.lax.stop_gradient(value)
    if names is None:
        return value
    if jnp.issubdtype(value.dtype, np.complexfloating):
        value = jnp.abs(value)
    if value.dtype not in (np.float32, np.float64):
        value = value.astype(np.float32)
    record: OrderedDict[str, Any] = OrderedDict()
    if set(names) & set(DEFAULT):
        if devices > 1 and not compat.in_manual_region():
            record[SHARES] = device_ops.share_statistics(value, devices)
        else:
            measured = device_ops.statistics(value)
            record.update((name, measured[name]) for name in names if name in measured)
    if "histogram" in names:
        record["histogram"] = compat.without_sharding_types(_histogram, value)
    return _in_order(record, names)


def merged(records: Mapping[str, Any], names: tuple[str, ...] | None) -> OrderedDict[str, Any]:
    """Returns the records with the statistics of whole values in place of those of shares."""
    divided = [label for label, one in records.items() if isinstance(one, dict) and SHARES in one]
    found = device_ops.merged_statistics([records[label][SHARES] for label in divided]) if divided else []
    wholes = dict(zip(divided, found, strict=True))
    result: OrderedDict[str, Any] = OrderedDict(records)
    for label, measured in wholes.items():
        others = {name: value for name, value in records[label].items() if name != SHARES}
        result[label] = _in_order(
            {name: measured[name] for name in names or () if name in measured} | others, names
        )
    return result


def _in_order(record: Mapping[str, Any], names: tuple[str, ...] | None) -> OrderedDict[str, Any]:
    # As they were asked for; what else there is, such as a ratio, comes last.
    order = [name for name in names or () if name in record]
    return OrderedDict((name, record[name]) for name in (*order, *(n for n in record if n not in order)))


def _histogram(value: jax.Array) -> jax.Array:
    _, exponent = jnp.frexp(jnp.where(jnp.isfinite(value), value, 0))
    low, count = HISTOGRAM_EXPONENTS.start, len(HISTOGRAM_EXPONENTS)
    bins = jnp.clip(exponent - 1 - low, 0, count - 1)
    counted = jnp.isfinite(value) & (value != 0)
    return jnp.zeros(count, np.int32).at[bins.ravel()].add(counted.ravel().astype(np.int32))


# ---- Messages --------------------------------------------------------------------------------------------------------


def sender_of(
    tap_func: Callable[..., Any] | None, name: str, ordered: bool, names: tuple[str, ...] | None
) -> Callable[[Mapping[str, Any]], None]:
    """Returns a function that sends records, which `measure` made with these names, in one message."""

    def send(records: Mapping[str, Any]) -> None:
        message = merged(records, names)
        if tap_func is metrics:
            metrics(dict(_metrics(message)), name=name, ordered=ordered)
            return
        id_tap(tap_func or print_table, message, name=name, ordered=ordered, tap_tangents=False)

    return send


def _metrics(records: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for label, record in records.items():
        values = record if isinstance(record, dict) else {"": record}
        for statistic, value in values.items():
            name = f"{label}/{statistic}" if statistic else label
            if value.size > MAX_METRICS:
                raise ValueError(
                    f"hcb.observe: {label!r} has {value.size} values in one run, one for each iteration or element, "
                    f"and tap_func=hcb.metrics takes at most {MAX_METRICS}: observe the body of the loop, or take "
                    f"another tap_func, at {user_source_line()}"
                )
            for index in np.ndindex(value.shape):
                yield "/".join((name, *map(str, index))), value[index]


# ---- The table -------------------------------------------------------------------------------------------------------


def print_table(records: Mapping[str, Any]) -> None:
    """Prints records, which is what `observe` does by default."""
    print(table(records))


def table(records: Mapping[str, Any]) -> str:
    """Returns records as a table, one row for each value, or for each iteration, device and lane of it."""
    rows: list[tuple[str, dict[str, Any]]] = []
    plain: list[str] = []
    for label, record in records.items():
        if isinstance(record, Mapping):
            rows.extend(_rows(label, record))
        else:
            plain.append(f"{label}: {record}")
    if not rows:
        return "\n".join(plain)
    columns = list(rows[0][1])
    width = max(len("value"), *(len(label) for label, _ in rows))
    lines = [" ".join(("value".ljust(width), *(name.rjust(10) for name in columns)))]
    for label, row in rows:
        lines.append(" ".join((label.ljust(width), *(f"{row[name]:10.4g}" for name in columns))))
    return "\n".join((*lines, *plain))


def _rows(label: str, record: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    scalars = {name: np.asarray(value) for name, value in record.items() if name != "histogram"}
    shape = next(iter(scalars.values())).shape if scalars else ()
    for index in np.ndindex(shape):
        where = f"[{','.join(map(str, index))}]" if index else ""
        yield label + where, {name: value[index] for name, value in scalars.items()}

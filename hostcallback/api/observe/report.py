"""Sends the records of one run of an observed function as one message, and prints them as a table."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from hostcallback import _jax_compat as compat
from hostcallback.api.outputs.metrics import metrics
from hostcallback.api.tap import id_tap
from hostcallback.tracing.source_line import user_source_line

MAX_METRICS = 128
"""Number of iterations or devices of which each is a separate metric."""


def sender_of(
    tap_func: Callable[..., Any] | None, name: str, ordered: bool
) -> Callable[[Mapping[str, Any]], None]:
    """Returns a function that sends records in one message."""

    def send(records: Mapping[str, Any]) -> None:
        if tap_func is metrics:
            metrics(dict(_metrics(records)), name=name, ordered=ordered)
            return
        message = OrderedDict(records)
        id_tap(tap_func or print_table, message, name=name, ordered=ordered, tap_tangents=False)

    return send


def _metrics(records: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for label, record in records.items():
        values = record if isinstance(record, dict) else {"": record}
        for statistic, value in values.items():
            name = f"{label}/{statistic}" if statistic else label
            if statistic == "histogram":
                raise ValueError(
                    f"hcb.observe: a histogram cannot be sent by tap_func=hcb.metrics: take another tap_func, or leave "
                    f"'histogram' out of what, at {user_source_line()}"
                )
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


# ---- An identity whose cotangent is sent -----------------------------------------------------------------------------

observed_cotangent_p = Primitive("observe_cotangent")


def send_cotangent(value: Any, report: Callable[[Any], None]) -> Any:
    """Returns `value`. Under differentiation by code around the observed function, `report` gets its cotangent."""
    return observed_cotangent_p.bind(value, report=report)


def _jvp(primals: Any, tangents: Any, *, report: Any) -> Any:
    tangent = tangents[0]
    if type(tangent) is not ad.Zero:
        tangent = observed_cotangent_p.bind(tangent, report=report)
    return primals[0], tangent


def _transpose(cotangent: Any, value: Any, *, report: Any) -> Any:
    if type(cotangent) is not ad.Zero:
        report(cotangent)
    return [cotangent]


observed_cotangent_p.def_abstract_eval(lambda value, *, report: value)
observed_cotangent_p.def_impl(lambda value, *, report: value)
ad.primitive_jvps[observed_cotangent_p] = _jvp
ad.primitive_transposes[observed_cotangent_p] = _transpose
batching.primitive_batchers[observed_cotangent_p] = lambda args, dims, *, report: (
    observed_cotangent_p.bind(args[0], report=report),
    dims[0],
)
compat.register_lowering(observed_cotangent_p, lambda ctx, value, *, report: [value])

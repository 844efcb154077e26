"""A model of a collector and its hosts, fitted to a few numbers of hosts: what more of them take."""

from __future__ import annotations

import bisect
import math
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from tools.scale.senders import LOADS, Measured

HIGHEST_SHARE = 0.6
"""Share of a core that one collector is planned for: beyond, acknowledgements wait for each other."""


class Model(NamedTuple):
    """The constants, by least squares.

    Attributes:
        fitted: numbers of hosts that they were fitted to.
        collector: processor time of a collector in ms a second: constant, for each slice, for each MiB.
        hosts: processor time of all hosts together: for each host, each slice.
        resident: resident memory of a collector in MiB: constant, for each host, for each MiB of a write of each host.
        files: open files of a collector: constant, for each host.
        stream_bytes: bytes of a stream: of each write, of each scalar in it.
        wire_factor: bytes over the network for each byte of streams, if writes are small.
    """

    fitted: tuple[int, ...]
    collector: tuple[float, ...]
    hosts: tuple[float, ...]
    resident: tuple[float, ...]
    files: tuple[float, ...]
    stream_bytes: tuple[float, ...]
    wire_factor: float

    def predict(self, hosts: int, per_second: float, scalars: int) -> Predicted:
        """What hosts take of which each writes `scalars` at once, `per_second` times, if nothing is saturated."""
        slices = hosts * per_second
        write_mib = _sum(self.stream_bytes, (1.0, scalars)) / 2**20 if scalars else 0.0
        mib = slices * write_mib
        return Predicted(
            slices, mib, _sum(self.collector, (1.0, slices, mib)), _sum(self.hosts, (hosts, slices)),
            _sum(self.resident, (1.0, hosts, hosts * write_mib)), _sum(self.files, (1.0, hosts)),
        )  # fmt: skip

    @property
    def most_slices(self) -> float:
        """Small slices a second that take one core of the collector."""
        return (1e3 - self.collector[0]) / self.collector[1] if self.collector[1] > 0 else math.inf

    def most_hosts(self, per_second: float, scalars: int) -> int:
        """Largest number of hosts with that load whose collector, and this machine, have processors for it."""
        cores = os.cpu_count() or 1

        def fits(hosts: int) -> bool:
            found = self.predict(hosts, per_second, scalars)
            return found.collector_ms <= 1e3 and found.collector_ms + found.hosts_ms <= cores * 1e3

        return bisect.bisect_left(range(1, 100_000), True, key=lambda hosts: not fits(hosts))

    def text(self) -> str:
        """The equations."""
        c, h, r, f, b = self.collector, self.hosts, self.resident, self.files, self.stream_bytes
        return (
            "```\n"
            f"stream, bytes a write    = {b[0]:.0f} + {b[1]:.1f} * scalars\n"
            f"collector, ms a second   = {c[0]:.1f} + {c[1]:.3f} * slices/s + {c[2]:.2f} * MiB/s\n"
            f"all hosts, ms a second   = {h[0]:.2f} * hosts + {h[1]:.3f} * slices/s\n"
            f"collector, resident MiB  = {r[0]:.0f} + {r[1]:.3f} * hosts + {r[2]:.1f} * hosts * MiB of a write\n"
            f"collector, open files    = {f[0]:.0f} + {f[1]:.2f} * hosts\n"
            f"network, bytes           = {self.wire_factor:.2f} * bytes of the stream, for small writes\n"
            "```\n"
        )


class Predicted(NamedTuple):
    """What the model says. See `Measured`."""

    slices_sec: float
    mib_sec: float
    collector_ms: float
    hosts_ms: float
    resident_mib: float
    files: float


def _sum(constants: Sequence[float], amounts: Sequence[float]) -> float:
    return float(np.dot(constants, amounts))


def fit(found: Sequence[Measured], fitted: Sequence[int]) -> Model:
    """Fits the constants to the measurements of some numbers of hosts, under all loads that saturated nothing."""
    rows = [row for row in found if row.hosts in fitted and not row.is_saturated]
    writing = [row for row in rows if row.messages]
    if not writing:
        raise ValueError(
            f"everything was saturated at {fitted} hosts, expected numbers that this machine can run"
        )

    def constants(
        of: Callable[[Measured], float],
        *amounts: Callable[[Measured], float],
        among: Sequence[Measured] = rows,
    ) -> tuple[float, ...]:
        matrix = [[amount(row) for amount in amounts] for row in among]
        solution = np.linalg.lstsq(np.array(matrix), np.array([of(row) for row in among]), rcond=None)[0]
        return tuple(float(number) for number in solution)

    def one(row: Measured) -> float:
        return 1.0

    def hosts(row: Measured) -> float:
        return row.hosts

    def slices(row: Measured) -> float:
        return row.slices_sec

    def mib(row: Measured) -> float:
        return row.mib_sec

    def writes_mib(row: Measured) -> float:
        return row.hosts * row.file_bytes * LOADS[row.load][1] / 2**20

    small = [row for row in writing if row.load == "small"]
    return Model(
        fitted=tuple(fitted),
        collector=constants(lambda row: row.collector_ms, one, slices, mib),
        hosts=constants(lambda row: row.hosts_ms, hosts, slices),
        resident=constants(lambda row: row.resident_mib, one, hosts, writes_mib),
        files=constants(lambda row: row.files, one, hosts),
        stream_bytes=constants(
            lambda row: row.file_bytes * LOADS[row.load][1],
            one,
            lambda row: LOADS[row.load][1],
            among=writing,
        ),
        wire_factor=float(np.mean([row.wire_bytes / row.file_bytes for row in small])),
    )


def comparison(found: Sequence[Measured], model: Model) -> str:
    """Prediction against measurement, as a table."""
    lines = [
        "| hosts | load | slices/s: predicted | measured | collector, ms/s: predicted | measured | all hosts, ms/s: "
        "predicted | measured | collector, MiB: predicted | measured | open files: predicted | measured | |",
        "|" + "---|" * 13,
    ]
    for row in found:
        said = model.predict(row.hosts, *LOADS[row.load])
        was_fitted = row.hosts in model.fitted
        remark = "fitted" if was_fitted else _verdict(said, row)
        cells = [
            row.hosts, row.load, f"{said.slices_sec:,.0f}", f"{row.slices_sec:,.0f}", f"{said.collector_ms:.0f}",
            f"{row.collector_ms:.0f}", f"{said.hosts_ms:.0f}", f"{row.hosts_ms:.0f}", f"{said.resident_mib:.0f}",
            f"{row.resident_mib:.0f}", f"{said.files:.0f}", row.files, remark,
        ]  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def _verdict(said: Predicted, row: Measured) -> str:
    if row.is_saturated:
        return "saturated"
    return f"collector {row.collector_ms / said.collector_ms - 1:+.0%}" if row.messages else ""


def plan(models: Sequence[Model], hosts: int, scalars: int, per_second: float) -> str:
    """What many hosts need by each of some models, as a table, with a write for each step."""
    columns = [_needs(model, hosts, scalars, per_second) for model in models]
    heads = [f"fitted to {', '.join(map(str, model.fitted))}" for model in models]
    lines = [f"| | {' | '.join(heads)} |", "|---" * (1 + len(models)) + "|"]
    for name in columns[0]:
        lines.append(f"| {name} | {' | '.join(needs[name] for needs in columns)} |")
    return "\n".join(lines) + "\n"


def _needs(model: Model, hosts: int, scalars: int, per_second: float) -> dict[str, str]:
    found = model.predict(hosts, per_second, scalars)
    day_tb = found.mib_sec * 2**20 * 86_400 / 1e12
    collectors = max(1, math.ceil(found.collector_ms / (1e3 * HIGHEST_SHARE)))
    each = model.predict(math.ceil(hosts / collectors), per_second, scalars)
    return {
        "hosts, each a process": f"{hosts:,}",
        "scalars of a write, writes a second": f"{scalars:,}, {per_second:g}",
        "scalars a second": f"{hosts * scalars * per_second:,.0f}",
        "slices a second": f"{found.slices_sec:,.0f}",
        "bytes a second, in streams and files": f"{found.mib_sec:.0f} MiB",
        "bytes a day": f"{day_tb:.1f} TB",
        "bytes a second over the network, at most": f"{found.mib_sec * model.wire_factor:.0f} MiB",
        "processor time of collectors": f"{found.collector_ms / 1e3:.1f} cores",
        "processor time of each host's sending": f"{found.hosts_ms / hosts:.1f} ms a second",
        f"collectors, of at most {HIGHEST_SHARE:.0%} of a core each": f"{collectors}",
        "connections of each": f"{math.ceil(hosts / collectors):,}",
        "open files of each": f"{each.files:,.0f}",
        "resident memory of each": f"{each.resident_mib:.0f} MiB",
        "disk of each": f"{each.mib_sec:.0f} MiB a second, {day_tb / collectors:.1f} TB a day",
        "spool of a host, an hour without collector": f"{found.mib_sec / hosts * 3600 / 1024:.2f} GiB",
    }

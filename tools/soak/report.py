"""What the long test has done and found, and the document that says so."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from dataclasses import dataclass, field
from pathlib import Path

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "reliability.md"
MAX_FAULTS = 50


@dataclass(slots=True)
class Totals:
    """Counts of one run.

    Attributes:
        seed: of the moments and options.
        seconds: for which it ran.
        messages: emitted by processes that were killed.
        steady_messages: emitted by the steady process.
        dropped: by the policies of the steady process.
        kills: processes that were killed.
        collector_kills: collectors that were killed.
        stored: messages that the collector had at the end, of processes that were killed.
        not_logged: messages of the moment of a kill that no log has.
        not_spooled: messages of the moment of a kill that no spool has.
        not_anywhere: of these, messages that the flight recorder had overwritten.
        log_late_ms: age of the oldest message that was not logged, for each kill.
        spool_late_ms: age of the oldest message that was not spooled, for each kill.
        usage: memory in KiB, open files and threads of the steady process, after each round.
        collector_kib: most memory of the collector.
        faults: what must not be.
    """

    seed: int
    seconds: float = 0.0
    messages: int = 0
    steady_messages: int = 0
    dropped: int = 0
    kills: int = 0
    collector_kills: int = 0
    stored: int = 0
    not_logged: int = 0
    not_spooled: int = 0
    not_anywhere: int = 0
    log_late_ms: list[float] = field(default_factory=list)
    spool_late_ms: list[float] = field(default_factory=list)
    usage: list[tuple[int, int, int]] = field(default_factory=list)
    collector_kib: int = 0
    faults: list[str] = field(default_factory=list)

    def line(self) -> str:
        """How far it is, in one line."""
        return (
            f"{self.seconds:5.0f} s: {self.steady_messages + self.messages:,} messages, {self.kills} kills, "
            f"{self.collector_kills} of the collector, {len(self.faults)} faults"
        )


def report(totals: Totals, messages: float, kills: int) -> str:
    """The document."""
    all_messages = totals.messages + totals.steady_messages
    rows = [
        ("date", time.strftime("%Y-%m-%d")),
        ("machine", f"{platform.system()}, {platform.machine()}, {os.cpu_count()} cores, shared with other work"),
        ("versions", ", ".join([f"Python {platform.python_version()}", *map(_version, ("jax", "jaxlib", "numpy"))])),
        ("time", f"{totals.seconds / 60:.1f} minutes"),
        ("asked for", f"{messages:,.0f} messages of the steady process, {kills:,} kills, seed {totals.seed}"),
        ("messages", f"{all_messages:,}: {totals.steady_messages:,} of the steady process, {totals.messages:,} of "
         "killed ones"),
        ("kills", f"{totals.kills:,} processes, {totals.collector_kills:,} collectors"),
        ("drops, all counted", f"{totals.dropped:,}, by the policies `drop_newest`, `sample` and `overwrite_oldest`"),
        ("stored by the collector, once and in order", f"{totals.stored:,}"),
        ("emitted at a kill, not in the log", _late(totals.not_logged, totals.log_late_ms)),
        ("emitted at a kill, not in the spool", _late(totals.not_spooled, totals.spool_late_ms)),
        ("of those not in the log, not in the flight recorder either", f"{totals.not_anywhere:,} (its ring has 1 MiB)"),
        ("memory of the steady process", _growth([found[0] / 1024 for found in totals.usage], "MiB")),
        ("its open files", _growth([found[1] for found in totals.usage], "")),
        ("its threads", _growth([found[2] for found in totals.usage], "")),
        ("most memory of the collector", f"{totals.collector_kib / 1024:,.0f} MiB"),
        ("faults", f"{len(totals.faults)}"),
    ]  # fmt: skip
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    faults = "".join(f"- {' '.join(fault.split())[:500]}\n" for fault in totals.faults[:MAX_FAULTS])
    return f"""{BEGINNING}
## The last run

| | |
|---|---|
{table}
{NOTES}{"## Faults" + chr(10) * 2 + faults if faults else ""}"""


BEGINNING = """# Reliability

`make soak` runs the test of this page, for an hour, and writes the page. Do not edit it by hand.

- One steady process emits at all times. It changes between the policies of back-pressure, with a tap function that is
  slow now and then, checks the order of all values, and compares what was delivered and dropped with what was emitted.
- Other processes record, forward through a spool and keep a flight recorder at once, with tap functions of 0, 0.5 and
  20 ms. Each is killed at a random moment: four in five by SIGKILL, the others by SIGTERM. One in ten may be killed
  while it starts.
- The collector is killed and started again at random moments. Later processes send what the spools of dead ones hold.

After each kill the log, the spool with the collector's files, and the flight recorder are read. The log must have the
messages from the first one on, once and in order; so must the spool together with the collector. What is missing at the
end must have been emitted at the very end. What was emitted before a SIGTERM may not be missing. When a spool has been
sent, the collector must have exactly what the spool had.
"""
NOTES = """
The ages say how long before the process's last message the oldest missing one was emitted, after SIGKILL. Several
processes shared each core, so that threads waited for their turns.
"""


def _late(count: int, ages: list[float]) -> str:
    ordered = sorted(ages) or [0.0]
    middle, most = ordered[len(ordered) // 2], ordered[-1]
    return f"{count:,}; age of the oldest: median {middle:,.0f} ms, at most {most:,.0f} ms"


def _growth(found: list[float], unit: str) -> str:
    if len(found) < 10:
        return "too few rounds"
    tenth = len(found) // 10
    first, last = (sum(part) / tenth for part in (found[tenth : 2 * tenth], found[-tenth:]))
    return f"{first:,.1f} {unit} in the second tenth of the run, {last:,.1f} {unit} in the last".replace(
        "  ", " "
    )


def _version(name: str) -> str:
    return f"{name} {importlib.metadata.version(name)}"

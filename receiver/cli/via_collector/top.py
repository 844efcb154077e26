"""`hcb top --via`: shows the activity of the taps of all processes that forward to a collector, at intervals."""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from hostcallback.receiver.cli.arguments.collector import reaching
from hostcallback.receiver.cli.output.messages import make_safe
from hostcallback.receiver.cli.output.rates import between, show
from hostcallback.receiver.cli.output.tables import bytes_text, text_table
from hostcallback.receiver.cli.via_collector.ctl import mixed, places
from hostcallback.receiver.terminal import printable

if TYPE_CHECKING:
    from hostcallback.receiver.remote.control.client import CollectorControl, ProcessAnswer

ANSWER_SEC = 5.0
"""Seconds that a process has to answer the first time; a process that did not is not waited for again."""

_SUMMED = ("messages_per_sec", "bytes_per_sec", "busy", "failed", "suppressed")


def look(arguments: argparse.Namespace) -> int:
    """Runs the command.

    Raises:
        HostCallbackError: the collector cannot be reached, or refuses.
    """
    from hostcallback.receiver.remote.control.client import (
        CollectorControl,  # here, because grpc takes long to import
    )

    make_safe()
    with CollectorControl(reaching(arguments.via, arguments), arguments.of_run) as collector:
        looks = _Looks(collector)
        looks.look()  # starts the counting
        return show(arguments, looks.look, lines)


class _Looks:
    # Asks all processes, interval by interval.

    def __init__(self, collector: CollectorControl) -> None:
        self._collector = collector
        self._before: dict[Any, dict[str, Any]] = {}

    def look(self) -> dict[str, Any]:
        shown, silent = [], []
        before, self._before = self._before, {}
        for told in self._collector.ask("figures", seconds=ANSWER_SEC).told:
            instance = told.process.instance
            found = _figures(told, before.get(instance))
            if found is None:
                silent.append(_where(told))
                continue
            self._before[instance] = told.result
            shown.append(_where(told) | found)
        return {"time": time.time(), "processes": shown, "silent": silent}


def _where(told: ProcessAnswer) -> dict[str, Any]:
    process = told.process
    return {"run": process.key.run, "process": process.key.process, "host": process.host, "pid": process.pid}


def _figures(told: ProcessAnswer, before: dict[str, Any] | None) -> dict[str, Any] | None:
    # None if the answer is invalid or missing.
    try:
        found = between(before or told.result, told.result)
        return {
            "devices": [
                {name: _plain(device[name]) for name in (
                    "device", "messages_per_sec", "bytes_per_sec", "queued", "queued_bytes", "waiting", "dropped"
                )}
                for device in found["devices"]
            ],
            "taps": [
                {name: _plain(tap[name]) for name in ("name", "source_line", "enabled", "rules", *_SUMMED)}
                for tap in found["taps"]
            ],
        }  # fmt: skip
    except (LookupError, TypeError, ValueError, AttributeError):
        return None


def _plain(found: Any) -> Any:
    if isinstance(found, str):
        return printable(found)
    if not isinstance(found, int | float):
        raise TypeError
    return found


def lines(shown: dict[str, Any]) -> list[str]:
    """The metrics of an interval as lines of text."""
    processes = [_process_row(process) for process in shown["processes"]]
    silent = "".join(
        f", {place['run']} p{place['process']} (process {place['pid']} on {place['host']}) does not answer"
        for place in shown["silent"][:5]
    )
    head = ("process", "host", "pid", "messages", "bytes", "queue", "queued", "waiting", "dropped")
    taps = ("tap", "processes", "messages", "bytes", "time", "errors", "suppressed", "rules", "line")
    return [
        f"{len(processes)} process(es){silent}",
        "",
        *text_table(head, processes, left=(0, 1)),
        "",
        *text_table(taps, _tap_rows(shown["processes"]), left=(0, 1, 7, 8)),
    ]


def _process_row(process: dict[str, Any]) -> tuple[str, ...]:
    def total(field: str) -> float:
        return float(sum(device[field] for device in process["devices"]))

    return (
        f"{process['run']} p{process['process']}",
        process["host"],
        str(process["pid"]),
        f"{total('messages_per_sec'):,.0f}/s",
        f"{bytes_text(total('bytes_per_sec'))}/s",
        f"{total('queued'):,.0f}",
        bytes_text(total("queued_bytes")),
        f"{total('waiting'):,.0f}",
        f"{total('dropped'):,.0f}",
    )


def _tap_rows(processes: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    # Sums over all processes; so "time" may exceed one second per second.
    found: dict[tuple[str, str], list[tuple[dict[str, Any], dict[str, Any]]]] = defaultdict(list)
    for process in processes:
        for tap in process["taps"]:
            found[tap["name"], tap["source_line"]].append((process, tap))
    rows = []
    for (name, line), those in found.items():
        sums = {field: sum(tap[field] for _, tap in those) for field in _SUMMED}
        rules = [tap["rules"] or "-" if tap["enabled"] else "enabled=false" for _, tap in those]
        row = (
            name, places((process["run"], process["process"]) for process, _ in those),
            f"{sums['messages_per_sec']:,.0f}/s", f"{bytes_text(sums['bytes_per_sec'])}/s", f"{sums['busy']:.1%}",
            f"{sums['failed']:,.0f}", f"{sums['suppressed']:,.0f}", mixed(rules), line,
        )  # fmt: skip
        rows.append((-sums["messages_per_sec"], row))
    return [row for _, row in sorted(rows)]

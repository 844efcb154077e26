"""`hcb ctl --via` and `hcb top --via`: the processes that forward to a collector, their taps, rules and activity."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from hostcallback.receiver.cli.arguments import reaching
from hostcallback.receiver.cli.output import tables
from hostcallback.receiver.cli.output.messages import make_safe
from hostcallback.receiver.runtime.rules.rules import matching, settings_text
from hostcallback.receiver.text import printable, text_table

if TYPE_CHECKING:
    from hostcallback.receiver.remote.control.client import Answers, CollectorControl, ProcessAnswer
    from hostcallback.receiver.remote.control.protocol import Controlled

NO_PROCESS = "no process can be controlled there: none is connected, or they belong to other runs"

MAX_SAID = 20
"""Number of processes without a result that are named; the others are counted."""


def _collector(arguments: argparse.Namespace) -> CollectorControl:
    # Also makes the output safe for what processes say. Imported here, because grpc takes long to import.
    from hostcallback.receiver.remote.control.client import CollectorControl

    make_safe()
    return CollectorControl(reaching(arguments.via, arguments), arguments.of_run)


def control(
    arguments: argparse.Namespace, pattern: str | None, settings: dict[str, Any], *, reset: bool
) -> int:
    """Sends a command to all processes and shows their answers; the exit status tells whether all fulfilled it.

    Raises:
        HostCallbackError: the collector cannot be reached, or refuses.
    """
    seconds = arguments.timeout
    with _collector(arguments) as collector:
        if pattern is None:
            answers = collector.ask("process", seconds=seconds)
            (_print_processes if arguments.json else _show_processes)(answers)
        elif settings or reset:
            answers = collector.ask("rules", seconds=seconds, pattern=pattern, settings=settings, reset=reset)
            return _show_rules(answers, seconds, as_json=arguments.json)
        else:
            answers = collector.ask("taps", seconds=seconds, pattern=pattern)
            if not _show_taps(answers, pattern, as_json=arguments.json):
                return _report(answers.told, seconds) or 1
    return _report(answers.told, seconds)


def steer(arguments: argparse.Namespace, command: str, more: dict[str, Any]) -> int:
    """Sends `knobs`, `set` or `stop` to all processes; as `control` else."""
    with _collector(arguments) as collector:
        told = collector.ask(command, seconds=arguments.timeout, **more).told
    if not told:
        print(f"hcb: {NO_PROCESS}", file=sys.stderr)
        return 1
    if command == "stop":
        stopping = [one.process for one in told if one.result is not None]
        if stopping:
            print(f"stop requested: {_places(stopping)}")
        unheard: dict[str, list[Controlled]] = {}
        for one in told:
            if isinstance(one.result, dict) and (said := one.result.get("unheard")):
                unheard.setdefault(str(said), []).append(one.process)
        for said, where in unheard.items():
            print(f"hcb: {_places(where)}: {printable(said)}", file=sys.stderr)
    else:
        found = [
            (_places([one.process]), knob)
            for one in told
            if isinstance(one.result, list)
            for knob in one.result
        ]
        tables.print_knobs([each for each in found if isinstance(each[1], dict)], as_json=arguments.json)
    return _report(told, arguments.timeout)


def _show_processes(answers: Answers) -> None:
    if not answers.told:
        print(NO_PROCESS)
    rows = [_process_row(told) for told in answers.told]
    if rows:
        tables.print_table(("run", "process", "host", "pid", "up", "command"), rows, left=(0, 2, 5))
    if answers.kept:
        said: dict[tuple[str, str], dict[str, Any]] = {}
        for statement in answers.kept:
            said.setdefault((statement.run, statement.pattern), {})[statement.field] = statement.value
        kept = [(run, pattern, printable(settings_text(s))) for (run, pattern), s in said.items()]
        print("\nremembered for processes that start later:")
        tables.print_table(("run", "tap", "rules"), kept, left=(0, 1, 2))


def _print_processes(answers: Answers) -> None:
    fields = ("host", "pid", "started", "command")
    tables.print_json_lines(
        _place(told.process) | {field: getattr(told.process, field) for field in fields}
        for told in answers.told
    )
    tables.print_json_lines({"remembered": statement._asdict()} for statement in answers.kept)


def _place(process: Controlled) -> dict[str, Any]:
    return {"run": process.key.run, "process": process.key.process}


def _process_row(told: ProcessAnswer) -> tuple[str, ...]:
    process = told.process
    up = tables.seconds_text(max(0.0, time.time() - process.started))
    key = process.key
    return key.run, f"p{key.process}", process.host, str(process.pid), up, process.command[:100]


def _show_taps(answers: Answers, pattern: str, *, as_json: bool) -> bool:
    # Groups by name and line: the processes that have the tap, and its rules there.
    rules: dict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
    suppressed: Counter[tuple[str, str, str]] = Counter()
    where: dict[tuple[str, str, str], list[Controlled]] = defaultdict(list)
    for told in answers.told:
        for tap in told.result if isinstance(told.result, list) else ():
            try:
                name, line, kind = printable(tap["name"]), printable(tap["source_line"]), bool(tap["check"])
                text, count = tables.rules_text(tap), int(tap["suppressed"])
                if not matching(pattern, [name]):
                    continue
                key = name, line, "check" if kind else "tap"
                rules[key][printable(text)] += 1
            except (LookupError, TypeError, ValueError, AttributeError):
                # An answer from another version, or from another program: skip it.
                continue
            suppressed[key] += count
            where[key].append(told.process)
    if not rules:
        print(f"hcb: no tap is called {pattern!r} in {len(answers.told)} process(es)", file=sys.stderr)
        return False
    if as_json:
        tables.print_json_lines(
            {
                "name": name, "kind": kind, "source_line": line, "rules": rules[name, line, kind],
                "suppressed": suppressed[name, line, kind], "processes": [*map(_place, where[name, line, kind])],
            }
            for name, line, kind in sorted(rules)
        )  # fmt: skip
        return True
    rows = [
        (name, kind, _places(where[name, line, kind]), mixed(rules[name, line, kind].elements()),
         f"{suppressed[name, line, kind]:,}", line)
        for name, line, kind in sorted(rules)
    ]  # fmt: skip
    head = ("tap", "kind", "processes", "rules", "suppressed", "line")
    tables.print_table(head, rows, left=(0, 1, 2, 3, 5))
    return True


def _show_rules(answers: Answers, seconds: float, *, as_json: bool) -> int:
    rules: dict[str, Counter[str]] = defaultdict(Counter)
    where: dict[str, list[Controlled]] = defaultdict(list)
    without, failed = [], []
    for told in answers.told:
        found = told.result.get("rules") if isinstance(told.result, dict) else None
        if isinstance(found, dict):
            for name, text in found.items():
                rules[printable(name)][printable(str(text)) or "-"] += 1
                where[printable(name)].append(told.process)
        elif told.kind == "NoSuchTapError":
            without.append(told)
        else:
            failed.append(told)
    if as_json:
        tables.print_json_lines(
            {"name": name, "rules": rules[name], "processes": [*map(_place, where[name])]}
            for name in sorted(rules)
        )
    elif rules:
        rows = [(name, _places(where[name]), mixed(rules[name].elements())) for name in sorted(rules)]
        tables.print_table(("tap", "processes", "rules"), rows, left=(0, 1, 2))
    if as_json:
        pass
    elif not answers.told:
        print("no process is connected; the rules are remembered for those that start later")
    elif without and rules:
        print(f"no such tap so far: {_places([told.process for told in without])}")
    status = _report(failed, seconds)
    if without and not rules:  # the name is wrong, or the tap has not been traced yet
        print(f"hcb: {without[0].error}; remembered for later taps (--reset removes it)", file=sys.stderr)
        return 1
    return status


def _report(told: Sequence[ProcessAnswer], seconds: float) -> int:
    # Names the processes that did not answer, or answered with an error.
    failed = [one for one in told if one.result is None]
    for one in failed[:MAX_SAID]:
        why = f"did not answer within {seconds:g} s" if one.is_silent else one.error
        print(f"hcb: {one.process}: {why}", file=sys.stderr)
    if len(failed) > MAX_SAID:
        others = _places([one.process for one in failed[MAX_SAID:]])
        print(f"hcb: and {len(failed) - MAX_SAID} more: {others}", file=sys.stderr)
    return 1 if failed else 0


def mixed(texts: Iterable[str]) -> str:
    """Joins the texts of several processes: `every=10` if all are equal, else with counts: `every=10 (3), - (1)`."""
    counted = Counter(texts)
    if len(counted) == 1:
        return next(iter(counted))
    return ", ".join(f"{text} ({count})" for text, count in counted.most_common())


def _places(processes: Iterable[Controlled]) -> str:
    return places((process.key.run, process.key.process) for process in processes)


def places(processes: Iterable[tuple[str, int]]) -> str:
    """Runs and process numbers, as in `exp p0-3,7`; with a count if several processes have one number."""
    numbers: dict[str, list[int]] = defaultdict(list)
    for run, process in processes:
        numbers[run].append(process)
    return "; ".join(f"{run} p{_ranges(found)}" for run, found in sorted(numbers.items()))


def _ranges(numbers: Sequence[int]) -> str:
    ranges: list[list[int]] = []
    for number in sorted(set(numbers)):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    text = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
    return text if len(set(numbers)) == len(numbers) else f"{text} ({len(numbers)})"


ANSWER_SEC = 5.0
"""Seconds that a process has to answer the first time; a process that did not is not waited for again."""

_SUMMED = ("messages_per_sec", "bytes_per_sec", "busy", "failed", "suppressed")


def look(arguments: argparse.Namespace) -> int:
    """Runs the command.

    Raises:
        HostCallbackError: the collector cannot be reached, or refuses.
    """
    with _collector(arguments) as collector:
        looks = _Looks(collector)
        looks.look()  # starts the counting
        return tables.show(arguments, looks.look, lines)


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
        found = tables.between(before or told.result, told.result)
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
    """The stats of an interval as lines of text."""
    processes = [_measured_row(process) for process in shown["processes"]]
    silent = "".join(
        f", {place['run']} p{place['process']} (process {place['pid']} on {place['host']}) does not answer"
        for place in shown["silent"][:5]
    )
    return [
        f"{len(processes)} process(es){silent}",
        "",
        *text_table(("process", "host", "pid", *tables.DEVICE_HEAD), processes, left=(0, 1)),
        "",
        *text_table(("tap", "processes", *tables.TAP_HEAD), _tap_rows(shown["processes"]), left=(0, 1, 7, 8)),
    ]


def _measured_row(process: dict[str, Any]) -> tuple[str, ...]:
    fields = ("messages_per_sec", "bytes_per_sec", "queued", "queued_bytes", "waiting", "dropped")
    totals = {field: sum(device[field] for device in process["devices"]) for field in fields}
    name = f"{process['run']} p{process['process']}"
    return name, process["host"], str(process["pid"]), *tables.device_cells(totals)


def _tap_rows(processes: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    # Sums over all processes; so "time" may exceed one second per second.
    found: dict[tuple[str, str], list[tuple[dict[str, Any], dict[str, Any]]]] = defaultdict(list)
    for process in processes:
        for tap in process["taps"]:
            found[tap["name"], tap["source_line"]].append((process, tap))
    rows = []
    for (name, line), those in found.items():
        sums = {field: sum(tap[field] for _, tap in those) for field in _SUMMED}
        where = places((process["run"], process["process"]) for process, _ in those)
        row = (name, where, *tables.tap_cells(sums), mixed(tables.rules_text(tap) for _, tap in those), line)
        rows.append((-sums["messages_per_sec"], row))
    return [row for _, row in sorted(rows)]

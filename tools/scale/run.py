"""The command `tools/scale.py`, and the document that it writes."""

from __future__ import annotations

import argparse
import re
import time
from pathlib import Path

from tools.bench.machine import describe_machine

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "design" / "scale.md"
PLANNED_HOSTS, PLANNED_SCALARS, PLANNED_PER_SECOND = 1000, 80, 5.0
"""As in docs/scaling.md: 8 devices with 10 scalars each, 5 steps a second."""


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scale.py", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    messages = commands.add_parser("messages", help="many messages in one process")
    messages.add_argument("--count", type=float, default=1e9, help="of messages (1e9)")
    senders = commands.add_parser("senders", help="many hosts on one collector")
    senders.add_argument(
        "--clients", type=_numbers, default=[8, 32, 128, 256], help="numbers of hosts (8,32,128,256)"
    )
    senders.add_argument(
        "--fit", type=_numbers, default=[8, 32], help="those that the model is fitted to (8,32)"
    )
    senders.add_argument("--sec", type=float, default=12.0, help="seconds of each load (12)")
    nats = commands.add_parser("nats", help="hosts on one collector, directly and through a NATS server")
    nats.add_argument("--clients", type=int, default=32, help="number of hosts (32)")
    nats.add_argument("--sec", type=float, default=12.0, help="seconds of each load (12)")
    columns = commands.add_parser("columns", help="a long recorded run read as columns, and imports")
    columns.add_argument("--count", type=float, default=1e8, help="of scalars (1e8)")
    for command in (messages, senders, nats, columns):
        command.add_argument("--write", action="store_true", help=f"write the tables into {DOCUMENT.name}")
    return parser.parse_args(argv)


def _messages(arguments: argparse.Namespace) -> tuple[dict[str, str], list[str]]:
    from tools.scale import messages

    found = messages.run(int(arguments.count))
    return {"messages": f"{_when()}\n\n{found.table()}"}, found.faults()


def _columns(arguments: argparse.Namespace) -> tuple[dict[str, str], list[str]]:
    from tools.scale import reading

    table, faults = reading.run(int(arguments.count))
    return {"columns": f"{_when()}\n\n{table}"}, faults


def _senders(arguments: argparse.Namespace) -> tuple[dict[str, str], list[str]]:
    from tools.scale import model, senders

    unknown = set(arguments.fit) - set(arguments.clients)
    if unknown or len(arguments.fit) < 2:
        raise SystemExit(f"--fit is {arguments.fit}, expected two or more of {arguments.clients}")
    found: list[senders.Measured] = []
    faults: list[str] = []
    for count in arguments.clients:
        rows, wrong = senders.measure(count, arguments.sec)
        found += rows
        faults += wrong
        print(senders.table(rows), flush=True)
    fitted = model.fit(found, arguments.fit)
    whole = model.fit(found, arguments.clients)
    models = [fitted, whole]
    planned = model.plan(models, PLANNED_HOSTS, PLANNED_SCALARS, PLANNED_PER_SECOND)
    together = model.plan(models, PLANNED_HOSTS, round(PLANNED_SCALARS * PLANNED_PER_SECOND), 1.0)
    knee = (
        f"By this model one core of a collector takes {fitted.most_slices:,.0f} small slices a second. On this "
        "machine, which runs the hosts as well, the processors are used up at "
        f"{fitted.most_hosts(*senders.LOADS['slow']):,} hosts under the load `slow`, "
        f"{fitted.most_hosts(*senders.LOADS['small']):,} under `small` and "
        f"{fitted.most_hosts(*senders.LOADS['large']):,} under `large`."
    )
    return {
        "senders": f"{_when()} Each load took {arguments.sec:g} s.\n\n{senders.table(found)}",
        "model": f"Fitted to {' and '.join(map(str, fitted.fitted))} hosts:\n\n{fitted.text()}\n{knee}\n\n"
        f"Fitted to {', '.join(map(str, whole.fitted))} hosts, without what was saturated:\n\n{whole.text()}",
        "comparison": model.comparison(found, fitted),
        "plan": f"{planned}\nThe same scalars in one slice a second, as hosts send to a busy collector:\n\n{together}",
    }, faults


def _nats(arguments: argparse.Namespace) -> tuple[dict[str, str], list[str]]:
    from tools.bench.servers import nats_server_program
    from tools.scale import senders

    program = nats_server_program()
    if program is None:
        raise SystemExit("nats-server is not installed: apt-get install nats-server")
    direct, faults = senders.measure(arguments.clients, arguments.sec)
    through, more = senders.measure(arguments.clients, arguments.sec, program)
    return {"nats": f"{_when()}\n\n{senders.nats_table(direct, through)}"}, faults + more


def _when() -> str:
    return f"{time.strftime('%Y-%m-%d')}, {describe_machine()}."


def written(text: str, parts: dict[str, str]) -> str:
    """The document with these parts.

    Raises:
        ValueError: it has no place for one of them.
    """
    for name, part in parts.items():
        place = re.compile(rf"(<!-- scale: {name} -->\n).*?(<!-- end of scale -->)", re.DOTALL)
        if not place.search(text):
            raise ValueError(f"{DOCUMENT.name} has no mark <!-- scale: {name} -->")
        text = place.sub(lambda found, part=part: f"{found[1]}{part}{found[2]}", text)
    return text


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns 1 if something is wrong."""
    arguments = _arguments(argv)
    commands = {"messages": _messages, "senders": _senders, "nats": _nats, "columns": _columns}
    parts, faults = commands[arguments.command](arguments)
    for name, part in parts.items():
        print(f"{name}:\n\n{part}")
    for fault in faults:
        print(f"fault: {fault}")
    print(f"{len(faults)} fault(s)")
    if arguments.write and not faults:
        DOCUMENT.write_text(written(DOCUMENT.read_text(encoding="utf-8"), parts), encoding="utf-8")
    return 1 if faults else 0

"""`hcb ctl`: lists the processes that can be controlled and their taps, and sets rules."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from typing import Any

from hostcallback.receiver.cli.arguments import add_reaching, number
from hostcallback.receiver.cli.output import tables
from hostcallback.receiver.cli.via_collector import control, steer
from hostcallback.receiver.control.client import ControlClient, processes
from hostcallback.receiver.runtime.rules.rules import checked
from hostcallback.receiver.text import printable

EXAMPLES = """\
examples:
  hcb ctl                                       the processes that can be controlled
  hcb ctl 4242                                  the taps of one, and their rules
  hcb ctl 4242 'layer*/grad' --every 100        only the first message of each tap, and every 100th after it
  hcb ctl 4242 loss --rate 10 --truncate 8      at most 10 per second, and the first 8 elements of each array
  hcb ctl 4242 '*' --reset                      no rules: all messages are sent again
  hcb ctl 4242 set                              the knobs of one, and their values
  hcb ctl 4242 set lr 3e-4                      sets the knob lr; an array is '[1, 2, 3]'
  hcb ctl 4242 stop                             loops with stop=True end, and keep what they have computed
  hcb ctl --via host:7070                       the processes of all hosts that forward to a collector
  hcb ctl --via host:7070 'loss*' --every 10    in all of them, and in those that start later
  hcb ctl --via host:7070 set lr 3e-4           in all that run; so does stop
"""


WAIT_SEC = number("seconds to wait, 0.1 to 60", lambda x: 0.1 <= x <= 60)


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    parser.add_argument(
        "pid",
        nargs="?",
        metavar="PID",
        help="the process; without it, all are listed. Not with --via",
    )
    parser.add_argument(
        "pattern",
        nargs="?",
        metavar="PATTERN",
        help="name or glob of taps; quote it. Or one of the words set and stop",
    )
    parser.add_argument(
        "knob",
        nargs="*",
        metavar="NAME VALUE",
        help="after the word set: a knob, and its new value, or NAME=VALUE",
    )
    parser.add_argument(
        "--every", type=_setting("every", int), metavar="N", help="send every N-th message; 1 for all"
    )
    parser.add_argument(
        "--rate",
        type=_setting("rate", float),
        metavar="R",
        help="send at most R messages per second; none: no limit",
    )
    parser.add_argument(
        "--truncate",
        type=_setting("truncate", int),
        metavar="N",
        help="send the first N elements of each array; none: all",
    )
    parser.add_argument(
        "--reset", action="store_true", help="remove all rules first, then set those given here"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object per process or tap")
    switch = parser.add_mutually_exclusive_group()
    switch.add_argument("--disable", dest="enabled", action="store_false", default=None, help="send nothing")
    switch.add_argument("--enable", dest="enabled", action="store_true", default=None, help="send again")
    group = parser.add_argument_group("or all processes that forward to a collector")
    group.add_argument("--via", metavar="HOST:PORT", help="the collector; it remembers the rules")
    add_reaching(group)
    group.add_argument(
        "--timeout",
        type=WAIT_SEC,
        default=5.0,
        metavar="S",
        help="seconds to wait for answers of processes (5)",
    )
    parser.set_defaults(parser=parser)
    # argparse takes -3e-4 for an option, up to Python 3.13 at least.
    parser._negative_number_matcher = re.compile(r"^-(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$")


_NOTHING = "none"


def _setting(field: str, kind: Any) -> Any:
    def convert(text: str) -> Any:
        if text == _NOTHING and field != "every":
            return _NOTHING
        try:
            return checked(field, kind(text))
        except ValueError as error:
            said = str(error) if str(error).startswith(field) else f"{text!r} is not a number"
            raise argparse.ArgumentTypeError(said) from None

    return convert


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    fields = ("enabled", "every", "rate", "truncate")
    settings = {field: value for field in fields if (value := getattr(arguments, field)) is not None}
    settings = {field: None if value == _NOTHING else value for field, value in settings.items()}
    words = [word for word in (arguments.pid, arguments.pattern, *arguments.knob) if word is not None]
    pattern, *rest = words[arguments.via is None :] or [None]
    if rest and pattern != "set" and arguments.via is not None:
        arguments.parser.error("--via addresses all processes: give a pattern of taps, and no PID")
    if rest and pattern != "set":
        meant = f": hcb ctl {arguments.pid} set {pattern} {rest[0]}" if len(rest) == 1 else ""
        arguments.parser.error(f"unexpected {' '.join(rest)}: only set takes a name and a value{meant}")
    if pattern is None and (settings or arguments.reset):
        arguments.parser.error("rules are for taps: give their name or a glob, such as '*'")
    if pattern == "set" and (settings or arguments.reset):
        arguments.parser.error("set changes a knob, and takes no rules: give them in a second command")
    command, more = _knob_command(arguments, rest) if pattern == "set" else ("", {})
    if pattern == "stop" and not settings and not arguments.reset:
        command = "stop"
    if arguments.via is not None:
        if command:
            return steer(arguments, command, more)
        return control(arguments, pattern, settings, reset=arguments.reset)
    if arguments.pid is None:
        _list_processes(as_json=arguments.json)
        return 0
    if not arguments.pid.isdecimal():
        arguments.parser.error(f"argument PID: {arguments.pid!r} is not a process id; `hcb ctl` lists them")
    with ControlClient(int(arguments.pid)) as client:
        if command == "stop":
            answer = client.ask("stop")
            print(f"stop requested: {answer['reason']}")
            if unheard := answer.get("unheard"):  # processes of earlier versions do not say
                print(f"hcb: {printable(unheard)}", file=sys.stderr)
            return 0
        if command:
            tables.print_knobs([("", knob) for knob in client.ask(command, **more)], as_json=arguments.json)
            return 0
        if pattern is None:
            _list_taps(client.ask("taps"), as_json=arguments.json)
            return 0
        answer = client.ask("rules", pattern=pattern, settings=settings, reset=arguments.reset)
    if arguments.json:
        tables.print_json_lines({"name": name, "rules": answer["rules"][name]} for name in answer["names"])
        return 0
    rows = [(name, answer["rules"][name] or "-") for name in answer["names"]]
    tables.print_table(("tap", "rules"), rows, left=(0, 1))
    return 0


def _knob_command(arguments: argparse.Namespace, words: list[str]) -> tuple[str, dict[str, Any]]:
    # The command and its arguments for the words after `set`. No value has a `=`.
    if len(words) == 1 and "=" in words[0]:
        words = [*words[0].rpartition("=")[::2]]
    if len(words) not in (0, 2):
        arguments.parser.error("set takes the name of a knob and its new value, or nothing: set lr 3e-4")
    return ("set", {"name": words[0], "value": _value(arguments, words[1])}) if words else ("knobs", {})


def _value(arguments: argparse.Namespace, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        arguments.parser.error(f"{text!r} is not a value: expected a number, true, false or a list of them")


def _list_processes(*, as_json: bool) -> None:
    found = processes()
    if as_json:
        tables.print_json_lines({key: p[key] for key in ("pid", "started", "command")} for p in found)
        return
    if not found:
        print("no process can be controlled here: none runs taps, or they belong to other users")
        return
    rows = [
        (str(p["pid"]), tables.seconds_text(time.time() - p["started"]), p["command"][:100]) for p in found
    ]
    tables.print_table(("pid", "up", "command"), rows, left=(2,))


def _list_taps(taps: list[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        tables.print_json_lines(taps)
        return
    if not taps:
        print("no tap has been traced in this process yet")
        return
    rows = [
        (
            tap["name"],
            "check" if tap["check"] else "tap",
            tables.rules_text(tap),
            f"{tap['suppressed']:,}",
            tap["source_line"],
        )
        for tap in taps
    ]
    tables.print_table(("tap", "kind", "rules", "suppressed", "line"), rows, left=(0, 1, 2, 4))

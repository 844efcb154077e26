"""`hcb reproduce`: runs the step that failed, from a capsule. Needs JAX."""

from __future__ import annotations

import argparse
import code
import importlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hostcallback.receiver.capsule.file_format import CapsuleError, Failure, shown
from hostcallback.receiver.capsule.reading import MAX_DEVICES, Capsule, prepare_devices
from hostcallback.receiver.cli import CommandError
from hostcallback.receiver.text import printable

FAILED, OTHER_VALUES, NOT_REPRODUCED = 2, 3, 1
"""Exit statuses. As of `hcb diff`: 0 the same, 1 different, 2 an error."""

OPERATIONS_BEFORE = 4
"""Number of operations that --breakpoint shows before the one that failed."""

EXAMPLES = """\
examples:
  hcb reproduce capsules/step-17-4242.hcb             run the call that failed, and compare
  hcb reproduce FILE --show                           what it is, without running it and without JAX
  hcb reproduce FILE --python again.py                write a script with the inputs loaded, to edit
  hcb reproduce FILE --bisect                         find the first operation that differs in 64 bits
  hcb reproduce FILE --bisect /other/venv/bin/python  ... that differs with that Python's JAX
  hcb reproduce FILE --breakpoint                     run it, and open a Python prompt at the operation that failed
  hcb reproduce FILE --bind loss=train:check_loss     call a function for the tap called loss

exit status: 0 the same failure, 3 the same check or tap with other values, 1 not reproduced, 2 an error
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    parser.add_argument("capsule", metavar="FILE", help="a capsule that hcb.capsule wrote")
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--show", action="store_true", help="show the report, the inputs and the versions; run nothing"
    )
    group.add_argument(
        "--bisect",
        nargs="?",
        const="float64",
        metavar="SIDE",
        help="find the first operation that differs in 64 bits (float64, the default), on another device (device:1), "
        "or with another JAX (the path of its Python). FILE comes before it",
    )
    group.add_argument(
        "--breakpoint",
        action="store_true",
        help="run it, show the operation that failed and those before it with the statistics of their results, and "
        "open a Python prompt with the step's inputs, results, failures and operations",
    )
    group.add_argument("--digests", help=argparse.SUPPRESS)
    group.add_argument("--python", metavar="OUT", help="write a script that runs it, to be edited")
    parser.add_argument(
        "--bind",
        action="append",
        default=[],
        metavar="NAME=MODULE:FUNCTION",
        help="call this function for the taps of a name; imports the module",
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs the command.

    Raises:
        CommandError: JAX is missing, or an argument is wrong.
    """
    capsule = Capsule(arguments.capsule)
    if arguments.show:
        _show(capsule)
        return 0
    try:
        reproduce: Any = _module(capsule)
    except ImportError as error:
        raise CommandError(
            f"hcb reproduce runs a program of JAX, and it cannot be imported: {error}. Without JAX: --show"
        ) from None
    if arguments.digests:
        reproduce.write_digests(capsule, arguments.digests)
        return 0
    if arguments.bisect:
        side = arguments.bisect
        if side != "float64" and not side.startswith("device:") and not Path(side).is_file():
            raise CommandError(f"--bisect {side}: expected float64, device:N, or the path of another Python")
        return _bisect(capsule, arguments.bisect)
    if arguments.python:
        Path(arguments.python).write_text(reproduce.script_of(capsule), encoding="utf-8")
        print(f"wrote {arguments.python}")
        return 0
    return _reproduce(capsule, reproduce, _bindings(arguments.bind, reproduce), prompt=arguments.breakpoint)


def _bisect(capsule: Capsule, against: str) -> int:
    found, compared, missing = _module(capsule, against).bisect(capsule, against)
    apart = f", {missing} operations of the first run only" if missing else ""
    if found is None:
        print(f"no operation differs: {compared} compared{apart}")
        return 0
    iterations = f", iteration {', '.join(map(str, found.left.iterations))}" if found.left.iterations else ""
    print(printable(f"the first operation that differs: {found.left.name}{iterations}"))
    names = ("min", "max", "mean", "rms", "first elements")
    for title, digest in (("here", found.left), (against, found.right)):
        values = [*digest.stats[:4], list(digest.stats[4:])]
        shown = ", ".join(f"{name} {value}" for name, value in zip(names, values, strict=True))
        shown = ", ".join(filter(None, (digest.not_finite, shown)))
        print(printable(f"  {title}: {shown}"))
    finite = math.isfinite(found.relative)
    how = f"by {found.relative:.2g} of its magnitude" if finite else "one of them is not finite"
    print(f"  {how}; {compared} operations before it are the same{apart}")
    return NOT_REPRODUCED


def _module(capsule: Capsule, against: str = "") -> Any:
    number = against.removeprefix("device:")
    prepare_devices(capsule, min(int(number), MAX_DEVICES) + 1 if number.isdecimal() else 1)
    return importlib.import_module("hostcallback.api.capsule.reproduce")


def _bindings(given: list[str], reproduce: Any) -> dict[str, Callable[..., Any]]:
    found = {}
    for text in given:
        name, separator, function = text.partition("=")
        if not separator or ":" not in function:
            raise CommandError(f"--bind {text}: expected NAME=MODULE:FUNCTION, such as loss=train:check_loss")
        try:
            found[name] = reproduce.function_of(function)
        except ValueError as error:
            raise CommandError(f"--bind {text}: {error}") from None
    return found


def _show(capsule: Capsule) -> None:
    failure, about = capsule.failure, capsule.about
    # The receiver's capsules are not of a program.
    of = f"in {capsule.name}" if about.get("of") == "receiver" else capsule.name
    lines = [f"{of} failed: {_named(failure)} on {failure.device}", ""]
    lines += [*capsule.report.splitlines(), ""]
    for title in ("versions", "platform", "system", "environment"):
        value = about.get(title)
        if isinstance(value, dict):
            value = ", ".join(f"{key} {_plain(entry)}" for key, entry in value.items())
        if value:
            lines.append(f"{title}: {_plain(value)}")
    devices = about.get("devices")
    lines.append(f"devices: {len(devices) if isinstance(devices, list) else 0}")
    lines.append(f"inputs: {len(capsule.inputs)}")
    for entry in capsule.inputs:
        shards = f" in {len(entry.shards)} shards" if len(entry.shards) > 1 else ""
        gone = f"; LEFT OUT: {entry.left_out}" if entry.left_out else ""
        lines.append(f"  {entry.path}: {entry.dtype}{list(entry.shape)}{shards}{gone}")
    lines.append(f"last messages of the log: {len(capsule.messages)}")
    lines += [f"left out: {text}" for text in capsule.left_out]
    for line in lines:
        print(printable(line))


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else shown(value)


def _reproduce(
    capsule: Capsule, reproduce: Any, bindings: dict[str, Callable[..., Any]], *, prompt: bool
) -> int:
    result = reproduce.reproduce(capsule, bindings)
    status = _report(capsule, result)
    if prompt:
        program = reproduce.load(capsule)
        arrays = reproduce.arrays_of(capsule, program.nr_devices)
        operations, stopped_at = _operations(capsule)
        names = {
            "capsule": capsule,
            "inputs": dict(zip([e.path for e in capsule.inputs], arrays, strict=True)),
            "program": program,
            "results": result.results,
            "failures": result.found,
            "operations": operations,
            "stopped_at": stopped_at,
        }
        code.interact(f"names: {', '.join(names)}; end with Ctrl-D", local=names, exitmsg="")
    return status


def _operations(capsule: Capsule) -> tuple[list[Any], int | None]:
    """The operations of the step in program order, and the number of the one that failed; prints those around it."""
    reproduce: Any = _module(capsule)
    try:
        operations = reproduce.digests(capsule)
    except CapsuleError as error:
        print(printable(f"the step's operations are not known: {error}"))
        return [], None
    place = reproduce.operation_that_failed(operations, capsule.failure)
    if place is not None:
        bad = (n for n in range(place) if not all(map(math.isfinite, operations[n].stats)))
        first_bad = next(bad, place)
        if first_bad < place:
            print("the first result that is not finite:")
            _print_operation(operations, first_bad, "  ")
        print(f"stopped at operation {place} of {len(operations)}:")
        for number in range(max(0, place - OPERATIONS_BEFORE), place + 1):
            _print_operation(operations, number, "->" if number == place else "  ")
    return operations, place


def _print_operation(operations: list[Any], number: int, mark: str) -> None:
    digest = operations[number]
    low, high, mean, _, *first = digest.stats
    iterations = f", iteration {', '.join(map(str, digest.iterations))}" if digest.iterations else ""
    values = f"value {mean:g}"
    if " [] " not in digest.name:
        elements = ", ".join(f"{x:g}" for x in first)
        values = digest.not_finite or f"min {low:g}, max {high:g}, mean {mean:g}"
        values += f", first elements {elements}"
    print(printable(f"{mark} {number}: {digest.name}{iterations}"))
    print(printable(f"       {values}"))


def _named(failure: Failure) -> str:
    # A check without a name is called `check`.
    return failure.name if failure.name == failure.kind else f"{failure.kind} {failure.name}"


def _report(capsule: Capsule, result: Any) -> int:
    expected = capsule.failure
    for report in result.reports:
        for line in report.splitlines():
            print(printable(line))
    place = f"{_named(expected)} at {expected.source_line}"
    if result.same is not None:
        how = "" if result.is_exact else f", with other values: {result.same.text}; it was: {expected.text}"
        print(printable(f"reproduced: {place}{how}"))
        return 0 if result.is_exact else OTHER_VALUES
    if result.got is not None:
        print(printable(f"the tap {expected.name} got {result.got!r}"))
        print(
            printable(
                f"its function is not in the capsule, so its exception was not seen: {expected.text}. Bind it: "
                f"--bind {expected.name}=MODULE:FUNCTION"
            )
        )
        return NOT_REPRODUCED
    others = f"; what failed: {', '.join(f.source_line for f in result.found)}" if result.found else ""
    print(printable(f"not reproduced: {place}: {expected.text}{others}"))
    return NOT_REPRODUCED

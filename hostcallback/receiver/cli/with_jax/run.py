"""`hcb run`: runs a script with JAX's own callback functions routed through hostcallback."""

from __future__ import annotations

import argparse
import importlib
import os
import runpy
import sys
from types import TracebackType

from hostcallback.receiver import environment
from hostcallback.receiver.cli import FAILED, INTERRUPTED, CommandError

EXAMPLES = """\
The script runs as with `python SCRIPT ARGUMENTS`, in this interpreter, and needs no change. When it imports jax,
hostcallback is imported too, and hcb.accelerate() is in force: see docs/accelerate.md. The same holds for Python
processes that the script starts and that import hostcallback.

examples:
  hcb run train.py --epochs 3
  hcb run --verbose train.py    reports on standard error for each callback whether it is taken over
  hcb run -m package.module     as `python -m package.module`
  hcb run --capsule DIR train.py    a call of a jitted function that fails, or whose results are not finite, leaves a
                                capsule in DIR: see docs/capsules.md
  hcb run --watch train.py      names the operation that made a NaN or an infinite value: see docs/checks.md
  hcb run --observe 'layers/*' train.py    prints statistics of these places, step by step: see docs/observe.md
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    parser.add_argument(
        "--verbose", action="store_true", help="report for each callback whether it is taken over"
    )
    parser.add_argument(
        "--capsule",
        metavar="DIR",
        help="folder for capsules of the calls that fail, as by hcb.capsule(nonfinite=True)",
    )
    parser.add_argument(
        "--watch",
        action="store_true",
        help="report operations whose results are not finite, as hcb.watch_nonfinite",
    )
    parser.add_argument(
        "--observe",
        metavar="WHERE",
        help="places whose values are measured, as by hcb.observe(where=WHERE.split(','))",
    )
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is the name of a module")
    # One positional argument, not two: argparse drops a `--` between two of them (seen on Python 3.11).
    parser.add_argument(
        "script",
        nargs=argparse.PARSER,
        metavar="SCRIPT",
        help="a Python file, or a folder or archive with __main__.py; what follows are its arguments",
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs the script, and returns the status with which Python would end. Prints its exceptions as Python does.

    Raises:
        CommandError: no such script or module exists.
    """
    given, is_module = arguments.script, arguments.module
    script, *rest = given[1:] if given[0] == "--" and given[1:] else given
    if not is_module and not os.path.exists(script):
        raise CommandError(f"{script}: no such script: hcb run SCRIPT ARGUMENTS")
    os.environ[environment.ACCELERATE.name] = "verbose" if arguments.verbose else "1"
    accelerate_with_jax()
    for variable, text in (
        (environment.CAPSULES, arguments.capsule and os.path.abspath(arguments.capsule)),
        (environment.OBSERVE, arguments.observe),
        (environment.WATCH, "1" if arguments.watch else ""),
    ):
        if text:
            os.environ[variable.name] = text
    sys.argv = [script, *rest]
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.abspath(script))
    try:
        if is_module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")
    except SystemExit:
        raise
    except BaseException as error:  # reported as the interpreter does, not as an error of this command
        begun = _traceback_of_script(error.__traceback__)
        if begun is None and is_module and isinstance(error, ImportError):
            raise CommandError(f"{error}: hcb run -m MODULE ARGUMENTS") from None
        error = error.with_traceback(begun or error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        return INTERRUPTED if isinstance(error, KeyboardInterrupt) else FAILED
    return 0


def _traceback_of_script(traceback: TracebackType | None) -> TracebackType | None:
    # Starts at the script's first frame. An exception of runpy itself has no such frame.
    script = traceback
    while script is not None and script.tb_frame.f_globals.get("__name__") in (__name__, "runpy"):
        script = script.tb_next
    return script


def accelerate_with_jax() -> None:
    """Has the environment variable obeyed: now if jax is imported, else by hostcallback once it is.

    Not before, since the script may set JAX's variables.
    """
    if "jax" in sys.modules:
        importlib.import_module("hostcallback.api.accelerate")

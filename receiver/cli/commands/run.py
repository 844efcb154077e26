"""`hcb run`: runs a script with JAX's own callback functions routed through hostcallback."""

from __future__ import annotations

import argparse
import importlib
import importlib.machinery
import importlib.util
import os
import runpy
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType, TracebackType
from typing import Any

from receiver import environment
from receiver.cli import FAILED, INTERRUPTED, CommandError

EXAMPLES = """\
The script runs as with `python SCRIPT ARGUMENTS`, in this interpreter, and needs no change. When it imports jax,
hostcallback is imported too, and hcb.accelerate() is in force: see docs/accelerate.md. The same holds for Python
processes that the script starts and that import hostcallback.

examples:
  hcb run train.py --epochs 3
  hcb run --verbose train.py    reports on standard error for each callback whether it is taken over
  hcb run -m package.module     as `python -m package.module`
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    parser.add_argument(
        "--verbose", action="store_true", help="report for each callback whether it is taken over"
    )
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument(
        "script", metavar="SCRIPT", help="a Python file, or a folder or archive with __main__.py"
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENTS", help="of the script")


def run(arguments: argparse.Namespace) -> int:
    """Runs the script, and returns the status with which Python would end. Prints its exceptions as Python does.

    Raises:
        CommandError: no such script exists.
    """
    script, is_module = arguments.script, arguments.module
    if not is_module and not os.path.exists(script):
        raise CommandError(f"{script}: no such script: hcb run SCRIPT ARGUMENTS")
    os.environ[environment.ACCELERATE.name] = "verbose" if arguments.verbose else "1"
    accelerate_with_jax()
    sys.argv = [script, *arguments.arguments]
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
        error = error.with_traceback(_traceback_of_script(error.__traceback__))
        sys.excepthook(type(error), error, error.__traceback__)
        return INTERRUPTED if isinstance(error, KeyboardInterrupt) else FAILED
    return 0


def _traceback_of_script(traceback: TracebackType | None) -> TracebackType | None:
    # Starts at the script's first frame. An exception of runpy itself has no such frame.
    script = traceback
    while script is not None and script.tb_frame.f_globals.get("__name__") in (__name__, "runpy"):
        script = script.tb_next
    return script or traceback


def accelerate_with_jax() -> None:
    """Imports hostcallback right after jax: not earlier, because the script may set JAX's variables before it."""
    if "jax" in sys.modules:
        importlib.import_module("hostcallback")
    else:
        sys.meta_path.insert(0, _BesideJax())


class _BesideJax(MetaPathFinder):
    # Finds jax as Python does, imports hostcallback after jax has been executed, and then removes itself.

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "jax":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenHostcallback(spec.loader)
        return spec


class _ThenHostcallback(Loader):
    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        importlib.import_module("hostcallback")

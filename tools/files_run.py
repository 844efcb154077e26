"""Counts the files of the package whose code runs for one message, one metric and one request, in a warm process.

docs/architecture.md has the figures. `python tools/files_run.py --names` lists the files.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

PACKAGE = Path(__file__).resolve().parent.parent / "hostcallback"


class Files:
    """The files whose functions are called between `begin` and `end`, by any thread that Python starts."""

    def __init__(self) -> None:
        """Profiles this thread, and all that are started after it."""
        self._codes: set[CodeType] = set()
        self._is_on = False
        threading.setprofile(self._see)
        sys.setprofile(self._see)

    def _see(self, frame: FrameType, event: str, _: Any) -> None:
        if self._is_on and event == "call":
            self._codes.add(frame.f_code)

    @contextmanager
    def of(self, files: set[str]) -> Iterator[None]:
        """Adds the files of the package that run in the block, as paths within it."""
        self._codes.clear()
        self._is_on = True
        try:
            yield
        finally:
            self._is_on = False
        for code in self._codes.copy():
            path = Path(code.co_filename)
            if code.co_name != "<module>" and path.is_relative_to(PACKAGE):
                files.add(path.relative_to(PACKAGE).as_posix())


def one_print(run: Files) -> dict[str, set[str]]:
    """One `id_print` in a jitted function: when it is traced and lowered, and when it runs."""
    import jax
    import jax.numpy as jnp

    import hostcallback as hcb

    def program() -> Callable[..., Any]:
        return jax.jit(lambda x: hcb.id_print(x * 2, what="x"))

    for _ in range(2):
        program()(jnp.float32(1))
        hcb.barrier_wait()
    traced: set[str] = set()
    delivered: set[str] = set()
    step = program()
    with run.of(traced):
        compiled = step.lower(jnp.float32(1))
    del compiled
    step(jnp.float32(1))
    hcb.barrier_wait()
    with run.of(delivered):
        step(jnp.float32(1))
        hcb.barrier_wait()
    return {"id_print: traced and lowered": traced, "id_print: run, delivered, waited for": delivered}


def one_metric(run: Files) -> dict[str, set[str]]:
    """One metric into a CSV file, from trace to file."""
    import jax
    import jax.numpy as jnp

    import hostcallback as hcb

    files: set[str] = set()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(3):
            step = jax.jit(lambda i, x: hcb.metrics({"loss": x * 2}, step=i))
            table = str(Path(folder) / f"{number}.csv")
            with run.of(files if number == 2 else set()):
                with hcb.outfeed_receiver(writers=[hcb.csv(table)]):
                    step(jnp.int32(0), jnp.float32(1))
            assert "loss" in Path(table).read_text()
    return {"a metric into a CSV file": files}


def one_series(run: Files) -> dict[str, set[str]]:
    """A log on the page: from its file to the answer of `/api/series`."""
    import jax
    import jax.numpy as jnp
    from starlette.testclient import TestClient

    import hostcallback as hcb
    from hostcallback.receiver.ui.server import app

    raise NotImplementedError(app, jax, jnp, TestClient, hcb)


def main() -> None:
    """Prints the counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--names", action="store_true", help="list the files")
    names = parser.parse_args().names
    run = Files()
    for measure in (one_print, one_metric):
        for what, files in measure(run).items():
            print(f"{what}: {len(files)} files")
            for name in sorted(files) if names else ():
                print("   ", name)


if __name__ == "__main__":
    main()

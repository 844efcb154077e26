"""Counts the files of the package whose code runs for one message, one metric and one request, in a warm process.

`python tools/documents/files_run.py` writes the counts into docs/architecture.md, `--names` lists the files. Only those
count that run both of two times: a thread may work for something else meanwhile.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "hostcallback"
DOCUMENT = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- files that run -->\n", "<!-- end of files -->"


class Files:
    """The files whose functions are called in a block, by any thread that Python starts."""

    def __init__(self) -> None:
        """Profiles this thread, and all that are started after it."""
        self._codes: set[CodeType] = set()
        self._is_on = False
        self._thread: int | None = None
        threading.setprofile(self._see)
        sys.setprofile(self._see)

    def _see(self, frame: FrameType, event: str, _: Any) -> None:
        if self._is_on and event == "call" and self._thread in (None, threading.get_ident()):
            self._codes.add(frame.f_code)

    @contextmanager
    def of(self, files: set[str], *, thread: int | None = None) -> Iterator[None]:
        """Adds the files of the package that run in the block, as paths within it, of one thread or of all."""
        self._thread = thread
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
    with run.of(traced, thread=threading.get_ident()):  # the receiver looks for messages meanwhile
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
    return {"a metric into a CSV file, from trace to file": files}


def one_series(run: Files) -> dict[str, set[str]]:
    """A log on the page: from its files to the answer of `/api/series`, in the server's threads."""
    import httpx
    import jax
    import jax.numpy as jnp

    import hostcallback as hcb
    from hostcallback.receiver.ui.server.serving import Listening, serve_logs

    files: set[str] = set()
    with tempfile.TemporaryDirectory() as folder:
        with hcb.outfeed_receiver(record=folder):
            step = jax.jit(lambda i: hcb.id_tap(lambda _: None, {"step": i, "loss": i * 2.0}, name="train"))
            for number in range(3):
                step(jnp.int32(number))
        for number in range(2):
            with run.of(files if number else set()), closing(serve_logs([folder], Listening())) as server:
                base, _, token = server.address.partition("#token=")
                headers = {"Authorization": f"Bearer {token}"}
                with httpx.Client(base_url=base, headers=headers, timeout=20) as client:
                    (tap,) = [
                        tap for tap in client.get("/api/overview").json()["taps"] if tap["field"] == "loss"
                    ]
                    (series,) = client.get("/api/series", params={"tap": tap["id"]}).json()["series"]
            assert series["max"] == [0.0, 2.0, 4.0]
    return {"a log on the page: from its files to the answer of `/api/series`": files}


def measure() -> dict[str, set[str]]:
    """What runs, and the files of it that run both of two times. Takes some seconds."""
    run = Files()
    programs = one_print, one_metric, one_series
    once, again = ({what: files for of in programs for what, files in of(run).items()} for _ in range(2))
    return {what: files & again[what] for what, files in once.items()}


def table(counts: dict[str, int]) -> str:
    """The table of docs/architecture.md."""
    rows = "".join(f"| {what} | {count} |\n" for what, count in counts.items())
    return f"| what runs in a warm process | files of the package |\n|---|---|\n{rows}"


def main() -> None:
    """Measures, prints the files if asked for, and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--names", action="store_true", help="list the files; write nothing")
    names = parser.parse_args().names
    found = measure()
    for what, files in found.items():
        print(f"{what}: {len(files)} files", *(sorted(files) if names else ()), sep="\n    ")
    if not names:
        before, _, rest = DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)
        after = rest.partition(END)[2]
        counts = table({what: len(files) for what, files in found.items()})
        DOCUMENT.write_text(f"{before}{BEGIN}{counts}{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()

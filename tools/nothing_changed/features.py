"""The features of the matrix: what each puts around a program, and into it."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

COLLECTOR = "NOTHING_CHANGED_COLLECTOR"
"""Address of the collector for `forward`, in a cell's environment."""


class Feature(NamedTuple):
    """A column of the matrix.

    Attributes:
        name: in the table.
        enter: turns it on: takes the edits and an empty folder, returns the context to run the program in.
        taps: whether programs get taps, so that their code is another one.
        draws: whether it writes to the standard error output.
        needs: what of the edits it needs; a program without it has no cell.
    """

    name: str
    enter: Callable[[Any, Path], Any]
    taps: bool = True
    draws: bool = False
    needs: str = ""


def _nothing(edits: Any, folder: Path) -> Any:
    return contextlib.nullcontext()


def _loaded(edits: Any, folder: Path) -> Any:
    import jax
    import jax.numpy as jnp

    import hostcallback as hcb

    def before(x: Any) -> Any:
        return hcb.id_tap(lambda value: None, x)

    jax.jit(before)(jnp.float32(0)).block_until_ready()
    hcb.barrier_wait()
    return contextlib.nullcontext()


def _accelerate(edits: Any, folder: Path) -> Any:
    import hostcallback as hcb

    return hcb.accelerate()


def _observe(edits: Any, folder: Path) -> Any:
    import hostcallback as hcb

    return hcb.observe(where=lambda site: site.primitive in edits.observed, tap_func=lambda values: None)


def _time(edits: Any, folder: Path) -> Any:
    import hostcallback as hcb

    return hcb.observe(
        where=lambda site: site.primitive in edits.observed, what="time", tap_func=lambda times: None
    )


def _watch(edits: Any, folder: Path) -> Any:
    import hostcallback as hcb

    return hcb.watch_nonfinite()


def _capsule(edits: Any, folder: Path) -> Any:
    import hostcallback as hcb

    return hcb.capsule(folder / "capsules", nonfinite=True)


def _checked(edits: Any, folder: Path) -> Any:
    import hostcallback as hcb

    edits.wrapped = hcb.checked
    edits.logged = _check
    return contextlib.nullcontext()


def _check(values: dict[str, Any]) -> None:
    import jax.numpy as jnp

    import hostcallback as hcb

    for name, value in values.items():
        hcb.check(jnp.isfinite(value), name + " is {}", value)


def _error_collector(edits: Any, folder: Path) -> Any:
    import hostcallback as hcb

    edits.logged = _check
    return hcb.error_collector()


def _progress(edits: Any, folder: Path) -> Any:
    import hostcallback as hcb

    edits.scanned = hcb.scan
    return hcb.outfeed_receiver()


def _stop(edits: Any, folder: Path) -> Any:
    edits.scanned = _stoppable
    return contextlib.nullcontext()


def _stoppable(*args: Any, **options: Any) -> Any:
    import hostcallback as hcb

    return hcb.scan(*args, **options, stop=True, progress=False)[:2]


def _knob(edits: Any, folder: Path) -> Any:
    import hostcallback as hcb

    edits.logged = _tap_with_knob
    return hcb.outfeed_receiver()


def _tap_with_knob(values: dict[str, Any]) -> None:
    import hostcallback as hcb

    hcb.id_tap(lambda value: None, (values, hcb.knob("untouched", 1.0)))


def _record(edits: Any, folder: Path) -> Any:
    import hostcallback as hcb

    edits.logged = _tap
    return hcb.outfeed_receiver(record=folder / "log")


def _tap(values: dict[str, Any]) -> None:
    import hostcallback as hcb

    hcb.id_tap(lambda value: None, values)


def _forward(edits: Any, folder: Path) -> Any:
    import hostcallback as hcb

    edits.logged = _tap
    to = hcb.Forward(os.environ[COLLECTOR], spool=folder / "spool", drain_sec=60.0)
    return hcb.outfeed_receiver(forward=to)


def _flight(edits: Any, folder: Path) -> Any:
    import hostcallback as hcb

    edits.logged = _tap
    return hcb.outfeed_receiver(flight_recorder=folder / "flights")


def _metrics(writer: str) -> Callable[[Any, Path], Any]:
    def enter(edits: Any, folder: Path) -> Any:
        import hostcallback as hcb

        edits.logged = hcb.metrics
        return hcb.outfeed_receiver(writers=[getattr(hcb, writer)(folder / f"metrics.{writer}")])

    return enter


BARE = Feature("bare", _nothing, taps=False)
FEATURES = {
    "loaded": Feature("loaded", _loaded, taps=False),
    "accelerate": Feature("`accelerate`", _accelerate, taps=False),
    "pytest": Feature("pytest plugin", _nothing, taps=False),
    "observe": Feature("`observe`", _observe),
    "time": Feature("`observe`, time", _time),
    "watch": Feature("`watch_nonfinite`", _watch),
    "capsule": Feature("`capsule`", _capsule),
    "checked": Feature("`checked`", _checked),
    "error_collector": Feature("`error_collector`", _error_collector),
    "progress": Feature("progress", _progress, draws=True, needs="loops"),
    "stop": Feature("`stop=True`", _stop, needs="loops"),
    "knob": Feature("`knob`", _knob),
    "record": Feature("`record`", _record),
    "forward": Feature("`forward`", _forward),
    "flight": Feature("flight recorder", _flight),
    "jsonl": Feature("metrics, `jsonl`", _metrics("jsonl")),
    "csv": Feature("metrics, `csv`", _metrics("csv")),
    "tensorboard": Feature("metrics, `tensorboard`", _metrics("tensorboard")),
}


def named(name: str) -> Feature:
    """The feature of a name, or `module:attribute` of another one."""
    if ":" in name:
        module, _, attribute = name.partition(":")
        found: Feature = getattr(importlib.import_module(module), attribute)
        return found
    return FEATURES.get(name, BARE)


@contextlib.contextmanager
def on(feature: Feature, edits: Any, folder: Path) -> Iterator[None]:
    """Turns a feature on for a block, and off after it."""
    unedited = dict(vars(edits))
    folder.mkdir()
    try:
        with feature.enter(edits, folder):
            yield
    finally:
        for name in ("wrapped", "logged", "scanned"):
            setattr(edits, name, unedited[name])

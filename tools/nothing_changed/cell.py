"""A process of the matrix: runs one program under one feature, and writes what happened.

`python -m tools.nothing_changed.cell PROGRAM FEATURE`, in a separate folder. It imports nothing of hostcallback unless
the feature does.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "tests" / "libraries" / "programs"
OBSERVATION, RESULTS = "observation.json", "results.npz"
EVENTS = {
    "/jax/core/compile/jaxpr_trace_duration": "traces",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lowerings",
}


def load(program: str) -> Any:
    """The module of a program."""
    (path,) = PROGRAMS.rglob(f"{program}.py")
    spec = importlib.util.spec_from_file_location(program, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def leaves(tree: Any) -> dict[str, Any]:
    """The results of a program by path, as numpy arrays."""
    import jax
    import numpy as np

    def data(leaf: Any) -> Any:
        is_key = hasattr(leaf, "dtype") and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(leaf) if is_key else leaf)

    return {
        jax.tree_util.keystr(path): data(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def functions_of(module: Any) -> set[str]:
    """Names of the functions in the source of a program."""
    found: set[str] = set()

    def walk(code: Any) -> None:
        found.add(code.co_name)
        for constant in code.co_consts:
            if hasattr(constant, "co_name"):
                walk(constant)

    for path in {module.__file__, *getattr(module, "SOURCES", ())}:
        walk(compile(Path(path).read_text(encoding="utf-8"), path, "exec"))
    return found


class Watch:
    """What JAX traces and lowers, by function, and the exception of the variant that fails."""

    def __init__(self) -> None:
        """Listens from now on."""
        import jax

        self.counts = {kind: Counter[str]() for kind in EVENTS.values()}
        jax.monitoring.register_event_duration_secs_listener(self._event)

    def _event(self, event: str, duration: float, **details: Any) -> None:
        if event in EVENTS:
            self.counts[EVENTS[event]][str(details.get("fun_name"))] += 1


def run(program: str, name: str) -> None:
    """Runs the program, then the variant that fails, and writes both down."""
    import jax
    import numpy as np

    from program_edits import edits
    from tools.nothing_changed.features import named, on

    feature, watch, module = named(name), Watch(), load(program)
    started = time.process_time(), time.perf_counter()
    with on(feature, edits, Path("first").absolute()):
        result = module.main()
        jax.block_until_ready([leaf for leaf in jax.tree.leaves(result) if isinstance(leaf, jax.Array)])
    seconds = time.process_time() - started[0], time.perf_counter() - started[1]
    observation: dict[str, Any] = {
        "seconds": seconds,
        "keys": sorted(name for name in os.listdir("cache") if name.endswith("-cache")),
        "calls": edits.calls,
        "loops": edits.loops,
        "functions": sorted(functions_of(module)),
        **{kind: dict(counts) for kind, counts in watch.counts.items()},
    }
    arrays = leaves(result)
    observation["results"] = {
        path: f"{array.dtype}{array.shape} {hashlib.sha256(array.tobytes()).hexdigest()}"
        for path, array in arrays.items()
    }
    np.savez(RESULTS, *arrays.values())
    observation["exception"] = failing(module, feature, edits)
    Path(OBSERVATION).write_text(json.dumps(observation), encoding="utf-8")


def failing(module: Any, feature: Any, edits: Any) -> list[str]:
    """The type and text of the exception of the variant that fails, and the user's functions that it went through."""
    import jax

    from tools.nothing_changed.features import on

    jax.clear_caches()
    edits.fails = True
    # Its programs are no part of the comparison.
    jax.config.update("jax_dump_ir_to", "")
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        with on(feature, edits, Path("second").absolute()):
            module.main()
    except Exception as error:
        own = [
            frame.name
            for frame in traceback.extract_tb(error.__traceback__)
            if str(PROGRAMS) in frame.filename
        ]
        return [type(error).__name__, str(error).partition("\n")[0], *own]
    finally:
        edits.fails = False
    return ["no exception"]


if __name__ == "__main__":
    run(*sys.argv[1:])

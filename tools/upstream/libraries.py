"""The libraries whose tests run, and which of their tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

JAX = "0.10.2"
"""The JAX of the default pair."""

BEARTYPE = "beartype==0.23.1"


@dataclass(frozen=True)
class Library:
    """One library.

    Attributes:
        name: its name on the package registry, and of the folder of its checkout.
        version: of the package that is installed, and of the tests.
        every: its test folders and files; `--full` runs these.
        selected: files or tests that run by default, which print, call back, compile, export or loop.
        chosen: which of the selected tests run by default, as `-k` takes it; empty for all.
        excluded: tests that run in no setting, as `--deselect` takes them: they take very long or need a network.
        by_file: whether each file runs in other processes: there is a limit to the programs of one process.
        requirements: further packages that its tests import.
        environment: variables for its tests.
    """

    name: str
    version: str
    every: tuple[str, ...]
    selected: tuple[str, ...] = ()
    chosen: str = ""
    excluded: tuple[str, ...] = ()
    by_file: bool = False
    requirements: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


LIBRARIES = {
    library.name: library
    for library in (
        Library("jax-tqdm", "0.4.0", ("tests",)),
        Library(
            "optax",
            "0.2.8",
            ("optax",),
            ("optax/_src/linesearch_test.py",),
        ),
        Library(
            "jax",
            JAX,
            ("tests",),
            (
                "tests/debugging_primitives_test.py",
                "tests/jaxpr_effects_test.py",
                "tests/python_callback_test.py",
                "tests/export_test.py",
                "tests/pjit_test.py",
            ),
            "debugging_primitives_test or jaxpr_effects_test or python_callback_test or mesh or kwargs or cache",
            excluded=(  # they hang plain, too, on two cores
                "tests/pallas/tpu_pallas_interpret_distributed_test.py::InterpretDistributedTest"
                "::test_reduce_scatter_sum_with_emit_pipeline_example",
            ),
            by_file=True,
            requirements=("absl-py==2.5.1", "cloudpickle==3.1.2", "hypothesis==6.170.17", "scipy==1.17.1"),
        ),
        Library("chex", "0.1.92", ("chex",), ("chex/_src/asserts_chexify_test.py",)),
        Library(
            "equinox",
            "0.13.8",
            ("tests",),
            (
                "tests/test_while_loop.py",
                "tests/test_callback.py",
                "tests/test_debug.py",
                "tests/test_errors.py",
                "tests/test_progress_meter.py",
            ),
            "not test_while_loop or forward or scalar",
            requirements=(BEARTYPE,),
        ),
        Library(
            "diffrax",
            "0.7.2",
            ("test",),
            ("test/test_progress_meter.py",),
            requirements=(BEARTYPE,),
            # Its statistics run for long: programs that are compiled quickly take hours.
            environment={"JAX_DISABLE_MOST_OPTIMIZATIONS": "0"},
        ),
        Library("lineax", "0.1.1", ("tests",), ("tests/test_misc.py",), requirements=(BEARTYPE,)),
        Library(
            "optimistix",
            "0.1.0",
            ("tests",),
            ("tests/test_misc.py",),
            requirements=(BEARTYPE, "pytest-benchmark==5.3.1"),
        ),
        Library(
            "blackjax",
            "1.7.1",
            ("tests",),
            ("tests/test_progress_bar.py",),
            requirements=("jax-tap==0.3.1", "tqdm==4.70.1"),
        ),
        Library("numpyro", "0.22.0", ("test",), ("test/test_compile.py",)),
        Library("flax", "0.12.8", ("tests",), ("tests/core/core_lift_test.py",)),
    )
}
"""The libraries by name, in the order in which they run."""

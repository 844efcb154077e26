"""The primitive that reads a cell: a value that the host changes while programs run (`receiver.runtime.cells`).

Its result depends on no operand, so vmap and differentiation do not change it: one value for all elements, and a
constant. An operand only says when: XLA knows no other order between a read and a loop without effects. A read has
the effects of a tap: JAX neither merges two reads nor moves one out of a loop, XLA keeps them in program order, and a
checkpoint saves what was read in place of reading it again.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, batching

from hostcallback import _jax_compat as compat
from hostcallback._jax_compat.types import Primitive
from hostcallback.primitives.batched_predicates import runs_for_all_elements
from hostcallback.primitives.effects import PASSED_TOKEN_EFFECT
from hostcallback.primitives.tap import effect_here, jvp_without_tangents
from hostcallback.receiver.runtime.cells import CellSpec, cell_of
from hostcallback.tracing.source_line import SourceLine

read_cell_p = Primitive("read_knob")
"""Parameters: `cell`, a `CellSpec`; `site`, a text that says where the program reads; `once`, whether all reads of the
cell in one launch have one value; `processes`, see `Processes`."""
read_cell_p.multiple_results = True

Processes: TypeAlias = Literal["refuse", "agree", "own"]
"""What a read in a program on devices of several processes does: it is refused; all get the value of the process of the
program's first device, by a collective; each gets its own."""


def read_cell(
    cell: CellSpec, site: str, *, once: bool = False, processes: Processes = "refuse", after: Any = None
) -> Any:
    """Reads a cell: in a program each time the read runs, and when the integer `after` is computed; elsewhere now."""
    operands = [] if after is None else [jnp.asarray(after)]
    return read_cell_p.bind(*operands, cell=cell, site=site, once=once, processes=processes)[0]


def processes_of(name: str, given: Any, alone: Any, line: SourceLine) -> Processes:
    """What reads do, for an argument that is "processes", or `alone` for programs of one process.

    Raises:
        ValueError: the argument is something else.
    """
    if isinstance(given, str) and given == "processes":
        return "agree"
    if given is not alone:
        raise ValueError(f"{name}={given!r}, expected {alone} or 'processes', at {line}")
    return "refuse"


def _abstract(*after: Any, cell: CellSpec, site: str, once: bool, processes: Processes) -> Any:
    aval = jax.core.ShapedArray(cell.shape, cell.array(cell.default).dtype)
    return compat.results_that_vary_as([], [aval]), {effect_here(), PASSED_TOKEN_EFFECT}


def now(*after: Any, cell: CellSpec, **_: Any) -> list[Any]:
    """The value at this moment, outside of any program, or as a constant of one."""
    return [jnp.asarray(np.array(cell_of(cell).value))]


def _batch(args: Any, dims: Any, **params: Any) -> Any:
    return read_cell_p.bind(
        *(jnp.max(arg, axis=dim) for arg, dim in zip(args, dims, strict=True)), **params
    ), [None]


read_cell_p.def_effectful_abstract_eval(_abstract)
read_cell_p.def_impl(now)
ad.primitive_jvps[read_cell_p] = functools.partial(jvp_without_tangents, read_cell_p)
batching.primitive_batchers[read_cell_p] = _batch
compat.lower_with_devices(read_cell_p)
runs_for_all_elements(read_cell_p)
# Lowering is registered in hostcallback.lowering, which knows the transports.

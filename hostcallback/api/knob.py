"""`knob` and `knobs`: values in compiled code that the host changes while the program runs."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from hostcallback import _jax_compat as compat
from hostcallback.primitives.cells import processes_of, read_cell
from hostcallback.receiver.runtime import knobs as registry
from hostcallback.receiver.runtime.cells import cell_of
from hostcallback.receiver.wire.array_types import BY_NAME
from hostcallback.tracing.source_line import public, user_source_line

MAX_BYTES = 4096
"""Bytes of a knob: each read copies all of it."""

READS = ("always", "call")

knobs = registry.knobs
knobs.user_line = lambda: str(user_source_line())


@public
def knob(
    name: str,
    default: Any,
    *,
    min: float | None = None,
    max: float | None = None,
    read: Literal["always", "call"] = "always",
    agree: Literal["processes"] | None = None,
) -> Any:
    """Returns a value that `hcb.knobs[name] = value` changes while the program runs, without recompilation.

    In traced code the value is read where it stands, each time it runs: in a `scan` in every iteration. Elsewhere it is
    the value now. All devices of this process that run a program read the same value at the same point; the first
    device there decides. A program on devices of several processes is refused without `agree`.

    Under `vmap` it is one value for all elements, and under `grad` a constant; a checkpoint does not read it again. An
    exported program carries the default, and reads the knob of that name in the process that runs it, if there is one.
    On CPUs with the native transport a read costs little more than an empty foreign call, elsewhere a Python callback.

    Args:
        name: of the knob, by which it is set. Several places may read one knob; they must declare it alike.
        default: the value until it is set: a number or a small array (up to 4096 bytes) of any dtype of whole bytes. A
            Python number is weakly typed, as it is elsewhere in JAX.
        min: the smallest value that may be set; None for no bound.
        max: the largest one.
        read: "always", or "call": all reads of one launch of the program have one value, that of the first of them.
        agree: "processes": in a program on devices of several processes all read the value of the process that has the
            program's first device, by a collective in each read. Then all of them must run the read equally often.

    Returns:
        The value: an array of the shape and dtype of `default`.

    Raises:
        TypeError: the name is not a text, or the default is traced or of a type that a knob cannot have; or the knob
            exists with another dtype or shape.
        ValueError: `read` is unknown, the bounds are not in order, the default is out of bounds, NaN or too large; or
            the knob exists with another default or other bounds.
        NotImplementedError: (later) the program runs on several processes, without `agree`, or is lowered for several
            platforms.

    Example:
        @jax.jit
        def descend(x):
            return jax.lax.scan(lambda x, _: (x - hcb.knob("lr", 1e-3, min=0, max=1) * x, None), x, length=100)[0]

        descend(x)
        hcb.knobs["lr"] = 3e-4  # another thread may do this while it runs
    """
    line = user_source_line()
    if not isinstance(name, str) or not name or name != name.strip():
        raise TypeError(f"a knob's name is a text, got {name!r}: hcb.knob('lr', 1e-3), at {line}")
    if read not in READS:
        raise ValueError(f"read={read!r}, expected one of {', '.join(map(repr, READS))}, at {line}")
    processes = processes_of("agree", agree, None, line)
    if min is not None and max is not None and not min <= max:
        raise ValueError(
            f"the knob {name!r} has min={min!r} and max={max!r}, which are not in order, at {line}"
        )
    value = _as_array(name, default, str(line))
    if value.dtype.kind in "bc" and (min, max) != (None, None):
        raise ValueError(
            f"the knob {name!r} is {value.dtype}, which has no bounds: leave min and max out, at {line}"
        )
    declared = knobs.declare(name, value, min, max, str(line))
    site = f"{line.module}:{line.line} ({line.function})"
    is_weak = type(default) in (int, float, complex)
    if is_weak and compat.outside_traces():  # without a program that only makes its type weak
        return jnp.asarray(cell_of(declared.spec).value.item())
    out = read_cell(declared.spec, site, once=read == "call", processes=processes)
    return compat.weakly_typed(out) if is_weak else out


def _as_array(name: str, default: Any, line: str) -> np.ndarray[Any, Any]:
    if isinstance(default, jax.core.Tracer):
        raise TypeError(
            f"the default of the knob {name!r} is traced, and a knob's first value must be known where it is declared: "
            f"give it a number, at {line}"
        )
    try:
        given = np.asarray(default)
        dtype = jax.dtypes.canonicalize_dtype(given.dtype)
        known = BY_NAME[dtype.name]
    except (TypeError, ValueError, KeyError) as error:
        raise TypeError(
            f"the default of the knob {name!r} is {default!r:.80}, expected a number or an array of numbers, at {line}"
        ) from error
    if known.bits % 8:
        raise TypeError(
            f"the knob {name!r} is {dtype}, whose elements are less than a byte: use int8 and convert it, at {line}"
        )
    with np.errstate(over="ignore", invalid="ignore"):
        value = given.astype(dtype)
    if not registry.fits(given, value):
        raise ValueError(
            f"the default of the knob {name!r}, {default!r:.80}, does not fit into {dtype}, which JAX makes of it: "
            f"give an array of a wider dtype (jax_enable_x64), at {line}"
        )
    if value.nbytes > MAX_BYTES:
        raise ValueError(
            f"the knob {name!r} has {value.nbytes:,} bytes, at most {MAX_BYTES:,} are allowed, since each read copies "
            f"all of it: pass a large array to the program as an argument, at {line}"
        )
    return value

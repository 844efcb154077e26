"""Lowers reads of cells: to a native handler on CPUs, elsewhere to a Python callback, which takes some 50 us."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import numpy as np

from hostcallback import _jax_compat as compat
from hostcallback._jax_compat.types import LoweringRuleContext
from hostcallback.lifecycle import receivers as transport
from hostcallback.lowering.partition import KEPT_NAME
from hostcallback.primitives.cells import Processes, read_cell_p
from hostcallback.primitives.effects import TAP_EFFECT
from hostcallback.receiver.runtime.cells import KNOB_PREFIX, CallbackReads, Cell, CellSpec, cell_of, site_id

PARTITIONED_NAME = "hostcallback_partitioned_cell"

_OF_A_LAUNCH = site_id("a launch")
"""The site of all reads that have one value in a launch."""

_REQUEST = struct.Struct("<QQQII")
"""`Request` in receiver/native/handlers/cell.cc."""


_keeps_values: ContextVar[bool] = ContextVar("keeps_values", default=False)


@contextmanager
def values_as_defaults() -> Iterator[None]:
    """Exports programs in the block with the values that their cells have now, in place of their defaults."""
    before = _keeps_values.set(True)
    try:
        yield
    finally:
        _keeps_values.reset(before)


def _lower(
    ctx: LoweringRuleContext, *after: Any, cell: CellSpec, site: str, once: bool, processes: Processes
) -> Any:
    context = compat.LoweringContext(ctx)
    several = len({device.process_index for device in context.devices() or ()}) > 1
    _check_supported(context, cell, site, once, refused=several and processes == "refuse")
    agrees = several and processes == "agree"
    known = cell_of(cell)
    transport.start(context.platform)
    token = context.token_in(TAP_EFFECT)
    if not _is_native(context):
        function = _python_read(context, known)
        token_out, results = compat.python_callback(
            context, function, token, after, ctx.avals_in, ctx.avals_out
        )
    else:
        if once and compat.LAUNCH_NUMBERS_REPEAT:
            known.forget_launches(_OF_A_LAUNCH)
        request = _request(context, cell, site, once)
        if not context.for_export:
            context.avoid_persistent_cache()
        if context.automatic:
            # Where the compiler partitions, all devices call, and the collective stands in their program.
            if after:
                token = context.partitioned_call(KEPT_NAME, token, after, transport.FFI_CLOCK_TARGET)
            config = _config(request, cell, context.device_count if agrees else 0)
            token_out, results = compat.partitioned_read(
                context, PARTITIONED_NAME, token, ctx.avals_out[0], config
            )
        else:
            attributes = {"cell": np.frombuffer(request, np.uint8)}
            token_out, results = compat.custom_call_with_results(
                context, transport.FFI_CELL_TARGET, token, after, ctx.avals_out, attributes
            )
    if agrees and context.manual and not context.automatic:
        results = [compat.of_first_device(results[0], context.device_count)]
    context.set_token_out(TAP_EFFECT, token_out)
    return results


def _is_native(context: compat.LoweringContext) -> bool:
    return context.platform == "cpu" and transport.use_native("cpu")


_CURE_OF_KNOBS = (
    'add agree="processes", for the value of the first process by a collective in each read, or pass the value to the '
    "program as an argument"
)
_CURE_OF_STOPS = (
    'use stop="processes" for a loop, or hcb.stop_requested(agree="processes"): all processes then stop after the same '
    "step, by a collective in each"
)


def _check_supported(
    context: compat.LoweringContext, cell: CellSpec, site: str, once: bool, *, refused: bool
) -> None:
    is_knob = cell.name.startswith(KNOB_PREFIX)
    where = f"the read of {cell.name if is_knob else 'a request to stop'} at {site} is in a program that"
    if len(context.platforms) > 1:
        raise NotImplementedError(
            f"{where} is lowered for several platforms at once, {', '.join(context.platforms)}: lower it for one at a "
            "time, since each reads its knobs another way"
        )
    if refused:
        raise NotImplementedError(
            f"{where} runs on devices of several processes, which would read different values: "
            f"{_CURE_OF_KNOBS if is_knob else _CURE_OF_STOPS}"
        )
    if _is_native(context):
        return
    if context.for_export:
        raise NotImplementedError(
            f"{where} is exported, and its knob would be a Python callback, which JAX cannot export: programs with "
            "knobs are exported for CPU, on the native transport"
        )
    if once:
        raise NotImplementedError(
            f'{where} reads it with read="call" on a platform without the native handler, where a read does not know '
            'its launch: use read="always" (the default), or pass the value to the program as an argument'
        )


def _request(context: compat.LoweringContext, cell: CellSpec, site: str, once: bool) -> bytes:
    site_number = _OF_A_LAUNCH if once else site_id(site)
    head = _REQUEST.pack(cell.cell_id, cell.type_id, site_number, _devices(context), once)
    return head + (cell_of(cell).value.tobytes() if _keeps_values.get() else cell.default)


def _devices(context: compat.LoweringContext) -> int:
    if context.device_count == 1 and not context.is_replicated:
        return 1
    return max(2, len(context.local_devices()))


def _python_read(context: compat.LoweringContext, cell: Cell) -> Callable[..., Any]:
    # Where the compiler partitions, one device calls, and its result is sent to all.
    several = _devices(context) if context.manual or context.is_replicated else 1
    reads = CallbackReads(cell, several)

    def read(partition: Any, *after: Any) -> tuple[np.ndarray[Any, Any]]:
        value = reads.of(int(partition))
        return (value.astype(compat.widened(value.dtype), copy=False),)

    return read


def _config(request: bytes, cell: CellSpec, agreeing: int) -> str:
    return json.dumps(
        {"request": request.hex(), "shape": cell.shape, "dtype": cell.dtype, "agreeing": agreeing}
    )


def _partition(_: Sequence[Any], given: Sequence[Any], __: Any, ___: Any, config: bytes) -> Any:
    # XLA calls this on one of its threads while it compiles. Each device reads for itself.
    settings = json.loads(config)
    attributes = {"cell": np.frombuffer(bytes.fromhex(settings["request"]), np.uint8)}
    made = (tuple(settings["shape"]), jax.numpy.dtype(settings["dtype"]))
    return (
        compat.read_of_a_device(
            transport.FFI_CELL_TARGET, attributes, made, on_token=bool(given), agreeing=settings["agreeing"]
        ),
        list(given),
        compat.REPLICATED,
    )


compat.register_partitioner(PARTITIONED_NAME, _partition)
compat.register_lowering(read_cell_p, _lower)

"""Custom calls that the compiler asks us to partition.

`jax.experimental.custom_partitioning` is built on the same hooks (0.8 to 0.12), but its call takes no token, has no
side effect, and names its Python callback by an address, which makes programs differ between processes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax._src import (
    dispatch as _dispatch,  # prim_requires_devices_during_lowering
    xla_bridge as _xla_bridge,  # register_plugin_callbacks
)
from jax._src.export import _export  # the primitive that calls an exported program, and its lowering rule
from jax._src.interpreters import mlir as _mlir  # make_ir_context, custom_call, module_to_bytecode
from jax._src.lib import xla_client as _xla_client  # register_custom_call_partitioner, HloSharding
from jax._src.lib.mlir import ir as _ir  # types of lowered values
from jax._src.lib.mlir.dialects import func as _func, hlo as _hlo  # FuncOp; TokenType, PartitionIdOp

REPLICATED: Any = _xla_client.HloSharding.replicate()


def sharding_without(sharding: Any, rank: int, axes: Sequence[int]) -> Any:
    """The sharding of an array of that rank that leaves some of its axes whole, and the others as they are."""
    if not axes or not sharding.is_tiled():
        return sharding
    sizes = sharding.tile_assignment_dimensions()
    if all(sizes[axis] == 1 for axis in axes):
        return sharding
    kinds: Any = _xla_client.OpSharding.Type
    # What devices are tiled over: the array's axes, and then those of devices that hold the same shard, or are of
    # different groups where some axes of the mesh are manual.
    groups = [*sharding.subgroup_types()] or [kinds.REPLICATED] * (len(sizes) - rank)
    devices = np.reshape(sharding.tile_assignment_devices(), sizes)
    same = [*axes, *(rank + i for i, kind in enumerate(groups) if kind == kinds.REPLICATED)]
    rest = [axis for axis in range(devices.ndim) if axis not in same]
    devices = devices.transpose([*rest, *same])
    left = [1 if axis in axes else sizes[axis] for axis in range(rank)]
    other = [kind for kind in groups if kind != kinds.REPLICATED]
    found = _xla_client.OpSharding()
    found.type = kinds.OTHER
    found.tile_assignment_dimensions = [
        *left, *(sizes[axis] for axis in rest if axis >= rank), int(np.prod([sizes[axis] for axis in same]))
    ]  # fmt: skip
    found.tile_assignment_devices = devices.ravel().tolist()
    if other:
        found.last_tile_dims = [*other, kinds.REPLICATED]
    else:
        found.replicate_on_last_tile_dim = True
    return _xla_client.HloSharding.from_proto(found)


def register_partitioner(name: str, partition: Callable[..., Any]) -> None:
    """Lets `partition` say what each device runs of the side-effecting custom calls of that name.

    It is called as `partition(arg_shapes, arg_shardings, result_shape, result_sharding, config)` while XLA compiles and
    returns a module, the operands' shardings and the result's.
    """
    arguments: dict[str, Any] = {
        "name": name,
        "prop_user_sharding": lambda sharding, shape, config: sharding,
        "partition": partition,
        "infer_sharding_from_operands": lambda shapes, shardings, shape, config: REPLICATED,
        "can_side_effecting_have_replicated_sharding": True,
    }
    _xla_client.register_custom_call_partitioner(**arguments)
    # Each platform in a plugin keeps its own partitioners (0.8 to 0.12): without this, it knows no such call.
    _xla_bridge.register_plugin_callbacks(
        functools.partial(_xla_client.register_custom_call_partitioner, **arguments)
    )


def rewrite_in_exported(name: str, rewrite: Callable[[Any, str], str]) -> None:
    """Lets `rewrite(ctx, config)` replace the configuration of the calls `name` in exported programs.

    JAX merges an exported program into the one that calls it when it lowers that one, and its rule for that (0.8 to
    0.12) leaves the calls as they were where the program was exported, on other devices.
    """
    primitive, rule = _export.call_exported_p, _export._call_exported_lowering

    def lower(ctx: Any, *args: Any, **params: Any) -> Any:
        results = rule(ctx, *args, **params)
        if not ctx.module_context.lowering_parameters.for_export:
            ctx.module_context.module.operation.walk(functools.partial(_rewrite, ctx, name, rewrite))
        return results

    _dispatch.prim_requires_devices_during_lowering.add(primitive)
    _mlir.register_lowering(primitive, lower)


def _rewrite(ctx: Any, name: str, rewrite: Callable[[Any, str], str], operation: Any) -> Any:
    attributes = operation.attributes
    if (
        operation.name == "stablehlo.custom_call"
        and _ir.StringAttr(attributes["call_target_name"]).value == name
    ):
        config = _ir.StringAttr(attributes["backend_config"]).value
        attributes["backend_config"] = _ir.StringAttr.get(rewrite(ctx, config))
    return _ir.WalkResult.ADVANCE


def tap_of_a_partition(
    target: str,
    attributes: dict[str, Any],
    table: np.ndarray[Any, Any],
    operands: Sequence[tuple[tuple[int, ...], Any]],
    *,
    with_partition: bool,
) -> bytes:
    """A module that calls `target` on a token, this device's row of `table` and the operands; returns the token.

    Args:
        target: of a typed-FFI call.
        attributes: of the call.
        table: int64, shape [partitions, numbers].
        operands: shape and dtype of each on one device.
        with_partition: whether the number of the device comes before the row.
    """
    context = _mlir.make_ir_context()
    with context, _ir.Location.unknown(context):
        module = _ir.Module.create()
        types = [
            _ir.RankedTensorType.get(shape, _mlir.dtype_to_ir_type(np.dtype(dtype)))
            for shape, dtype in operands
        ]
        token = _hlo.TokenType.get()
        with _ir.InsertionPoint(module.body):
            main: Any = _func.FuncOp("main", ([token, *types], [token]))
            main.attributes["sym_visibility"] = _ir.StringAttr.get("public")
            with _ir.InsertionPoint(main.add_entry_block()):
                token_in, *arrays = main.arguments
                partition = _hlo.PartitionIdOp().result
                values = [_row(table, partition), *arrays]
                if with_partition:
                    values.insert(0, partition)
                ranks = [len(_ir.RankedTensorType(value.type).shape) for value in values]
                call = _mlir.custom_call(
                    target,
                    result_types=[token],
                    operands=[token_in, *values],
                    has_side_effect=True,
                    api_version=4,
                    backend_config={key: _mlir.ir_attribute(value) for key, value in attributes.items()},
                    operand_layouts=[(), *(tuple(range(rank - 1, -1, -1)) for rank in ranks)],
                    result_layouts=[()],
                )
                _func.ReturnOp(call.results)
        return _mlir.module_to_bytecode(module)


def _row(table: np.ndarray[Any, Any], index: Any) -> Any:
    int64, int32 = _ir.IntegerType.get_signless(64), _ir.IntegerType.get_signless(32)
    elements: Any = _ir.DenseElementsAttr  # whose annotations know no types of elements
    rows = _hlo.constant(elements.get(table, type=int64, shape=table.shape))
    start = _hlo.convert(_ir.RankedTensorType.get((), int32), index)
    zero = _hlo.constant(elements.get(np.zeros((), np.int32), type=int32, shape=()))
    sizes = _ir.DenseI64ArrayAttr.get((1, table.shape[1]))
    row = _hlo.dynamic_slice(rows, [start, zero], sizes)
    return _hlo.reshape(_ir.RankedTensorType.get((table.shape[1],), int64), row)

"""Custom calls that the compiler asks us to partition, and the manual axes of shard_map.

`jax.experimental.custom_partitioning` is built on the same hooks (0.8 to 0.12), but its call takes no token, has no
side effect, and names its Python callback by an address, which makes programs differ between processes.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import jax
import numpy as np
from jax._src import (
    core as _core,  # ShapedArray, ManualAxisType, get_cur_mesh_sharding
    custom_partitioning as _custom_partitioning,  # its primitive and its lowering rule
    dispatch as _dispatch,  # prim_requires_devices_during_lowering
    effects as _effects,  # ordered_effects
    shard_map as _shard_map,  # shard_map_p and its lowering rule
    xla_bridge as _xla_bridge,  # register_plugin_callbacks
)
from jax._src.interpreters import mlir as _mlir  # register_lowering, with JAX's own rules; TokenSet
from jax._src.lib import xla_client as _xla_client  # register_custom_call_partitioner, HloSharding
from jax._src.lib.mlir import ir as _ir  # BoolAttr
from jax._src.lib.mlir.dialects import func as _func, hlo as _hlo  # FuncOp; TokenType, PartitionIdOp

from hostcallback._jax_compat import lowering, versions
from hostcallback._jax_compat.types import (
    Aval,
    ClosedJaxpr,
    Effect,
    Jaxpr,
    JaxprEqn,
    LoweringRuleContext,
    Primitive,
)

custom_partitioning_p: Any = _custom_partitioning.custom_partitioning_p


def wrap_custom_partitioning(wrapper: Callable[[Any], Any]) -> None:
    """Replaces the lowering rule of functions with `jax.experimental.custom_partitioning`.

    Where the compiler partitions, JAX's rule (0.8 to 0.12) makes a call without side effects and sets no tokens. Later,
    while XLA compiles, it lowers what the function's `partition` returns, for a program without tokens, and keeps
    nothing alive of that. Without another rule, lowering fails for lack of a token if the function has taps.
    """
    _mlir.register_lowering(
        custom_partitioning_p, wrapper(_custom_partitioning._custom_partitioning_lowering_rule)
    )


def mark_side_effect(results: Sequence[Any]) -> None:
    """Keeps XLA from dropping the custom call that has these results, if it is one with any."""
    for result in results[:1]:
        result.owner.attributes["has_side_effect"] = _ir.BoolAttr.get(True)


def keeping_alive_in(ctx: LoweringRuleContext, kept: list[Any]) -> Any:
    """Returns the lowering context with the list `kept` in place of JAX's own list of objects to keep alive."""
    return ctx.replace(module_context=ctx.module_context.replace(keepalives=kept))


def without_sharding_types(function: Callable[[jax.Array], Any], value: jax.Array) -> Any:
    """Returns `function(value)`, whole on each device, and leaves the explicit axes of a mesh to the compiler in it.

    Under explicit sharding JAX refuses operations of which it cannot tell how the result is divided.
    """
    mesh = jax.typeof(value).sharding.mesh
    if not mesh.explicit_axes:
        return function(value)
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return jax.sharding.auto_axes(function, axes=mesh.explicit_axes, out_sharding=whole)(value)


shard_map_p: Any = _shard_map.shard_map_p


def keep_tokens_out(effect_type: type[Effect], instead: Effect) -> None:
    """Lowers a shard_map over some axes with `instead` in place of the ordered effects of that type in its body.

    Its body has some if it holds a shard_map over the other axes, whose body has no axes that are the compiler's. A
    trace of that body is as one of a single shard_map over all axes, with which a jit may share it, so that only the
    lowering can tell. See `versions.TOKENS_ENTER_PARTIALLY_MANUAL_REGIONS`.
    """
    rule: Any = _shard_map._shard_map_lowering

    def lower(ctx: LoweringRuleContext, *args: Any, jaxpr: Any, **params: Any) -> Any:
        mesh, new = params["mesh"], jaxpr
        outer = frozenset(getattr(mesh, "manual_axes", ()))
        config: Any = jax.config
        if outer and "manual_axes" in params and config.jax_use_shardy_partitioner:
            # Until 0.9 the context within has these axes only; later it has those of the shard_map around it, too.
            params["manual_axes"] = frozenset(params["manual_axes"]) | outer
        if {*shard_map_axes(params), *outer} != set(mesh.axis_names):
            new = _with_effect(jaxpr, effect_type, instead, {})
        if new is jaxpr:
            return rule(ctx, *args, jaxpr=jaxpr, **params)
        tokens = ctx.tokens_in
        others = {e: tokens.get(e) for e in tokens.effects() if not isinstance(e, effect_type)}
        inside = ctx.replace(tokens_in=_mlir.TokenSet(others), tokens_out=None)
        outs = rule(inside, *args, jaxpr=new, **params)
        ctx.set_tokens_out(tokens.update_tokens(inside.tokens_out or _mlir.TokenSet()))
        return outs

    _mlir.register_lowering(shard_map_p, lower)


def _with_effect(param: Any, effect_type: type[Effect], instead: Effect, done: dict[int, Any]) -> Any:
    # An equation's parameter; `done` has the jaxprs that were replaced, so that one that is called twice stays one.
    if isinstance(param, tuple):
        new = [_with_effect(each, effect_type, instead, done) for each in param]
        if all(map(operator.is_, new, param)):
            return param
        return type(param)(*new) if hasattr(param, "_fields") else tuple(new)
    if not isinstance(param, Jaxpr | ClosedJaxpr):
        return param
    if id(param) not in done:
        done[id(param)] = _with_effect_inside(param, effect_type, instead, done)
    return done[id(param)]


def _with_effect_inside(jaxpr: Any, effect_type: type[Effect], instead: Effect, done: dict[int, Any]) -> Any:
    def replaced(effects: Iterable[Effect]) -> set[Effect]:
        ordered = _effects.ordered_effects
        return {
            instead if isinstance(effect, effect_type) and ordered.contains(effect) else effect
            for effect in effects
        }

    if isinstance(jaxpr, ClosedJaxpr):
        return jaxpr.replace(jaxpr=_with_effect(jaxpr.jaxpr, effect_type, instead, done))
    if replaced(jaxpr.effects) == set(jaxpr.effects):
        return jaxpr
    equations = [
        equation.replace(
            params={
                name: _with_effect(param, effect_type, instead, done)
                for name, param in equation.params.items()
            },
            effects=replaced(equation.effects),
        )
        for equation in jaxpr.eqns
    ]
    return jaxpr.replace(eqns=equations, effects=replaced(jaxpr.effects))


def shard_map_axes(params: dict[str, Any]) -> tuple[Any, ...]:
    """The axes that a shard_map takes over, in the order of its mesh; the parameter is `manual_axes` until 0.9."""
    manual = params["newly_manual_axes"] if "newly_manual_axes" in params else params["manual_axes"]
    return tuple(axis for axis in params["mesh"].axis_names if axis in manual)


def is_nested_shard_map(params: dict[str, Any]) -> bool:
    """Whether a shard_map is in another one, which takes over other axes of the same mesh."""
    return bool(getattr(params["mesh"], "manual_axes", ()))


def mesh_sizes(params: dict[str, Any]) -> tuple[int, ...]:
    """The sizes of the axes that `shard_map_axes` names."""
    return tuple(int(params["mesh"].shape[axis]) for axis in shard_map_axes(params))


def mesh_device(params: dict[str, Any], index: Sequence[int]) -> str:
    """The name of the device at an index of the axes that `shard_map_axes` names; empty if it is not known."""
    devices = getattr(params["mesh"], "devices", None)
    if devices is None or params["mesh"].axis_names != shard_map_axes(params):
        return ""
    device = devices[tuple(index)]
    return f"{device.platform}:{device.id}"


def collective_under_vmap(equation: JaxprEqn, values: Sequence[Any]) -> list[Any] | None:
    """The results of an equation of a shard_map's body where vmap stands for the devices; None for most equations.

    These primitives (0.9 to 0.12) look at the types of values in a shard_map, which they do not have under vmap.
    """
    name, params = equation.primitive.name, equation.params
    if name in ("psum_invariant", "psum"):
        return [jax.lax.psum(value, params["axes"]) for value in values]
    if name in ("pvary", "pcast"):
        return list(values)
    return None


def varying_axes(avals: Iterable[Aval]) -> frozenset[Any]:
    """The manual mesh axes over which any of the avals varies; see `results_that_vary_as`."""
    axes: frozenset[Any] = frozenset()
    arrays: list[Any] = [aval for aval in avals if isinstance(aval, _core.ShapedArray)]
    for aval in arrays:
        axes |= aval.mat.varying if versions.HAS_MANUAL_AXIS_TYPE else aval.vma
    return axes


def vary_over(axes: frozenset[Any], value: Any) -> Any:
    """Marks a value as varying over those axes: the two results of a branch, for example, must agree in this."""
    missing = tuple(sorted(axes - varying_axes([jax.typeof(value)]), key=str))
    if not missing:
        return value
    lax: Any = jax.lax  # which has pcast from 0.9 on, where pvary is deprecated
    return lax.pcast(value, missing, to="varying") if hasattr(lax, "pcast") else lax.pvary(value, missing)


def results_that_vary_as(avals: Sequence[Aval], results: Sequence[Any]) -> list[Any]:
    """The avals of results that depend on all operands: they vary over every manual mesh axis that one of those does.

    JAX's own rule for its callbacks and FFI calls leaves the axes out, or demands that all operands agree (0.8 to
    0.12): without this one, shard_map refuses the result of a call or the call itself.
    """
    varying = varying_axes(avals)
    sharding = _core.get_cur_mesh_sharding()
    if not varying:
        return [result.update(sharding=sharding) for result in results]
    if versions.HAS_MANUAL_AXIS_TYPE:
        axes: dict[str, Any] = {"manual_axis_type": _core.ManualAxisType(varying=varying)}
    else:
        axes = {"vma": varying}
    return [result.update(sharding=sharding, **axes) for result in results]


REPLICATED: Any = _xla_client.HloSharding.replicate()


def sharding_without(sharding: Any, rank: int, axes: Sequence[int]) -> Any:
    """The sharding of an array of that rank in which some axes are not divided; the other axes stay as they are."""
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


def one_row_each(devices: int) -> Any:
    """The sharding of a matrix whose row `i` lies on the program's device `i`."""
    return _xla_client.HloSharding.iota_tile((devices, 1))


def lower_with_devices(primitive: Primitive) -> None:
    """Makes JAX tell the primitive's lowering rule which devices the program is for.

    Without it, JAX may lower the program without knowing them, and `LoweringContext.devices` is None (0.8 to 0.12).
    """
    _dispatch.prim_requires_devices_during_lowering.add(primitive)


def partitioned_read(
    context: lowering.LoweringContext, name: str, token: Any, result: Aval, config: str
) -> tuple[Any, list[Any]]:
    """As `partitioned_call` of a context on a token only, with a result of the aval; returns token and result.

    In a shard_map over some axes only, it has no token: with one, XLA aborts the process (0.12).
    """
    tokens = [] if context.partially_manual else [token]
    types = [lowering.ir_type(context, result)]
    return token, lowering.partitioned_op(name, types, tokens, config, has_side_effect=True)


def rows_by_device(shape: Any, shardings: Sequence[Any], rows: Sequence[tuple[int, ...]]) -> Any:
    """The shardings of a tuple of XLA's shape `shape`: those given, and of the last ones, whose shapes are `rows`.

    Of these row `i` lies on the program's device `i`.
    """
    last = [_xla_client.HloSharding.iota_tile((row[0], *(1 for _ in row[1:]))) for row in rows]
    return _xla_client.HloSharding.tuple_sharding(shape, [*shardings, *last])


def register_partitioner(
    name: str, partition: Callable[..., Any], sharding_of_result: Callable[[bytes], Any] | None = None
) -> None:
    """Lets `partition` say what each device runs of the custom calls of that name.

    It is called as `partition(arg_shapes, arg_shardings, result_shape, result_sharding, config)` while XLA compiles and
    returns a module, the operands' shardings and the result's.

    Args:
        name: of the calls.
        partition: see above.
        sharding_of_result: of the configuration; by default the result is on every device.
    """
    infer = sharding_of_result or (lambda config: REPLICATED)
    arguments: dict[str, Any] = {
        "name": name,
        "prop_user_sharding": lambda sharding, shape, config: sharding,
        "partition": partition,
        "infer_sharding_from_operands": lambda shapes, shardings, shape, config: infer(config),
        "can_side_effecting_have_replicated_sharding": True,
    }
    _xla_client.register_custom_call_partitioner(**arguments)
    # Each platform in a plugin keeps its own partitioners (0.8 to 0.12): without this, it knows no such call.
    _xla_bridge.register_plugin_callbacks(
        functools.partial(_xla_client.register_custom_call_partitioner, **arguments)
    )


_TOKEN = "token"
"""Among the types of a device's program: a token."""

_Given = tuple[tuple[int, ...], Any]
"""Shape and dtype of an array on one device."""


def tap_of_a_partition(
    target: str,
    attributes: dict[str, Any],
    table: np.ndarray[Any, Any],
    operands: Sequence[_Given],
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

    def body(token: Any, *arrays: Any) -> Any:
        partition = _hlo.PartitionIdOp().result
        first = [partition] if with_partition else []
        return lowering.ffi_call(target, token, [*first, _row(table, partition), *arrays], [], attributes)

    return _program_of_a_device([_TOKEN, *operands], [_TOKEN], body)


def call_of_a_partition(target: str, operands: Sequence[_Given]) -> bytes:
    """A module that calls `target` on a token and the operands, of these shapes on one device; returns the token."""

    def body(token: Any, *arrays: Any) -> Any:
        return lowering.ffi_call(target, token, arrays, [], {})

    return _program_of_a_device([_TOKEN, *operands], [_TOKEN], body)


def call_of_a_share(
    target: str, attributes: dict[str, Any], operand: _Given, result: tuple[int, ...]
) -> bytes:
    """A module that calls `target` on an operand and the number of this device; returns the result of the call.

    Args:
        target: of a typed-FFI call without side effects.
        attributes: of the call.
        operand: its shape and dtype on one device.
        result: its shape on one device; it is float32.
    """
    made = (result, np.float32)

    def body(array: Any) -> Any:
        return lowering.ffi_call(
            target, None, [array, _hlo.PartitionIdOp().result], [_type_of(made)], attributes
        )

    return _program_of_a_device([operand], [made], body)


def edge_of_a_device(target: str, operands: Sequence[_Given], results: Sequence[_Given]) -> bytes:
    """A module that calls `target`, as `pure_call`, on operands of these shapes on one device.

    All results but the last two are in the memory of the operands of the same number.
    """

    def body(*arrays: Any) -> Any:
        return lowering.ffi_call(
            target, None, arrays, list(map(_type_of, results)), {}, in_place=len(results) - 2
        )

    return _program_of_a_device(operands, results, body)


def read_of_a_device(
    target: str, attributes: dict[str, Any], made: _Given, *, on_token: bool, agreeing: int
) -> bytes:
    """A module that calls `target`, and returns its result, or with `agreeing` devices that of the first one."""

    def body(*tokens: Any) -> Any:
        token = tokens[0] if on_token else _hlo.create_token()
        op = lowering.ffi_call(target, token, [], [_type_of(made)], attributes)
        return of_first_device(op.results[1], agreeing).owner if agreeing else op

    return _program_of_a_device([_TOKEN] if on_token else [], [made], body)


def of_first_device(value: Any, devices: int) -> Any:
    """Emits a collective of all devices of a program, of which each runs this; returns the first device's value.

    As JAX lowers `jax.lax.all_gather` (0.8 to 0.12), which needs the names of all axes: they are not known here.
    """
    given, is_global = _ir.RankedTensorType(value.type), cast(Any, _ir.BoolAttr.get(True))
    one, every = [1, *given.shape], [devices, *given.shape]
    gathered = _hlo.AllGatherOp(
        [_ir.RankedTensorType.get(every, given.element_type)],
        [_hlo.reshape(_ir.RankedTensorType.get(one, given.element_type), value)],
        all_gather_dim=_mlir.i64_attr(0),
        replica_groups=_mlir.dense_int_elements([range(devices)]),
        channel_handle=_hlo.ChannelHandle.get(1, _mlir.DEVICE_TO_DEVICE_TYPE),  # JAX has one for all, too
        use_global_device_ids=is_global,
    )
    starts, strides = [0] * len(one), [1] * len(one)
    first = _hlo.slice(gathered.results[0], *map(_ir.DenseI64ArrayAttr.get, (starts, one, strides)))
    return _hlo.reshape(given, first)


def _program_of_a_device(
    given: Sequence[_Given | str], made: Sequence[_Given | str], body: Callable[..., Any]
) -> bytes:
    # A module that returns the last results of the operation that `body` emits for its arguments.
    context = _mlir.make_ir_context()
    with context, _ir.Location.unknown(context):
        module = _ir.Module.create()
        with _ir.InsertionPoint(module.body):
            main: Any = _func.FuncOp("main", (list(map(_type_of, given)), list(map(_type_of, made))))
            main.attributes["sym_visibility"] = _ir.StringAttr.get("public")
            with _ir.InsertionPoint(main.add_entry_block()):
                _func.ReturnOp(list(body(*main.arguments).results)[-len(made) :])
        return _mlir.module_to_bytecode(module)


def _type_of(given: _Given | str) -> Any:
    if isinstance(given, str):
        return _hlo.TokenType.get()
    shape, dtype = given
    return _ir.RankedTensorType.get(shape, _mlir.dtype_to_ir_type(np.dtype(dtype)))


def _row(table: np.ndarray[Any, Any], index: Any) -> Any:
    int64, int32 = _ir.IntegerType.get_signless(64), _ir.IntegerType.get_signless(32)
    elements: Any = _ir.DenseElementsAttr  # whose annotations know no types of elements
    rows = _hlo.constant(elements.get(table, type=int64, shape=table.shape))
    start = _hlo.convert(_ir.RankedTensorType.get((), int32), index)
    zero = _hlo.constant(elements.get(np.zeros((), np.int32), type=int32, shape=()))
    sizes = _ir.DenseI64ArrayAttr.get((1, table.shape[1]))
    row = _hlo.dynamic_slice(rows, [start, zero], sizes)
    return _hlo.reshape(_ir.RankedTensorType.get((table.shape[1],), int64), row)

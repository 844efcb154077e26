"""Every private or version-dependent JAX name this package uses, with the versions and the reason.

Checked on JAX 0.8.0, 0.10.2 and 0.12.0.1 by all tests, on 0.8.3 and 0.9.2 by tests of dispatch, loops and calls. No
other module of hostcallback imports `jax._src` or `jaxlib`, or asks for the version of JAX: `from hostcallback import
_jax_compat as compat` has all that they need. What differs between the versions is in `versions`.
"""

from hostcallback._jax_compat.callbacks import (
    batch_call as batch_call,
    call_of_shares as call_of_shares,
    call_when_run as call_when_run,
    custom_call_with_results as custom_call_with_results,
    dispatch_synchronously as dispatch_synchronously,
    lower_function as lower_function,
    pure_call as pure_call,
    python_callback_with_results as python_callback_with_results,
)
from hostcallback._jax_compat.configuration import (
    define_flag as define_flag,
    shared_value as shared_value,
)
from hostcallback._jax_compat.custom_partitioning import (
    custom_partitioning_p as custom_partitioning_p,
    keeping_alive_in as keeping_alive_in,
    mark_side_effect as mark_side_effect,
    wrap_custom_partitioning as wrap_custom_partitioning,
)
from hostcallback._jax_compat.dispatch import (
    as_one_equation as as_one_equation,
    call_after_each_jit as call_after_each_jit,
    is_hooked as is_hooked,
    let_threads_have_the_hook as let_threads_have_the_hook,
    notice_dispatches as notice_dispatches,
    wrap_outermost_lowering as wrap_outermost_lowering,
)
from hostcallback._jax_compat.effects import (
    Effect as Effect,
    add_effects as add_effects,
    asks_for_token as asks_for_token,
    drop_failed_runtime_tokens as drop_failed_runtime_tokens,
    drop_token as drop_token,
    has_effect as has_effect,
    has_input_effect as has_input_effect,
    has_ordered_io_effect as has_ordered_io_effect,
    ordered_tokens as ordered_tokens,
    pass_tokens as pass_tokens,
    register_effect as register_effect,
    thread_tokens as thread_tokens,
    tokens_are_set as tokens_are_set,
    wait_for_runtime_tokens as wait_for_runtime_tokens,
)
from hostcallback._jax_compat.jaxprs import (
    INLINE_CALLS as INLINE_CALLS,
    Primitive as Primitive,
    Var as Var,
    batch_jaxpr as batch_jaxpr,
    bind_equation as bind_equation,
    closed_jaxpr as closed_jaxpr,
    constants_to_inputs as constants_to_inputs,
    equations_of as equations_of,
    eval_jaxpr as eval_jaxpr,
    jit_options as jit_options,
    jit_shardings as jit_shardings,
    lower_to_primitives as lower_to_primitives,
    open_jaxpr as open_jaxpr,
    remat_p as remat_p,
    result_paths as result_paths,
    scan_groups as scan_groups,
    wrap_keys as wrap_keys,
    wrap_scan_hoisting as wrap_scan_hoisting,
    zero_keys as zero_keys,
    zero_tangent as zero_tangent,
)
from hostcallback._jax_compat.lowering import (
    LoweringContext as LoweringContext,
    lower_discharged as lower_discharged,
    lower_with_devices as lower_with_devices,
    lowering_platform as lowering_platform,
    register_lowering as register_lowering,
    uint8_attribute as uint8_attribute,
    widened as widened,
)
from hostcallback._jax_compat.manual_axes import (
    collective_under_vmap as collective_under_vmap,
    in_manual_region as in_manual_region,
    in_partially_manual_region as in_partially_manual_region,
    mesh_device as mesh_device,
    mesh_sizes as mesh_sizes,
    results_that_vary_as as results_that_vary_as,
    shard_map_axes as shard_map_axes,
    shard_map_p as shard_map_p,
    vary_over as vary_over,
    varying_axes as varying_axes,
)
from hostcallback._jax_compat.pallas import (
    KERNEL_PRIMITIVES as KERNEL_PRIMITIVES,
    kernel_jaxprs as kernel_jaxprs,
)
from hostcallback._jax_compat.partitioning import (
    REPLICATED as REPLICATED,
    call_of_a_share as call_of_a_share,
    explain_refused_export as explain_refused_export,
    one_row_each as one_row_each,
    register_partitioner as register_partitioner,
    rewrite_in_exported as rewrite_in_exported,
    sharding_without as sharding_without,
    tap_of_a_partition as tap_of_a_partition,
)
from hostcallback._jax_compat.source_info import (
    UNKNOWN_FUNCTION as UNKNOWN_FUNCTION,
    equation_context as equation_context,
    equation_frames as equation_frames,
    equation_origin as equation_origin,
    evaluated_frames as evaluated_frames,
    hide_frames as hide_frames,
    input_paths as input_paths,
    is_eager as is_eager,
    is_jaxs_own as is_jaxs_own,
    is_pmap as is_pmap,
    no_equation_context as no_equation_context,
    set_user_context as set_user_context,
    source_of as source_of,
    traced_function as traced_function,
)
from hostcallback._jax_compat.sync import (
    PROGRAMS_IN_FLIGHT as PROGRAMS_IN_FLIGHT,
    dispatches_asynchronously as dispatches_asynchronously,
    execution_stream as execution_stream,
    extend_effects_barrier as extend_effects_barrier,
    extend_waits as extend_waits,
    get_buffer_slot as get_buffer_slot,
    in_callback_of_jax as in_callback_of_jax,
)
from hostcallback._jax_compat.takeover import (
    callback_parts as callback_parts,
    callback_primitive as callback_primitive,
    check_callback_params as check_callback_params,
    debug_logger as debug_logger,
    is_debug_effect as is_debug_effect,
    is_ordered_debug_effect as is_ordered_debug_effect,
    own_bind as own_bind,
    replace_bind as replace_bind,
    restore_bind as restore_bind,
)
from hostcallback._jax_compat.tracing import (
    ArrayImpl as ArrayImpl,
    cache_weakly as cache_weakly,
    escaped_tracer_error as escaped_tracer_error,
    eval_trace as eval_trace,
    is_batching as is_batching,
    is_frame_of_jit as is_frame_of_jit,
    is_staging as is_staging,
    outside_traces as outside_traces,
    trace_context as trace_context,
    trace_of as trace_of,
    tracing_for as tracing_for,
)
from hostcallback._jax_compat.versions import (
    TOKENS_ENTER_PARTIALLY_MANUAL_REGIONS as TOKENS_ENTER_PARTIALLY_MANUAL_REGIONS,
)

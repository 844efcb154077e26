"""`check` and its kin, and `error_collector`, which collects the failed checks of a part of the program."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from hostcallback import _jax_compat as compat
from hostcallback.api.barrier import wait_for_taps
from hostcallback.api.receiver import OutfeedReceiver, outfeed_receiver
from hostcallback.lowering import check_groups  # noqa: F401 - sets the rule for checks that follow each other
from hostcallback.primitives.tap import bind_tap, template_of
from hostcallback.receiver.errors import TapFunctionException
from hostcallback.receiver.failures.deferred_errors import MAX_KEPT, OnError
from hostcallback.receiver.messages import NAME as STEP
from hostcallback.receiver.runtime.dispatch.scope import COLLECTOR
from hostcallback.receiver.runtime.runtime import runtime
from hostcallback.receiver.sinks.factory import Binding
from hostcallback.receiver.wire import tap_descriptor
from hostcallback.tracing import arguments, leaves, tap_spec
from hostcallback.tracing.source_line import SourceLine, hide_frames, public, user_place, user_source_line

P = ParamSpec("P")
R = TypeVar("R")


@public
def check(
    pred: Any,
    fmt: str,
    /,
    *args: Any,
    step: Any = None,
    name: str = "check",
    devices: Sequence[jax.Device] | None = None,
    **kwargs: Any,
) -> None:
    """Checks on the device that all elements of `pred` are true.

    Works inside and outside of traced code. While the check holds, it sends no message and no thread waits: on CPU it
    is one branch. If it fails, the device sends `pred` and the arguments with sequence number, time, run and device.
    The program goes on. The failures are grouped by line and raised together, as `CheckError` in a
    `TapFunctionException`, by `barrier_wait` or at the end of `outfeed_receiver` or `error_collector`; the receiver's
    `on_error` may change that.

    Under vmap one check covers the whole batch, and the report says which elements failed. If vmap batches the
    predicate of a `cond` or `while_loop`, only the elements that take part are checked. Under jvp and grad the primals
    are checked, once. If the compiler partitions `pred` over devices, each device checks its shard; all of them check a
    replicated `pred`.

    Args:
        pred: bool array of any shape.
        fmt: a format string for `str.format`. Not an f-string: the values are not known at trace time.
        *args: pytrees for its placeholders, traced or not.
        step: the step of a failure, an integer, traced or not, as in `metrics`. `fmt` may have it as `{step}`. A step
            that vmap batches is not known to the report.
        name: name of the check in reports and for `disable_checks`.
        devices: the devices that check; all by default. Other devices of this process do not check.
        **kwargs: pytrees for its named placeholders.

    Raises:
        TypeError: `pred` is not boolean, `fmt` is not a text, or `step` is not an integer and not in the text.
        ValueError: an argument is not used by `fmt`, or `fmt` is malformed.
        IndexError: `fmt` has more placeholders than there are `args`.
        KeyError: a placeholder's name is not among `kwargs`.

    Example:
        hcb.check(jnp.isfinite(x), "x is {x}", x=x, step=step)
    """
    line = user_source_line()
    if not isinstance(fmt, str):
        raise TypeError(
            f"hcb.check takes a format string after the predicate, got {type(fmt).__name__} {fmt!r}: "
            f"hcb.check(x > 0, 'x is {{}}', x), at {line}"
        )
    predicate = _predicate(leaves.scalar_of(pred), line)
    if step is not None:
        kwargs = {**kwargs, STEP: step}
    args, kwargs = arguments.with_scalars(fmt, args, kwargs)
    arguments.check_format("hcb.check", fmt, args, kwargs)
    without = _without(devices, line)
    template = template_of(fmt, args, kwargs)

    options = tap_spec.TapOptions(
        name, tap_tangents=False, sharding="local", keep_objects=True, kind=tap_descriptor.CHECK,
        params=template.params(),
        without_devices=without, place=user_place(),
    )  # fmt: skip
    identity = ("check", fmt, str(template.printoptions))
    binding = Binding(objects={"template": template})
    bind_tap((predicate, args, kwargs), (), {}, binding, identity=identity, options=options)


def _predicate(pred: Any, line: SourceLine) -> jax.Array:
    found = (
        jnp.result_type(pred)
        if isinstance(pred, jax.Array | np.ndarray | np.generic | bool | int | float)
        else None
    )
    if found != jnp.bool_:
        shown = f"{found}{list(np.shape(pred))}" if found is not None else f"{type(pred).__name__} {pred!r}"
        raise TypeError(
            f"hcb.check's predicate is {shown}, expected booleans that hold when all is well, such as "
            f"jnp.isfinite(x) or x > 0, at {line}"
        )
    return jnp.asarray(pred)


def _without(devices: Sequence[jax.Device] | None, line: SourceLine) -> tuple[int, ...]:
    if devices is None:
        return ()
    wanted = [devices] if isinstance(devices, jax.Device) else list(devices)
    wrong = [device for device in wanted if not isinstance(device, jax.Device)]
    if wrong:
        raise TypeError(
            f"hcb.check's devices are jax.Device, got {wrong!r}: jax.local_devices()[:1], at {line}"
        )
    return tuple(device.id for device in jax.local_devices() if device not in wanted)


@public
def disable_checks(*names: str) -> None:
    """Switches checks off, in running programs and in later ones, without recompilation.

    A check that is off sends no messages. Any thread. Does not wait: messages that were emitted before are delivered.

    Args:
        *names: names of the checks, as in `check(..., name=)`; without names, all checks.

    Raises:
        TypeError: a name is not a text.

    Example:
        hcb.disable_checks("loss")
    """
    _switch(names, off=True)


@public
def enable_checks(*names: str) -> None:
    """Switches checks on again, in running programs and in later ones. Any thread. Undoes `disable_checks`.

    Args:
        *names: names of the checks; without names, all checks, also those that were switched off by name.

    Raises:
        TypeError: a name is not a text.

    Example:
        hcb.enable_checks("loss")
    """
    _switch(names, off=False)


def _switch(names: Iterable[str], *, off: bool) -> None:
    names = list(names)
    wrong = [name for name in names if not isinstance(name, str)]
    if wrong:
        raise TypeError(f"the names of checks are texts, got {wrong!r}: as in hcb.check(..., name='loss')")
    if names:
        runtime.rule_table.set_named(runtime.registry, names, off=off)
    else:
        runtime.rule_table.set_all(runtime.registry, off=off)


# ---- A step that raises the failures of its checks -------------------------------------------------------------------


@public
def checked(step: Callable[P, R]) -> Callable[P, R]:
    """Returns a function that calls `step` and raises if a check in it failed.

    Each call waits for the device: it returns when the results are ready and all emitted messages are delivered. If a
    check failed, the results are dropped, and donated arguments of `step` are gone. Failed checks of other threads
    during the call count as failures of `step`. Earlier failures stay for the next barrier.

    Args:
        step: a compiled function: of `hostcallback.jit`, `jax.jit`, `jax.pmap` or around a `jax.shard_map`.

    Returns:
        The function, which raises TapFunctionException with one `CheckError` per line with failed checks, the first
        failure first. (Also if `on_error="abort"` ended the program.)

    Raises:
        TypeError: `step` is not callable, a generator function, or async.

    Example:
        step = hcb.checked(hcb.jit(train_step, donate_argnums=0))
    """
    if not callable(step):
        raise TypeError(
            f"hcb.checked takes a function, got {type(step).__name__} {step!r}: hcb.checked(step)"
        )
    arguments.refuse_generators("hcb.checked", step)

    @functools.wraps(step)
    @hide_frames
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not compat.outside_traces():
            return step(*args, **kwargs)
        wait_for_taps()
        with contextlib.ExitStack() as leaving:
            for deferred in [scope.deferred for scope in runtime.scopes()]:
                leaving.callback(deferred.put_back, deferred.take_checks())
                leaving.enter_context(deferred.raised_by_caller())
            try:
                out = step(*args, **kwargs)
                jax.block_until_ready(out)
            except jax.errors.JaxRuntimeError as error:
                wait_for_taps()
                _raise_failed_checks(error)
                raise
            wait_for_taps()
            _raise_failed_checks(None)
            return out

    return call


def _raise_failed_checks(cause: BaseException | None) -> None:
    found = [checks for scope in runtime.scopes() if (checks := scope.deferred.take_checks())]
    if found:
        checks = found[0]
        for more in found[1:]:
            checks.merge(more)
        raise TapFunctionException(checks.headline(), checks.errors()) from cause


@public
def error_collector(
    *,
    on_error: OnError | str = OnError.DEFER,
    max_errors: int = MAX_KEPT,
    timeout_sec: float = 10.0,
    devices: Sequence[jax.Device] | None = None,
) -> OutfeedReceiver:
    """Returns a context manager that collects the failed checks of a part of the program; see `outfeed_receiver`.

    Args:
        on_error: action for failed checks; see `outfeed_receiver`.
        max_errors: number of lines with failed checks that are reported separately; failures beyond them are counted.
        timeout_sec: see `outfeed_receiver`.
        devices: devices of this process to collect from; all by default.

    Raises:
        ValueError: an argument is out of range.
        DeviceClaimedError: (on entering) another open receiver or collector has one of the devices.
        TapFunctionException: (on leaving) has one `CheckError` per line, the first failure first.

    Example:
        with hcb.error_collector() as errors:
            train()
            for failed in errors.failed_checks:
                print(failed)
    """
    return outfeed_receiver(
        receiver_name=COLLECTOR, on_error=on_error, max_errors=max_errors, timeout_sec=timeout_sec,
        devices=devices,
    )  # fmt: skip

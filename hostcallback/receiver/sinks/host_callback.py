"""The sinks of the drop-in for `jax.experimental.host_callback`: positional transforms, failures logged at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hostcallback.receiver.failures.failure_report import note_logged
from hostcallback.receiver.log import logger, traceback_text
from hostcallback.receiver.messages import Message, Sink
from hostcallback.receiver.sinks.lane_mask import shown_transforms
from hostcallback.receiver.sinks.tap import Unflatten


def positional_tap_sink(
    func: Callable[..., Any],
    kwargs: Mapping[str, Any],
    unflatten: Unflatten,
    *,
    with_device: bool,
    batched: bool = False,
) -> Sink:
    """Returns the sink that calls `func(arg, transforms)`, with `device=` if `with_device` is true. See `tap_sink`.

    Args:
        func: the user's tap function. Each call gets a new list `transforms`: `[("batch", {"batch_dims": (0,)})]`.
        kwargs: none, since that module's taps have none.
        unflatten: makes the pytree `arg` from the message's arrays.
        batched: False, as above.
        with_device: whether `func` gets the message's device.
    """

    def call(message: Message) -> None:
        transforms = [(name, dict(params)) for name, params in shown_transforms(message)]
        if with_device:
            func(unflatten(message.arrays), transforms, device=message.device)
        else:
            func(unflatten(message.arrays), transforms)

    return call


def logging_failures(sink: Sink) -> Sink:
    """Returns a sink that calls `sink` and logs its errors with their tracebacks before they are deferred."""

    def call(message: Message) -> None:
        try:
            sink(message)
        except Exception as error:
            logger.error("Postponing exception raised in callback function: %s", traceback_text(error))
            note_logged(error)
            raise

    return call


def call_and_log(func: Callable[..., Any], with_device: bool, arg: Any, *, device: Any) -> Any:
    """Returns `func(arg)`, with `device=` if `with_device` is true. Logs errors with their tracebacks."""
    try:
        return func(arg, device=device) if with_device else func(arg)
    except Exception as error:
        logger.error("Postponing exception raised in callback function: %s", traceback_text(error))
        raise

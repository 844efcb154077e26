"""`error_collector`: collects the failed checks of a part of the program."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from hostcallback.api.public import public
from hostcallback.api.receiver import OutfeedReceiver, outfeed_receiver
from hostcallback.receiver.messages.deferred_errors import MAX_KEPT, OnError


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
            print(errors.failed_checks)
    """
    return outfeed_receiver(
        receiver_name="error collector", on_error=on_error, max_errors=max_errors, timeout_sec=timeout_sec,
        devices=devices,
    )  # fmt: skip

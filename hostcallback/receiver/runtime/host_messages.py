"""Messages that this process itself puts into the streams of its devices, for logs: changes of knobs, NaN reports."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hostcallback.receiver import processes
from hostcallback.receiver.messages import Lease
from hostcallback.receiver.runtime.device_receiver import DeviceReceiver
from hostcallback.receiver.runtime.runtime import runtime
from hostcallback.receiver.sinks.factory import Binding, BoundTap
from hostcallback.receiver.wire.array_types import Array, ArraySpec
from hostcallback.receiver.wire.frame import Flags, encode_prefix
from hostcallback.receiver.wire.tap_descriptor import TapDescriptor

_leases: dict[int, Lease] = {}


def send(
    described: TapDescriptor, arrays: Sequence[Array], devices: Iterable[DeviceReceiver], run_id: int = 0
) -> None:
    """Appends a message of a described tap to the streams of some devices. Does not wait. Any thread.

    Here nothing consumes it, and readers of logs treat it as its kind says. `run_id` is that of the launch to which it
    belongs; 0 for none.
    """
    lease = _leases.get(described.consumer_id)
    if lease is None:
        tap = BoundTap(described, Binding(_ignore), unbound=lambda described: _ignore)
        lease = _leases[described.consumer_id] = runtime.registry.lease(tap.consumer)
    specs = [ArraySpec.of(array.dtype, array.shape) for array in arrays]
    flags = Flags.CHECK if described.tap_kind.is_check else Flags(0)
    prefix = encode_prefix(lease.consumer.consumer_id, flags, specs)
    for receiver in devices:
        receiver.source.post(prefix, arrays, run_id)


def _ignore(*args: object, **kwargs: object) -> None:
    pass


processes.in_child(processes.Stage.RUNTIME, _leases.clear)

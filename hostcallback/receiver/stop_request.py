"""`request_stop`: asks the loops of this process to end, also before anything that runs them is loaded."""

from __future__ import annotations

from collections.abc import Callable

from hostcallback.receiver.public_names import hide_frames

_makers: list[Callable[[str], None]] = []
_early: list[str] = []


@hide_frames
def request_stop(reason: str) -> None:
    """Asks all loops with `stop=True` of this process to end after the iteration that runs. docs/stopping.md has more.

    Such a loop returns what it has computed, and how many iterations it ran. Loops that begin later end before their
    first iteration, until `clear_stop`. The standard error output says once who asked, and only the first counts.
    In a program of several processes (`jax.distributed`) all that run taps get the request, within some seconds. Any
    thread: a tap function may call it, and so may the handler of a signal, at any time. Not in traced code, where it
    would ask while it is traced.

    Args:
        reason: a text for people.

    Raises:
        TypeError: the reason is not a text.

    Example:
        hcb.tap(lambda loss: loss < 1e-3 and hcb.request_stop("the loss is low"), loss)
    """
    if not isinstance(reason, str):
        raise TypeError(
            f"the reason of a stop is a text, got {reason!r:.80}: hcb.request_stop('the loss is low')"
        )
    # Nothing is imported here: a signal may have interrupted the import of what makes the request.
    if not _makers:
        _early.append(reason)
    for make in _makers:
        make(reason)


def take_requests(make: Callable[[str], None]) -> None:
    """Has `make` called with the reason of each request, and with the earliest one there was. It must not raise."""
    _makers.append(make)
    if _early:
        make(_early[0])

"""`clear_stop`, `stop_requested`, `stop_on_signals`: loops that end early and keep what they have computed."""

from __future__ import annotations

from typing import Any, Literal

import jax.numpy as jnp

from hostcallback import _jax_compat as compat
from hostcallback.lifecycle.job import this_job
from hostcallback.primitives.cells import Processes, processes_of, read_cell
from hostcallback.receiver.runtime.signals import watch_interrupt, watch_termination
from hostcallback.receiver.runtime.stop import BEGUN, ENDED, SPEC, stop_request
from hostcallback.receiver.stop_request import take_requests
from hostcallback.tracing.source_line import public, user_source_line


@public
def clear_stop() -> None:
    """Takes the request to stop back, so that later loops run. Any thread.

    Example:
        hcb.clear_stop()
    """
    stop_request.clear()


@public
def stop_requested(*, agree: Literal["processes"] | None = None) -> Any:
    """Whether a stop is requested: in traced code a boolean that is read each time it runs, elsewhere a bool now.

    For the condition of a loop of your own. All devices of this process that run a program read the same at the same
    point. Under `vmap` it is one value for all elements, and under `grad` a constant.

    Args:
        agree: as for `knob`.

    Raises:
        ValueError: `agree` is something else.
        NotImplementedError: (later) the program runs on devices of several processes, without `agree`, or for several
            platforms.

    Example:
        x = jax.lax.while_loop(lambda x: (x.max() > 1e-6) & ~hcb.stop_requested(), lambda x: x / 2, x)
    """
    line = user_source_line()
    processes = processes_of("agree", agree, None, line)
    if compat.outside_traces():
        return stop_request.reason is not None
    return read_stop(str(line), processes)


def read_stop(site: str, processes: Processes, after: Any = None) -> Any:
    """Reads the request in traced code, when `after` is computed; `site` says where.

    From now on Ctrl-C requests a stop while loops read it.
    """
    watch_interrupt.stops(stop_request)
    return jnp.asarray(read_cell(SPEC, site, processes=processes, after=after))


def count_loop(site: str, begins: bool) -> None:
    """Counts, in traced code, a loop that can be stopped where it begins or ends; `site` says where."""
    read_cell(BEGUN if begins else ENDED, site, processes="own")


@public
def stop_on_signals() -> None:
    """Has the first SIGTERM request a stop, as cluster schedulers send it before they end a program.

    The second SIGTERM does what the first one did before. Other handlers of SIGTERM are called, too.

    Raises:
        NotImplementedError: the native library is not available.

    Example:
        hcb.stop_on_signals()
        x, count = hcb.fori_loop(0, 1000, lambda i, x: jnp.cos(x), x, stop=True)
        jnp.savez("state.npz", x=x, count=count)
    """
    if not watch_termination.stop_by(stop_request):
        raise NotImplementedError(
            "SIGTERM is watched by the native library, which is not available here: call hcb.request_stop from a "
            "handler of your own, which Python runs when the main thread is back from the program"
        )


def _tell(reason: str) -> None:
    this_job.tell("stop", "", reason)


stop_request.tell = _tell
take_requests(stop_request.make)
this_job.on_stop.append(lambda reason: stop_request.make(reason, tells=False))

"""Opens the X-rays that environment variables ask for, until the process ends: what `hcb run` sets."""

from __future__ import annotations

import atexit

from hostcallback.api.capsule.capsule import capsule
from hostcallback.api.observe.observe import Observe, observe
from hostcallback.api.watch.watch import watch_nonfinite
from hostcallback.lowering.xray import Context
from hostcallback.receiver import environment
from hostcallback.receiver.log import logger


def open_asked() -> None:
    """Opens the blocks that the variables ask for, for all threads. Called once JAX is imported.

    Raises:
        ValueError: a variable has another value than is expected.
    """
    selections = [text.strip() for text in environment.OBSERVE.read().split(",") if text.strip()]
    if selections:
        context = observe(where=selections, name="observe", all_threads=True)
        context.__enter__()
        if isinstance(context.xray, Observe):
            atexit.register(_say_what_matched_nothing, context, context.xray)
    if environment.WATCH.read() == "1":
        watch_nonfinite(all_threads=True).__enter__()
    folder = environment.CAPSULES.read()
    if folder is not None:
        capsule(folder, nonfinite=True, all_threads=True).__enter__()


def _say_what_matched_nothing(context: Context, asked: Observe) -> None:
    if error := asked.unmatched("the option --observe of hcb run"):
        logger.error("%s", error)
    else:
        asked.left(context, None)

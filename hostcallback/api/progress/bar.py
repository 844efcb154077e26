"""`Progress`: what a bar of a loop shows, and its messages."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hostcallback.primitives.bind import bind_tap
from hostcallback.receiver.sinks.factory import Binding
from hostcallback.receiver.sinks.progress.message import Phase
from hostcallback.receiver.wire import tap_kind
from hostcallback.tracing.source_line import user_source_line
from hostcallback.tracing.tap_options import TapOptions

DISPLAYS = ("tqdm", "rich")


@dataclass(frozen=True, slots=True)
class Progress:
    """What the bar of a loop shows, for `progress=` of `hcb.scan`, `hcb.fori_loop` and `hcb.while_loop`.

    Attributes:
        desc: the text before the bar. `hcb.taps[desc]` selects the bar's messages; without a text, the name is
            "progress".
        total: number of steps, for a `while_loop`, which does not know its number; the loop's own by default. A wrong
            number does no harm: the bar then ends early, or counts on without one.
        postfix: returns the values to show after the bar, a dict of scalars. Of a scan it is called as
            `postfix(carry, y)`, of the other loops as `postfix(value)`, both with the results of a step. It is traced,
            and runs ten times a second, not in every step. It must not communicate between devices (`lax.psum`).
        unit: what is counted.
        display: "tqdm" (`tqdm.auto`: in notebooks a widget) or "rich".
        leave: whether the bar stays on the screen when its loop has ended. Bars of inner loops never stay.

    Raises:
        TypeError: an attribute has another type.
        ValueError: `display` has another value, or `total` is negative.

    Example:
        bar = hcb.Progress("sum", postfix=lambda total, _: {"total": total})
        total, _ = hcb.scan(lambda total, value: (total + value, None), jnp.float32(0), x, progress=bar)
    """

    desc: str | None = None
    total: int | None = None
    postfix: Callable[..., Mapping[str, Any]] | None = None
    unit: str = "it"
    display: str = "tqdm"
    leave: bool = True

    def __post_init__(self) -> None:
        """Checks the attributes, which come from users."""
        for name, value in (("desc", self.desc or ""), ("unit", self.unit)):
            if not isinstance(value, str):
                raise TypeError(
                    f"{name} of a Progress is a text, got {type(value).__name__} {value!r}: hcb.Progress('train')"
                )
        if self.postfix is not None and not callable(self.postfix):
            raise TypeError(
                f"postfix of a Progress is a function that returns a dict, got {self.postfix!r}: as in "
                "lambda carry, y: {'loss': y}"
            )
        if self.total is not None:
            check_total(self.total, "total of a Progress")
        if self.display not in DISPLAYS:
            raise ValueError(f"display is {self.display!r}, expected 'tqdm' or 'rich'")


def check_total(total: Any, what: str) -> None:
    """Checks a number of steps that a user gives, if it is not traced.

    Raises:
        TypeError: it is not a whole number.
        ValueError: it is negative.
    """
    if isinstance(total, jax.Array) and jnp.issubdtype(total.dtype, jnp.integer) and not total.shape:
        return
    if isinstance(total, bool) or not isinstance(total, int | np.integer):
        raise TypeError(f"{what} is {total!r}, expected a whole number of steps, or None")
    if total < 0:
        raise ValueError(f"{what} is {total!r}, expected a number of steps, 0 or more")


def chosen(progress: Any) -> Progress | None:
    """Returns the bar for a value of `progress=`; None for no bar.

    Raises:
        TypeError: it is neither a bool, a text, a `Progress` nor None.
        ModuleNotFoundError: the library that shows the bar is missing.
    """
    if progress is None or progress is False:
        return None
    bar = Progress() if progress is True else Progress(progress) if isinstance(progress, str) else progress
    if not isinstance(bar, Progress):
        raise TypeError(
            f"progress is {type(progress).__name__} {progress!r}, expected True, a description, or "
            "hcb.Progress('train', postfix=...)"
        )
    check_installed(bar.display)
    return bar


def check_installed(display: str) -> None:
    """Raises ModuleNotFoundError with the command to install the library that shows a bar, if it is missing."""
    if importlib.util.find_spec(display) is None:
        extra = "progress" if display == "tqdm" else "top"
        raise ModuleNotFoundError(
            f"a progress bar needs {display}, which is not installed: pip install 'hostcallback[{extra}]'",
            name=display,
        )


class BarMessages:
    """Emits the messages of one loop's bar."""

    def __init__(
        self, progress: Progress, total: Any, view: Callable[..., tuple[Any, ...]] = lambda *values: values
    ) -> None:
        """Makes the messages of a bar.

        Args:
            progress: what it shows.
            total: number of steps of the loop, traced or not; None if it is not known.
            view: returns the arguments of the user's `postfix`, from the values of the loop.
        """
        self._progress = progress
        self._total = total if progress.total is None else progress.total
        # The loop's messages may be traced at several lines, and in the rule of a derivative.
        self._view = view
        self._key = str(user_source_line())

    def begin(self) -> None:
        """Shows the bar, at step 0."""
        self._emit(Phase.BEGIN, 0, {})

    def update(self, step: Any, postfix: Mapping[str, Any]) -> None:
        """Moves the bar to a step."""
        self._emit(Phase.UPDATE, step, postfix)

    def end(self, step: Any, postfix: Mapping[str, Any]) -> None:
        """Moves the bar to its last step, and ends it."""
        self._emit(Phase.END, step, postfix)

    def postfix(self, *values: Any) -> Mapping[str, Any]:
        """Calls the user's function with values of the loop, through which no gradient flows.

        Raises:
            TypeError: it returned something else than a dict with texts as keys.
        """
        if self._progress.postfix is None:
            return {}
        found = self._progress.postfix(*without_gradient(self._view(*values)))
        if not isinstance(found, Mapping) or not all(isinstance(key, str) for key in found):
            raise TypeError(f"postfix returned {found!r}, expected a dict such as {{'loss': loss}}")
        return found

    def _emit(self, phase: Phase, step: Any, postfix: Mapping[str, Any]) -> None:
        progress = self._progress
        total = -1 if self._total is None else self._total
        emit(message(phase, step, total, postfix), progress, self._key)


def message(phase: Phase, step: Any, total: Any, postfix: Mapping[str, Any]) -> Any:
    """Returns what the tap of a message sends; see `receiver.sinks.progress.message.Step`."""
    return np.int32(phase), _count(step), _count(total), dict(postfix)


def emit(arg: Any, progress: Progress, key: str, *, own_rate: float = 0.0) -> None:
    """Binds the tap of one message of a bar.

    Args:
        arg: the message.
        progress: what the bar shows.
        key: loops with the same key on a device share a bar.
        own_rate: largest number of messages per second; 0 for no limit.
    """
    params = {
        "key": key, "desc": progress.desc, "unit": progress.unit, "display": progress.display, "leave": progress.leave,
        "own_rate": own_rate,
    }  # fmt: skip
    options = TapOptions(
        progress.desc or "progress", tap_tangents=False, tap_transposed=False, sharding="local",
        kind=tap_kind.PROGRESS, params=params,
    )  # fmt: skip
    bind_tap(arg, (), {}, Binding(), identity=("progress", *params.values()), options=options)


def _count(number: Any) -> Any:
    dtype = jax.dtypes.canonicalize_dtype(np.int64)
    return jnp.asarray(number).astype(dtype)


def without_gradient(tree: Any) -> Any:
    """Returns a tree of values through which no gradient flows."""
    return jax.tree.map(jax.lax.stop_gradient, tree)

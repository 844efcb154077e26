"""The bars that are open in this process, what moves them, and how tqdm and rich show them."""

from __future__ import annotations

import contextlib
import enum
import functools
import importlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from hostcallback.receiver import processes
from hostcallback.receiver.log import logger
from hostcallback.receiver.sinks import printing as output, progress
from hostcallback.receiver.text import say


class Display(Protocol):
    """One bar on the screen. The caller has a lock."""

    def show(self, step: int, total: int | None, postfix: str, time_ns: int) -> None:
        """Moves the bar to a step that was done at `time_ns`, Unix time."""

    def label(self, desc: str) -> None:
        """Sets the text before the bar."""

    def reset(self) -> None:
        """Starts the bar again at step 0, with a new clock."""

    def clear(self) -> None:
        """Removes the bar from the screen until it is closed."""

    def close(self, *, leave: bool) -> None:
        """Leaves the bar as it is, or removes it."""


@contextlib.contextmanager
def above_bars() -> Iterator[None]:
    """Removes the bars of tqdm from a terminal while text is written to the standard output.

    rich does that by itself.
    """
    from tqdm import tqdm

    if not (sys.stdout.isatty() and sys.stderr.isatty()):
        yield
        return
    with tqdm.external_write_mode():
        yield
        sys.stdout.flush()


def _size() -> dict[str, Any]:
    # A pseudo-terminal may have no size yet: tqdm would draw nothing at all.
    try:
        if os.get_terminal_size(sys.stderr.fileno()).columns == 0:
            return {"ncols": 80, "nrows": 24}
    except (OSError, ValueError, AttributeError):  # no terminal
        pass
    return {"dynamic_ncols": True}


class TqdmDisplay:
    """A bar of `tqdm.auto`: text in a terminal, a widget in a notebook."""

    def __init__(self, desc: str, unit: str) -> None:
        """Shows the bar at step 0."""
        from tqdm.auto import tqdm

        # Messages come ten times a second, and the last one must be shown: tqdm leaves none out.
        self._bar = tqdm(desc=desc or None, unit=unit, leave=True, mininterval=0, miniters=0, **_size())
        self._times_ns: tuple[int, int] | None = None  # of the first message and of the last one

    def show(self, step: int, total: int | None, postfix: str, time_ns: int) -> None:
        """Moves the bar. Rates are computed from the time of the step: messages may arrive later, many at once."""
        bar = self._bar
        if self._times_ns is None:
            # Not in the rate: it was done before, or in a time that is not known.
            bar.initial = bar.n = bar.last_print_n = step
        self._set_clock(time_ns)
        if total != bar.total:
            bar.total = total
        bar.set_postfix_str(postfix, refresh=False)
        bar.update(step - bar.n)  # also by 0, which shows the bar as well

    def _set_clock(self, time_ns: int) -> None:
        first, last = self._times_ns or (time_ns, time_ns)
        self._times_ns = first, time_ns
        now = time.time()
        self._bar.start_t, self._bar.last_print_t = (
            now - (time_ns - first) / 1e9,
            now - (time_ns - last) / 1e9,
        )

    def label(self, desc: str) -> None:
        """Sets the text before the bar."""
        self._bar.set_description_str(desc)

    def reset(self) -> None:
        """Starts the bar again."""
        self._times_ns = None
        self._bar.reset()

    def clear(self) -> None:
        """Removes the bar for now."""
        self._bar.clear()

    def close(self, *, leave: bool) -> None:
        """Leaves or removes the bar."""
        if self._times_ns is not None:  # tqdm draws it once more
            self._set_clock(self._times_ns[1])
        self._bar.leave = leave
        self._bar.close()


LINE_SEC = 10.0
"""Where bars cannot be drawn again, such as in a file, each writes a line at most this often, and one at its end."""


class LineDisplay:
    """The lines of a bar in a file or pipe."""

    def __init__(self, desc: str, unit: str) -> None:
        """Writes nothing so far."""
        self._desc, self._unit = desc, unit
        self._first = 0  # the first step
        self._times_ns: tuple[int, int] | None = None  # of the first step, and of the last line
        self._state: tuple[int, int | None, str, float] | None = None  # what the last line does not show

    def show(self, step: int, total: int | None, postfix: str, time_ns: int) -> None:
        """Notes the step, and writes a line if the last one was long ago by the steps' times."""
        if self._times_ns is None:
            self._first = step
        first, last = self._times_ns or (time_ns, time_ns)
        self._times_ns = first, last
        self._state = step, total, postfix, (time_ns - first) / 1e9
        if time_ns - last >= LINE_SEC * 1e9:
            self._times_ns = first, time_ns
            self._write()

    def _write(self) -> None:
        from tqdm import tqdm

        if self._state is not None:
            step, total, postfix, elapsed = self._state
            say(tqdm.format_meter(
                step, total, elapsed, prefix=self._desc, unit=self._unit, postfix=postfix, ascii=True,
                initial=self._first,
            ))  # fmt: skip
            self._state = None

    def label(self, desc: str) -> None:
        """Sets the text before the bar."""
        self._desc = desc

    def reset(self) -> None:
        """Starts again."""
        self._times_ns = self._state = None

    def clear(self) -> None:
        """Does nothing: lines stay."""

    def close(self, *, leave: bool) -> None:
        """Writes the last step, unless the bar was to be removed."""
        if leave:
            self._write()


def _text_display(desc: str, unit: str) -> Display:
    # Notebooks take what is drawn again, though they are no terminals. tqdm knows when it is switched off.
    is_notebook = type(sys.stderr).__module__.startswith("ipykernel")
    is_terminal = getattr(sys.stderr, "isatty", None)  # a stream of the user's may lack it
    if is_notebook or "TQDM_DISABLE" in os.environ or (is_terminal is not None and is_terminal()):
        return TqdmDisplay(desc, unit)
    importlib.import_module("tqdm")  # says at once that it is missing
    return LineDisplay(desc, unit)


class RichDisplay:
    """A bar of `rich.progress`. All bars share one live display, which ends with the last of them."""

    _shared: Any = None
    _open = 0

    def __init__(self, desc: str, unit: str) -> None:
        """Shows the bar at step 0."""
        if RichDisplay._shared is None:
            RichDisplay._shared = _rich_progress()
            RichDisplay._shared.start()
        RichDisplay._open += 1
        self._task = RichDisplay._shared.add_task(desc or "progress", total=None, unit=unit, postfix="")

    def show(self, step: int, total: int | None, postfix: str, time_ns: int) -> None:
        """Moves the bar. It shows no rate; its elapsed time is that of the screen."""
        self._shared.update(self._task, completed=step, total=total, postfix=postfix)

    def label(self, desc: str) -> None:
        """Sets the text before the bar."""
        self._shared.update(self._task, description=desc)

    def reset(self) -> None:
        """Starts the bar again."""
        self._shared.reset(self._task)

    def clear(self) -> None:
        """Does nothing: rich draws all bars at once."""

    def close(self, *, leave: bool) -> None:
        """Leaves or removes the bar."""
        shared = RichDisplay._shared
        if not leave:
            shared.remove_task(self._task)
        else:
            shared.stop_task(self._task)
        RichDisplay._open -= 1
        if not RichDisplay._open:
            shared.stop()
            RichDisplay._shared = None


def _rich_progress() -> Any:
    from rich import console, progress

    text = functools.partial(progress.TextColumn, markup=False)
    return progress.Progress(
        text("{task.description}"), progress.BarColumn(), progress.MofNCompleteColumn(), text("{task.fields[unit]}"),
        progress.TimeElapsedColumn(), progress.TimeRemainingColumn(), text("{task.fields[postfix]}"),
        console=console.Console(stderr=True),
    )  # fmt: skip


DISPLAYS: dict[str, Callable[..., Display]] = {"tqdm": _text_display, "rich": RichDisplay}
"""The displays by name."""


class Phase(enum.IntEnum):
    """What happens to the bar."""

    BEGIN = 0
    UPDATE = 1
    END = 2


class Step(NamedTuple):
    """One message of a bar, of one element of a batch.

    Attributes:
        phase: what happens to the bar.
        step: number of steps that are done.
        total: number of steps of the loop; None if it is not known.
        postfix: values to show, by name.
    """

    phase: Phase
    step: int
    total: int | None
    postfix: Mapping[str, Any]

    @property
    def is_stopped(self) -> bool:
        """Whether the loop has ended before its last step, as it was asked to."""
        return self.phase is Phase.END and self.total is not None and self.step < self.total


MAX_BARS = 64
"""Largest number of bars that are open at once. Messages of further ones show nothing."""


class Look(NamedTuple):
    """How a bar looks.

    Attributes:
        desc: the text before it.
        unit: what it counts.
        display: name of a display.
        leave: whether it stays on the screen.
    """

    desc: str
    unit: str
    display: str
    leave: bool


class Place(NamedTuple):
    """The loop that a bar is for.

    Attributes:
        key: tells loops of a program apart.
        device: name of the device; empty for a program that the compiler partitions, whose devices share a bar.
        lane: index of the element under vmap; empty for all.
    """

    key: str
    device: str
    lane: tuple[int, ...]


@dataclass(slots=True)
class _Bar:
    place: Place
    look: Look
    display: Display
    run_id: int
    depth: int
    leave: bool
    is_done: bool = False  # its loop has ended, and an outer one has not


class Bars:
    """All bars of this process. Any thread.

    Attributes:
        open: the bars that are shown, by place.
    """

    def __init__(self) -> None:
        """Starts without bars."""
        self._lock = threading.RLock()  # protects everything below, and the displays
        self.open: dict[Place, _Bar] = {}
        self._senders: dict[str, str] = {}  # of bars that devices share
        self._refused: set[str] = set()
        self._ended: dict[Place, tuple[int, int]] = {}  # launch and time of the message that ended a bar

    def take(self, place: Place, look: Look, run_id: int, step: Step, sender: str, time_ns: int) -> None:
        """Takes one message of a bar: opens, moves or closes it.

        Args:
            place: the loop, device and element.
            look: how the bar looks.
            run_id: launch of the program.
            step: the message.
            sender: the device that sent it. If devices share the bar, only the messages of one of them count.
            time_ns: when it was emitted.
        """
        with self._lock:
            if not place.device and self._senders.setdefault(place.key, sender) != sender:
                return
            # A message that a rate has held back may come after the one that ended the bar.
            ended_by, last = self._ended.get(place, (None, 0))
            if ended_by == run_id and step.phase is Phase.UPDATE and time_ns <= last:
                return
            bar = self.open.get(place)
            if bar is None and place.lane:
                self._open_lanes(place)
            if bar is not None and (step.phase is Phase.BEGIN or bar.run_id != run_id):
                bar = self._again(bar, run_id)
            if bar is None:
                bar = self._begin(place, look, run_id)
            if bar is None:
                return
            postfix = [postfix_text(step.postfix), "stopped" if step.is_stopped else ""]
            bar.display.show(step.step, step.total, ", ".join(filter(None, postfix)), time_ns)
            if step.phase is Phase.END:
                if len(self._ended) >= MAX_BARS:
                    self._ended.clear()
                self._ended[place] = run_id, time_ns
                self._end(bar)

    def close_all(self) -> None:
        """Closes all bars: their programs have ended, failed or were aborted."""
        if self.open:
            with self._lock:
                self._close([*self.open.values()])

    def write_lines(self) -> None:
        """Writes the last step of the bars that are lines, at the end of the process."""
        if not self._lock.acquire(timeout=1.0):  # a receiver thread may be stuck in what it writes
            return
        try:
            for bar in self.open.values():
                if isinstance(bar.display, LineDisplay):
                    bar.display.close(leave=bar.leave)
        finally:
            self._lock.release()

    def _again(self, bar: _Bar, run_id: int) -> _Bar | None:
        # An inner loop begins again. Otherwise the program that opened the bar has not ended its loop.
        if bar.run_id == run_id and bar.is_done:
            bar.display.reset()
            bar.is_done = False
            return bar
        self._close(self._of_program(bar))
        return None

    def _of_program(self, bar: _Bar) -> list[_Bar]:
        return [
            other for other in self.open.values()
            if other.place.device == bar.place.device and other.run_id == bar.run_id
        ]  # fmt: skip

    def _open_lanes(self, place: Place) -> None:
        # The bar of all elements goes when the first one gets its own.
        bar = self.open.pop(place._replace(lane=()), None)
        if bar is not None:
            bar.display.close(leave=False)

    def _begin(self, place: Place, look: Look, run_id: int) -> _Bar | None:
        outer = [
            bar for bar in self.open.values()
            if bar.place.device == place.device and bar.run_id == run_id and bar.place.key != place.key
        ]  # fmt: skip
        if len(self.open) >= MAX_BARS:
            return None
        make = DISPLAYS.get(look.display, DISPLAYS["tqdm"])
        try:
            display = make(self._label(place, look), look.unit)
        except ModuleNotFoundError as error:
            if look.display not in self._refused:
                package, extra = ("rich", "top") if look.display == "rich" else ("tqdm", "progress")
                logger.warning(
                    "progress bars are not shown: they need the package %s: pip install 'hostcallback[%s]' (%s)",
                    package, extra, error,
                )  # fmt: skip
                self._refused.add(look.display)
            return None
        if look.display != "rich":
            output.above_bars = above_bars
        bar = self.open[place] = _Bar(place, look, display, run_id, len(outer), look.leave and not outer)
        if len(self._siblings(place)) == 2:  # the first was made when it was not known that there are others
            for sibling in self._siblings(place):
                sibling.display.label(self._label(sibling.place, sibling.look))
        return bar

    def _siblings(self, place: Place) -> list[_Bar]:
        return [bar for bar in self.open.values() if bar.place.key == place.key]

    def _label(self, place: Place, look: Look) -> str:
        others = [bar.place for bar in self._siblings(place) if bar.place != place]
        parts = [look.desc]
        if any(other.device != place.device for other in others):
            parts.append(f"[{place.device}]")
        if place.lane:
            parts.append(f"[{', '.join(map(str, place.lane))}]")
        return " ".join(filter(None, parts))

    def _end(self, bar: _Bar) -> None:
        bar.is_done = True
        around = [other for other in self._of_program(bar) if other.depth < bar.depth]
        if any(not other.is_done for other in around):
            return
        # Bars of other devices and elements end at about the same time: closed one by one, they would leave gaps.
        siblings = self._siblings(bar.place)
        if all(sibling.is_done for sibling in siblings):
            inner = [other for sibling in siblings for other in self._of_program(sibling) if other.is_done]
            self._close(inner)

    def _close(self, closing: list[_Bar]) -> None:
        closing = [bar for bar in self.open.values() if any(bar is other for other in closing)]
        for bar in closing:
            bar.display.clear()
        for bar in sorted(
            closing, key=lambda bar: bar.leave
        ):  # what is removed first, then what stays, in order
            del self.open[bar.place]
            bar.display.close(leave=bar.leave)
        if not self.open:
            output.above_bars = None


def postfix_text(postfix: Mapping[str, Any]) -> str:
    """Formats the values behind a bar: `loss=0.3, step=7`."""
    return ", ".join(f"{name}={value_text(value)}" for name, value in postfix.items())


def value_text(value: Any) -> str:
    """Formats a value behind a bar."""
    if getattr(value, "ndim", 0) == 0 and hasattr(value, "item"):
        number = value.item()
        return f"{number:.4g}" if isinstance(number, float) else str(number)
    return " ".join(str(value).split())[:40]


bars = Bars()
"""The bars of this process."""

progress.shown.append(bars)


def forget() -> None:
    """Drops all bars, for a forked child: its parent shows them."""
    bars.__init__()  # type: ignore[misc]
    output.above_bars = None


processes.in_child(processes.Stage.PROGRAM, forget)

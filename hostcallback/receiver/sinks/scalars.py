"""The scalars of any tap's messages by name, and the sink that writes them with a writer of `hcb.metrics`."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hostcallback.receiver import messages
from hostcallback.receiver.log import logger
from hostcallback.receiver.sinks.metric_writers.files import CsvWriter, JsonlWriter, csv, jsonl
from hostcallback.receiver.sinks.metric_writers.reduction import NO_STEP, MetricRecord
from hostcallback.receiver.wire import pytree as tree, tap_descriptor

_UNNAMED = re.compile(r"metrics@.+:\d+")


class TapScalars:
    """Reads the step and the scalars of the messages of one tap."""

    def __init__(self, described: tap_descriptor.TapDescriptor) -> None:
        """Reads the tap's description."""
        # Without a name of the user's, metrics are called as their writers call them.
        self._name = "" if _UNNAMED.fullmatch(described.name) else described.name
        self._unflatten = tree.unflatten_with(described.tree)
        self._kind = described.tap_kind
        self.place: messages.StepSource | None = messages.step_place(described)

    def step(self, message: messages.Message) -> int | None:
        """The step of a message; None if it has none."""
        return None if self.place is None else self.place.read(message.arrays)

    def scalars(self, message: messages.Message, *, means: bool = False) -> dict[str, float]:
        """The scalars of a message by name. With `means`, arrays are included, as the mean of their elements."""
        if not self._kind.has_metrics:
            return {}
        value = messages.by_name(self._kind, self._unflatten(message.arrays))
        step = None if self.place is None else self.place.array_in(message.arrays)
        return {
            name: number
            for name, leaf in messages.named_leaves(self._name, value)
            if leaf is not step and (number := _number(_mean(leaf) if means else leaf)) is not None
        }


def _mean(leaf: Any) -> Any:
    if not isinstance(leaf, np.ndarray) or not leaf.ndim or not leaf.size or leaf.dtype.kind in "cOSUM":
        return leaf
    try:
        return float(leaf.astype(np.float64, copy=False).mean())
    except (TypeError, ValueError):
        return leaf


def _number(leaf: Any) -> float | None:
    if isinstance(leaf, np.ndarray):
        if leaf.ndim or leaf.dtype.kind in "cOSUM":
            return None
        try:
            return float(leaf)
        except (TypeError, ValueError):  # a dtype without a conversion, such as a structured one
            return None
    return float(leaf) if type(leaf) in (int, float) else None


MAX_HELD = 1024
"""Records of a launch that wait for its step."""

LAUNCHES = 3
"""Launches of a device whose messages may overlap. When one more begins, the one that sent least recently is over."""

WAIT_SEC = 5.0
"""Seconds for which a record waits for the step of its launch."""

FORGET_SEC = 60.0
"""Seconds after which a launch that sends nothing is forgotten."""

COLUMNS = "step", "device"
"""Names that metrics cannot have: that of `device` is called `device_value`."""


@dataclass(slots=True)
class _Launch:
    # A launch on a device: its one step so far, the tap that sent it, and the records that wait for a step.
    step: int = NO_STEP
    tap: int = 0
    has_several: bool = False
    held: list[MetricRecord] = field(default_factory=list)
    held_since: float = 0.0
    seen: float = field(default_factory=time.monotonic)

    @property
    def has_one(self) -> bool:
        return self.step != NO_STEP and not self.has_several

    def hold(self, record: MetricRecord) -> None:
        if not self.held:
            self.held_since = self.seen
        self.held.append(record)

    def take_held(self, *, is_sure: bool = True) -> list[MetricRecord]:
        # With the launch's step, if it has one only.
        held, self.held = self.held, []
        for record in held:
            record.step = self.step if is_sure and self.has_one else NO_STEP
        return held

    def plain(self, device: str, run_id: int) -> list[Any]:
        held = [[record.time_ns, record.scalars] for record in self.held]
        return [device, run_id, self.step, self.tap, self.has_several, held]


_Launches = dict[str, dict[int, _Launch]]
"""By device and number, those of a device by their last message."""


def _launches_of(plain: list[Any]) -> _Launches:
    found: _Launches = {}
    for device, run_id, step, tap, has_several, held in plain:
        records = [MetricRecord(NO_STEP, time_ns, scalars, device=device) for time_ns, scalars in held]
        launch = _Launch(step, tap, has_several, records, time.monotonic())
        found.setdefault(device, {})[run_id] = launch
    return found


def _apart(scalars: dict[str, float]) -> dict[str, float]:
    # From the columns that are no metrics.
    for column in COLUMNS:
        if column in scalars:
            name = column
            while name in scalars:
                name += "_value"
            scalars = {name if key == column else key: value for key, value in scalars.items()}
    return scalars


class ScalarsSink:
    """Writes the scalars of all messages with a writer of metrics: `name` for a tap of one scalar, else `name/key`.

    A record per message, with the name of its device. Values of `hcb.metrics` without a name are called `key`, as in
    its own writers. Arrays that are not scalars, texts and failed checks are left out. The step is that of the message
    (see `messages.steps`), or else the one that the reader of a log knows; `NO_STEP` if there is none. Any thread. Of a
    program of several processes, the first one writes a replicated scalar.

    Attributes:
        written: number of scalars by name.
        taps: names of the taps that had scalars.
    """

    def __init__(self, writer: CsvWriter | JsonlWriter, *, waits: bool = False) -> None:
        """Takes a writer, which stays open.

        Args:
            writer: of a file, which is open, or which `open_at` opens.
            waits: whether records without a step wait for the end of their launch, and get its step if it has one only:
                for messages that are delivered before the step of their launch is there. `release_waiting` must be
                called regularly then.
        """
        self.written: Counter[str] = Counter()
        self.taps: set[str] = set()
        self._writer = writer
        self._waits = waits
        self._lock = threading.Lock()  # protects the writer and everything else
        self._taps: dict[int, tuple[messages.Consumer, TapScalars | None]] = {}
        self._launches: _Launches = {}
        self._taken_at = 0.0  # of the last message
        self._has_unflushed = False  # rows of the file
        self._single: set[int] = set()  # taps with a step whose launches had one step
        self._looping: set[int] = set()  # taps with a step whose launches had several

    def __call__(self, message: messages.Message) -> None:
        """Takes a message."""
        self.take(message)

    @property
    def _file(self) -> str:
        return str(self._writer.path.absolute())

    def take(
        self,
        message: messages.Message,
        step_of: Callable[[messages.Message], int | None] = lambda message: None,
        device_of: Callable[[messages.Message], str] = lambda message: messages.device_text(message.device),
    ) -> None:
        """Takes a message; `step_of` knows the steps of those that have none of their own.

        `device_of` returns the name of its device, which no device of another process may have.
        """
        with self._lock:
            tap = self._tap_of(message.consumer)
            if tap is None:
                return
            step = tap.step(message)
            if step is None:
                step = step_of(message)
            scalars = _apart(tap.scalars(message))
            if step is None and not scalars:
                return
            self._taken_at = time.monotonic()
            self.written.update(scalars.keys())
            if scalars:
                self.taps.add(message.consumer.name)
            record = MetricRecord(
                NO_STEP if step is None else step,
                message.time_ns,
                scalars,
                device=device_of(message),
            )
            self._write(self._ready(record, message) if self._waits and message.run_id else [record])

    def _write(self, records: Iterable[MetricRecord]) -> None:
        # Of a record that cannot be written the error is raised after those behind it, which wait nowhere any more.
        failed: Exception | None = None
        for record in records:
            if record.scalars:
                try:
                    self._writer.write(record)
                except Exception as error:
                    failed = failed or error
                else:
                    self._has_unflushed = True
        if failed is not None:
            raise failed

    def _ready(self, record: MetricRecord, message: messages.Message) -> list[MetricRecord]:
        # The records whose steps are known, or will not be.
        ready: list[MetricRecord] = []
        launches = self._launches.setdefault(record.device, {})
        launch = launches.pop(message.run_id) if message.run_id in launches else _Launch()
        launches[message.run_id] = launch  # the last one now
        launch.seen = time.monotonic()
        if len(launches) > LAUNCHES:
            ready += self._over(launches.pop(next(iter(launches))))
            # What this tells of the tap is true of the others, too, and their records come in order.
            ready += [
                early for other in launches.values() if self._is_sure(other) for early in other.take_held()
            ]
        if record.step != NO_STEP:
            if launch.step == NO_STEP:
                launch.step, launch.tap = record.step, message.consumer.consumer_id
            elif launch.step != record.step:
                launch.has_several = True
                self._looping.add(launch.tap)
            ready.append(record)
        elif launch.has_several:
            ready.append(record)
        else:
            launch.hold(record)
        launch.has_several |= len(launch.held) > MAX_HELD  # it is not known
        if launch.has_several or self._is_sure(launch):
            ready += launch.take_held()
        return ready

    def _is_sure(self, launch: _Launch) -> bool:
        # Whether a launch that is not over will have no other step.
        return launch.has_one and launch.tap in self._single and launch.tap not in self._looping

    def _over(self, launch: _Launch) -> list[MetricRecord]:
        if launch.has_one:
            self._single.add(launch.tap)
        return launch.take_held()

    def release_waiting(self) -> None:
        """Writes what has waited for long, without a step if that is not sure, and forgets old launches."""
        now, ready = time.monotonic(), list[MetricRecord]()
        with self._lock:
            for device, launches in list(self._launches.items()):
                last = next(reversed(launches))
                for run_id, launch in list(launches.items()):
                    if run_id != last and launch.seen <= now - WAIT_SEC:
                        ready += self._over(launch)
                    elif launch.held and launch.held_since <= now - WAIT_SEC:
                        ready += launch.take_held(is_sure=self._is_sure(launch))
                    if launch.seen <= now - FORGET_SEC:
                        del launches[run_id]
                if not launches:
                    del self._launches[device]
            self._write(ready)
            if self._has_unflushed and self._taken_at <= now - WAIT_SEC:
                self._writer.flush()
                self._has_unflushed = False

    def open_at(self, state: object, *, appends: bool) -> None:
        """Opens the file, and goes on where `state` was taken: what was written to it since then is taken out.

        If `state` is none of this file, `appends` says whether what the file has stays.
        """
        with self._lock:
            if isinstance(state, dict) and state.get("file") == self._file:
                with contextlib.suppress(TypeError, ValueError, KeyError):  # a damaged one
                    launches = _launches_of(state["launches"])
                    self._writer.resume(state)
                    self._launches = launches
                    self._taken_at, self._has_unflushed = time.monotonic(), True
                    return
            if appends:
                self._writer.append()
            self._writer.open()

    def state(self) -> dict[str, Any]:
        """Flushes the file's buffer, and returns what `open_at` needs to go on from here, as plain data."""
        with self._lock:
            launches = [
                launch.plain(device, run_id)
                for device, of_device in self._launches.items()
                for run_id, launch in of_device.items()
            ]
            return {"file": self._file, "launches": launches, **self._writer.state()}

    def finish(self) -> None:
        """Writes what waits for a step, and all rows of the file."""
        with self._lock:
            held = [launch.take_held() for each in self._launches.values() for launch in each.values()]
            try:
                self._write(itertools.chain.from_iterable(held))
            finally:
                self._writer.flush()

    def _tap_of(self, consumer: messages.Consumer) -> TapScalars | None:
        known = self._taps.get(id(consumer))
        if known is None or known[0] is not consumer:
            described = consumer.describe() if consumer.describe is not None else None
            known = self._taps[id(consumer)] = consumer, None if described is None else TapScalars(described)
        return known[1]


@contextlib.contextmanager
def scalars_into(
    file: str | os.PathLike[str], *, devices: bool = False, resumes: bool = False
) -> Iterator[ScalarsSink]:
    """Returns a sink that writes a file: CSV if its name ends in `.csv`, else JSON lines.

    Args:
        file: path of the file.
        devices: whether records have the name of the device. Those of several devices share no row in any case.
        resumes: whether the sink is that of a collector, which opens the file where the one before ended; else the
            file is new. Its records wait for the steps of their launches.

    Raises:
        OSError: (on entering) the file cannot be made.
    """
    writer = csv(file) if str(file).endswith(".csv") else jsonl(file)
    writer.has_devices = devices
    writer.advice = "another --metrics FILE keeps it"
    sink = ScalarsSink(writer, waits=resumes)
    if not resumes:
        writer.open()
    try:
        yield sink
        try:
            sink.finish()
        except Exception as error:  # the end of a collector has more to do
            if not resumes:
                raise
            logger.warning("%s lacks the last rows: %s: %s", file, type(error).__name__, error)
    finally:
        with contextlib.suppress(OSError) if resumes else contextlib.nullcontext():
            writer.close()

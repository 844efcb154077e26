"""The taps of a log as data: `read`."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping

from hostcallback.receiver import tap_name
from hostcallback.receiver.errors import HostCallbackError
from hostcallback.receiver.html import table
from hostcallback.receiver.taplog.columns.column_batches import ColumnReader
from hostcallback.receiver.taplog.columns.tap_data import TapData
from hostcallback.receiver.taplog.format.layout import ALL_CONSUMERS, Kind
from hostcallback.receiver.taplog.reading.chunk_reader import Chunk
from hostcallback.receiver.taplog.reading.reader import LogReader, Paths
from hostcallback.receiver.wire.tap_descriptor import TapDescriptor


class UnknownTapError(HostCallbackError, KeyError):
    """A log does not have the tap; the text lists those that it has.

    Example:
        with contextlib.suppress(hcb.UnknownTapError):
            hcb.read("run/taps")["los"]
    """

    def __str__(self) -> str:
        """The text, which KeyError would quote."""
        return str(self.args[0])


class LogData(Mapping[str, TapData]):
    """The taps of a log by name, each with its messages as columns. Made by `read` and `capture`.

    Nothing is read before it is needed. Each conversion reads the messages again.

    Example:
        print(sorted(hcb.read("run/taps")))
    """

    def __init__(self, reader: LogReader) -> None:
        """`reader` has the log open."""
        self._reader = reader
        self._taps: dict[str, list[TapDescriptor]] | None = None

    def _described(self) -> dict[str, list[TapDescriptor]]:
        if self._taps is None:
            found: dict[str, dict[int, TapDescriptor]] = {}
            carried = False  # whether messages may carry their descriptors, as those of exported programs do
            for _, segment in self._reader.segments():
                for chunk in segment.chunks():  # reading the chunks collects the descriptors
                    if isinstance(chunk, Chunk) and chunk.kind is Kind.FRAMES:
                        carried |= chunk.consumers == ALL_CONSUMERS
                for _, described in segment.consumers.values():
                    found.setdefault(described.name, {})[described.consumer_id] = described
            for described in ColumnReader(self._reader).exported() if carried else ():
                found.setdefault(described.name, {})[described.consumer_id] = described
            self._taps = {name: [*found[name].values()] for name in sorted(found)}
        return self._taps

    def __getitem__(self, name: str) -> TapData:
        """The tap of that name; the name of an unnamed tap may be given without its line, if there is only one.

        Raises:
            UnknownTapError: there is no such tap, or several; the text lists what there is.
        """
        taps = self._described()
        if name in taps:
            return TapData(self._reader, name, taps[name])
        near = [known for known in taps if tap_name.matches(known, name)]
        if len(near) == 1:
            return TapData(self._reader, near[0], taps[near[0]])
        there = ", ".join(map(repr, taps)) or "none"
        if near:
            raise UnknownTapError(f"{name!r} may be one of {', '.join(map(repr, near))}: give the whole name")
        similar = difflib.get_close_matches(str(name), [*taps], n=1)
        meant = f" Did you mean {similar[0]!r}?" if similar else ""
        raise UnknownTapError(f"the log has no tap {name!r}; its taps are {there}.{meant}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._described())

    def __len__(self) -> int:
        return len(self._described())

    def __repr__(self) -> str:
        """The names of the taps."""
        return f"LogData({', '.join(map(repr, self._described()))})"

    def _repr_html_(self) -> str:
        rows = [(tap.name, ", ".join(tap.kinds), "\n".join(tap.source_lines)) for tap in self.values()]
        return table(("tap", "kind", "line"), rows)


def read(paths: Paths, *, run: str | None = None) -> LogData:
    """Opens tap logs as data: a mapping of taps by name, each with its messages as columns.

    Logs that are larger than memory can be read: `data[name]` is iterated in batches, and converted to Arrow batch by
    batch. Works without JAX, while the program still writes, and after it was killed.

    Args:
        paths: folder of a log (`record=` of a receiver), a segment, or several of them.
        run: of a folder with several runs, the name of one, a pattern, or "all"; None for the last one.

    Raises:
        NotATapLogError: a path is not a log.
        NoSuchRunError: no run has that name.
        OSError: a path cannot be read.

    Example:
        data = hcb.read("logs")
        data["loss"].to_pandas().plot(x="step", y="loss")
    """
    return LogData(LogReader(paths, run=run))

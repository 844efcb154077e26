"""The steps of chunks that are read in any order: the chunks around one are read if its steps follow from them."""

from __future__ import annotations

from hostcallback.receiver.taplog.format import step_finder
from hostcallback.receiver.taplog.format.block import FrameBlock
from hostcallback.receiver.taplog.format.layout import NO_STEP, Kind
from hostcallback.receiver.taplog.reading.chunk_reader import Chunk, read_frames
from hostcallback.receiver.ui.index.buckets import ChunkTable
from hostcallback.receiver.ui.index.log_files import LogFiles, Segment
from hostcallback.receiver.wire.array_types import Array

CHUNKS_AROUND = 64
"""Headers of chunks that are looked at for the next or previous chunk of a device."""


class ChunkSteps:
    """Finds the steps of chunks. Under the index's lock."""

    def __init__(self, files: LogFiles, chunks: ChunkTable) -> None:
        """`files` and `chunks` are those of the index."""
        self._files = files
        self._chunks = chunks
        self._looked_ahead: dict[tuple[int, int], step_finder.Columns] = {}

    def of(
        self, finder: step_finder.StepFinder, segment: Segment, number: int, chunk: Chunk, block: FrameBlock
    ) -> Array:
        """The steps of the messages of a chunk.

        Raises:
            OSError: a chunk around it cannot be read.
        """
        here = finder.columns(block)
        earlier = step_finder.BEGINNING if chunk.step_before == NO_STEP else step_finder.UNKNOWN
        found = finder.find(here, earlier)
        before = self._chunk_before(segment, number, chunk) if found.need_earlier else None
        if before is not None:
            start = step_finder.BEGINNING if before.step_before == NO_STEP else step_finder.UNKNOWN
            earlier = start.and_then(finder.columns(read_frames(segment, before)[0]))
            found = finder.find(here, earlier)
        if not found.need_later:
            return found.steps
        later: list[step_finder.Columns] = []
        messages, nbytes, look_at = 0, 0, 1
        while (
            messages < step_finder.AHEAD_MESSAGES
            and nbytes < step_finder.AHEAD_BYTES
            and len(later) < step_finder.AHEAD_CHUNKS
        ):
            after = self._chunk_after(segment, chunk)
            if after is None:
                is_end = self._is_last(segment)
                return finder.find(here, earlier, later, is_end=is_end, guess=True).steps
            later.append(self._columns_of(segment, after, finder))
            chunk, messages, nbytes = (
                after,
                messages + len(later[-1].steps),
                nbytes + after.end - after.offset,
            )
            if len(later) >= look_at:  # each time twice as many
                look_at = 2 * len(later)
                found = finder.find(here, earlier, later)
                if not found.need_later:
                    return found.steps
        return finder.find(here, earlier, later, guess=True).steps

    def _columns_of(
        self, segment: Segment, chunk: Chunk, finder: step_finder.StepFinder
    ) -> step_finder.Columns:
        # The chunks before the same launch's end look into it again.
        key = segment.number, chunk.offset
        known = self._looked_ahead.get(key)
        if known is None:
            known = finder.columns(read_frames(segment, chunk)[0])
            if len(self._looked_ahead) >= step_finder.AHEAD_CHUNKS:
                del self._looked_ahead[next(iter(self._looked_ahead))]
            if not chunk.is_torn:
                self._looked_ahead[key] = known
        return known

    def _chunk_before(self, segment: Segment, number: int, chunk: Chunk) -> Chunk | None:
        # The chunk of the same device before one in its segment.
        for other in range(number - 1, max(number - CHUNKS_AROUND, 0) - 1, -1):
            of, offset = self._chunks.place(other)
            found = segment.chunk_at(offset) if of == segment.number else None
            if found is not None and found.stream == chunk.stream:
                return found
        return None

    @staticmethod
    def _chunk_after(segment: Segment, chunk: Chunk) -> Chunk | None:
        end = chunk.end
        for _ in range(CHUNKS_AROUND):
            found = segment.chunk_at(end)
            if found is None or (found.kind is Kind.FRAMES and found.stream == chunk.stream):
                return found
            end = found.end
        return None

    def _is_last(self, segment: Segment) -> bool:
        # Whether no more comes after a segment.
        if not segment.is_complete:
            return False
        others = (other for other in self._files.segments if other.writer == segment.writer)
        return all(other.created_ns <= segment.created_ns for other in others)

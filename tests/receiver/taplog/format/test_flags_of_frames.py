"""Flags of the frames of a block, and blocks in which one of them is cleared."""

from __future__ import annotations

import numpy as np
import pytest

from hostcallback.receiver.wire.frame import Flags
from logged_frames import LOSS, block_of, frame

FLAGS = [Flags.ORDERED | each for each in (Flags.BATCHED, Flags.CHECK, Flags.TRUNCATED, Flags(0))]


@pytest.mark.parametrize("cleared", [Flags.ORDERED, Flags.CHECK, Flags.BATCHED, Flags.TRUNCATED], ids=str)
def test_a_flag_is_cleared_in_a_copy_and_the_others_stay(cleared: Flags) -> None:
    frames = [
        frame(LOSS, np.float32(seq), np.int32(seq), seq=seq, flags=flags) for seq, flags in enumerate(FLAGS)
    ]
    block = block_of(*frames)
    found = block.without_flags(cleared)
    assert found.flags.tolist() == [flags & ~cleared for flags in FLAGS]
    assert block.flags.tolist() == FLAGS
    assert found.seqs.tolist() == block.seqs.tolist() == [0, 1, 2, 3]
    assert found.without_flags(cleared) is found


def test_a_block_in_which_no_frame_has_the_flag_is_not_copied() -> None:
    block = block_of(frame(LOSS, np.float32(1), np.int32(1), seq=0, flags=Flags.ORDERED))
    assert block.without_flags(Flags.BATCHED | Flags.CALL) is block

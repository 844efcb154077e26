"""Messages of which the handlers send the first elements: their metadata are rewritten, as readers take them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from compiling import needs_compiler
from fake_gpu import Gpu
from hostcallback.receiver.native import bindings as native
from hostcallback.receiver.wire.truncation import split_truncated

pytestmark = [pytest.mark.native_only, needs_compiler]


def heads_of(gpu: Gpu, elements: int, consumer_id: int, *arrays: Any) -> list[Any]:
    """What arrives of the arrays, through the handler of a GPU, of a tap that sends that many elements of each."""
    assert native.load().hcb_control_set(consumer_id, native.Control(truncate=elements)) == native.EMITTED
    gpu.tap(*arrays, consumer_id=consumer_id)
    ((*_, sent),) = gpu.take(1)
    return split_truncated(sent, 0)


@pytest.mark.parametrize("elements", [127, 128, 255, 256, 65_535, 65_536])
def test_the_length_of_a_head_is_in_the_form_that_readers_take(gpu: Gpu, elements: int) -> None:
    (head,) = heads_of(gpu, elements, 8_000_000 + elements, np.arange(elements + 1, dtype=np.int32))
    assert (head.shape, int(head[-1]), head.whole_shape) == ((elements,), elements - 1, (elements + 1,))


def test_metadata_of_many_arrays_are_rewritten_too(gpu: Gpu) -> None:
    arrays = [
        np.full(size, size, np.int32) for size in (1, 127, 128, 255, 256, 300, 301, 65_536) for _ in range(20)
    ]
    heads = heads_of(gpu, 300, 8_100_000, *arrays)
    assert [(head.shape, int(head[0])) for head in heads] == [((min(a.size, 300),), a.size) for a in arrays]

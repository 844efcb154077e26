"""What a message of a progress bar says."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, NamedTuple


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

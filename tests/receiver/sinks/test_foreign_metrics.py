"""Descriptions of metrics that another version or program wrote: what makes no sense is an error that says so."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hostcallback.receiver.messages import Message
from hostcallback.receiver.sinks.metric_writers.reduction import TapLayout
from logged_frames import LOSS, consumer_of

METRICS = replace(LOSS, kind="metrics", transforms=())


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"forms": {"loss": ["sound"]}}, "the metric 'loss' has the form 'sound' and the reduction 'mean'"),
        ({"reduce": {"loss": "median"}}, "has the form 'scalar' and the reduction 'median'"),
        ({"reduce": {"": "median"}}, "has the form 'scalar' and the reduction 'median'"),
        ({"forms": {"loss": ["histogram", 0]}}, "bins is 0, expected a number from 1"),
        ({"forms": {"loss": ["histogram", 1 << 31]}}, "bins is 2147483648, expected"),
        ({"every": 0}, "every is 0, expected a number from 1"),
        ({"every": True}, "every is True, expected a number from 1"),
        ({"forms": ["loss"]}, r"expected a map, got \['loss'\]"),
    ],
)
def test_what_makes_no_sense_is_told(params: dict[str, Any], text: str) -> None:
    described = replace(METRICS, params=params)
    message = Message(consumer_of(described), [np.float32(1), np.int32(7)], 0, 0, 1, "cpu:0", None)
    with pytest.raises(ValueError, match=text):
        TapLayout(described).take(message)


def test_forms_and_reductions_are_those_of_the_description() -> None:
    params = {"forms": {"loss": ["histogram", 5]}, "reduce": {"loss": "last", "": "max"}, "every": 3}
    described = replace(METRICS, params=params)
    layout = TapLayout(described)
    layout.take(Message(consumer_of(described), [np.float32(1), np.int32(7)], 0, 0, 1, "cpu:0", None))
    (metric,) = layout.metrics
    assert (metric.name, metric.form, metric.bins, metric.reduce, layout.every) == (
        "loss", "histogram", 5, "last", 3,
    )  # fmt: skip

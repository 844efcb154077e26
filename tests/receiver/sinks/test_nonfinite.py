"""The sink of `watch_nonfinite`, which tells of operations."""

from __future__ import annotations

import numpy as np
import pytest

from hostcallback.receiver.failures.deferred_errors import DelegatedFailure, MultipleFailures
from hostcallback.receiver.failures.explanation import CheckFailed
from hostcallback.receiver.messages import Consumer, Message
from hostcallback.receiver.sinks.nonfinite import Line, NonFiniteSink, Watched


def test_operations_of_one_name_and_line_are_numbered_one_by_one() -> None:
    names, line = ("log", "exp", "log", "log"), Line("train.py", 3, "step")
    operations = [Watched(name, line, "", (), "float32", False, False) for name in names]
    made, nans, infs = ([np.array(one)] * len(names) for one in (True, 1, 0))
    sink = NonFiniteSink(lambda arrays: (np.array(True), made, nans, infs, []), operations)
    with pytest.raises(MultipleFailures) as caught:
        sink(Message(Consumer(1, "watched", "train.py:1 (main)", sink), [], 0, 0, 0, "cpu:0", None))
    numbered = []
    for failure in caught.value.exceptions:
        assert isinstance(failure, DelegatedFailure)
        assert isinstance(failure.error, CheckFailed)
        numbered.append((failure.consumer.name, failure.error.part))
    assert numbered == [("log", 0), ("exp", 0), ("log", 1), ("log", 2)]

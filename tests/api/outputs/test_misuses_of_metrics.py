"""Misuses of metrics and of their files: each is told with its cure."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hostcallback as hcb


@pytest.mark.parametrize("make", [hcb.csv, hcb.jsonl])
def test_a_file_with_content_is_replaced_and_that_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Any
) -> None:
    path = tmp_path / "m"
    for mode in ("w", "a", "w"):
        with hcb.outfeed_receiver(writers=[make(path, mode=mode)]):
            hcb.metrics({"loss": 1}, step=0)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    # Earlier tests of the process may have left other devices, of which its supervisor warns.
    (text,) = [warning for warning in warnings if str(path) in warning]
    assert text == f"{path} had content and is replaced; hcb.{make.__name__}(..., mode='a') appends"


@pytest.mark.parametrize("make", [hcb.csv, hcb.jsonl])
def test_the_folder_of_a_file_is_made_with_the_first_row(tmp_path: Path, make: Any) -> None:
    path = tmp_path / "runs" / "one" / "m"
    writer = make(path)
    assert not path.parent.parent.exists()
    with hcb.outfeed_receiver(writers=[writer]):
        hcb.metrics({"loss": 1}, step=0)
    assert path.stat().st_size > 0


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: hcb.metrics({"loss": None}), "'loss' is None, expected a value: leave the name out"),
        (lambda: hcb.metrics({"loss": 1}, 2), r"options are keyword arguments: hcb\.metrics\(values, step=\.\.\.\)"),  # type: ignore[misc]
        (lambda: hcb.metrics(loss=1, step=2), r"a dict, hcb\.metrics\(\{'loss': \.\.\.\}, step=\.\.\.\)"),  # type: ignore[call-arg]
        (lambda: hcb.Progress(postfixes=print), "did you mean postfix="),  # type: ignore[call-arg]
    ],
)  # fmt: skip
def test_misuses_name_the_cure_and_the_line(call: Any, text: str) -> None:
    with pytest.raises(TypeError, match=rf"{text}.*, at .*test_misuses_of_metrics\.py:\d+"):
        call()


@pytest.mark.parametrize("bins", [1, 10_000])
def test_a_histogram_may_have_one_bin_and_ten_thousand(bins: int) -> None:
    assert hcb.histogram(np.ones(3), bins=bins).params == (bins,)
    text = r"^hcb\.histogram: bins is (0|10001), expected a whole number from 1 to 10000, at "
    with pytest.raises(ValueError, match=text):
        hcb.histogram(np.ones(3), bins=0 if bins == 1 else bins + 1)

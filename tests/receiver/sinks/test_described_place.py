"""Places of described checks: the reader opens no file for them unless it is Python source."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hostcallback.receiver import limits
from hostcallback.receiver.failures.call_site import DescribedFrame, described_place


def test_only_python_files_of_usual_size_are_read(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("first\nsecond(x)\n")
    (tmp_path / "token").write_text("secret\n")
    os.mkfifo(tmp_path / "pipe.py")
    with (tmp_path / "large.py").open("wb") as file:
        file.truncate(limits.SOURCE_BYTES + 1)
    assert described_place([[str(tmp_path / "code.py"), 2, "step"]], [2, 2, 0, 9]).source()[0] == "second(x)"
    for name in ("token", "pipe.py", "large.py", "missing.py", "\0.py"):
        frame = DescribedFrame(str(tmp_path / name), 1, "step")
        assert frame.source_text(1) == ""
        assert "secret" not in str(frame)
    assert DescribedFrame("/dev/zero", 1, "step").source_text(1) == ""


@pytest.mark.parametrize("text", ["\n\n\n\n", "  \n \n\t\n\n", "x\n", "", '"""\n\n\n\n', ")\n(\n)\n]\n"])
def test_a_file_that_was_edited_since_is_no_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "code.py").write_text(text)
    place = described_place([[str(tmp_path / "code.py"), 2, "step"]], [2, 3, 4, 90])
    assert all(line.strip() in text for line in place.source())


@pytest.mark.parametrize(
    ("stack", "span"),
    [
        (None, None),
        ([["a.py", "1", "f"]], None),
        ([["a.py", 1]], None),
        ([["a.py", 1, "f"]] * 1001, None),
        ([["a.py", 1, "f"]], [0, 10**12, 0, 0]),
        ([["a.py", 1, "f"]], [0, 1, 0]),
        ([["a.py", 1, "f"]], [-5, 1, 0, 0]),
        ([["a.py", 1, "f"]], ["0", 1, 0, 0]),
    ],
)
def test_a_place_that_is_none_is_refused(stack: object, span: object) -> None:
    with pytest.raises(ValueError, match="described as"):
        described_place(stack, span)

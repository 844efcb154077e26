"""Crafted files raise one documented class of errors each, and are one line at the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hostcallback.receiver.cli import main
from hostcallback.receiver.control.protocol import RuleFileError
from hostcallback.receiver.control.rule_file import read_rules
from hostcallback.receiver.errors import NotATapLogError
from hostcallback.receiver.remote.forwarding_protocol import StreamKey
from hostcallback.receiver.remote.spool.spool_folders import find_orphans
from hostcallback.receiver.taplog.flight.recorder import _CONTROL, MAGIC, RingFileError, read_ring
from hostcallback.receiver.taplog.format import layout
from hostcallback.receiver.taplog.reading.segment_reader import SegmentReader
from hostcallback.receiver.taplog.writing.segment_writer import segment_info

INFO = segment_info(1)


@pytest.mark.parametrize(
    "change",
    [
        {"pid": float("inf")},
        {"pid": float("nan")},
        {"pid": "x"},
        {"pid": None},
        {"process_index": float("inf")},
        {"process_index": [1]},
    ],
    ids=str,
)
def test_the_header_of_a_log(
    change: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.hcblog"
    path.write_bytes(layout.encode_file_header({**INFO, **change}))
    with pytest.raises(NotATapLogError):
        SegmentReader(path)
    assert main(["cat", str(path)]) == 1
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    "text",
    [
        "a = " + "[" * 50_000,
        "a = " + "{a=" * 20_000,
        '["x"]\nrate = inf',
        '["x"]\nevery = nan',
        "x = 1",
        "\x1b",
        "[[a]]",
    ],
    ids=range(7),
)
def test_a_rule_file(text: str, tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    path.write_text(text)
    with pytest.raises(RuleFileError):
        read_rules(path)


@pytest.mark.parametrize(
    "process",
    [
        {"host": "h", "started_ns": 1},
        {"host": "h", "pid": float("inf"), "started_ns": 1},
        {"host": "h", "pid": 2**40, "started_ns": 1},
        {"host": "h", "pid": 1, "started_ns": 10**30},
        {"host": 1, "pid": 1, "started_ns": 1},
        {"host": "h", "pid": 1, "started_ns": 1, "command": 7},
        [],
        None,
    ],
    ids=range(8),
)
def test_the_description_of_a_flight(
    process: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "process.json").write_text(json.dumps(process))
    (tmp_path / "cpu.hcbring").write_bytes(b"none")
    assert main(["recover", str(tmp_path)]) == 1
    assert "Traceback" not in capsys.readouterr().err


def test_a_nested_description_of_a_flight(tmp_path: Path) -> None:
    (tmp_path / "process.json").write_text("[" * 100_000)
    (tmp_path / "cpu.hcbring").write_bytes(b"none")
    assert main(["recover", str(tmp_path)]) == 1


@pytest.mark.parametrize("page", [0, 1, 64, 4096, 2**31])
@pytest.mark.parametrize("capacity", [0, 1, 64, 4096, 2**63 - 64])
def test_a_ring(page: int, capacity: int, tmp_path: Path) -> None:
    path = tmp_path / "cpu.hcbring"
    control = _CONTROL.pack(MAGIC, 1, page, capacity, 0, 0, 1, 1, 0, 0, b"cpu:0")
    path.write_bytes(control.ljust(8192, b"\xff"))
    try:
        contents = read_ring(path)
    except RingFileError:
        return
    assert not contents.frames


def test_a_folder_in_a_spool_that_is_no_stream(tmp_path: Path) -> None:
    for name in ("run~9999999999~" + "a" * 16, "run~2147483648~" + "a" * 16, "run~1~x", "run~~"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lock").write_bytes(b"")
        assert StreamKey.of_folder(name) is None
    assert find_orphans(tmp_path, "run") == []

"""The package's logger: what streams and files say reaches the handlers of a program only as plain text."""

from __future__ import annotations

import logging

import pytest

from hostcallback.receiver.log import INDENT, logger
from hostile_log import FORGED, HOSTILE, UNSAFE


def check(text: str) -> None:
    """Fails for text that a terminal would obey, or with a line that a sender made."""
    assert not UNSAFE & set(text), sorted(UNSAFE & set(text))
    assert not [line for line in text.split("\n") if line.startswith(FORGED)]


def test_records_and_tracebacks_are_printable(caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        logger.exception("a stream says %s", HOSTILE)
    logger.warning(HOSTILE)
    record = caplog.records[0]
    check(record.getMessage())
    check(logging.Formatter().format(caplog.records[1]))
    assert not UNSAFE & set(logging.Formatter().format(record))


def test_a_record_of_a_described_place_names_it_printably(caplog: pytest.LogCaptureFixture) -> None:
    where = f"/runs/{HOSTILE}/train.py"
    logger.handle(
        logger.makeRecord("hostcallback", logging.WARNING, where, 12, "failed", (), None, func=HOSTILE)
    )
    (record,) = caplog.records
    for told in (record.pathname, record.filename, record.module, record.funcName):
        assert str(told).isprintable()
    assert (record.filename, record.lineno, record.message) == ("train.py", 12, "failed")


def test_plain_records_stay_as_they_are_and_further_lines_are_indented(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logger.warning("loss = %s at %s", 0.5, "Größe")
    logger.warning("first\nsecond")
    plain, of_two_lines = caplog.records
    assert (plain.msg, plain.args) == ("loss = %s at %s", (0.5, "Größe"))
    assert of_two_lines.message == f"first\n{INDENT}second"

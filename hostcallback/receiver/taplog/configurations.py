"""The configurations of runs, as the headers of their segments have them: for readers, and compared at a new start."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hostcallback.receiver import errors
from hostcallback.receiver.log import logger
from hostcallback.receiver.taplog.format import layout
from hostcallback.receiver.taplog.reading.logged_message import process_of
from hostcallback.receiver.taplog.reading.reader import LogReader
from hostcallback.receiver.taplog.reading.segment_reader import SegmentReader
from hostcallback.receiver.text import printable

MAX_SETTINGS = 500
"""Settings of a run that are shown."""

SETTING_CHARS = 500

MAX_LOOKED_AT = 1000
"""Newest segments of a folder among which those of a run that is continued are looked for."""

MAX_TOLD = 5
TOLD_CHARS = 80

Settings = dict[str, float | bool | str | None]


def configurations(reader: LogReader) -> dict[str, list[Settings]]:
    """The configurations of the runs in a log that have one: of each start of the run with another one, the last last.

    Of a program of several processes they are those of the first process.
    """
    found: dict[str, list[Settings]] = {}
    first: dict[str, int] = {}
    for writer, segment in reader.segments():
        config = segment.info.get("config")
        if isinstance(config, dict) and first.setdefault(writer.run, process_of(writer)) == process_of(
            writer
        ):
            known, settings = found.setdefault(writer.run, []), flat(config)
            if not known or known[-1] != settings:
                known.append(settings)
    return found


def flat(config: Mapping[Any, Any]) -> Settings:
    """A configuration for readers: the entries of nested dicts have names such as `optimizer.name`."""
    found: Settings = {}
    _flatten(config, "", found)
    return found


def _flatten(given: Mapping[Any, Any], prefix: str, found: Settings) -> None:
    for key, value in given.items():
        name = prefix + printable(str(key))[:SETTING_CHARS]
        if len(found) >= MAX_SETTINGS:
            return
        if isinstance(value, dict) and value and prefix.count(".") < 10:
            _flatten(value, name + ".", found)
        elif (
            isinstance(value, bool)
            or value is None
            or (isinstance(value, int | float) and abs(value) <= 1e300)
        ):
            found[name] = value
        else:
            found[name] = printable(str(value))[:SETTING_CHARS]


def differing_settings(configured: list[Settings]) -> list[str]:
    """Names of the settings that are not equal in all configured runs."""
    known = [each for each in configured if each]
    every = dict.fromkeys(name for each in known for name in each)
    return [name for name in every if any(each.get(name) != known[0].get(name) for each in known)]


def tell_of_change(directory: Path, run: str, config: Mapping[str, Any], process_index: int | None) -> None:
    """Logs how the configuration of a new start differs from the last one of the same run in a folder."""
    before = _last(directory, run, process_index or 0)
    if before is None:
        return
    now = flat(config)
    changed = differing_settings([before, now])
    told = [f"{name} {_told(before, name)} -> {_told(now, name)}" for name in changed[:MAX_TOLD]]
    if told:
        more = f" and {len(changed) - MAX_TOLD} more" if len(changed) > MAX_TOLD else ""
        logger.warning(
            "continues run %s, whose configuration differs: %s%s", printable(run), ", ".join(told), more
        )


def _told(settings: Settings, name: str) -> str:
    return str(settings[name])[:TOLD_CHARS] if name in settings else "not set"


def _last(directory: Path, run: str, process: int) -> Settings | None:
    # The configuration in the newest segment of a process of the run; None if there is none.
    segments = layout.segments_of(directory) if any(directory.glob(f"*{layout.SUFFIX}")) else []
    for path in segments[: -MAX_LOOKED_AT - 1 : -1]:
        try:
            segment = SegmentReader(path)
        except (errors.TapLogError, OSError):  # damaged, or removed meanwhile
            continue
        segment.close()
        config, writer = segment.info.get("config"), segment.writer
        if writer.run == run and process_of(writer) == process and isinstance(config, dict):
            return flat(config)
    return None

"""Profiles of `jax.profiler.trace`, made by hand, and the traces that `hcb convert` makes over them."""

from __future__ import annotations

import gzip
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hostcallback.receiver.cli import main
from hostcallback.receiver.sinks.times import DEVICE, SECONDS, START
from hostcallback.receiver.taplog.convert.output import ConvertError
from hostcallback.receiver.taplog.convert.perfetto import EVENTS, PLANES, read_profile
from hostcallback.receiver.taplog.writing.log_writer import LogWriter
from logged_frames import BEGIN_NS, LOSS, NORM, SECOND, block_of, frame, log_in

SPAN = {"ph": "X", "name": "train", "pid": 1, "tid": 1, "ts": 0.5, "dur": 2}
STOP_NS = BEGIN_NS + 5 * SECOND
START_ID, CLOCK, STOP_ID = 0, 3, 300  # ids of stats; the last one has two bytes


def varint(value: int) -> bytes:
    """A number as protobuf writes it."""
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + varint(value >> 7)


def field(number: int, value: int | bytes, kind: int | None = None) -> bytes:
    """A field of a message: a number, or bytes with their length unless another `kind` is given."""
    kind = kind if kind is not None else 0 if isinstance(value, int) else 2
    if isinstance(value, int):
        return varint(number << 3 | kind) + varint(value)
    return varint(number << 3 | kind) + (varint(len(value)) if kind == 2 else b"") + value


def named(key: int, name: bytes) -> bytes:
    """The name of a stat: protobuf leaves zeros out."""
    own = field(1, key) if key else b""
    return field(5, own + field(2, own + field(2, name)))


def stat(key: int, *value: bytes) -> bytes:
    """A stat."""
    return field(6, (field(1, key) if key else b"") + b"".join(value))


NAMES = named(START_ID, b"profile_start_time") + named(STOP_ID, b"profile_stop_time") + named(CLOCK, b"clock")


def environment(*stats: bytes, names: bytes = NAMES) -> bytes:
    """The plane that says when a profile began."""
    return field(1, field(1, 7) + field(2, b"Task Environment") + names + b"".join(stats))


TIMES = stat(START_ID, field(3, BEGIN_NS)), stat(STOP_ID, field(4, STOP_NS))
OTHER_PLANE = field(
    1, field(2, b"/host:CPU") + field(3, b"Task Environment") + NAMES + stat(START_ID, field(3, 1)) + stat(STOP_ID)
)  # fmt: skip
SPACE = (
    field(4, b"\xff" * 3)  # the host's name, for example
    + OTHER_PLANE
    + environment(
        stat(CLOCK, field(2, b"8 bytes.", kind=1), field(9, b"four", kind=5)), *TIMES, stat(99, field(3, 1))
    )
    + environment(stat(START_ID, field(3, 2)), stat(STOP_ID, field(3, 3)))
)


def profile_in(folder: Path, host: str = "host", *, space: bytes = SPACE, events: Any = None) -> Path:
    """Writes a profile; returns the file of its events."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / (host + EVENTS)
    text = json.dumps({"traceEvents": [SPAN, {}]} if events is None else events)
    path.write_bytes(gzip.compress(text.encode()))
    (folder / (host + PLANES)).write_bytes(space)
    return path


def test_a_profile_is_read_from_its_file_or_its_folder(tmp_path: Path) -> None:
    path = profile_in(tmp_path)
    for given in (path, tmp_path):
        assert read_profile(given) == (BEGIN_NS, STOP_NS, [SPAN])


def test_the_newest_profile_of_a_folder_is_read(tmp_path: Path) -> None:
    runs = tmp_path / "plugins" / "profile"
    for age, name in enumerate(("c", "a", "b"), 1):
        profile_in(runs / name, events={"traceEvents": [{"name": name}]})
        os.utime(runs / name, ns=(BEGIN_NS - age * SECOND,) * 2)
    assert read_profile(tmp_path).events == [{"name": "c"}]
    (runs / "c" / f"host{EVENTS}").unlink()  # JAX is about to write it
    os.utime(runs / "c", ns=(BEGIN_NS, BEGIN_NS))
    assert read_profile(tmp_path).events == [{"name": "a"}]


def test_a_profile_of_several_hosts_is_named(tmp_path: Path) -> None:
    paths = [profile_in(tmp_path, host) for host in ("one", "two")]
    with pytest.raises(ConvertError) as raised:
        read_profile(tmp_path)
    names = ", ".join(map(str, paths))
    assert str(raised.value) == f"{tmp_path} has the profiles of 2 hosts: name one of {names}"
    assert read_profile(paths[1]).start_ns == BEGIN_NS


def test_a_folder_without_a_profile_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ConvertError, match=f"{tmp_path}: no profile of jax.profiler.trace here, expected plugins/"
    ):
        read_profile(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_profile(tmp_path / "gone")


@pytest.mark.parametrize("lacks", ["name", "planes"])
def test_a_file_that_is_not_of_a_profile_is_named(tmp_path: Path, lacks: str) -> None:
    path = profile_in(tmp_path)
    if lacks == "name":
        path = path.rename(tmp_path / "host.json.gz")
        (tmp_path / f"host.json.gz{PLANES}").write_bytes(SPACE)
    else:
        (tmp_path / f"host{PLANES}").unlink()
    with pytest.raises(
        ConvertError, match=r"expected a HOST\.trace\.json\.gz of .*, and a HOST\.xplane\.pb in the"
    ):
        read_profile(path)


@pytest.mark.parametrize(
    "content",
    [
        b"no gzip",
        gzip.compress(b"[]")[:-9],
        gzip.compress(b"no JSON"),
        gzip.compress(b"{}"),
        gzip.compress(b"[1]"),
        gzip.compress(b"{}")[:10] + b"\xff" * 20,
    ],
    ids=["other", "cut", "no JSON", "no events", "a list", "damaged"],
)
def test_events_that_cannot_be_read_are_named(tmp_path: Path, content: bytes) -> None:
    path = profile_in(tmp_path)
    path.write_bytes(content)
    with pytest.raises(ConvertError, match=f"{path} has no trace events: "):
        read_profile(path)


@pytest.mark.parametrize(
    ("space", "said"),
    [
        ((OTHER_PLANE + environment(*TIMES))[:-1], "is not an XSpace of jax.profiler: it is cut off"),
        (field(1, field(2, b"x") + b"\x0f"), "XSpace of jax.profiler: a field of the kind 7"),
        (field(1, field(2, b"x") + b"\x0b"), "XSpace of jax.profiler: a field of the kind 3"),
        (b"\x10" + b"\xff" * 9 + b"\x01", "does not say when the profile began"),  # a number of ten bytes
        (b"\x08" + b"\xff" * 10 + b"\x01", "XSpace of jax.profiler: a number is too long"),
        (b"\x0a", "is not an XSpace of jax.profiler: "),
        (field(1, 5), "is not an XSpace of jax.profiler: "),
        (b"", "does not say when the profile began: it has no 'profile_start_time'"),
        (OTHER_PLANE, "does not say when the profile began: it has no 'profile_start_time'"),
        (environment(TIMES[0]), "when the profile began: it has no 'profile_stop_time'"),
        (environment(TIMES[1]), "when the profile began: it has no 'profile_start_time'"),
        (environment(TIMES[0], stat(STOP_ID, field(3, b"7"))), "it has no 'profile_stop_time'"),
        (environment(*TIMES, names=named(STOP_ID, b"profile_stop_time")), "it has no 'profile_start_time'"),
    ],
)
def test_times_that_cannot_be_read_are_named(tmp_path: Path, space: bytes, said: str) -> None:
    path = profile_in(tmp_path, space=space)
    with pytest.raises(ConvertError, match=said) as raised:
        read_profile(path)
    assert str(raised.value).startswith(str(tmp_path / f"host{PLANES}"))


def trace_of(log: Path, *options: str) -> dict[str, Any]:
    """The trace of a log."""
    output = log.with_name("out.json")
    assert main(["convert", str(log), "--to", "trace", "-o", str(output), *options]) == 0
    found: dict[str, Any] = json.loads(output.read_text())
    return found


def test_a_trace_has_the_events_of_the_profile_and_the_messages_of_its_time(tmp_path: Path) -> None:
    profile_in(tmp_path / "profile", space=environment(stat(START_ID, field(3, BEGIN_NS + SECOND)), TIMES[1]))
    with log_in(tmp_path / "log") as log:
        log.append("cpu:0", block_of(*(frame(NORM, np.float32(k), seq=k) for k in range(8))))
    found = trace_of(tmp_path / "log", "--beside", str(tmp_path / "profile"))
    assert found["otherData"]["zero_unix_ns"] == str(BEGIN_NS + SECOND)
    assert found["traceEvents"][0] == SPAN
    taps = [event for event in found["traceEvents"] if event.get("cat") == "tap" and event["ph"] == "i"]
    assert [(event["args"]["seq"], event["ts"]) for event in taps] == [
        (k, (k - 1) * 1e6) for k in range(1, 5)
    ]


def test_a_log_without_messages_is_a_trace_without_events(tmp_path: Path) -> None:
    with log_in(tmp_path / "log"):
        pass
    output = tmp_path / "out.json"
    assert main(["convert", str(tmp_path / "log"), "--to", "trace", "-o", str(output)]) == 0
    found = json.loads(output.read_text())
    assert (found["otherData"]["zero_unix_ns"], found["traceEvents"]) == ("0", [])


TIMED = replace(
    LOSS, name="parts", consumer_id=99, kind="time", params={"axes": {"mlp": [DEVICE], "norm": []}}, kwargs={},
    transforms=(), tree=["dict", [["value", "mlp"], ["value", "norm"]], [
        ["dict", [["value", SECONDS], ["value", START]], [["array"], ["array"]]] for _ in range(2)
    ]],
)  # fmt: skip


def stamps(*times_ns: int) -> np.ndarray[Any, Any]:
    """Unix times, as messages of times have them."""
    return np.array(times_ns, np.uint64).view(np.uint32).reshape(len(times_ns), 1, 2)


def test_a_trace_has_the_times_of_places_on_a_track_of_each_device(tmp_path: Path) -> None:
    with log_in(tmp_path / "log") as log:
        log.describe(TIMED)
        mlp = np.array([[0.25], [0.5]], np.float32)
        norm = np.array([np.nan], np.float32), stamps(BEGIN_NS)[0]
        early = stamps(BEGIN_NS + SECOND, BEGIN_NS + 2 * SECOND)
        log.append("cpu:0", block_of(frame(TIMED, mlp, early, *norm, seq=3, run_id=6)))
    events = trace_of(tmp_path / "log")["traceEvents"]
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert list(tracks.values()) == ["cpu:0", "cpu:0 time[0]", "cpu:0 time[1]"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in spans} == {event["pid"] for event in events if event["ph"] == "i"}
    assert [(tracks[event["tid"]], event["name"], event["cat"], event["dur"]) for event in spans] == [
        ("cpu:0 time[0]", "mlp", "time", 250_000),
        ("cpu:0 time[1]", "mlp", "time", 500_000),
    ]
    assert [event["ts"] for event in spans] == [-2e6, -1e6]  # before the message, which is the trace's zero
    assert spans[0]["args"] == {"iterations": [], "seq": 3, "run_id": 6}


@pytest.mark.parametrize("axes", [{}, {"axes": {"mlp": ["queue"]}}, {"axes": {"mlp": [DEVICE], "head": []}}])
def test_a_message_that_has_no_times_is_an_instant_only(tmp_path: Path, axes: dict[str, Any]) -> None:
    with log_in(tmp_path / "log") as log:
        log.describe(replace(TIMED, params=axes))
        one = np.zeros((1, 1), np.float32), stamps(BEGIN_NS)
        log.append("cpu:0", block_of(frame(TIMED, *one, *one, seq=0), frame(TIMED, *one, seq=1)))
    events = trace_of(tmp_path / "log")["traceEvents"]
    assert [event["args"]["seq"] for event in events if event["ph"] == "i"] == [0, 1]
    assert not [event for event in events if event.get("cat") == "time"]


def lose(log: LogWriter) -> None:
    """Notes that messages are missing, and that something else is."""
    log.lose("cpu:1", 5, 8, 4, "the ring was full")
    log.lose("cpu:1", 9, 9, 0, "its writer was killed")


def test_a_trace_has_the_notes_of_lost_messages(tmp_path: Path) -> None:
    with log_in(tmp_path / "log") as log:
        log.append("cpu:0", block_of(frame(NORM, np.float32(0.5), seq=0)))
        lose(log)
    found = trace_of(tmp_path / "log")
    events = found["traceEvents"]
    lost = [event for event in events if event.get("cat") == "lost"]
    assert [event["name"] for event in lost] == ["4 message(s) lost", "its writer was killed"]
    assert lost[0]["args"] == {"messages": 4, "reason": "the ring was full", "first_seq": 5}
    (tap,) = [event for event in events if event.get("cat") == "tap" and event["ph"] == "i"]
    tracks = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"] == "thread_name"
    }
    assert [tracks[event["pid"], event["tid"]] for event in (*lost, tap)] == ["cpu:1", "cpu:1", "cpu:0"]
    assert tap["pid"] == lost[0]["pid"]
    assert lost[0]["ts"] > 0
    assert (lost[0]["ph"], lost[0]["s"]) == ("i", "t")


def test_a_message_that_does_not_fit_its_description_says_so_in_the_trace(tmp_path: Path) -> None:
    with log_in(tmp_path / "log") as log:
        log.append("cpu:0", block_of(frame(LOSS, np.float32(1), seq=0), frame(NORM, np.float32(2), seq=1)))
    events = trace_of(tmp_path / "log")["traceEvents"]
    odd, good = (event["args"]["value"] for event in events if event["ph"] == "i")
    assert odd.startswith("(cannot be shown: ")
    assert len(odd) > len("(cannot be shown: )")
    assert good == "2.0"


@pytest.mark.parametrize(("kind", "counts"), [("tap", True), ("breakpoint", False)])
def test_only_taps_of_metrics_have_counters(tmp_path: Path, kind: str, counts: bool) -> None:
    with log_in(tmp_path / "log") as log:
        log.describe(replace(NORM, kind=kind, consumer_id=5, name="five"))
        arrays = [np.float32(2), np.complex64(1), np.float32(np.inf), np.zeros(3, np.float32)]
        log.append(
            "cpu:0",
            block_of(*(frame(replace(NORM, consumer_id=5), each, seq=k) for k, each in enumerate(arrays))),
        )
    events = trace_of(tmp_path / "log")["traceEvents"]
    counters = [(event["name"], event["args"]) for event in events if event["ph"] == "C"]
    assert counters == ([("five cpu:0", {"value": 2.0})] if counts else [])

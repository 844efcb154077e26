"""What the page takes from the sources of running processes: their answers, their rests, and what fails."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from scripted_sources import Source, device, figures, process, tap

from hostcallback.receiver.control.endpoints import endpoints
from hostcallback.receiver.control.protocol import ControlError, ControlSocketError, NoSuchTapError
from hostcallback.receiver.errors import TransportError
from hostcallback.receiver.remote.options import Forward
from hostcallback.receiver.ui.live import processes
from hostcallback.receiver.ui.live.processes import MAX_LOGS, LiveProcesses, ProcessSource
from hostcallback.receiver.ui.live.source import CollectorSource
from threads import wait_for

Clock = SimpleNamespace


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time that the page looks at, which stands still; `looks` counts the looks at it."""
    found = SimpleNamespace(now=100.0, looks=0)

    def monotonic() -> float:
        found.looks += 1
        return float(found.now)

    monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=monotonic))
    return found


@pytest.fixture
def live() -> Iterator[Callable[..., LiveProcesses]]:
    """Makes the processes of some sources, and closes them."""
    made: list[LiveProcesses] = []

    def make(*sources: Any) -> LiveProcesses:
        made.append(LiveProcesses(sources))
        return made[-1]

    yield make
    for each in made:
        each.close()


Live = Callable[..., LiveProcesses]


def test_processes_are_asked_twice_a_second_and_at_once_after_a_command(live: Live, clock: Clock) -> None:
    source = Source([process(figures(1.0))], answer=["done"])
    shown = live(source)
    assert (bool(shown), bool(live())) == (True, False)
    for now, asked in ((100.0, 1), (100.49, 1), (100.5, 2), (100.6, 2)):
        clock.now = now
        shown.refresh()
        assert (source.asked, shown.version) == (asked, asked)
    assert shown.tell("stop", by="me") == ["done"]
    assert source.told == [("stop", "", {"by": "me"})]
    shown.refresh()
    assert source.asked == 3
    shown.close()
    assert (source.closed, bool(shown)) == (True, False)
    clock.now += 1
    shown.refresh()
    assert source.asked == 3


def test_processes_may_stop_counting_ten_seconds_after_the_last_request(
    live: Live, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    rest_sec = 1 / 128
    monkeypatch.setattr(processes, "REST_SEC", rest_sec)  # of the timer
    source, other = Source([]), Source([])
    shown = live(source, other)
    shown.refresh()
    looks = clock.looks
    wait_for(lambda: clock.looks > looks + 2, "further looks of the timer")
    assert source.rests == other.rests == 0
    clock.now += rest_sec
    wait_for(lambda: source.rests and other.rests, "the rest")
    assert (source.asked, source.closed) == (1, False)
    clock.now += 1
    shown.refresh()  # starts the timer again
    assert source.asked == 2
    clock.now += rest_sec
    wait_for(lambda: source.rests > 1, "the next rest")


def test_the_rate_of_a_device_is_of_the_time_between_two_answers(live: Live, clock: Clock) -> None:
    source = Source(
        [process(figures(10.0, device(emitted=100)))],
        [process(figures(12.0, device(emitted=150), device("cpu:1", emitted=6)))],
        [process(figures(14.0, device(emitted=20), device("cpu:1", emitted=6)))],
        [process(figures(14.0, device(emitted=90)))],
    )
    shown = live(source)
    found = []
    for _ in range(4):
        shown.refresh()
        clock.now += 1
        (each,) = shown.processes()
        found.append([shown.rate(each, name) for name in ("cpu:0", "cpu:1", "cpu:2")])
    assert found == [[0.0, 0.0, 0.0], [25.0, 3.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]


def test_a_source_that_does_not_answer_has_no_processes_until_it_answers_again(
    live: Live, clock: Clock, tmp_path: Path
) -> None:
    good = Source([process(figures(1.0)), process(figures(1.0), 8)], name="good", folder=[tmp_path])
    bad = Source(ControlError("no \x1b answer"), [process(figures(1.0), 9)], name="b\x1bad")
    shown = live(good, bad)
    shown.refresh()
    assert [each.pid for each in shown.processes()] == [7, 8]
    state = shown.state
    first, second = shown.sources()
    assert first == {"kind": "process", "name": "good", "state": "live", "message": ""}
    assert second == {"kind": "process", "name": "b\\x1bad", "state": "lost", "message": "no \\x1b answer"}
    bad.ended = True
    assert [source["state"] for source in shown.sources()] == ["live", "ended"]
    assert shown.logs() == [tmp_path]
    clock.now += 1
    shown.refresh()
    assert [each.pid for each in shown.processes()] == [7, 8, 9]
    assert [(each["state"], each["message"]) for each in shown.sources()] == [("live", ""), ("live", "")]
    assert shown.state != state


def test_a_command_fails_if_no_source_has_a_result(live: Live) -> None:
    first, second = Source([], answer=ControlError("one")), Source([], answer=ControlError("two"))
    shown = live(first, second)
    with pytest.raises(ControlError, match="one"):
        shown.tell("set", "run", name="lr")
    assert second.told == [("set", "run", {"name": "lr"})]
    second.answer = [1, 2]
    assert shown.tell("set") == [1, 2]
    second.answer = []
    with pytest.raises(ControlError, match="one"):
        shown.tell("set")
    first.answer = []
    assert shown.tell("set") == []


def test_a_process_is_asked_on_one_connection_until_it_rests(
    sockets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoints.close()
    monkeypatch.setenv("HOSTCALLBACK_CONTROL_DIR", str(sockets))
    monkeypatch.delenv("HOSTCALLBACK_CONTROL_SOCKET", raising=False)
    endpoints.start()
    with closing(endpoints), closing(ProcessSource(os.getpid())) as source:
        assert source.name.startswith(f"{os.getpid()}: ")
        assert not source.has_ended()
        for _ in range(2):
            (found,) = source.ask()
            assert (found.pid, found.host, found.run) == (os.getpid(), os.uname().nodename, "")
            source.rest()
        (told,) = source.tell("process", "any run")
        assert told["pid"] == os.getpid()
        with pytest.raises(NoSuchTapError):
            source.tell("rules", "", pattern="no such tap \N{SNOWMAN}", settings={}, reset=False)


class Client:
    """A connection to a process, of which a test gives the answers; `opened` has all of them."""

    opened: list[Client]
    answers: dict[str, Any]

    def __init__(self, pid: int, timeout_sec: float) -> None:
        self.closed = False
        self.pid = pid
        self.opened.append(self)

    def ask(self, command: str, **arguments: Any) -> Any:
        found = self.answers[command]
        if isinstance(found, Exception):
            raise found
        return found

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> type[Client]:
    """The connections that sources of processes open."""
    monkeypatch.setattr(Client, "opened", [], raising=False)
    monkeypatch.setattr(Client, "answers", {}, raising=False)
    monkeypatch.setattr(processes, "ControlClient", Client)
    return Client


def test_the_name_and_the_logs_of_a_process_are_limited(connected: type[Client], tmp_path: Path) -> None:
    folders = [tmp_path / f"{number:03}" for number in range(MAX_LOGS + 1)]
    for folder in folders[1:]:
        folder.mkdir()
    told = [*map(str, folders)]
    connected.answers["process"] = {"command": "p" * 300, "logs": told}
    source = ProcessSource(41)
    assert source.name == "41: " + "p" * 200
    assert source.logs() == folders[1:MAX_LOGS]  # the first one is not there
    about = {"host": "h", "logs": [5, told[1]]}
    connected.answers["figures"] = figures(1.0, process=about)
    assert source.ask() == [("h", 41, "", connected.answers["figures"])]
    assert source.logs() == [folders[1]]
    connected.answers["figures"] = figures(1.0, process={"host": "h", "logs": told[1]})
    source.ask()
    assert source.logs() == []
    assert len(connected.opened) == 1
    source.close()
    assert connected.opened[0].closed


def test_a_lost_connection_is_opened_again_and_a_refused_command_keeps_it(connected: type[Client]) -> None:
    connected.answers["process"] = {"command": "train.py"}
    source = ProcessSource(41)
    for error, opened in (
        (ControlError("refused"), 1),
        (ControlSocketError("gone"), 1),
        (ControlError("no"), 2),
    ):
        connected.answers["figures"] = error
        with pytest.raises(type(error), match=str(error)):
            source.ask()
        assert len(connected.opened) == opened
    assert [each.closed for each in connected.opened] == [True, False]
    connected.answers["figures"] = {"time": 1.0}
    with pytest.raises(ControlError, match="process 41 answered with something else than its metrics"):
        source.ask()


class Log:
    """The copy of a collector's log."""

    folder = Path("copy")
    problem: Exception | None
    last: Log

    def __init__(self, options: Forward, run: str) -> None:
        self.run, self.closed = run, False
        type(self).last = self

    def wait(self, timeout_sec: float) -> None:
        self.check()

    def check(self) -> None:
        if self.problem is not None:
            raise self.problem

    def close(self) -> None:
        self.closed = True


class Control:
    """A connection for commands to the processes of a collector."""

    opened: list[Control]
    answer: Any

    def __init__(self, options: Forward, runs: str) -> None:
        self.runs, self.closed = runs, False
        self.asked: list[Any] = []
        self.opened.append(self)

    def __enter__(self) -> Control:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def ask(self, command: str, *, seconds: float, **arguments: Any) -> Any:
        self.asked.append((command, seconds, arguments))
        if isinstance(self.answer, Exception):
            raise self.answer
        return SimpleNamespace(told=self.answer)

    def close(self) -> None:
        self.closed = True


def answered(pid: int, result: Any = None, error: str = "", kind: str = "") -> Any:
    """What a process of a collector has answered."""

    class Process(SimpleNamespace):
        def __str__(self) -> str:
            return f"host:{self.pid}"

    found = Process(host="host", pid=pid, key=SimpleNamespace(run=f"run{pid}"))
    return SimpleNamespace(process=found, result=result, error=error, kind=kind)


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Callable[..., CollectorSource]:
    """Makes a source of a collector."""
    from hostcallback.receiver.remote import follow_client
    from hostcallback.receiver.remote.control import client

    monkeypatch.setattr(Log, "problem", None, raising=False)
    monkeypatch.setattr(Log, "last", None, raising=False)
    monkeypatch.setattr(Control, "opened", [], raising=False)
    monkeypatch.setattr(Control, "answer", [], raising=False)
    monkeypatch.setattr(follow_client, "RemoteLog", Log)
    monkeypatch.setattr(client, "CollectorControl", Control)
    return lambda *runs: CollectorSource(Forward("localhost:9", spool="spool"), *runs)


Collector = Callable[..., CollectorSource]


def test_the_processes_of_a_collector_are_those_with_a_whole_answer(collector: Collector) -> None:
    source = collector("run*")
    assert (source.kind, source.name, source.logs()) == ("collector", "localhost:9", [Path("copy")])
    assert (source.has_ended(), Log.last.run) == (False, "run*")
    told = figures(1.0, device(), taps=[tap()])
    Control.answer = [
        answered(3, told),
        answered(4, {"time": 1.0}),
        answered(5, error="lost"),
        answered(6, told),
    ]
    for _ in range(2):
        assert source.ask() == [("host", 3, "run3", told), ("host", 6, "run6", told)]
    (control,) = Control.opened  # the same for both questions
    assert control.runs == "run*"
    assert control.asked == [("figures", 2.0, {"failures": True})] * 2
    source.rest()
    assert (control.closed, Log.last.closed) == (True, False)
    source.ask()
    assert len(Control.opened) == 2
    source.close()
    assert (Control.opened[1].closed, Log.last.closed) == (True, True)


@pytest.mark.parametrize("error", [ControlError("--no-control"), TransportError("not granted")], ids=repr)
def test_a_collector_without_control_is_asked_once(collector: Collector, error: Exception) -> None:
    source = collector()
    Control.answer = error
    assert source.ask() == []
    Control.answer = [answered(3, figures(1.0))]
    assert source.ask() == []
    assert [(control.runs, control.closed) for control in Control.opened] == [("*", True)]
    Log.problem = TransportError("the collector is gone")
    with pytest.raises(TransportError, match="is gone"):
        source.ask()


def test_a_collector_that_refuses_leaves_no_copy(collector: Collector) -> None:
    Log.problem = TransportError("refused")
    with pytest.raises(TransportError, match="refused"):
        collector()
    assert Log.last.closed


def test_a_command_to_a_collector_fails_if_a_process_fails_and_none_succeeds(collector: Collector) -> None:
    source = collector("all*")
    no_tap = answered(3, error="no tap", kind="NoSuchTapError")
    Control.answer = [no_tap, answered(4, error="broken", kind="Other"), answered(5, error="", kind="")]
    with pytest.raises(ControlError, match=r"^host:4: broken$"):
        source.tell("rules", "one", pattern="x")
    Control.answer += [answered(6, {"names": ["x"]}), answered(7, 0)]
    assert source.tell("rules", "", pattern="x") == [{"names": ["x"]}, 0]
    Control.answer = [no_tap]
    assert source.tell("stop", "") == []
    assert [(control.runs, control.closed) for control in Control.opened] == [
        ("one", True), ("all*", True), ("all*", True),
    ]  # fmt: skip
    assert Control.opened[0].asked == [("rules", 2.0, {"pattern": "x"})]

"""`hcb ctl --via` and `hcb top --via`: what they show of processes with any answers, all in one process."""

from __future__ import annotations

import json
import queue
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from collecting import wait_for
from hostcallback.receiver.cli import main, via_collector
from hostcallback.receiver.control.protocol import pack
from hostcallback.receiver.remote.control.client import CollectorControl
from hostcallback.receiver.remote.control.protocol import encode_process
from hostcallback.receiver.remote.control.rule_store import NAME, RuleStore
from hostcallback.receiver.remote.forwarding_protocol import CONTROL, SERVICE, StreamKey
from hostcallback.receiver.remote.options import Forward
from served import Served, served

Answer = Callable[[str, dict[str, Any]], dict[str, Any] | None]
"""The answer to a command and its arguments; None to stay silent."""

PID = 70


@pytest.fixture
def collector(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path / "log") as found:
        yield found


@contextmanager
def processes(
    collector: Served, *answers: Answer | dict[str, Any] | None, run: str = "exp"
) -> Iterator[list[Any]]:
    """Processes of a run, numbered from 0, and their answers; yields the requests that they got."""
    got: list[Any] = []
    with ExitStack() as stack:
        for process, answer in enumerate(answers):
            stack.enter_context(_process(collector, StreamKey(run, process, "a" * 16), answer, got))
        with CollectorControl(Forward(collector.address)) as control:
            wait_for(lambda: len(control.ask("figures", seconds=0.001).told) == len(answers), "the processes")
        yield got


@contextmanager
def _process(collector: Served, key: StreamKey, answer: Any, got: list[Any]) -> Iterator[None]:
    about = {
        "host": "here",
        "pid": PID + key.process,
        "command": "train.py " * 20,
        "started": time.time() - 3723.0,
    }
    answers: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    answers.put(encode_process(key, about))

    def go_on() -> None:
        try:
            for request in call:
                _, number = struct.unpack_from("<QQ", request)
                if not number:
                    continue
                asked = json.loads(request[16:])
                command, arguments = asked["command"], asked["arguments"]
                if command != "figures":
                    got.append((key.process, command, arguments))
                found = answer(command, arguments) if callable(answer) else answer
                if found is not None:
                    answers.put(struct.pack("<Q", number) + pack(found))
        except grpc.RpcError:
            pass

    with grpc.insecure_channel(collector.address) as channel:
        call = channel.stream_stream(f"/{SERVICE}/{CONTROL}")(iter(answers.get, None))
        thread = threading.Thread(target=go_on)
        thread.start()
        try:
            yield
        finally:
            answers.put(None)
            call.cancel()
            thread.join()


class Shown:
    """The command, at one collector."""

    def __init__(self, collector: Served, capsys: pytest.CaptureFixture[str]) -> None:
        self._address = collector.address
        self._capsys = capsys

    def __call__(self, name: str, *arguments: str) -> tuple[int, str, str]:
        status = main([name, "--via", self._address, *arguments])
        out, err = self._capsys.readouterr()
        return status, out, err


@pytest.fixture
def hcb(collector: Served, capsys: pytest.CaptureFixture[str]) -> Shown:
    return Shown(collector, capsys)


def lines(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_without_a_process_the_command_says_so(hcb: Shown) -> None:
    none = "no process can be controlled there: none is connected, or they belong to other runs"
    assert hcb("ctl") == (0, f"{none}\n", "")
    assert hcb("ctl", "stop") == (1, "", f"hcb: {none}\n")
    assert hcb("ctl", "--json") == (0, "", "")
    assert hcb("ctl", "loss") == (1, "", "hcb: no tap is called 'loss' in 0 process(es)\n")


def test_processes_and_remembered_rules_are_listed(collector: Served, hcb: Shown) -> None:
    said = "no process is connected; the rules are remembered for those that start later\n"
    assert hcb("ctl", "loss", "--every", "10", "--rate", "2") == (0, said, "")
    assert hcb("ctl", "grad", "--disable", "--run", "exp") == (0, said, "")
    with processes(collector, {"result": {}}, {"result": {}}):
        status, out, err = hcb("ctl")
        _, as_json, _ = hcb("ctl", "--json")
    assert (status, err) == (0, "")
    table, remembered = out.split("\n\n")
    head, first, second = lines(table)
    assert head == ["run", "process", "host", "pid", "up", "command"]
    assert (first[:4], second[:4]) == (["exp", "p0", "here", "70"], ["exp", "p1", "here", "71"])
    assert first[4].startswith("1:02:0")
    assert table.splitlines()[1].endswith(("train.py " * 20)[:100].rstrip())
    assert lines(remembered) == [
        ["remembered", "for", "processes", "that", "start", "later:"], ["run", "tap", "rules"],
        ["*", "loss", "every=10", "rate=2"], ["exp", "grad", "enabled=false"],
    ]  # fmt: skip
    first_line, _, *kept = map(json.loads, as_json.splitlines())
    assert first_line.keys() == {"run", "process", "host", "pid", "started", "command"}
    assert (first_line["run"], first_line["process"], first_line["host"], first_line["pid"]) == (
        "exp",
        0,
        "here",
        70,
    )
    assert kept == [
        {"remembered": {"run": run, "pattern": pattern, "field": field, "value": value}}
        for run, pattern, field, value in (
            ("*", "loss", "every", 10), ("*", "loss", "rate", 2), ("exp", "grad", "enabled", False),
        )
    ]  # fmt: skip


def test_a_process_that_starts_later_gets_the_remembered_rules(collector: Served, hcb: Shown) -> None:
    for arguments in (
        ("loss", "--every", "10"),
        ("loss", "--every", "2", "--run", "other"),
        ("grad", "--disable"),
    ):
        hcb("ctl", *arguments)
    with processes(collector, lambda command, arguments: {"result": {}}) as got:
        hcb("ctl", "grad", "--reset", "--every", "3")
    rules = [arguments for _, command, arguments in got if command == "rules"]
    loss = ["loss", {"every": 10}]
    assert rules == [
        {"said": [loss, ["grad", {"enabled": False}]]},
        {"pattern": "grad", "settings": {"every": 3}, "reset": True, "said": [loss, ["grad", {"every": 3}]]},
    ]
    kept = RuleStore.read(collector.store.directory / NAME)
    assert [tuple(statement) for statement in kept.statements] == [
        ("*", "loss", "every", 10), ("other", "loss", "every", 2), ("*", "grad", "every", 3),
    ]  # fmt: skip


def tap(
    name: str, rules: str, suppressed: int, *, enabled: bool = True, check: bool = False
) -> dict[str, Any]:
    return {
        "name": name, "source_line": f"{name}.py:7", "check": check, "rules": rules, "enabled": enabled,
        "suppressed": suppressed,
    }  # fmt: skip


def test_taps_are_grouped_over_their_processes(collector: Served, hcb: Shown) -> None:
    answers = [
        {"result": [tap("loss", "every=2", 1_000), tap("sign", "", 0, check=True), {"name": "loss"}, 7]},
        {"result": [tap("loss", "every=2", 500), tap("lost", "", 3, enabled=False)]},
        {"result": [tap("loss", "", 4)]},
        {"result": {"name": "loss"}},
    ]
    with processes(collector, *answers):
        shown = hcb("ctl", "lo*")
        everything = hcb("ctl", "*")
        as_json = hcb("ctl", "lo*", "--json")
        nothing = hcb("ctl", "grad")
    rows = [
        ["tap", "kind", "processes", "rules", "suppressed", "line"],
        ["loss", "tap", "exp", "p0-2", "every=2", "(2),", "-", "(1)", "1,504", "loss.py:7"],
        ["lost", "tap", "exp", "p1", "enabled=false", "3", "lost.py:7"],
    ]
    assert (shown[0], lines(shown[1]), shown[2]) == (0, rows, "")
    assert lines(everything[1]) == [*rows, ["sign", "check", "exp", "p0", "-", "0", "sign.py:7"]]
    assert [json.loads(line) for line in as_json[1].splitlines()] == [
        {
            "name": "loss", "kind": "tap", "source_line": "loss.py:7", "rules": {"every=2": 2, "-": 1},
            "suppressed": 1504, "processes": [{"run": "exp", "process": process} for process in (0, 1, 2)],
        },
        {
            "name": "lost", "kind": "tap", "source_line": "lost.py:7", "rules": {"enabled=false": 1}, "suppressed": 3,
            "processes": [{"run": "exp", "process": 1}],
        },
    ]  # fmt: skip
    assert nothing == (1, "", "hcb: no tap is called 'grad' in 4 process(es)\n")


NO_TAP = {"error": "no tap is called 'loss' so far", "kind": "NoSuchTapError"}


def test_new_rules_are_shown_with_the_processes_that_have_not_the_tap(collector: Served, hcb: Shown) -> None:
    answers = [
        {"result": {"rules": {"loss": "every=2", "loss2": ""}}}, NO_TAP, {"result": {"rules": {"loss": "every=2"}}},
        {"error": "it is busy", "kind": "ControlError"},
    ]  # fmt: skip
    with processes(collector, *answers):
        shown = hcb("ctl", "lo*", "--every", "2")
        as_json = hcb("ctl", "lo*", "--every", "2", "--json")
    busy = "hcb: exp p3 (process 73 on here): it is busy\n"
    assert (shown[0], shown[2]) == (1, busy)
    assert lines(shown[1]) == [
        ["tap", "processes", "rules"], ["loss", "exp", "p0,2", "every=2"], ["loss2", "exp", "p0", "-"],
        ["no", "such", "tap", "so", "far:", "exp", "p1"],
    ]  # fmt: skip
    assert (as_json[0], as_json[2]) == (1, busy)
    assert [json.loads(line) for line in as_json[1].splitlines()] == [
        {
            "name": "loss", "rules": {"every=2": 2},
            "processes": [{"run": "exp", "process": 0}, {"run": "exp", "process": 2}],
        },
        {"name": "loss2", "rules": {"-": 1}, "processes": [{"run": "exp", "process": 0}]},
    ]  # fmt: skip


def test_new_rules_of_taps_that_all_processes_have(collector: Served, hcb: Shown) -> None:
    with processes(collector, {"result": {"rules": {"loss": "every=2"}}}):
        status, out, err = hcb("ctl", "lo*", "--every", "2")
    assert (status, lines(out), err) == (
        0, [["tap", "processes", "rules"], ["loss", "exp", "p0", "every=2"]], ""
    )  # fmt: skip


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_rules_for_a_name_that_no_process_has_are_remembered(
    collector: Served, hcb: Shown, options: tuple[str, ...]
) -> None:
    with processes(collector, NO_TAP):
        shown = hcb("ctl", "loss", "--every", "2", *options)
    said = "hcb: no tap is called 'loss' so far; remembered for later taps (--reset removes it)\n"
    assert shown == (1, "", said)


@pytest.mark.parametrize(
    ("count", "error", "said", "others"),
    [
        (2, {"error": "it is busy"}, "it is busy", []),
        (4, None, "did not answer within 0.1 s", ["hcb: and 2 more: exp p2-3"]),
    ],
)
def test_processes_without_a_result_are_named_up_to_a_limit(
    collector: Served,
    hcb: Shown,
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    error: Any,
    said: str,
    others: list[str],
) -> None:
    monkeypatch.setattr(via_collector, "MAX_SAID", 2)

    def silent(command: str, arguments: dict[str, Any]) -> dict[str, Any] | None:
        return {"result": []} if command == "figures" else error

    with processes(collector, *[silent] * count):
        shown = hcb("ctl", "--timeout", "0.1" if error is None else "30")
    assert shown[0] == 1
    assert len(lines(shown[1])) == count + 1
    assert shown[2].splitlines() == [
        f"hcb: exp p0 (process 70 on here): {said}",
        f"hcb: exp p1 (process 71 on here): {said}",
        *others,
    ]


def test_a_stop_is_requested_of_all_processes(collector: Served, hcb: Shown) -> None:
    unheard = {"reason": "hcb ctl", "unheard": "no loop listens"}
    answers = [
        {"result": {"reason": "x"}},
        {"result": unheard},
        {"result": unheard},
        {"error": "no", "kind": "x"},
    ]
    with processes(collector, *answers):
        status, out, err = hcb("ctl", "stop")
    assert (status, out) == (1, "stop requested: exp p0-2\n")
    assert err == "hcb: exp p1-2: no loop listens\nhcb: exp p3 (process 73 on here): no\n"


def test_knobs_are_listed_and_set_in_all_processes(collector: Served, hcb: Shown) -> None:
    def answer(command: str, arguments: dict[str, Any]) -> dict[str, Any]:
        knob = {
            "name": "lr",
            "value": arguments.get("value", 0.5),
            "default": 1,
            "min": None,
            "source_line": "t.py:3",
        }
        return {"result": [knob, "no knob"]}

    with processes(collector, answer, {"result": {"name": "lr"}}) as got:
        listed = hcb("ctl", "set")
        done = hcb("ctl", "set", "lr", "0.25", "--json")
    assert (listed[0], lines(listed[1]), listed[2]) == (
        0,
        [
            ["knob", "value", "default", "min", "max", "line", "process"],
            ["lr", "0.5", "1", "-", "-", "t.py:3", "exp", "p0"],
        ],
        "",
    )
    found = json.loads(done[1])
    assert (done[0], found["process"], found["name"], found["value"]) == (0, "exp p0", "lr", 0.25)
    assert [one for one in got if one[:2] == (0, "set")] == [(0, "set", {"name": "lr", "value": 0.25})]


def figures(messages: int, name: str = "loss") -> dict[str, Any]:
    device = {
        "device": "cpu:0", "emitted": messages, "emitted_bytes": 4 * messages, "queued": 3, "queued_bytes": 2048,
        "waiting": 1, "dropped": 5,
    }  # fmt: skip
    found = tap(name, "every=2", 9) | {
        "messages": messages,
        "bytes": 4 * messages,
        "tap_sec": 0.0,
        "failed": 2,
    }
    return {"time": messages / 10.0, "process": {}, "devices": [device, device], "taps": [found]}


def test_the_activity_of_all_processes_is_summed(collector: Served, hcb: Shown) -> None:
    def answer(command: str, arguments: dict[str, Any]) -> dict[str, Any]:
        counted.append(10 * len(counted))
        return {"result": figures(counted[-1])}

    def wrong(command: str, arguments: dict[str, Any]) -> dict[str, Any]:
        found = figures(1)
        found["taps"][0]["failed"] = None
        return {"result": found}

    counted: list[int] = []
    with processes(collector, answer, wrong):
        status, out, err = hcb("top", "--once", "--interval", "0.05")
        _, as_json, _ = hcb("top", "--once", "--interval", "0.05", "--json")
    assert (status, err) == (0, "")
    head, devices, taps = out.split("\n\n")
    assert head == "1 process(es), exp p1 (process 71 on here) does not answer"
    assert lines(devices) == [
        ["process", "host", "pid", "messages", "bytes", "queue", "queued", "waiting", "dropped"],
        ["exp", "p0", "here", "70", "20/s", "80", "B/s", "6", "4.0", "KiB", "2", "10"],
    ]
    assert lines(taps)[1:] == [
        ["loss", "exp", "p0", "10/s", "40", "B/s", "0.0%", "2", "9", "every=2", "loss.py:7"]
    ]
    shown = json.loads(as_json)
    assert shown["silent"] == [{"run": "exp", "process": 1, "host": "here", "pid": 71}]
    (one,) = shown["processes"]
    assert (one["run"], one["process"], one["devices"][0]["messages_per_sec"]) == ("exp", 0, 10.0)
    assert one["taps"][0]["messages_per_sec"] == 10.0

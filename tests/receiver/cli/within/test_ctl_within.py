"""`hcb ctl` for this process: what it lists, which rules it sets, knobs, and words that it refuses."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import numpy as np
import pytest
from own_server import PID, Served

from hostcallback.receiver.control.commands import process
from hostcallback.receiver.runtime.knobs import knobs


@pytest.fixture
def rate() -> Iterator[str]:
    """A knob from 0 to 1."""
    name = "rate of a test of ctl"
    knobs.declare(f"another {name}", np.asarray(1), None, None, "train.py:8 (step)")
    knobs.declare(name, np.asarray(0.5, np.float32), 0, 1, "train.py:7 (step)")
    yield name
    del knobs[name], knobs[f"another {name}"]


def rows(text: str) -> list[list[str]]:
    """The words of each line."""
    return [line.split() for line in text.splitlines()]


def test_the_taps_of_a_process_have_a_line_each(served: Served) -> None:
    status, out, err = served.hcb("ctl", PID)
    assert (status, err) == (0, "")
    assert out.splitlines() == [
        "tap          kind   rules  suppressed  line",
        "layer1/grad  tap    -               0  train.py:2 (f)",
        "loss         tap    -               0  train.py:1 (f)",
        "sign         check  -               0  train.py:3 (f)",
    ]
    served.hcb("ctl", PID, "sign", "--disable")
    served.hcb("ctl", PID, "layer*", "--rate", "2.5")
    assert [row[1:3] for row in rows(served.hcb("ctl", PID)[1])[1:]] == [
        ["tap", "rate=2.5"], ["tap", "-"], ["check", "enabled=false"],
    ]  # fmt: skip


def test_many_suppressed_messages_have_separators(served: Served) -> None:
    tap = {
        "name": "a", "source_line": "b.py:1 (f)", "check": False, "enabled": True, "rules": "", "suppressed": 1234567,
    }  # fmt: skip
    served.handlers["taps"] = lambda arguments, client: [tap]
    assert "  1,234,567  b.py:1 (f)" in served.hcb("ctl", PID)[1]
    served.handlers["taps"] = lambda arguments, client: []
    assert served.hcb("ctl", PID) == (0, "no tap has been traced in this process yet\n", "")


def test_taps_and_their_rules_as_json(served: Served) -> None:
    _, out, _ = served.hcb("ctl", PID, "l*", "--every", "3")
    assert out.splitlines() == ["tap          rules", "layer1/grad  every=3", "loss         every=3"]
    _, out, _ = served.hcb("ctl", PID, "l*", "--every", "3", "--json")
    assert [json.loads(line) for line in out.splitlines()] == [
        {"name": "layer1/grad", "rules": "every=3"}, {"name": "loss", "rules": "every=3"},
    ]  # fmt: skip
    _, out, _ = served.hcb("ctl", PID, "--json")
    assert [json.loads(line) for line in out.splitlines()][2] == {
        "name": "sign", "source_line": "train.py:3 (f)", "check": True, "enabled": True, "rules": "",
        "suppressed": 0,
    }  # fmt: skip


def test_rules_are_set_one_by_one_and_removed(served: Served) -> None:
    def after(*arguments: str) -> list[str]:
        status, out, err = served.hcb("ctl", PID, "loss", *arguments)
        assert (status, err) == (0, "")
        head, row = out.splitlines()
        assert head.split() == ["tap", "rules"]
        assert row.startswith("loss  ")
        return row.split()[1:]

    assert after("--every", "3", "--rate", "10") == ["every=3", "rate=10"]
    assert after("--truncate", "8") == ["every=3", "rate=10", "truncate=8"]
    assert after("--rate", "none", "--truncate", "none") == ["every=3"]
    assert after("--disable") == ["enabled=false", "every=3"]
    assert after("--reset", "--truncate", "4") == ["truncate=4"]
    assert after("--disable", "--truncate", "none") == ["enabled=false"]
    assert after("--enable") == ["-"]
    assert after("--every", "2") == ["every=2"]
    assert after("--reset") == ["-"]
    assert rows(served.hcb("ctl", PID, "loss", "--every", "2")[1]) == [["tap", "rules"], ["loss", "every=2"]]
    assert rows(served.hcb("ctl", PID, "*")[1])[1:] == [
        ["layer1/grad", "-"],
        ["loss", "every=2"],
        ["sign", "-"],
    ]


def test_processes_are_listed_with_the_time_since_their_start(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = time.time() - 3725.5
    described = {**process(), "started": started, "command": "python " + "x" * 200}
    served.handlers["process"] = lambda arguments, client: described
    monkeypatch.setattr(time, "time", lambda: started + 3725.5)
    status, out, _ = served.hcb("ctl")
    assert (status, out.splitlines()) == (
        0,
        [f"{'pid':>{len(PID)}}       up  command", f"{PID}  1:02:05  python {'x' * 93}"],
    )
    _, out, _ = served.hcb("ctl", "--json")
    assert json.loads(out) == {"pid": int(PID), "started": started, "command": described["command"]}


def test_without_a_process_a_line_says_so_and_json_has_none(served: Served) -> None:
    served.path.unlink()
    text = "no process can be controlled here: none runs taps, or they belong to other users\n"
    assert served.hcb("ctl") == (0, text, "")
    assert served.hcb("ctl", "--json") == (0, "", "")


def test_a_knob_is_shown_and_set(served: Served, rate: str) -> None:
    _, out, _ = served.hcb("ctl", PID, "set")
    assert rows(out)[0] == ["knob", "value", "default", "min", "max", "line"]
    (row,) = [line for line in out.splitlines() if line.startswith(rate)]
    assert row.removeprefix(rate).split() == ["0.5", "0.5", "0", "1", "train.py:7", "(step)"]
    status, out, err = served.hcb("ctl", PID, "set", rate, "2.5e-1")
    assert (status, err, knobs[rate]) == (0, "", 0.25)
    assert [line[len(rate) :].split() for line in out.splitlines()[1:]] == [
        ["0.25", "0.5", "0", "1", "train.py:7", "(step)"]
    ]
    assert served.hcb("ctl", PID, "set", f"{rate}=7.5e-1")[::2] == (0, "")
    assert knobs[rate] == 0.75
    _, out, _ = served.hcb("ctl", PID, "set", rate, "1", "--json")
    shown = json.loads(out)
    assert [shown[key] for key in ("name", "value", "default", "max")] == [rate, 1.0, 0.5, 1]
    assert "process" not in shown


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("-1e-3", "is from 0 to 1, got -0.001"),
        ("[1, 2]", "has the shape (), got (2,)"),
        ("true", "is float32, got True: set it to a number of that kind"),
        ('"fast"', "is float32, got 'fast': set it to a number of that kind"),
    ],
)
def test_a_value_that_a_knob_refuses_changes_nothing(
    served: Served, rate: str, value: str, text: str
) -> None:
    status, out, err = served.hcb("ctl", PID, "set", rate, value)
    assert (status, out) == (1, "")
    assert err.startswith(f"hcb: the knob {rate!r}, declared at train.py:7 (step), ")
    assert text in err
    assert knobs[rate] == 0.5


def test_a_knob_that_does_not_exist_gets_the_nearest(served: Served, rate: str) -> None:
    status, _, err = served.hcb("ctl", PID, "set", f"{rate}s", "1")
    assert status == 1
    assert err.startswith(f"hcb: no knob is called '{rate}s': there are '{rate}'")


def test_a_process_without_knobs(served: Served) -> None:
    served.handlers["knobs"] = lambda arguments, client: []
    assert served.hcb("ctl", PID, "set") == (0, "no program with a knob was traced yet\n", "")
    assert served.hcb("ctl", PID, "set", "--json") == (0, "", "")


@pytest.mark.parametrize("unheard", [None, "", "no loop\x07 hears it"])
def test_a_stop_says_why_and_whether_a_loop_hears_it(served: Served, unheard: str | None) -> None:
    answer = {"reason": "hcb ctl"} | ({} if unheard is None else {"unheard": unheard})
    served.handlers["stop"] = lambda arguments, client: answer
    said = "hcb: no loop\\x07 hears it\n" if unheard else ""
    assert served.hcb("ctl", PID, "stop") == (0, "stop requested: hcb ctl\n", said)


def test_a_tap_called_stop_can_have_rules(served: Served) -> None:
    asked: list[object] = []
    served.handlers["stop"] = lambda arguments, client: asked.append(arguments)
    for setting in (["--every", "2"], ["--reset"]):
        status, out, err = served.hcb("ctl", PID, "stop", *setting)
        assert (status, out) == (1, "")
        assert err.startswith("hcb: no tap is called 'stop' so far")
    assert asked == []


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("abc", "argument PID: 'abc' is not a process id; `hcb ctl` lists them"),
        ("PID loss 1", "unexpected 1: only set takes a name and a value: hcb ctl PID set loss 1"),
        ("PID loss 1 2", "unexpected 1 2: only set takes a name and a value"),
        ("PID --every 2", "rules are for taps: give their name or a glob, such as '*'"),
        ("PID --reset", "rules are for taps: give their name or a glob, such as '*'"),
        ("PID set lr 1 --every 2", "set changes a knob, and takes no rules: give them in a second command"),
        ("PID set --reset", "set changes a knob, and takes no rules: give them in a second command"),
        ("PID set lr", "set takes the name of a knob and its new value, or nothing: set lr 3e-4"),
        ("PID set lr 1 2", "set takes the name of a knob and its new value, or nothing: set lr 3e-4"),
        ("PID set lr=", "'' is not a value: expected a number, true, false or a list of them"),
        ("PID set lr fast", "'fast' is not a value: expected a number, true, false or a list of them"),
        ("--via host:1 4242 loss", "--via addresses all processes: give a pattern of taps, and no PID"),
        ("--via host:1 set lr", "set takes the name of a knob and its new value, or nothing: set lr 3e-4"),
        ("PID loss --every none", "argument --every: 'none' is not a number"),
        (
            "PID loss --every 0",
            "argument --every: every is 0, expected a whole number of messages, 1 or more",
        ),
        ("PID loss --rate fast", "argument --rate: 'fast' is not a number"),
        ("PID loss --timeout 0.09", "argument --timeout: got '0.09', expected seconds to wait, 0.1 to 60"),
        ("PID loss --timeout 60.1", "argument --timeout: got '60.1', expected seconds to wait, 0.1 to 60"),
    ],
)
def test_words_that_make_no_command_are_refused(served: Served, words: str, text: str) -> None:
    status, out, err = served.hcb("ctl", *words.replace("PID", PID).split())
    assert (status, out) == (2, "")
    assert err.splitlines()[-1].replace(PID, "PID") == f"hcb ctl: error: {text}"


@pytest.mark.parametrize("seconds", ["0.1", "60"])
def test_the_longest_and_the_shortest_wait_are_taken(served: Served, seconds: str) -> None:
    assert served.hcb("ctl", PID, "--timeout", seconds)[0] == 0

"""Live control through a collector: of running processes, of stopped ones, and of later ones."""

from __future__ import annotations

import io
import json
import random
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import hostcallback
from certificates import Authority
from collecting import CollectorProcess, wait_for
from controlled import Controlled, controlled
from hostcallback.receiver.cli import main
from hostcallback.receiver.remote.control.client import CollectorControl
from hostcallback.receiver.remote.control.rule_store import NAME, RuleStore
from hostcallback.receiver.remote.options import Forward
from hostcallback.receiver.runtime.rules.rule_table import Rules
from hostcallback.receiver.runtime.runtime import runtime


class Everywhere:
    """Processes that forward to a collector, and the `hcb` command to control them with."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self._stack = stack
        # tmp_path has the test's name in it: too long for a socket in some of them
        self._sockets = Path(stack.enter_context(tempfile.TemporaryDirectory()))

    def collect(self, *arguments: Any, name: str = "here", port: int = 0) -> CollectorProcess:
        """A collector."""
        return self._stack.enter_context(
            CollectorProcess(self.folder / name, "--quiet", *map(str, arguments), port=port)
        )

    def start(self, collector: CollectorProcess, run: str, *arguments: Any, **variables: str) -> Controlled:
        """A process that forwards."""
        return self._stack.enter_context(
            controlled(
                self._sockets, "0.002", collector.address, str(self.folder / "spool"),
                *map(str, arguments), HOSTCALLBACK_RUN=run, **variables,
            )
        )  # fmt: skip


@pytest.fixture
def everywhere(tmp_path: Path) -> Iterator[Everywhere]:
    with ExitStack() as stack:
        yield Everywhere(tmp_path, stack)


PATIENCE_SEC = 40


class Done(NamedTuple):
    """Outcome of a command."""

    returncode: int
    stdout: str
    stderr: str


def ctl(collector: CollectorProcess, *arguments: Any, token: str = "") -> Done:
    """`hcb ctl --via`. Processes may answer late on a loaded machine: they get more than the usual 5 s."""
    patience = () if "--timeout" in arguments else ("--timeout", PATIENCE_SEC)
    return run("ctl", "--via", collector.address, *patience, *arguments, token=token)


def run(*arguments: Any, token: str = "") -> Done:
    """`hcb`, in this process."""
    line = [*map(str, arguments)]
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setenv("HOSTCALLBACK_TOKEN", token)
        try:
            status = main(line)
        except SystemExit as wrong_arguments:
            status = int(wrong_arguments.code or 0)
    return Done(status, out.getvalue(), err.getvalue())


def rows(done: Done) -> list[list[str]]:
    """The cells of a table, without its head."""
    return [line.split() for line in done.stdout.splitlines()[1:] if line]


def wait_for_processes(collector: CollectorProcess, *runs: str, token: str = "") -> None:
    """Until these are connected, and no others."""

    def connected() -> bool:
        return [row[0] for row in rows(ctl(collector, token=token)) if row[1].startswith("p")] == sorted(runs)

    wait_for(connected, f"{runs} at the collector")


def check_sends(process: Controlled, every: int) -> None:
    """Waits until one in `every` messages of `loss` is sent (0: none), and each message of the other tap."""
    wait_for(lambda: _sends(process, every), f"each {every}th message")


def _sends(process: Controlled, every: int) -> bool:
    before = process.arrived()
    after = wait_for(
        lambda: (found := process.arrived())["layer1/grad"] >= before["layer1/grad"] + 100 and found,
        "messages",
    )
    sent, rest = (after[name] - before[name] for name in ("loss", "layer1/grad"))
    return bool(abs(sent * every - rest) <= 2 * every) if every else not sent


def test_rules_take_effect_in_all_processes(everywhere: Everywhere) -> None:
    collector = everywhere.collect()
    one, two = (everywhere.start(collector, run) for run in ("exp1", "exp2"))
    wait_for_processes(collector, "exp1", "exp2")
    listed = ctl(collector)
    assert [row[3] for row in rows(listed)] == [str(one.pid), str(two.pid)]
    taps = ctl(collector, "*")
    assert [row[0] for row in rows(taps)] == ["layer1/grad", "loss", "sign"]
    assert taps.stdout.count("exp1 p0; exp2 p0") == 3

    done = ctl(collector, "lo*", "--every", 10)
    assert (done.returncode, done.stderr) == (0, "")
    assert rows(done) == [["loss", "exp1", "p0;", "exp2", "p0", "every=10"]]
    check_sends(one, 10)
    check_sends(two, 10)

    done = ctl(collector, "--run", "exp2", "lo*", "--disable")
    assert rows(done) == [["loss", "exp2", "p0", "enabled=false", "every=10"]]
    check_sends(one, 10)
    check_sends(two, 0)
    (loss,) = rows(ctl(collector, "loss"))
    assert loss[-4] != "0", "what was suppressed is counted"

    assert ctl(collector, "*", "--reset").returncode == 0
    check_sends(one, 1)
    check_sends(two, 1)
    assert "remembered" not in ctl(collector).stdout

    done = ctl(collector, "stop")
    assert (done.returncode, done.stdout) == (0, "stop requested: exp1 p0; exp2 p0\n")
    assert done.stderr.startswith("hcb: exp1 p0; exp2 p0: no program with a loop with stop=True, or with")


@pytest.mark.slow
def test_a_wrong_name_and_impossible_settings(everywhere: Everywhere) -> None:
    collector = everywhere.collect()
    process = everywhere.start(collector, "exp")
    wait_for_processes(collector, "exp")
    done = ctl(collector, "los", "--every", 10)
    assert done.returncode == 1
    assert "no tap is called 'los' so far; there are 'loss'; remembered" in done.stderr
    check_sends(process, 1)
    assert "los  every=10" in ctl(collector).stdout
    assert ctl(collector, "nothing").returncode == 1
    for arguments, status, said in (
        (("x" * 300, "--every", "2"), 1, "at most 256 characters"),
        (("loss", "more", "--every", "2"), 2, "no PID"),
        (("--every", "2"), 2, "give their name or a glob"),
        (("--timeout", "0"), 2, "expected seconds to wait"),
        (("--tls-cert", "x"), 1, "belong together"),
        (("--via", "nats://localhost:4222"), 1, "is a NATS server, and this needs a collector"),
    ):
        done = ctl(collector, *arguments)
        assert (done.returncode, said in done.stderr) == (status, True), done.stderr


@pytest.mark.slow
def test_a_stopped_process_is_named_and_follows_later(everywhere: Everywhere) -> None:
    collector = everywhere.collect()
    one, two = (everywhere.start(collector, run) for run in ("exp1", "exp2"))
    wait_for_processes(collector, "exp1", "exp2")
    two.process.send_signal(signal.SIGSTOP)
    try:
        done = ctl(collector, "loss", "--every", 10, "--timeout", 2)
        assert done.returncode == 1
        assert rows(done) == [["loss", "exp1", "p0", "every=10"]]
        assert f"exp2 p0 (process {two.pid} on " in done.stderr
        assert done.stderr.strip().endswith("did not answer within 2 s")
        check_sends(one, 10)
    finally:
        two.process.send_signal(signal.SIGCONT)
    check_sends(two, 10)
    assert ctl(collector).returncode == 0


@pytest.mark.slow
def test_late_processes_get_earlier_rules_though_the_collector_was_killed(everywhere: Everywhere) -> None:
    collector = everywhere.collect()
    done = ctl(collector, "loss", "--every", 10, "--run", "exp*")
    assert (done.returncode, done.stdout) == (
        0,
        "no process is connected; the rules are remembered for those that start later\n",
    )
    collector.kill()
    collector.start()
    assert "exp*  loss  every=10" in ctl(collector).stdout
    remembered = (
        "1 remembered rule(s) apply to processes that connect: 'loss' every=10 in runs 'exp*'; hcb ctl"
    )
    assert sum(remembered in line for line in collector.errors) == 1  # the first collector had none
    process, other = everywhere.start(collector, "exp1"), everywhere.start(collector, "other")
    wait_for_processes(collector, "exp1", "other")
    check_sends(process, 10)
    check_sends(other, 1)
    collector.kill()
    check_sends(process, 10)  # rules stay while the collector is away
    collector.start()
    wait_for_processes(collector, "exp1", "other")
    done = ctl(collector, "loss", "--truncate", 7)
    assert "every=10 truncate=7 (1)" in done.stdout
    assert "truncate=7 (1)" in done.stdout


@pytest.mark.slow
def test_the_rules_in_force_are_the_ones_the_collector_remembers(everywhere: Everywhere) -> None:
    collector = everywhere.collect()
    process = everywhere.start(collector, "exp")
    wait_for_processes(collector, "exp")
    ctl(collector, "loss", "--every", 10, "--truncate", 7)
    check_sends(process, 10)
    process.hcb("ctl", process.pid, "loss", "--every", 1)
    check_sends(process, 1)  # the later rule counts
    collector.kill()
    collector.start()
    wait_for_processes(collector, "exp")
    check_sends(process, 1)  # the same rule is not sent again
    assert rows(ctl(collector, "loss"))[0][4] == "truncate=7"
    collector.kill()
    (collector.log / ".control.json").unlink()  # as of another collector, at the same address
    collector.start()
    wait_for_processes(collector, "exp")
    assert rows(ctl(collector, "loss"))[0][4] == "-"
    ctl(collector, "loss", "--every", 5)
    check_sends(process, 5)
    ctl(collector, "loss", "--reset")
    check_sends(process, 1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_processes_keep_remembered_rules_after_any_kill_and_stop(everywhere: Everywhere, seed: int) -> None:
    rng = random.Random(seed)
    collector = everywhere.collect()
    runs = ("exp1", "exp2")
    processes = [everywhere.start(collector, name) for name in runs]
    wait_for_processes(collector, *runs)

    def kill() -> None:
        collector.kill()
        collector.start()

    def stop_and_go_on() -> None:
        stopped = rng.choice(processes).process
        stopped.send_signal(signal.SIGSTOP)
        say()
        stopped.send_signal(signal.SIGCONT)

    def say() -> None:
        what = rng.choice([("--every", rng.randint(1, 9)), ("--truncate", rng.randint(1, 9)), ("--reset",)])
        glob, of_run = rng.choice(["loss", "l*", "*", "layer1/grad"]), rng.choice([*runs, "exp*", "*"])
        ctl(collector, glob, *what, "--run", of_run, "--timeout", 0.2)

    for _ in range(10):
        rng.choice([kill, stop_and_go_on, say, say])()

    def held() -> dict[tuple[str, str], str]:
        with CollectorControl(Forward(collector.address)) as control:
            told = control.ask("taps", seconds=5.0).told
        taps = [(one.process.key.run, tap) for one in told for tap in one.result or ()]
        return {(name, tap["name"]): tap["rules"] for name, tap in taps if not tap["check"]}

    kept = RuleStore.read(collector.log / NAME)
    expected = {}
    for name in runs:
        rules = Rules()
        for pattern, settings in kept.about(name):
            rules = rules.with_setting(pattern, settings)
        for tap in ("layer1/grad", "loss"):
            expected[name, tap] = str(rules.of(tap))
    wait_for(lambda: held() == expected, f"{expected}")


@pytest.mark.slow
def test_a_token_that_may_write_may_not_control(everywhere: Everywhere, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("writer exp*\nboss +control exp1 exp2\nboss *\nroot +control\n")
    tokens.chmod(0o600)
    collector = everywhere.collect("--token-file", tokens)
    one, two = (everywhere.start(collector, run, HOSTCALLBACK_TOKEN="writer") for run in ("exp1", "exp3"))
    wait_for_processes(collector, "exp1", "exp3", token="root")
    for token, said in (
        ("writer", "may not control"),
        ("wrong", "does not know this token"),
        ("", "does not know this token"),
    ):
        done = ctl(collector, "loss", "--disable", token=token)
        assert (done.returncode, said in done.stderr) == (1, True), done.stderr
    wait_for(lambda: any("may not control" in line for line in collector.errors), "a line in the log")
    done = ctl(collector, "loss", "--run", "e*", "--disable", token="boss")
    assert done.returncode == 1
    assert "this token controls exp1, exp2, not all of 'e*'" in done.stderr
    done = ctl(collector, "loss", "--disable", token="boss")
    assert rows(done) == [["loss", "exp1", "p0", "enabled=false"]]
    check_sends(one, 0)
    check_sends(two, 1)
    assert [row[:2] for row in rows(ctl(collector, token="boss"))][:1] == [["exp1", "p0"]]
    ctl(collector, "loss", "--every", 3, token="root")
    assert "exp3" not in ctl(collector, "loss", token="boss").stdout
    check_sends(two, 3)


@pytest.mark.slow
def test_figures_of_all_processes(everywhere: Everywhere) -> None:
    collector = everywhere.collect()
    one, two = (everywhere.start(collector, name) for name in ("exp1", "exp2"))
    wait_for_processes(collector, "exp1", "exp2")
    top = ("top", "--via", collector.address, "--interval", 1, "--once")
    done = run(*top)
    assert (done.returncode, done.stderr) == (0, "")
    head, processes, taps = (part.splitlines() for part in done.stdout.split("\n\n"))
    assert head == ["2 process(es)"]
    assert [row.split()[:2] for row in processes[1:]] == [["exp1", "p0"], ["exp2", "p0"]]
    assert {row.split()[0] for row in taps[1:]} == {"layer1/grad", "loss", "sign"}
    assert all("exp1 p0; exp2 p0" in row for row in taps[1:])

    two.process.send_signal(signal.SIGSTOP)
    try:
        done = run(*top, "--json")
        shown = json.loads(done.stdout)
        assert [(process["run"], process["pid"]) for process in shown["processes"]] == [("exp1", one.pid)]
        assert [(process["run"], process["pid"]) for process in shown["silent"]] == [("exp2", two.pid)]
        rates = {tap["name"]: tap["messages_per_sec"] for tap in shown["processes"][0]["taps"]}
        assert rates["loss"] > 0
    finally:
        two.process.send_signal(signal.SIGCONT)
    done = run("top", "--via", collector.address, "--run", "exp2", "--once", "--interval", 0.1)
    assert done.stdout.startswith("1 process(es)\n")
    assert run("top").returncode == run("top", one.pid, "--via", collector.address).returncode == 2


@pytest.mark.slow
def test_figures_are_counted_while_a_client_watches(everywhere: Everywhere) -> None:
    collector = everywhere.collect()
    program = hostcallback.jit(lambda x: hostcallback.id_tap(lambda value: None, x, name="looked at"))
    with hostcallback.outfeed_receiver(
        forward=hostcallback.Forward(collector.address, spool=everywhere.folder / "spool")
    ):
        program(1.0)
        wait_for_processes(collector, "run")
        with CollectorControl(Forward(collector.address)) as control:
            for count in (0, 1, 2):
                (told,) = control.ask("figures", seconds=60.0).told
                assert [tap["messages"] for tap in told.result["taps"] if tap["name"] == "looked at"] == [
                    count
                ]
                program(1.0)
                hostcallback.barrier_wait()
        wait_for(
            lambda: not any(receiver.dispatcher.tap_counters for receiver in runtime.receivers()),
            "no receiver counting",
        )


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates with openssl")
def test_over_tls(everywhere: Everywhere, tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    cert, key = authority.sign("collector")
    collector = everywhere.collect("--tls-cert", cert, "--tls-key", key)
    process = everywhere.start(collector, "exp", authority.certificate)
    tls = ("--tls-ca", authority.certificate)
    wait_for(lambda: "exp" in ctl(collector, *tls).stdout, "the process")
    assert ctl(collector, "loss", "--every", 10, *tls).returncode == 0
    check_sends(process, 10)
    done = ctl(collector, "loss", "--every", 1)
    assert done.returncode == 1
    assert "UNAVAILABLE" in done.stderr
    check_sends(process, 10)


@pytest.mark.slow
def test_beyond_this_machine_permission_to_control_is_required(
    everywhere: Everywhere, tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("secret\n")
    tokens.chmod(0o600)
    choices: dict[str, tuple[list[Any], bool]] = {
        "open": ([], True),
        "closed": (["--no-control"], False),
        "with tokens": (["--token-file", tokens], False),
    }
    for name, (arguments, said) in choices.items():
        collector = everywhere.collect("--insecure", "--listen", "0.0.0.0:0", *arguments, name=name)
        assert any("can also control" in line for line in collector.errors) is said


@pytest.mark.slow
def test_a_collector_that_does_not_control(everywhere: Everywhere) -> None:
    collector = everywhere.collect("--no-control")
    process = everywhere.start(collector, "exp")
    done = ctl(collector, "loss", "--disable")
    assert done.returncode == 1
    assert "started with --no-control" in done.stderr
    check_sends(process, 1)

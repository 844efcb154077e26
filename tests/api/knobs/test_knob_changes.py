"""Changes of knobs are messages: what logs have of them, how runs are repeated, and who may make changes."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hostcallback as hcb
from controlled import hcb as run_hcb
from hostcallback import receiver
from hostcallback.receiver.control.endpoints import endpoints
from hostcallback.receiver.control.protocol import RuleFileError
from hostcallback.receiver.control.rule_file import KNOBS
from python_process import run_python, start_python

PROGRAM = Path(__file__).with_name("steered_program.py")


def changes(log: Path, name: str) -> list[tuple[float, float, int | None]]:
    """The old and the new values in a log, and the steps."""
    found = receiver.LogReader(log).messages(receiver.Selection(names=(f"knob/{name}",)))
    return [(float(m.value["old"]), float(m.value["new"]), m.step) for m in found]


def test_a_change_is_a_message_with_both_values_the_step_and_who(name: str, tmp_path: Path) -> None:
    f = jax.jit(lambda: jax.lax.scan(lambda c, _: (c + hcb.knob(name, 1.0), None), 0.0, None, length=5)[0])
    with hcb.outfeed_receiver(record=tmp_path):
        f().block_until_ready()
        hcb.knobs[name] = 2
        f().block_until_ready()
        hcb.knobs[name] = 3
    assert changes(tmp_path, name) == [(1, 1, 0), (1, 2, 5), (2, 3, 10)]  # the first: it is declared
    shown = run_hcb("cat", tmp_path).stdout.splitlines()
    assert len(shown) == 3
    assert f"{name} is 1. after 0 reads" in shown[0]
    assert f"{name}: 1. -> 2. before read 5 (code, {__file__}:" in shown[1]
    assert f"{name}: 2. -> 3. before read 10 (code, {__file__}:" in shown[2]


def test_a_log_begins_with_the_values_of_the_knobs(name: str, tmp_path: Path) -> None:
    hcb.knob(name, 1.0)
    hcb.knobs[name] = 2
    with hcb.outfeed_receiver(record=tmp_path):
        pass
    assert changes(tmp_path, name) == [(1, 2, 0)]
    assert f"{name} is 2. after 0 reads" in run_hcb("cat", tmp_path).stdout


def test_a_change_from_a_tap_function_is_logged_and_waits_for_nothing(name: str, tmp_path: Path) -> None:
    hcb.knob(name, 0.0)

    def steer(value: Any) -> None:
        hcb.knobs[name] = float(value)

    with hcb.outfeed_receiver(record=tmp_path):
        jax.jit(lambda x: hcb.id_tap(steer, x))(jnp.float32(4)).block_until_ready()
        hcb.barrier_wait()
        assert hcb.knobs[name] == 4
    assert [change[:2] for change in changes(tmp_path, name)] == [(0, 0), (0, 4)]


def test_a_knob_of_an_array_is_logged_whole(name: str, tmp_path: Path) -> None:
    hcb.knob(name, np.arange(3.0))
    with hcb.outfeed_receiver(record=tmp_path):
        hcb.knobs[name] = [4, 5, 6]
    *_, last = receiver.LogReader(tmp_path).messages()
    assert last.value["old"].tolist() == [0, 1, 2]
    assert last.value["new"].tolist() == [4, 5, 6]


def run(*arguments: Any) -> str:
    """The result of the program."""
    done = run_python(PROGRAM, *map(str, arguments))
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.slow
def test_a_steered_run_is_repeated_bit_for_bit_and_diff_names_the_first_change(tmp_path: Path) -> None:
    steered = run(tmp_path / "steered", "at", "3=0.25", "7=0.0625")
    plain = run(tmp_path / "plain", "at")
    again = run(tmp_path / "again", "replay", tmp_path / "steered")
    assert again == steered != plain
    same = run_hcb("diff", tmp_path / "steered", tmp_path / "again")
    assert same.returncode == 0, same.stdout
    run(tmp_path / "other", "at", "3=0.25", "7=0.125")
    parted = run_hcb("diff", tmp_path / "steered", tmp_path / "other")
    assert parted.returncode == 1
    assert "step 7: knob/lr" in parted.stdout


def recorded_change(name: str, log: Path) -> Any:
    """Records a change between two runs of a program that reads the knob four times, and returns the program."""
    f = jax.jit(lambda: jax.lax.scan(lambda c, _: (c, hcb.knob(name, 1.0)), 0.0, None, length=4)[1])
    f().block_until_ready()
    with hcb.outfeed_receiver(record=log):
        f().block_until_ready()
        hcb.knobs[name] = 5
        f().block_until_ready()
    return f


def test_a_replay_in_the_same_process_counts_from_the_call_on(name: str, tmp_path: Path) -> None:
    f = recorded_change(name, tmp_path)
    hcb.knobs[name] = 9
    assert hcb.knobs.replay(tmp_path)[name] == 1
    assert np.asarray(f()).tolist() == [1] * 4
    assert np.asarray(f()).tolist() == [5] * 4
    assert hcb.knobs[name] == 5


def test_a_replay_may_come_before_the_knob_is_declared(name: str, tmp_path: Path) -> None:
    hcb.knob(name, 1.0)
    with hcb.outfeed_receiver(record=tmp_path):
        hcb.knobs[name] = 5
    del hcb.knobs[name]
    hcb.knobs.replay(tmp_path)
    assert hcb.knob(name, 1.0) == 5


def test_a_replay_before_the_end_of_another_is_refused(name: str, tmp_path: Path) -> None:
    f = recorded_change(name, tmp_path)
    hcb.knobs.replay(tmp_path)
    with pytest.raises(ValueError, match=r"changes of the knob .* wait that an earlier replay has planned"):
        hcb.knobs.replay(tmp_path)
    assert [np.asarray(f()).tolist() for _ in range(2)] == [[1] * 4, [5] * 4]
    hcb.knobs.replay(tmp_path)
    assert [np.asarray(f()).tolist() for _ in range(2)] == [[1] * 4, [5] * 4]
    del hcb.knobs[name]
    hcb.knobs.replay(tmp_path)
    with pytest.raises(ValueError, match="an earlier replay has planned"):
        hcb.knobs.replay(tmp_path)  # the knob is not declared yet
    hcb.knob(name, 1.0)


@pytest.mark.parametrize("early", [True, False])
def test_a_log_of_a_knob_that_was_not_changed_has_no_changes_to_make(
    name: str, tmp_path: Path, early: bool
) -> None:
    if early:
        hcb.knob(name, 1.0)
    with hcb.outfeed_receiver(record=tmp_path):
        jax.jit(lambda x: x * hcb.knob(name, 1.0))(2.0)
    del hcb.knobs[name]
    assert hcb.knobs.replay(tmp_path)[name] == 0
    assert hcb.knob(name, 1.0) == 1


def test_a_log_without_knobs_is_refused(tmp_path: Path) -> None:
    with hcb.outfeed_receiver(record=tmp_path / "log"):
        hcb.id_print(1)
    for name in list(hcb.knobs):
        del hcb.knobs[name]
    with hcb.outfeed_receiver(record=tmp_path / "none"):
        hcb.id_print(1)
    with pytest.raises(ValueError, match="has no knob, neither a value nor a change"):
        hcb.knobs.replay(tmp_path / "none")


# ---- Who else sets knobs ---------------------------------------------------------------------------------------------


def test_a_control_file_sets_knobs_also_those_of_later_programs(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "control.toml"
    hcb.knob(name, 1.0, max=10)
    path.write_text(f"[knobs]\n{name} = 2\n{name}later = 3.5\n")
    hcb.control_file(path)
    try:
        assert hcb.knobs[name] == 2
        assert hcb.knob(name + "later", 1.0) == 3.5
        hcb.knobs[name] = 4
        endpoints.watch(path)
        assert hcb.knobs[name] == 2, "a file that is followed again applies"
        path.write_text(f"[knobs]\n{name} = 20\n")
        with pytest.raises(RuleFileError, match=rf"\[{KNOBS}\] {name}: .*is at most 10, got 20"):
            hcb.control_file(path)
        assert hcb.knobs[name] == 2
        path.write_text(f"[knobs]\n{name}wrong = 'text'\n")
        hcb.control_file(path)
        with caplog.at_level(logging.ERROR):
            assert hcb.knob(name + "wrong", 1.0) == 1
        assert "cannot set a knob" in caplog.text
    finally:
        hcb.control_file(None)


@pytest.mark.slow
def test_hcb_ctl_lists_and_sets_knobs(tmp_path: Path) -> None:
    process = start_python(PROGRAM, tmp_path, "go", HOSTCALLBACK_CONTROL_DIR=str(tmp_path))
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        environment = {**os.environ, "HOSTCALLBACK_CONTROL_DIR": str(tmp_path)}

        def ctl(*arguments: Any) -> Any:
            return run_hcb("ctl", process.pid, *arguments, environment=environment)

        while "lr" not in ctl("set").stdout:
            assert process.poll() is None
        assert ctl("set", "lr", "3e-4").stdout.splitlines()[1].split()[1] == "0.0003"
        assert '"value": 0.0003, ' in ctl("set", "--json").stdout
        answer = ctl("set", "lr", "0.25")
        assert answer.returncode == 0, answer.stderr
        assert answer.stdout.splitlines()[1].split()[:5] == ["lr", "0.25", "0.1", "0", "1"]
        assert '"value": 0.25' in ctl("set", "--json").stdout
        for arguments, text in (
            (("lr", "2"), "is from 0 to 1, got 2"),
            (("lr", "[1]"), "has the shape ()"),
            (("lr", '"a"'), "is float32, got 'a'"),
            (("lr", "NaN"), "cannot be NaN"),
            (("ls", "1"), "no knob is called 'ls': there are 'lr'"),
            (("lr", "a b"), "is not a value"),
            (("lr",), "set takes the name of a knob"),
        ):
            answer = ctl("set", *arguments)
            assert answer.returncode != 0
            assert text in answer.stderr
        assert ctl("set", "go", "false").returncode == 0
        assert process.communicate(timeout=60)[0].strip() == "0.25"
        assert process.returncode == 0
    finally:
        process.kill()
        process.communicate()

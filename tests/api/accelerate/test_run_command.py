"""`hcb run SCRIPT` runs a script as Python does, with its callbacks taken over."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

import hostcallback
from python_process import run_python

ROOT = Path(hostcallback.__file__).parents[1]  # of the packages under test

SCRIPT = """
import os, sys
os.environ["JAX_ENABLE_X64"] = "1"
import sibling
import jax
print(__name__, __file__, sys.argv, sys.path[0], jax.config.jax_enable_x64)

@jax.jit
def f(x):
    jax.debug.print("printed {}", x)
    return x

f(1.0)
if "fails" in sys.argv:
    open("not there")
if "raises later" in sys.argv:
    jax.jit(lambda x: jax.debug.callback(lambda v: 1 / 0, x))(1.0)
if "exits" in sys.argv:
    sys.exit(3)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "sibling.py").write_text("")
    path = tmp_path / "folder" / "program.py"
    path.write_text(SCRIPT)
    return path


def python(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    # With PYTHONSAFEPATH, as the matrix sets it for the tests, Python itself would not find modules in the script's
    # folder.
    return run_python(*arguments, cwd=cwd, PYTHONSAFEPATH=None, PYTHONPATH=str(ROOT))


@pytest.mark.slow
def test_a_script_runs_as_by_python_and_its_callbacks_are_taken_over(script: Path, tmp_path: Path) -> None:
    alone = python(script, "a", "--verbose", "-m", cwd=tmp_path)
    ours = python(
        "-m", "hostcallback.receiver.cli", "run", "--verbose", script, "a", "--verbose", "-m", cwd=tmp_path
    )
    assert alone.returncode == ours.returncode == 0, ours.stderr
    assert ours.stdout == alone.stdout
    assert f"hostcallback: taken over: jax.debug.print at {script}:10 (f)" in ours.stderr


def test_callbacks_are_taken_over_also_if_jax_is_imported_already(script: Path, tmp_path: Path) -> None:
    main = "import sys, jax; from hostcallback.receiver.cli import main; sys.exit(main(sys.argv[1:]))"
    ours = python("-c", main, "run", "--verbose", script, cwd=tmp_path)
    assert ours.returncode == 0, ours.stderr
    assert "printed 1.0" in ours.stdout
    assert f"hostcallback: taken over: jax.debug.print at {script}:10 (f)" in ours.stderr


@pytest.mark.slow
def test_an_exception_looks_the_same(script: Path, tmp_path: Path) -> None:
    alone = python(script, "fails", cwd=tmp_path)
    ours = python("-m", "hostcallback.receiver.cli", "run", script, "fails", cwd=tmp_path)
    assert ours.returncode == alone.returncode == 1
    assert ours.stderr == alone.stderr
    assert "FileNotFoundError" in ours.stderr


@pytest.mark.slow
def test_the_exit_status_is_the_scripts(script: Path, tmp_path: Path) -> None:
    assert python("-m", "hostcallback.receiver.cli", "run", script, "exits", cwd=tmp_path).returncode == 3


@pytest.mark.slow
def test_callback_errors_are_reported_at_exit(script: Path, tmp_path: Path) -> None:
    result = python("-m", "hostcallback.receiver.cli", "run", script, "raises later", cwd=tmp_path)
    assert "ZeroDivisionError" in result.stderr
    assert f"{script}:17" in result.stderr


@pytest.mark.slow
def test_a_module_runs_by_its_name(script: Path) -> None:
    alone = python("-m", "program", "x", cwd=script.parent)
    ours = python("-m", "hostcallback.receiver.cli", "run", "-m", "program", "x", cwd=script.parent)
    assert ours.stdout.splitlines()[0].split("[")[0] == alone.stdout.splitlines()[0].split("[")[0], (
        ours.stderr
    )
    assert ours.stdout.splitlines()[1] == "printed 1.0"


def test_a_script_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    result = python("-m", "hostcallback.receiver.cli", "run", "nothing.py", cwd=tmp_path)
    assert result.returncode == 1
    assert result.stderr == "hcb: nothing.py: no such script: hcb run SCRIPT ARGUMENTS\n"
    result = python("-m", "hostcallback.receiver.cli", "run", "-m", "nothing", cwd=tmp_path)
    assert result.returncode == 1
    assert result.stderr == "hcb: No module named nothing: hcb run -m MODULE ARGUMENTS\n"


def test_a_script_without_jax_runs(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text("import sys; print(sys.argv[1:], 'jax' in sys.modules)")
    result = python("-m", "hostcallback.receiver.cli", "run", "plain.py", "--", "-x", "--", "1", cwd=tmp_path)
    assert result.stdout == "['--', '-x', '--', '1'] False\n"


FAILS = """
import jax, jax.numpy as jnp, threading

@jax.jit
def step(x):
    return jnp.log(x)

step(jnp.ones(3))
thread = threading.Thread(target=step, args=(jnp.array([1.0, -1.0, 2.0]),))
thread.start()
thread.join()
"""


@pytest.mark.slow
def test_a_script_that_knows_nothing_is_watched_and_observed(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text(FAILS)
    hcb = ("-m", "hostcallback.receiver.cli")
    done = python(*hcb, "run", "--watch", "--observe", "primitive:log", "fails.py", cwd=tmp_path)
    assert done.stdout.count("norm") == 2, done.stdout
    assert "log: 1 NaN and 0 infinite values in float32[3]" in done.stderr
    done = python(*hcb, "run", "--observe", "lag", "fails.py", cwd=tmp_path)
    assert re.search("where='lag' matches no output of .*, at the option --observe of hcb run;", done.stderr)
    assert "whole_process.py" not in done.stderr
    assert done.returncode == 0


@pytest.mark.slow
@pytest.mark.native_only
def test_a_script_that_knows_nothing_leaves_capsules(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text(FAILS)
    hcb = ("-m", "hostcallback.receiver.cli")
    done = python(*hcb, "run", "--capsule", "folder", "fails.py", cwd=tmp_path)
    (path,) = (tmp_path / "folder").glob("step-*.hcb")
    assert f"hcb reproduce {path}" in done.stderr
    again = python(*hcb, "reproduce", path, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "reproduced: nonfinite" in again.stdout

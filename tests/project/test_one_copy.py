"""A second copy of the package in a process is refused when it is imported; what is no second copy works."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from checkout import ROOT
from python_process import python_output

PROGRAM = """
import importlib, os, sys

def use():
    import hostcallback as hcb, jax, jax.numpy as jnp
    got = []
    jax.jit(lambda x: hcb.id_tap(lambda v: got.append(float(v)), x))(jnp.float32(3.0))
    hcb.barrier_wait()
    assert got == [3.0], got

def purge(*names):
    for name in list(sys.modules):
        if name.partition(".")[0] == "hostcallback" and (not names or name in names):
            del sys.modules[name]

def refused():
    for _ in range(2):  # and so is each further attempt
        try:
            import hostcallback
        except ImportError as error:
            assert "imported twice in this process, from " in str(error), error
            assert "Restart the process" in str(error), error
        else:
            raise SystemExit("it was imported")

"""


def run(program: str, *arguments: str) -> None:
    python_output(
        "-W", "ignore", "-c", PROGRAM + program, *arguments, PYTHONPATH=str(ROOT), JAX_PLATFORMS="cpu"
    )


BEFORE = {
    "used": "use()",
    "only imported": "import hostcallback",
    "without JAX": "import hostcallback.receiver.wire.frame",
    "with JAX": "import jax, hostcallback",
}


@pytest.mark.slow
@pytest.mark.parametrize("before", BEFORE)
def test_a_copy_after_a_purge_is_refused(before: str) -> None:
    run(f"{BEFORE[before]}\npurge()\nrefused()")


@pytest.mark.slow
def test_the_first_copy_goes_on(tmp_path: Path) -> None:
    run("use()\nfirst = {n: m for n, m in sys.modules.items() if 'hostcallback' in n}\npurge()\nrefused()\n"
        "sys.modules.update(first)\nuse()")  # fmt: skip


@pytest.mark.parametrize("order", ["import jax", "pass"])
def test_a_copy_from_another_place_is_refused(tmp_path: Path, order: str) -> None:
    shutil.copytree(
        ROOT / "hostcallback", tmp_path / "hostcallback", ignore=shutil.ignore_patterns("__pycache__", "*.o")
    )
    run(f"{order}\nimport hostcallback\npurge()\nsys.path.insert(0, sys.argv[1])\nrefused()", str(tmp_path))


NO_COPIES = {
    "the package's name alone": "use()\npurge('hostcallback')\nuse()",
    "reloaded": "use()\nimport hostcallback\nimportlib.reload(hostcallback)\nuse()",
    "reloaded with its guard": "use()\nimport hostcallback._one_copy\nimportlib.reload(hostcallback._one_copy)\n"
    "importlib.reload(hostcallback)\nuse()",
    "a forked child": "import hostcallback\npid = os.fork()\nimport hostcallback.api.tap\n"
    "if not pid: use(); os._exit(0)\nassert os.waitpid(pid, 0)[1] == 0",
    "several threads": "import threading\nfailed = []\ndef go():\n    try: import hostcallback.api.tap\n"
    "    except ImportError as error: failed.append(error)\nthreads = [threading.Thread(target=go) for _ in range(8)]\n"
    "[t.start() for t in threads]; [t.join() for t in threads]\nassert not failed\nuse()",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", NO_COPIES)
def test_what_is_no_second_copy_works(kind: str) -> None:
    run(NO_COPIES[kind])

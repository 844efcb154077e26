"""A capsule of one version of Python and JAX is reproduced by another, where JAX's export promises it.

HOSTCALLBACK_TEST_PYTHONS names the other interpreters, as PATH names folders; each has hostcallback installed. CI gives
those of the matrix.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PYTHONS = [sys.executable, *filter(None, os.environ.get("HOSTCALLBACK_TEST_PYTHONS", "").split(os.pathsep))]

pytestmark = [pytest.mark.native_only, pytest.mark.slow]

WRITES = """
import sys
import jax, jax.numpy as jnp
import hostcallback as hcb

def train(params, x):
    def loss_of(w):
        with jax.named_scope("layer"):
            loss = jnp.mean(jnp.log(jnp.tanh(x @ w) ** 2))
        hcb.check(loss < 0.0, "the loss is {}", loss)
        return loss
    loss, grad = jax.value_and_grad(loss_of)(params["w"])
    return {"w": params["w"] - 0.1 * grad}, loss

folder, nonfinite = sys.argv[1], sys.argv[2] == "nan"
step = hcb.capsule(jax.jit(train, donate_argnums=0), folder, nonfinite=nonfinite)
try:
    with hcb.outfeed_receiver():
        params = {"w": jnp.eye(4)}
        for i in range(3):
            x = jnp.ones((3, 4)).at[1].set(0.0) if nonfinite and i == 1 else jnp.full((3, 4), 1.0 + i)
            params, _ = step(params, x)
            if not nonfinite and i == 1:
                step({"w": jnp.full((4, 4), jnp.inf)}, x)
except* hcb.CheckError:
    pass
print(jax.__version__)
"""


def run(python: str, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, *command], capture_output=True, text=True, check=False, timeout=300,
        env={**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["check", "nan"])
def test_capsules_of_one_version_are_reproduced_by_another(kind: str, tmp_path: Path) -> None:
    if len(PYTHONS) == 1:
        pytest.skip(
            "HOSTCALLBACK_TEST_PYTHONS names no other interpreter (`make matrix` leaves some in .matrix)"
        )
    capsules, versions = {}, {}
    for python in PYTHONS:
        folder = tmp_path / str(len(versions))
        done = run(python, "-c", WRITES, str(folder), kind)
        assert done.returncode == 0, done.stderr
        capsules[python] = min(folder.glob("*.hcb"))  # later calls pass a NaN on
        versions[python] = tuple(map(int, done.stdout.split()[-1].split(".")[:2]))
    # The format is the same for all kinds: of the others, only the capsule of this version is read.
    for writer, path in list(capsules.items())[: None if kind == "nan" else 1]:
        for reader in PYTHONS:
            done = run(reader, "-m", "hostcallback.receiver.cli", "reproduce", str(path))
            age = versions[reader][1] - versions[writer][1]
            told = f"{kind} of {versions[writer]} by {versions[reader]}: {done.stdout}\n{done.stderr}"
            if 0 <= age <= 2:
                assert done.returncode == 0, told
                assert "reproduced" in done.stdout, told
            else:  # older than JAX's export promises, or newer than this JAX reads
                assert done.returncode in (0, 1, 2), told
                assert "Traceback" not in done.stderr, told

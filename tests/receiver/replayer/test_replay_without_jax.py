"""A log of a JAX program is replayed in a process that cannot import JAX."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkout import ROOT
from python_process import python_output

RECORDING = """
import sys
import jax.numpy as jnp
from jax import lax
import hostcallback as hcb

def body(x, step):
    hcb.id_tap(lambda value: None, {"x": x, "step": step}, name="loss")
    hcb.id_print(x, what="x")
    hcb.check(x < 2, "x is {}", x)
    return x + 1, None

try:
    with hcb.outfeed_receiver(record=sys.argv[1]):
        hcb.jit(lambda x: lax.scan(body, x, jnp.arange(4))[0])(jnp.float32(0))
except hcb.TapFunctionException:
    print("failed")
"""

REPLAYING = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("jax", "jaxlib", "grpc") or name == "hostcallback.api":
            raise ImportError(f"{name} was imported")

sys.meta_path.insert(0, Refuse())
sys.path.insert(0, sys.argv[2])
from hostcallback import receiver
try:
    receiver.replay(sys.argv[1], bind={"loss": lambda value: print("loss", int(value["step"]), float(value["x"]))})
except* AssertionError as failed:
    for error in failed.exceptions:
        print(str(error).splitlines()[0].partition(",")[0], error.check.count)
assert not {"jax", "jaxlib"} & {name.partition(".")[0] for name in sys.modules}
"""


@pytest.mark.slow
def test_a_recorded_program_is_replayed_without_jax(tmp_path: Path) -> None:
    log = tmp_path / "log"
    printed = python_output("-c", RECORDING, log).removesuffix("failed\n")
    lines = python_output("-c", REPLAYING, log, ROOT, timeout_sec=60).splitlines()
    assert [line for line in lines if line.startswith("loss")] == [f"loss {k} {float(k)}" for k in range(4)]
    assert [line for line in lines if not line.startswith(("loss", "x is"))] == printed.splitlines()
    assert lines[-1] == "x is 2.0 2"

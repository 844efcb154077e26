"""Capsules of training steps of flax nnx, linen and equinox: reproduced without the library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hostcallback as hcb
from checkout import python_path
from hostcallback.receiver import Capsule
from python_process import python_output
from training_programs import BATCHES, X, Y, equinox, linen, nnx

pytestmark = [pytest.mark.native_only, pytest.mark.slow]

WITHOUT = """
import sys

class Refuses:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("flax", "equinox", "optax", "jaxtyping"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Refuses())
from hostcallback.receiver.cli import main

sys.exit(main(["reproduce", sys.argv[1]]))
"""


@pytest.mark.parametrize("program", [nnx, equinox, linen], ids=lambda program: program.__name__)
def test_a_capsule_is_reproduced_without_the_library(program: Any, tmp_path: Path) -> None:
    bad = X.at[3, 2].set(np.inf)
    with pytest.raises(hcb.TapFunctionException), hcb.outfeed_receiver():
        program(
            lambda step: hcb.capsule(step, tmp_path, nonfinite=True, max_capsules=1),
            [*BATCHES[:7], (bad, Y), *BATCHES[8:]],
        )
    (path,) = tmp_path.iterdir()
    capsule = Capsule(path)
    found = {entry.path: capsule.array(entry) for entry in capsule.inputs}
    (batch,) = [name for name, array in found.items() if np.isinf(array.astype(np.float32)).any()]
    np.testing.assert_array_equal(found[batch], bad)
    printed = python_output("-c", WITHOUT, path, PYTHONPATH=python_path())
    assert "reproduced: nonfinite" in printed

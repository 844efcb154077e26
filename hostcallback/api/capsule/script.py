"""Writes a Python script that runs a capsule's program, for the user to edit."""

from __future__ import annotations

from pathlib import Path

from hostcallback.receiver.capsule.reading import Capsule

TEMPLATE = '''\
"""Runs {name}, call {call}, from the capsule {file}. Written by `hcb reproduce --python`; edit it as you like.

What failed: {text}
  at {line}
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count={devices}")

import jax
import numpy as np

import hostcallback as hcb
from hostcallback.api.capsule.reproduce import arrays_of, load
from hostcallback.receiver import Capsule

capsule = Capsule({path!r})
program = load(capsule)  # a jax.export.Exported: print(program.mlir_module()) shows it
inputs = dict(zip([entry.path for entry in capsule.inputs], arrays_of(capsule), strict=True))
# The inputs:
{inputs}

# Change inputs here, such as: inputs[{first!r}] = np.zeros_like(inputs[{first!r}])
# Receive taps with: hcb.bind("name", function)

with hcb.outfeed_receiver():
    results = jax.block_until_ready(jax.jit(program.call)(*inputs.values()))
for result in results:
    print(result.shape, result.dtype, "finite" if np.isfinite(np.asarray(result)).all() else "NOT FINITE")
'''


def script_of(capsule: Capsule) -> str:
    """Returns the script for a capsule. Texts from the capsule are comments or literals in it, never code."""
    failure = capsule.failure
    inputs = "\n".join(
        f"#   {_comment(entry.path)}: {entry.dtype}{list(entry.shape)}" for entry in capsule.inputs
    )
    devices = capsule.about.get("devices")
    return TEMPLATE.format(
        name=_comment(capsule.name),
        call=capsule.call,
        file=_comment(capsule.path.name),
        text=_comment(failure.text),
        line=_comment(failure.source_line),
        devices=min(len(devices), 4096) if isinstance(devices, list) else 1,
        path=str(Path(capsule.path).resolve()),
        inputs=inputs or "#   none",
        first=capsule.inputs[0].path if capsule.inputs else "",
    )


def _comment(text: str) -> str:
    # On one line, and without what would end a docstring.
    shown = text[:1000].encode("unicode_escape").decode("ascii")
    return shown.replace('"', "'")

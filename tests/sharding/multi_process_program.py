"""One of two processes that run one program: `python multi_process_program.py NUMBER PORT FILE`."""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

number = int(sys.argv[1])
jax.distributed.initialize(f"localhost:{sys.argv[2]}", num_processes=2, process_id=number)

import hostcallback as hcb  # noqa: E402, as a program would that initializes first

mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("i", "j"))
found: list[Any] = []


def keep(part: Any, *, device: Any, index: Any, program: str) -> None:
    place = None if index is None else [[s.start, s.stop] for s in index[0]]
    found.append((program, jax.local_devices().index(device), place, part.tolist()))


def automatic(x: Any) -> Any:
    return lax.scan(lambda c, _: (hcb.id_tap(keep, c + 1, program="automatic"), None), x, None, length=3)[0]


def manual(x: Any) -> Any:
    def each(x: Any) -> Any:
        return hcb.id_tap(keep, x, program="manual")

    return jax.shard_map(each, mesh=mesh, in_specs=P("i", "j"), out_specs=P("i", "j"))(x)


whole = np.arange(16.0, dtype=np.float32).reshape(4, 4)
x = jax.make_array_from_callback((4, 4), NamedSharding(mesh, P("i", "j")), lambda place: whole[place])
for jit in (jax.jit, hcb.jit):
    for program in (automatic, manual):
        jit(program)(x).block_until_ready()
hcb.barrier_wait()
with open(sys.argv[3], "w") as file:  # standard output is shared with JAX's own messages
    json.dump(found, file)

"""One process of two, of which the second fails a check in a loop of collectives: `failing_job NUMBER PORT`.

Prints the Unix time at which the check fails, or at which this process raises that.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

FAILS_AFTER_SEC, STEP_SEC = 0.5, 1e-3


def main(number: int, port: str) -> None:
    """Runs the process."""
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=number)
    import hostcallback as hcb
    from tools.bench.handlers import pace

    mesh = Mesh(np.array(jax.devices()), ("i",))
    steps = round(FAILS_AFTER_SEC / STEP_SEC)

    def body(i: Any, x: Any) -> Any:
        x = pace(x, STEP_SEC)
        is_good = (lax.axis_index("i") == 0) | (i < steps)
        hcb.check(is_good, "failed at {}", i, name="bound")
        return x + lax.psum(x, "i")

    def loop(x: Any) -> Any:
        return lax.fori_loop(0, 10**9, lambda i, x: body(i, x[0])[None], x)

    zeros = np.zeros(2, np.float32)
    x = jax.make_array_from_callback((2,), NamedSharding(mesh, P("i")), lambda place: zeros[place])
    first: list[float] = []
    try:
        with hcb.outfeed_receiver(on_error="abort", sinks=[lambda message: first.append(time.time())]):
            jax.jit(jax.shard_map(loop, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False))(
                x
            ).block_until_ready()
    except* (hcb.JobError, hcb.CheckError):
        print(*(first[:1] or [time.time()]), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])

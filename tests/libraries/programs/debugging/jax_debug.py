"""JAX's own callbacks: prints and callbacks in a scan and in a vmapped step, a host function with a result."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from program_edits import edits


def main():
    seen = []
    edits.observed = ("mul",)

    @jax.jit
    def train(x):
        def step(x, i):
            jax.debug.print("step {i}: {x:.6f}", i=i, x=x, ordered=True)
            jax.debug.callback(lambda i, x: seen.append((int(i), float(x))), i, x, ordered=True)
            # Not ordered: JAX threads the tokens of two kinds of order in the order of a set.
            noise = io_callback(lambda i: np.float32(0.1 * i), jax.ShapeDtypeStruct((), jnp.float32), i)
            x = 0.5 * x + noise
            edits.log(x=x)
            return x, x

        return edits.scan(step, x, jnp.arange(5))

    last, xs = edits.wrap(train)(jnp.float32(1.0))
    last.block_until_ready()
    print("seen", seen)
    batched = jax.jit(jax.vmap(lambda x: jax.debug.print("element {}", x, ordered=False) or x * 2))(
        jnp.arange(3.0)
    )
    batched.block_until_ready()
    jax.effects_barrier()
    print("last", float(last))
    return last, xs, batched, [x for _, x in seen]

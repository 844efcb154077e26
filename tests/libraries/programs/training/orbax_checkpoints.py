"""orbax: a training that is saved in the middle, and restored into another state."""

import logging
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from program_edits import edits

logging.getLogger("absl").setLevel(logging.ERROR)  # it tells of saves that take long


def main():
    @jax.jit
    def step(state):
        loss, grads = jax.value_and_grad(lambda w: jnp.sum((w @ w.T - jnp.eye(3)) ** 2))(state["w"])
        edits.log(loss=loss)
        return {"w": state["w"] - 0.01 * grads, "step": state["step"] + 1}, loss

    wrapped, state = edits.wrap(step), {"w": 0.5 * jnp.eye(3) + 0.1, "step": jnp.int32(0)}
    with tempfile.TemporaryDirectory() as folder:
        with ocp.CheckpointManager(
            Path(folder).absolute(), options=ocp.CheckpointManagerOptions(max_to_keep=2)
        ) as manager:
            for i in range(6):
                state, loss = wrapped(state)
                manager.save(i, args=ocp.args.StandardSave(state))
            manager.wait_until_finished()
            steps = manager.all_steps()
            restored = manager.restore(4, args=ocp.args.StandardRestore(jax.tree.map(jnp.zeros_like, state)))
    again, _ = wrapped(restored)
    print("kept", steps, "loss", loss)
    return state, restored, again

"""A run that a cluster may end at any time: at SIGTERM the loop stops, the state is saved, and the next start goes on.

python examples/stop_and_resume.py state.npz          # kill -TERM its process, and start it again
"""

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import hostcallback as hcb

STEPS = 100_000


def batch(step: Any) -> tuple[Any, Any]:
    """The data of a step, which depend on its number only, so that they are the same in each start."""
    x = jax.random.normal(jax.random.fold_in(jax.random.key(0), step), (32, 8))
    return x, jnp.sin(x.sum(axis=1))


def loss(params: Any, x: Any, y: Any) -> Any:
    """The mean square error of a network with one layer."""
    hidden = jnp.tanh(x @ params["w"] + params["b"])
    return jnp.mean((hidden @ params["v"] - y) ** 2)


def update(step: Any, params: Any) -> Any:
    """One step of gradient descent."""
    value, gradient = jax.value_and_grad(loss)(params, *batch(step))
    hcb.metrics({"loss": value}, step=step, every=1000)
    return jax.tree.map(lambda p, g: p - 0.01 * g, params, gradient)


@jax.jit
def train(first: Any, params: Any) -> Any:
    """The steps from `first` on, and how many of them ran."""
    return hcb.fori_loop(first, STEPS, update, params, stop=True, progress=False)


def main(path: Path) -> None:
    """Goes on where the last start has stopped."""
    hcb.stop_on_signals()
    if path.exists():
        saved = dict(np.load(path))
        first, params = int(saved.pop("step")), saved
    else:
        first = 0
        params = {
            "w": np.linspace(-1, 1, 128, dtype=np.float32).reshape(8, 16),
            "b": np.zeros(16, np.float32),
            "v": np.full(16, 0.1, np.float32),
        }
    compiled = train.lower(first, params).compile()
    print(f"training from step {first}", flush=True)
    with hcb.outfeed_receiver(writers=[hcb.csv(path.with_suffix(".csv"), mode="a")]):  # "a": it goes on, too
        params, count = compiled(first, params)
    step = first + int(count)
    np.savez(path, step=step, **params)
    print(f"step {step} of {STEPS}: " + ("finished" if step == STEPS else "saved; start again to go on"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

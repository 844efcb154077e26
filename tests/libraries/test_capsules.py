"""Capsules of training steps of flax nnx, linen, equinox and optax: the results are those without, bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hostcallback as hcb
from checkout import python_path
from hostcallback.receiver import Capsule

pytestmark = [pytest.mark.native_only, pytest.mark.slow]

Train = Callable[[Callable[[Any], Any], int], Any]
"""Trains for some steps; the first argument wraps the jitted step. Returns parameters and Python state."""

BAD = 7
"""Number of the step whose batch is bad, where one is."""


def batch_of(step: int, bad: int) -> Any:
    x = np.random.default_rng(step).normal(size=(8, 4)).astype(np.float32)
    if step == bad:
        x[3, 2] = np.inf
    return x


def nnx_training(wrap: Callable[[Any], Any], bad: int) -> Any:
    nnx = pytest.importorskip("flax.nnx")
    optax = pytest.importorskip("optax")

    class Model(nnx.Module):  # type: ignore[misc]
        def __init__(self, rngs: Any) -> None:
            self.linear = nnx.Linear(4, 16, rngs=rngs)
            self.norm = nnx.BatchNorm(16, rngs=rngs)
            self.dropout = nnx.Dropout(0.2, rngs=rngs)
            self.out = nnx.Linear(16, 1, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.out(self.dropout(nnx.relu(self.norm(self.linear(x)))))

    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def train_step(model: Any, optimizer: Any, x: Any) -> Any:
        loss, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
        optimizer.update(model, grads)
        return loss

    step = wrap(train_step)
    losses = [step(model, optimizer, batch_of(n, bad)) for n in range(10)]
    return losses, jax.tree.leaves(nnx.state(model)), jax.tree.leaves(nnx.state(optimizer))


def equinox_training(wrap: Callable[[Any], Any], bad: int) -> Any:
    eqx = pytest.importorskip("equinox")
    optax = pytest.importorskip("optax")

    class Model(eqx.Module):  # type: ignore[misc]
        mlp: Any
        norm: Any

        def __call__(self, x: Any, state: Any) -> Any:
            x, state = self.norm(x, state)
            return self.mlp(x), state

    keys = jax.random.split(jax.random.key(0), 2)
    mlp = eqx.nn.MLP(4, 1, 16, 2, key=keys[0])  # its activation function is a leaf
    norm = eqx.nn.BatchNorm(4, "batch", mode="batch")
    model, state = Model(mlp, norm), eqx.nn.State(Model(mlp, norm))
    optimizer = optax.adam(1e-2)
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def train_step(model: Any, state: Any, opt_state: Any, x: Any) -> Any:
        def loss_of(model: Any, state: Any) -> Any:
            y, state = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)
            return (y**2).mean(), state

        (loss, state), grads = eqx.filter_value_and_grad(loss_of, has_aux=True)(model, state)
        updates, opt_state = optimizer.update(grads, opt_state)
        return eqx.apply_updates(model, updates), state, opt_state, loss

    step, losses = wrap(train_step), []
    for n in range(10):
        model, state, opt_state, loss = step(model, state, opt_state, batch_of(n, bad))
        losses.append(loss)
    return losses, jax.tree.leaves(eqx.filter((model, state, opt_state), eqx.is_array))


def linen_training(wrap: Callable[[Any], Any], bad: int) -> Any:
    linen = pytest.importorskip("flax.linen")
    optax = pytest.importorskip("optax")

    class Model(linen.Module):  # type: ignore[misc]
        @linen.compact
        def __call__(self, x: Any) -> Any:
            x = linen.BatchNorm(use_running_average=False)(linen.Dense(16)(x))
            return linen.Dense(1)(linen.Dropout(0.2, deterministic=False)(linen.gelu(x)))

    model, optimizer = Model(), optax.adamw(1e-2)
    key = jax.random.key(1)
    variables = model.init({"params": key, "dropout": key}, jnp.ones((8, 4)))
    params, stats = variables["params"], variables["batch_stats"]
    state = optimizer.init(params)

    def train_step(params: Any, stats: Any, state: Any, x: Any, key: Any, *, scale: float) -> Any:
        def loss_of(params: Any) -> Any:
            y, new = model.apply(
                {"params": params, "batch_stats": stats}, x, rngs={"dropout": key}, mutable=["batch_stats"]
            )
            return scale * (y**2).mean(), new["batch_stats"]

        (loss, stats), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), stats, state, loss

    step = wrap(jax.jit(train_step, donate_argnums=(0, 1, 2), static_argnames="scale"))
    losses = []
    for n in range(10):
        params, stats, state, loss = step(
            params, stats, state, batch_of(n, bad), jax.random.fold_in(key, n), scale=0.5
        )
        losses.append(loss)
    return losses, jax.tree.leaves((params, stats, state))


TRAININGS: dict[str, Train] = {"nnx": nnx_training, "equinox": equinox_training, "linen": linen_training}


@pytest.mark.parametrize("name", TRAININGS)
def test_the_results_are_those_without_capsules(name: str, tmp_path: Path) -> None:
    train = TRAININGS[name]
    plain = train(lambda step: step, -1)
    held = train(lambda step: hcb.capsule(step, tmp_path, nonfinite=True), -1)
    with hcb.capsule(tmp_path, nonfinite=True, exceptions=True):
        in_block = train(lambda step: step, -1)
    hcb.barrier_wait()
    for other in (held, in_block):
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(_data(a), _data(b)), plain, other)
    assert not list(tmp_path.iterdir())


def _data(leaf: Any) -> Any:
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


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


@pytest.mark.parametrize("name", TRAININGS)
def test_a_capsule_is_reproduced_without_the_library(name: str, tmp_path: Path) -> None:
    with pytest.raises(hcb.TapFunctionException), hcb.outfeed_receiver():
        TRAININGS[name](lambda step: hcb.capsule(step, tmp_path, nonfinite=True, max_capsules=1), BAD)
    (path,) = tmp_path.iterdir()
    capsule = Capsule(path)
    found = {entry.path: capsule.array(entry) for entry in capsule.inputs}
    (batch,) = [name for name, array in found.items() if np.isinf(array.astype(np.float32)).any()]
    np.testing.assert_array_equal(found[batch], batch_of(BAD, BAD))
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, str(path)], capture_output=True, text=True, timeout=100, check=False,
        env={**os.environ, "PYTHONPATH": python_path(), "XLA_FLAGS": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "reproduced: nonfinite" in done.stdout

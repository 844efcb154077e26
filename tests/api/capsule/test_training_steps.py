"""Planted faults in training steps of real models, seen again in a fresh process, also after SIGKILL."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hostcallback as hcb
from checkout import python_path
from hostcallback.api.capsule.reproduce import reproduce
from hostcallback.receiver import Capsule
from python_process import run_python

pytestmark = pytest.mark.native_only

WIDTH, HEADS, TOKENS = 16, 2, 8


def normed(x: Any, gain: Any) -> Any:
    return gain * (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-6)


def attention(params: Any, x: Any) -> Any:
    q, k, v = (
        (x @ params[name]).reshape(*x.shape[:-1], HEADS, -1).swapaxes(-3, -2) for name in ("q", "k", "v")
    )
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(WIDTH / HEADS)
    scores = jnp.where(jnp.tril(jnp.ones((TOKENS, TOKENS), bool)), scores, -1e9)
    mixed = (jax.nn.softmax(scores) @ v).swapaxes(-3, -2).reshape(x.shape)
    return mixed @ params["out"]


def block(params: Any, x: Any) -> Any:
    """One block of a transformer."""
    with jax.named_scope("attention"):
        x = x + attention(params, normed(x, params["gain"]))
    with jax.named_scope("mlp"):
        return x + jax.nn.gelu(normed(x, params["gain2"]) @ params["up"]) @ params["down"]


def transformer_loss(params: Any, batch: Any) -> Any:
    x, _ = jax.lax.scan(lambda x, layer: (block(layer, x), None), batch, params)
    loss = ((x - batch) ** 2).mean()
    hcb.check(loss < 50, "the loss is {}", loss)
    return loss


def transformer_params() -> Any:
    shapes = dict.fromkeys(("q", "k", "v", "out"), (2, WIDTH, WIDTH)) | {
        "up": (2, WIDTH, 4 * WIDTH), "down": (2, 4 * WIDTH, WIDTH)}  # fmt: skip
    keys = jax.random.split(jax.random.key(0), len(shapes))
    params = {
        name: jax.random.normal(key, shape) * 0.1
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    return params | {"gain": jnp.ones((2, WIDTH)), "gain2": jnp.ones((2, WIDTH))}


def transformer_step(params: Any, momentum: Any, batch: Any) -> Any:
    loss, grads = jax.value_and_grad(transformer_loss)(params, batch)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
    return jax.tree.map(lambda p, m: p - 0.01 * m, params, momentum), momentum, loss


def failing(train: Callable[[], Any], **options: Any) -> None:
    with pytest.raises(hcb.TapFunctionException), hcb.outfeed_receiver(**options):
        train()


def failing_transformer(folder: Path) -> Capsule:
    """The second of three calls gets a batch that is too large; parameters and momentum are donated."""
    step = hcb.capsule(jax.jit(transformer_step, donate_argnums=(0, 1)), folder)
    params = transformer_params()
    momentum = jax.tree.map(jnp.zeros_like, params)
    batches = np.random.default_rng(0).normal(size=(3, 4, TOKENS, WIDTH)).astype(np.float32)
    params["down"] = params["down"].at[1, 3, 3].set(1e3)

    def train() -> None:
        state = params, momentum
        for n, batch in enumerate(batches):
            *state, _ = step(*state, batch * (0, 1, 1)[n])

    failing(train)
    return only(folder)


def only(folder: Path) -> Capsule:
    (path,) = folder.glob("*.hcb")
    assert not list(folder.glob(".*")), "no file is left unfinished"
    return Capsule(path)


def failing_mlp(folder: Path) -> Capsule:
    """A NaN in the backward pass of an MLP with optax: the square root of 0."""
    optax = pytest.importorskip("optax")
    optimizer = optax.adamw(1e-2)

    def loss_of(params: Any, x: Any, y: Any) -> Any:
        hidden = jax.nn.relu(x @ params["w1"])
        return jnp.sqrt(((hidden @ params["w2"] - y) ** 2).sum(-1)).mean()

    @jax.jit
    def mlp_step(params: Any, state: Any, x: Any, y: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(params, x, y)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    params = {"w1": jnp.ones((3, 5)), "w2": jnp.ones((5, 2))}
    state = optimizer.init(params)
    step = hcb.capsule(mlp_step, folder, nonfinite=True)
    x = np.ones((4, 3), np.float32)

    def train() -> None:
        now = params, state
        for n in range(3):
            x[1] = 0 if n == 1 else 1
            *now, _ = step(*now, x, jnp.zeros((4, 2)))

    failing(train)
    return only(folder)


KILLED = """
import logging, os, signal, sys
import jax, jax.numpy as jnp
import hostcallback as hcb

class Kill(logging.Handler):
    def emit(self, record):
        if "hcb reproduce" in record.getMessage():
            os.kill(os.getpid(), signal.SIGKILL)

logging.getLogger("hostcallback").addHandler(Kill())

def step(x):
    hcb.tap(lambda value: None, x, ordered=True, name="before")
    hcb.check(x[0] < 3, "x is {}", x[0])
    hcb.tap(lambda value: None, x, ordered=True, name="after")
    return x + 1

wrapped = hcb.capsule(jax.jit(step), sys.argv[1])
x = jnp.zeros(1 << 20)
with hcb.outfeed_receiver():
    for _ in range(50):
        x = wrapped(x)
"""


@pytest.mark.slow
def test_faults_are_seen_again_in_a_fresh_process(tmp_path: Path) -> None:
    environment = {"PYTHONPATH": python_path(), "XLA_FLAGS": ""}
    killed = run_python("-c", KILLED, tmp_path / "killed", timeout_sec=120, **environment)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    after = only(tmp_path / "killed")
    assert after.failure.text == "x is 3.0"
    assert np.all(after.array(after.inputs[0]) == 3)
    transformer, mlp = failing_transformer(tmp_path / "transformer"), failing_mlp(tmp_path / "mlp")
    assert transformer.failure.kind == "check"
    assert len(transformer.inputs) == 17
    assert mlp.failure.kind == "nonfinite"
    command = (
        "import sys\nfrom hostcallback.receiver.cli import main\nfor path in sys.argv[1:]:\n"
        "    print('status', main(['reproduce', path]), flush=True)"
    )
    paths = [capsule.path for capsule in (after, transformer, mlp)]
    fresh = run_python("-c", command, *paths, cwd=tmp_path, timeout_sec=200, **environment)
    statuses = [line for line in fresh.stdout.splitlines() if line.startswith("status")]
    # XLA may compile the transformer otherwise in a process with fewer devices, and the loss has other last digits.
    assert statuses in (["status 0"] * 3, ["status 0", "status 3", "status 0"]), fresh.stdout + fresh.stderr
    assert fresh.stdout.count("reproduced: ") == 3


def test_a_program_that_a_check_ended(tmp_path: Path) -> None:
    def step(x: Any) -> Any:
        hcb.check(x < 2, "x is {}", x)
        return jax.lax.fori_loop(0, 3, lambda _, y: hcb.tap(lambda value: None, y) + 1, x)

    wrapped = hcb.capsule(jax.jit(step), tmp_path)
    failing(lambda: [wrapped(jnp.float32(n)).block_until_ready() for n in range(4)], on_error="abort")
    capsule = only(tmp_path)
    assert capsule.failure.text == "x is 2.0"
    assert reproduce(capsule).is_exact


def test_a_program_with_calls_of_the_host(tmp_path: Path) -> None:
    def step(x: Any) -> Any:
        y = hcb.call(np.sin, x, result_shape=x)
        hcb.check(y < 0.5, "y is {}", y)
        return y

    with pytest.raises(hcb.TapFunctionException), hcb.outfeed_receiver():
        hcb.capsule(jax.jit(step), tmp_path)(jnp.float32(1))
    capsule = only(tmp_path)
    assert float(capsule.array(capsule.inputs[0])) == 1
    assert "program that is exported, and no other process has its host function" in capsule.left_out[0]

"""The benchmark of the demo's training loop."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import hostcallback as hcb
from tools.bench.handlers import empty_call
from tools.bench.row import Row, measure
from tools.bench.timing import Counter

WIDTH, BATCH, STEPS, TAPS = 448, 128, 100, 10


def training_loop(rounds: int, send: Callable[[int], None] = lambda count: None) -> list[Row]:
    """The loop of examples/train_digits.py with a larger model and 10 taps a step, against the same loop untapped.

    The whole loop is one compiled call, as there: a scan over steps of 1 ms or more. Both sides compute the same 10
    metrics, which both loops return as well, so that XLA leaves none out; ours also taps each, and the clock stops when
    all are delivered.

    The floor has an empty FFI call in each tap's place. Meanwhile a Python thread looks every 2 ms how many metrics
    should have come by now, calls `send` with their number, makes an array for each and gives it to the function.
    """
    model = eqx.nn.MLP(in_size=64, out_size=10, width_size=WIDTH, depth=3, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_array)
    optimizer = optax.adam(1e-3)
    generator = np.random.default_rng(0)
    images = jnp.asarray(generator.uniform(size=(1_500, 64)), jnp.float32)
    labels = jnp.asarray(generator.integers(0, 10, len(images)))

    def loss_and_accuracy(params: Any, images: Any, labels: Any) -> tuple[Any, Any]:
        logits = jax.vmap(eqx.combine(params, static))(images)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), (logits.argmax(-1) == labels).mean()

    def loop(tap: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
        def step(state: Any, batch: Any) -> Any:
            params, opt_state, number = state
            (loss, accuracy), grads = jax.value_and_grad(loss_and_accuracy, has_aux=True)(
                params, images[batch], labels[batch]
            )
            metrics = [number, loss, accuracy, *map(jnp.linalg.norm, jax.tree.leaves(grads))][:TAPS]
            for metric in metrics:
                tap(metric)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state, number + 1), metrics

        def train(params: Any, key: Any) -> Any:
            batches = jax.random.randint(key, (STEPS, BATCH), 0, len(images))
            (params, _, _), metrics = lax.scan(step, (params, optimizer.init(params), jnp.int32(0)), batches)
            return metrics

        return train

    count, key, messages = Counter(), jax.random.key(1), TAPS * STEPS
    plain, tapped, empty = (
        jax.jit(loop(tap)) for tap in (lambda metric: None, partial(hcb.id_tap, count), empty_call)
    )
    pace_sec = 0.0

    def per_step(train: Callable[[Any, Any], Any], wait: Callable[[], Any] = hcb.barrier_wait) -> float:
        nonlocal pace_sec
        start = perf_counter()
        jax.block_until_ready(train(params, key))
        wait()
        pace_sec = (perf_counter() - start) / STEPS
        return pace_sec * 1e3

    def floor() -> float:
        start, done, ended, message_sec = perf_counter(), Counter(), threading.Event(), pace_sec / TAPS

        def deliver() -> None:
            while done.count < messages:
                passed = (perf_counter() - start) / message_sec
                arrived = messages if ended.wait(2e-3) else min(messages, int(passed))
                send(arrived - done.count)
                while done.count < arrived:
                    done(np.array(0, np.float32))

        def deliver_rest() -> None:
            ended.set()
            thread.join()

        thread = threading.Thread(target=deliver)
        thread.start()
        return per_step(empty, deliver_rest)

    rounds *= 3  # the bound is 5 %, less than a round's spread
    mine, peer, least = measure([lambda: per_step(tapped), lambda: per_step(plain), floor], rounds)
    assert count.count == messages * (rounds + 1)
    assert peer.median >= 1, f"a step of the untapped loop takes {peer.median:.2f} ms: make the model larger"
    name, unit = "training loop of the demo, 10 taps a step", "ms/step"
    return [
        mine.versus(peer, name, unit, "the untapped loop", 1.05),
        mine.versus(least, "the same", unit, "empty FFI calls, and a thread that makes arrays", None),
    ]

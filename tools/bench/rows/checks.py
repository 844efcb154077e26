"""The benchmarks of checks, compared with the checks of equinox and JAX."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from time import perf_counter
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.experimental import checkify

import hostcallback as hcb
from tools.bench.row import LIMIT, Row, compare

STEPS = 20_000


def _scan(check: Callable[[Any], Any], steps: int = STEPS) -> Callable[[Any], Any]:
    # The checked value is computed from the carry: checkify and equinox return the value they checked.
    return lambda x: lax.scan(lambda c, _: (check(c * 0.5 + 1), None), x, None, length=steps)[0]


def _ours(y: Any) -> Any:
    hcb.check(y < 1e9, "y is {}", y)
    return y


def _equinox(y: Any) -> Any:
    return eqx.error_if(y, y >= 1e9, "y is large")


def _checkify(y: Any) -> Any:
    checkify.check(y < 1e9, "y is {y}", y=y)
    return y


def _added(checked: Callable[[Any], Any], plain: Callable[[Any], Any], steps: int = STEPS) -> float:
    """Nanoseconds that a check adds to a step: of five runs of each, in turn, the fastest."""

    def seconds(f: Callable[[Any], Any]) -> float:
        start = perf_counter()
        jax.block_until_ready(f(jnp.float32(0)))
        return perf_counter() - start

    times = [(seconds(checked), seconds(plain)) for _ in range(5)]
    return (min(t for t, _ in times) - min(t for _, t in times)) / steps * 1e9


def holding_check(rounds: int) -> Row:
    """The cost that a check that holds adds to a step of a scan."""
    plain, ours, peer = jax.jit(_scan(lambda y: y)), jax.jit(_scan(_ours)), jax.jit(_scan(_equinox))
    return compare(
        "a check that holds, in a scan: what it adds to a step", "ns", lambda: _added(ours, plain),
        lambda: _added(peer, plain), "equinox.error_if", 1.0, rounds,
    )  # fmt: skip


def holding_check_against_checkify(rounds: int) -> Row:
    """The same compared with checkify, whose errors are values that the program returns."""
    plain, ours = jax.jit(_scan(lambda y: y)), jax.jit(_scan(_ours))
    peer = jax.jit(checkify.checkify(_scan(_checkify)))
    return compare(
        "the same",
        "ns",
        lambda: _added(ours, plain),
        lambda: _added(peer, plain),
        "checkify.check",
        None,
        rounds,
    )


def failing_check(rounds: int) -> Row:
    """A check that fails in every iteration, until it is accounted for."""
    steps = 5_000

    def fails(y: Any) -> Any:
        hcb.check(y > 1e9, "y is {}", y)
        return y

    seen = 0

    def count(y: Any) -> None:
        nonlocal seen
        seen += 1

    def calls_back(y: Any) -> Any:
        jax.debug.callback(count, y)
        return y

    ours, peer = jax.jit(_scan(fails, steps)), jax.jit(_scan(calls_back, steps))

    def run_ours() -> float:
        start = perf_counter()
        ours(jnp.float32(0)).block_until_ready()
        try:
            hcb.barrier_wait()
        except hcb.TapFunctionException as error:
            (check,) = error.exceptions
            assert isinstance(check, hcb.CheckError)
            assert check.check.count == steps
        return (perf_counter() - start) / steps * 1e6

    def run_peer() -> float:
        start = perf_counter()
        peer(jnp.float32(0)).block_until_ready()
        jax.effects_barrier()
        return (perf_counter() - start) / steps * 1e6

    row = compare(
        "a check that fails in every step of a scan, counted", "us/failure", run_ours, run_peer,
        "jax.debug.callback", 1 / 20, rounds,
    )  # fmt: skip
    assert seen == steps * (rounds + 1)
    return row


def checked_call(rounds: int) -> Row:
    """One call of a program with a check that holds; both programs compute and return its predicate."""
    y = jnp.ones(16)

    def body(y: Any, check: Callable[[Any, Any], None]) -> Any:
        y = y * 0.5 + 1
        ok = y[0] < 1e9
        check(ok, y)
        return y, ok

    def per_call(f: Callable[[Any], Any]) -> float:
        start = perf_counter()
        for _ in range(2_000):
            f(y)[0].block_until_ready()
        return (perf_counter() - start) / 2_000 * 1e6

    ours = jax.jit(lambda y: body(y, lambda ok, y: hcb.check(ok, "y is {}", y)))
    plain = jax.jit(lambda y: body(y, lambda ok, y: None))
    return compare(
        "one jax.jit call with a check that holds (both compute its predicate)", "us/call", lambda: per_call(ours),
        lambda: per_call(plain), "the unchecked jax.jit call", 1.2, rounds,
    )  # fmt: skip


def checks_compile(rounds: int) -> Row:
    """The cost that each of 1,000 checks adds to tracing, lowering and compiling a program that has the predicates."""
    count = 1_000

    def seconds(check: Callable[[Any, int], None]) -> float:
        # XLA:CPU takes milliseconds for every kernel: predicates that have to be computed cost that as well.
        def f(*predicates: Any) -> Any:
            for i, predicate in enumerate(predicates):
                check(predicate, i)
            return predicates[0]

        start = perf_counter()
        jax.jit(f).lower(*[jnp.bool_(True)] * count).compile()
        return perf_counter() - start

    def added() -> float:
        checked = seconds(lambda ok, i: hcb.check(ok, "failed: {}", i, name=f"check {i}"))
        return (checked - seconds(lambda ok, i: None)) / count * 1e3

    return compare(
        "each of 1,000 checks of a program, their predicates given: trace, lower and compile", "ms", added,
        lambda: 1.0, LIMIT, 1.0, min(rounds, 5),
    )  # fmt: skip


@contextlib.contextmanager
def _debug_nans() -> Iterator[None]:
    jax.config.update("jax_debug_nans", True)
    try:
        yield
    finally:
        jax.config.update("jax_debug_nans", False)


def training_step(check: Callable[[Any], None]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The demo's training step, which passes 20 values to `check`, and its arguments."""
    model = eqx.nn.MLP(in_size=64, out_size=10, width_size=128, depth=2, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_array)
    optimizer = optax.adam(1e-3)
    generator = np.random.default_rng(0)
    images = jnp.asarray(generator.uniform(size=(32, 64)), jnp.float32)
    labels = jnp.asarray(generator.integers(0, 10, 32))

    def loss(params: Any) -> Any:
        logits = jax.vmap(eqx.combine(params, static))(images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def step(params: Any, state: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        leaves = [value, *jax.tree.leaves(grads), *jax.tree.leaves(updates), *jax.tree.leaves(params)]
        for leaf in [*leaves, optax.tree.norm(grads)]:
            check(leaf)
        return params, state

    assert len(jax.tree.leaves(params)) * 3 + 2 == 20
    return step, (params, optimizer.init(params))


def _per_step(step: Callable[..., Any], arguments: tuple[Any, ...], steps: int = 300) -> float:
    start = perf_counter()
    for _ in range(steps):
        out = step(*arguments)
    jax.block_until_ready(out)
    return (perf_counter() - start) / steps * 1e6


def demo_checks(rounds: int) -> list[Row]:
    """The demo's training step with 20 checks, compared with the unchecked one and with other ways to find a NaN."""
    plain_step, arguments = training_step(lambda x: None)
    ours_step, _ = training_step(lambda x: hcb.check(jnp.isfinite(x).all(), "not finite"))
    checkify_step, _ = training_step(lambda x: checkify.check(jnp.isfinite(x).all(), "not finite"))
    plain, ours = jax.jit(plain_step), jax.jit(ours_step)
    user_checks = jax.jit(checkify.checkify(checkify_step))
    nan_checks = jax.jit(checkify.checkify(plain_step, errors=checkify.nan_checks))
    watched = hcb.watch_nonfinite(jax.jit(plain_step), mode="every")
    debugged = jax.jit(plain_step)

    def debug_nans() -> float:
        with _debug_nans():
            return _per_step(debugged, arguments)

    run = partial(_per_step, arguments=arguments)
    rows = []
    checked, watching = "the demo's training step with 20 checks", "the same under `watch_nonfinite`"
    for name, mine, peer_name, peer, bound in (
        (checked, ours, "the unchecked step", plain, 1.3),
        (checked, ours, "checkify, 20 checks", user_checks, None),
        (watching, watched, "the unwatched step", plain, None),
        (watching, watched, "checkify, nan_checks", nan_checks, None),
    ):
        rows.append(
            compare(name, "us/step", partial(run, mine), partial(run, peer), peer_name, bound, rounds)
        )
    rows.append(
        compare(watching, "us/step", partial(run, watched), debug_nans, "jax_debug_nans", None, rounds)
    )
    hcb.barrier_wait()
    return rows


def transformer_step() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The training step of a transformer of 4 layers of width 128 with Adam, and its arguments."""
    width, layers, tokens = 128, 4, 64
    keys = iter(jax.random.split(jax.random.key(0), 3 * layers + 2))

    def matrix(*shape: int) -> Any:
        return jax.random.normal(next(keys), shape) * 0.05

    params = {
        "embedding": matrix(256, width),
        "layers": [
            {
                "qkv": matrix(width, 3 * width),
                "up": matrix(width, 4 * width),
                "down": matrix(4 * width, width),
            }
            for _ in range(layers)
        ],
    }
    optimizer = optax.adam(1e-3)
    text = jnp.asarray(np.random.default_rng(0).integers(0, 256, (8, tokens)))
    mask = jnp.tril(jnp.ones((tokens, tokens), bool))

    def loss(params: Any) -> Any:
        x = params["embedding"][text]
        for layer in params["layers"]:
            q, k, v = jnp.split(jax.nn.standardize(x) @ layer["qkv"], 3, axis=-1)
            scores = jnp.where(mask, q @ k.swapaxes(1, 2) / width**0.5, -1e9)
            x = x + jax.nn.softmax(scores) @ v
            x = x + jax.nn.gelu(jax.nn.standardize(x) @ layer["up"]) @ layer["down"]
        logits = (x @ params["embedding"].T)[:, :-1]
        return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean()

    def step(params: Any, state: Any) -> Any:
        grads = jax.grad(loss)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step, (params, optimizer.init(params))


def _in_a_row(step: Callable[..., Any], arguments: tuple[Any, ...], steps: int) -> float:
    start = perf_counter()
    for _ in range(steps):
        arguments = step(*arguments)
    jax.block_until_ready(arguments)
    return (perf_counter() - start) / steps * 1e6


def watched_steps(rounds: int) -> list[Row]:
    """Steps under `watch_nonfinite`, which tests their results, and a scan of the first under `watch=True`."""
    rows = []
    cases = (("demo's", *training_step(lambda x: None), 300), ("transformer's", *transformer_step(), 10))
    for name, step, arguments, steps in cases:
        plain, watched = jax.jit(step), hcb.watch_nonfinite(jax.jit(step))
        rows.append(
            compare(
                f"the {name} training step under `watch_nonfinite`, before a failure", "us/step",
                partial(_in_a_row, watched, arguments, steps), partial(_in_a_row, plain, arguments, steps),
                "the unwatched step", 1.05, rounds,
            )
        )  # fmt: skip
    step, arguments = cases[0][1], cases[0][2]
    copies = partial(jax.tree.map, lambda leaf: leaf.copy() if isinstance(leaf, jax.Array) else leaf)
    donating = jax.jit(step, donate_argnums=(0, 1))
    watched_donating = hcb.watch_nonfinite(donating)
    rows.append(
        compare(
            "the same, with its state donated", "us/step",
            lambda: _in_a_row(watched_donating, copies(arguments), cases[0][3]),
            lambda: _in_a_row(donating, copies(arguments), cases[0][3]), "the unwatched step", None, rounds,
        )
    )  # fmt: skip

    def epoch(scan: Callable[..., Any]) -> Callable[[], float]:
        run = jax.jit(lambda state: scan(lambda state, _: (step(*state), None), state, jnp.arange(320))[0])
        return lambda: _in_a_row(lambda *state: run(state), arguments, 1) / 320

    ours = epoch(partial(hcb.scan, progress=False, watch=True))
    name = "a scan of the demo's training step with `watch=True`, before a failure"
    rows.append(compare(name, "us/step", ours, epoch(lax.scan), "jax.lax.scan", 1.05, rounds))
    hcb.barrier_wait()
    return rows


def watched_failure(rounds: int) -> Row:
    """From the call whose results are not finite to the report."""
    step, (params, state) = training_step(lambda x: None)
    params = jax.tree.map(lambda leaf: leaf.at[0].set(jnp.nan), params)

    def report() -> float:
        watched = hcb.watch_nonfinite(jax.jit(step))
        start = perf_counter()
        watched(params, state)
        found = False
        try:
            hcb.barrier_wait()
        except* hcb.NonFiniteError:
            found = True
        assert found
        return perf_counter() - start

    rounds = min(rounds, 3)
    name = "from the first call of the demo's step, which fails, to the report (compiles the step)"
    return compare(name, "s", report, lambda: 30.0, LIMIT, None, rounds)

"""`observe` where the compiler divides a program among devices: values, messages, and what devices exchange."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collecting_writer import CollectingWriter
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import hostcallback as hcb

WEIGHTS = [jnp.linspace(-0.5, 0.6, 9).reshape(3, 3), jnp.linspace(0.4, -0.3, 9).reshape(3, 3)]
X = jnp.arange(12.0).reshape(4, 3)


def loss(ws: Any, x: Any) -> Any:
    for i, w in enumerate(ws):
        with jax.named_scope(f"layer_{i}"):
            x = jax.nn.relu(jnp.tanh(x @ w) * 2)
    return jnp.sum(x**2)


def train_step(ws: Any, x: Any) -> Any:
    value, grads = jax.value_and_grad(loss)(ws, x)
    return value, jax.tree.map(lambda w, g: w - 0.1 * g, ws, grads)


def divided() -> Any:
    """The weights on each of four devices, and a row of `X` on each."""
    mesh = Mesh(np.array(jax.devices()[:4]), "a")
    return jax.device_put(WEIGHTS, NamedSharding(mesh, P())), jax.device_put(X, NamedSharding(mesh, P("a")))


def values_of(function: Callable[..., Any], *args: Any, **options: Any) -> tuple[Any, list[dict[str, Any]]]:
    """The results of the jitted, observed function, and the messages it sent."""
    messages: list[dict[str, Any]] = []
    with hcb.outfeed_receiver():
        out = jax.jit(hcb.observe(function, tap_func=messages.append, **options))(*args)
        jax.block_until_ready(out)
        hcb.barrier_wait()
    return out, messages


def structured(ws: Any, x: Any) -> Any:
    """A program whose named values are in a scan, a branch, a checkpoint and a while loop."""

    @jax.checkpoint
    def layer(x: Any, w: Any) -> Any:
        return jax.named_scope("in_scan")(jnp.tanh)(x @ w), None

    x, _ = jax.lax.scan(layer, x, jnp.stack(ws))
    branches = [jax.named_scope("taken")(jnp.sin), jax.named_scope("not_taken")(jnp.cos)]
    x = jax.lax.cond(ws[0][0, 0] < 0, *branches, x)
    return jax.lax.fori_loop(0, ws[0].shape[0] - 1, lambda i, x: jax.named_scope("in_while")(jnp.cos)(x), x)


@pytest.mark.slow_variants
@pytest.mark.parametrize("spec", [P("a", "b"), P(), P("b")])
def test_statistics_under_automatic_sharding_are_those_of_one_device(spec: Any) -> None:
    names = ["max", "histogram", "mean", "std", "min", "norm", "zeros", "nonfinite"]
    options = {"where": ["in_scan", "taken", "not_taken", "in_while"], "what": names}

    def step(ws: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(lambda ws: jnp.sum(structured(ws, x)))(ws)
        return (
            value,
            grads,
            jax.lax.while_loop(
                lambda s: s[0] < 2, lambda s: (s[0] + 1, jax.named_scope("in_while")(jnp.cos)(s[1])), (0, x)
            )[1],
        )

    x = jnp.linspace(-2, 2, 12).reshape(4, 3).at[0].set(0)
    _, expected = values_of(step, WEIGHTS, x, **options)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
    rows = P("a") if spec == P("a", "b") else spec
    placed = jax.device_put(x, NamedSharding(mesh, rows))
    weights = jax.device_put(WEIGHTS, NamedSharding(mesh, P()))
    out, got = values_of(step, weights, placed, **options)

    jax.tree.map(np.testing.assert_array_equal, out, jax.jit(step)(weights, placed))
    assert len(got) == len(expected) > 1
    for message, one in zip(got, expected, strict=True):
        assert list(message) == list(one)
        for label in one:
            assert list(message[label]) == list(one[label]) == names
            for name in names:
                assert message[label][name].dtype == one[label][name].dtype
                np.testing.assert_allclose(message[label][name], one[label][name], rtol=1e-5, atol=1e-6)


@pytest.mark.native_only
def test_devices_exchange_the_statistics_of_all_values_of_a_run_at_once() -> None:
    weights, x = divided()
    observed = hcb.observe(train_step, where="layer_*", what_of=["output", "grad"], tap_func=print)

    def exchanges(step: Any) -> tuple[int, int]:
        text = jax.jit(step).lower(weights, x).compile().as_text()
        return text.count(" all-reduce("), text.count(" all-gather(")

    reductions, gatherings = exchanges(train_step)
    assert exchanges(observed) == (reductions, gatherings + 1)


def test_metrics_and_updates_under_automatic_sharding() -> None:
    weights, x = divided()
    writer = CollectingWriter()
    step = jax.jit(hcb.observe(train_step, where="layer_*", what=["norm"], tap_func=hcb.metrics))
    with hcb.outfeed_receiver(writers=[writer]):
        step(weights, x)
        hcb.barrier_wait()
    first = np.linalg.norm(jax.nn.relu(jnp.tanh(X @ WEIGHTS[0]) * 2))
    assert [values["layer_0/norm"] for _, values in writer.rows] == pytest.approx([first], rel=1e-5)

    _, [message] = values_of(train_step, weights, x, where="ws[*]", what=["norm"], what_of="update")
    _, grads = jax.value_and_grad(loss)(WEIGHTS, X)
    for values, weight, grad in zip(message.values(), WEIGHTS, grads, strict=True):
        assert list(values) == ["norm", "ratio"]
        norm = 0.1 * np.linalg.norm(grad)
        np.testing.assert_allclose([*values.values()], [norm, norm / np.linalg.norm(weight)], rtol=1e-4)


def test_a_device_without_an_element_of_an_array_adds_nothing_to_its_statistics() -> None:
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:4]), "a"), P("a"))

    def five(x: Any) -> Any:  # of which the first two devices have two each, and the last none
        x = jax.lax.with_sharding_constraint(x[:5] * 2, sharding)
        return jax.named_scope("here")(jnp.exp)(x)

    names = ["max", "mean", "std", "norm", "zeros"]
    _, [message] = values_of(five, jax.device_put(jnp.zeros(8), sharding), where="here", what=names)
    np.testing.assert_allclose([message["here"][name] for name in names], [1, 1, 0, np.sqrt(5), 0], rtol=1e-6)


def test_times_of_parts_of_nested_shard_maps_are_refused() -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("i", "j"))
    with jax.set_mesh(mesh):
        inner = jax.shard_map(jnp.sin, in_specs=P(None, "j"), out_specs=P(None, "j"), axis_names={"j"})
        outer = jax.jit(jax.shard_map(inner, in_specs=P("i"), out_specs=P("i"), axis_names={"i"}))
        with pytest.raises(
            ValueError, match=r"no part of a shard_map within a shard_map: .* at .*_divided\.py"
        ):
            hcb.observe(outer, what="time", where="sin")(jnp.ones((4, 4)))

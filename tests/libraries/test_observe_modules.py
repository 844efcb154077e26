"""`observe` finds the modules of equinox and flax nnx from the parameters that operations use."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hostcallback as hcb

eqx = pytest.importorskip("equinox", reason="needs equinox, of the extra `libraries`")


def observed(step: Any, *args: Any, **options: Any) -> dict[str, Any]:
    """The one message of an observed run under jit, with each value."""
    messages: list[dict[str, Any]] = []
    with hcb.outfeed_receiver():
        run = jax.jit(hcb.observe(step, what="value", tap_func=messages.append, **options))
        jax.block_until_ready(run(*args))
        hcb.barrier_wait()
    [message] = messages
    return message


def assert_same_elements(got: Any, expected: Any) -> None:
    # vmap in the function may have moved the axes of what its operations compute.
    if got.shape != expected.shape:
        got = got.T
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_an_equinox_training_step_shows_activations_and_cotangents_of_its_layers() -> None:
    mlp = eqx.nn.MLP(4, 3, 8, 2, key=jax.random.key(0))
    params, static = eqx.partition(mlp, eqx.is_array)
    x = jnp.linspace(-1.0, 1.0, 8).reshape(2, 4)

    def loss(params: Any, x: Any) -> Any:
        return jnp.mean(jax.vmap(eqx.combine(params, static))(x) ** 2)

    def step(params: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, x)
        return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    message = observed(step, params, x, where="module:layers/*", what_of=["output", "grad"])
    first = jax.vmap(mlp.layers[0])(x)
    second, of_second = jax.vjp(lambda h: jax.vmap(mlp.layers[1])(jax.nn.relu(h)), first)
    third, of_third = jax.vjp(lambda h: jax.vmap(mlp.layers[2])(jax.nn.relu(h)), second)
    cotangents = [2 * third / third.size]
    cotangents.append(of_third(cotangents[-1])[0])
    cotangents.append(of_second(cotangents[-1])[0])
    names = [f"layers/{i}" for i in range(3)]
    assert list(message) == [*names, *(f"grad {name}" for name in reversed(names))]
    for got, expected in zip(message.values(), [first, second, third, *cotangents], strict=True):
        assert_same_elements(got, expected)


def test_a_module_of_modules_is_one_place() -> None:
    attention = eqx.nn.MultiheadAttention(2, 8, key=jax.random.key(1))
    params, static = eqx.partition({"attention": attention}, eqx.is_array)
    x = jnp.linspace(-1.0, 1.0, 32).reshape(4, 8)

    def f(params: Any, x: Any) -> Any:
        return x + eqx.combine(params, static)["attention"](x, x, x)

    message = observed(f, params, x, where="attention")
    assert list(message) == ["attention"]
    assert_same_elements(message["attention"], attention(x, x, x))


def test_nnx_modules_are_found_by_their_attributes() -> None:
    nnx = pytest.importorskip("flax.nnx", reason="needs flax, of the extra `libraries`")

    class Net(nnx.Module):  # type: ignore[misc, name-defined]
        def __init__(self, rngs: Any) -> None:
            self.first, self.second = nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 2, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.second(nnx.relu(self.first(x)))

    net = Net(nnx.Rngs(0))
    graph, state = nnx.split(net)
    x = jnp.ones((3, 4))
    message = observed(lambda state, x: nnx.merge(graph, state)(x), state, x, where=["first", "second"])
    assert list(message) == ["first", "second"]
    np.testing.assert_allclose(message["first"], net.first(x), rtol=1e-5)
    np.testing.assert_allclose(message["second"], net(x), rtol=1e-5)


def test_a_linen_module_that_layers_share_has_a_cotangent_for_each_call() -> None:
    linen = pytest.importorskip("flax.linen", reason="needs flax, of the extra `libraries`")

    class Net(linen.Module):  # type: ignore[misc, name-defined]
        @linen.compact
        def __call__(self, x: Any, zeros: Any) -> Any:
            dense = linen.Dense(3, name="shared")
            for zero in zeros:
                x = x + linen.tanh(dense(x) + zero)
            return x

    x, zeros = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3), [jnp.zeros((2, 3))] * 3
    net = Net()
    variables = net.init(jax.random.key(0), x, zeros)

    def loss(variables: Any, zeros: Any) -> Any:
        return jnp.sum(net.apply(variables, x, zeros) ** 2)

    def step(variables: Any) -> Any:
        return jax.value_and_grad(loss)(variables, zeros)

    message = observed(step, variables, where="Net/shared", what_of=["output", "grad"])
    names = [f"Net/shared[{i}]" for i in range(3)]
    assert list(message) == [*names, *(f"grad {name}" for name in reversed(names))]
    for name, cotangent in zip(names, jax.grad(loss, 1)(variables, zeros), strict=True):
        np.testing.assert_allclose(message[f"grad {name}"], cotangent, rtol=1e-5)

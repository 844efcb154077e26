"""`observe` finds what nothing else names by the expression that calls it: `self.linear(x)` is `linear`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hostcallback as hcb
from hostcallback.tracing.source_line import called_name

W = jnp.linspace(-0.5, 0.6, 9).reshape(3, 3)
X = jnp.arange(6.0).reshape(2, 3)


class Linear:
    def __init__(self, w: Any) -> None:
        self.w = w

    def __call__(self, x: Any) -> Any:
        return x @ self.w


class Net:
    def __init__(self) -> None:
        self.first, self.second = Linear(W), Linear(-W)
        self.layers = [Linear(W + 1), Linear(W - 1)]

    def __call__(self, x: Any) -> Any:
        x = jnp.tanh(self.second(jnp.tanh(self.first(x))))
        return jax.vmap(self.layers[1])(jax.checkpoint(self.layers[0])(x))


net = Net()


def observed(function: Any, *args: Any, **options: Any) -> dict[str, Any]:
    messages: list[Any] = []
    with hcb.outfeed_receiver():
        with hcb.observe(what="value", tap_func=messages.append, **options):
            jax.block_until_ready(jax.jit(function)(*args))
        hcb.barrier_wait()
    [message] = messages
    return dict(message)


@pytest.mark.parametrize("kind", ["", "module:", "call:"])
def test_objects_of_a_plain_class_are_found_by_their_attributes(kind: str) -> None:
    found = observed(lambda x: net(x), X, where=[f"{kind}first", f"{kind}second", f"{kind}layers/*"])
    assert list(found) == ["net/first", "net/second", "net/layers/0", "net/layers/1"]
    first = X @ W
    second = jnp.tanh(first) @ -W
    zero = jnp.tanh(second) @ (W + 1)
    for value, expected in zip(found.values(), [first, second, zero, zero @ (W - 1)], strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)


def test_the_cotangents_of_a_call_are_those_of_what_it_returns() -> None:
    def loss(shift: Any, x: Any) -> Any:
        return jnp.sum(jnp.tanh(net.second(jnp.tanh(net.first(x) + shift))))

    found = observed(
        jax.grad(loss, argnums=1), jnp.zeros((2, 3)), X, where="first", what_of=["output", "grad"]
    )
    assert list(found) == ["first", "grad first"]
    np.testing.assert_allclose(found["grad first"], jax.grad(loss)(jnp.zeros((2, 3)), X), rtol=1e-5)


def test_layers_in_a_scan_and_in_an_inner_jit() -> None:
    def f(x: Any) -> Any:
        def body(x: Any, _: Any) -> Any:
            return jax.jit(net.first)(x), None

        return jax.lax.scan(body, x, length=2)[0]

    found = observed(f, X, where="first")
    [(label, value)] = found.items()
    assert label.endswith("first")
    np.testing.assert_allclose(value, [X @ W, X @ W @ W], rtol=1e-5)


def test_names_of_calls_come_after_all_others_and_are_shown_where_nothing_matches() -> None:
    def first(x: Any) -> Any:
        return jax.named_scope("second")(jnp.sin)(net.first(x))

    assert list(observed(lambda x: net.second(first(x)), X, where="second")) == ["second"]  # the scope
    with pytest.raises(ValueError, match=r"where='secnd' matches no output(.|\n)*net/second"):
        observed(lambda x: net(x), X, where="secnd")


@pytest.mark.parametrize("is_argument", [True, False])
@pytest.mark.parametrize("kind", ["", "module:"])
def test_two_layers_of_an_equinox_model(is_argument: bool, kind: str) -> None:
    eqx = pytest.importorskip("equinox", reason="needs equinox, of the extra `libraries`")

    class Model(eqx.Module):  # type: ignore[misc]
        linear1: Any
        linear2: Any

        def __call__(self, x: Any) -> Any:
            return self.linear2(jax.nn.relu(self.linear1(x)))

    keys = jax.random.split(jax.random.key(0))
    model = Model(*(eqx.nn.Linear(3, 3, key=key) for key in keys))

    @eqx.filter_jit
    def step(model: Any, x: Any) -> Any:
        return jax.vmap(model)(x)

    call = step if is_argument else lambda _, x: jax.jit(lambda x: jax.vmap(model)(x))(x)
    messages: list[Any] = []
    with hcb.outfeed_receiver():
        with hcb.observe(where=[f"{kind}linear1", f"{kind}linear2"], what="value", tap_func=messages.append):
            jax.block_until_ready(call(model, X))
        hcb.barrier_wait()
    [message] = messages
    before = "" if is_argument else "model/"
    assert list(message) == [f"{before}linear1", f"{before}linear2"]
    first = jax.vmap(model.linear1)(X)
    for got, expected in zip(message.values(), [first, jax.vmap(model)(X)], strict=True):
        np.testing.assert_allclose(got if got.shape == X.shape else got.T, expected, rtol=1e-5, atol=1e-6)


def test_an_instruction_without_known_source_has_no_name() -> None:
    code = compile("f(1)", "<none>", "eval")
    assert called_name(code, len(code.co_code) - 4) == ()
    assert called_name(code.replace(co_linetable=b""), 0) == ()

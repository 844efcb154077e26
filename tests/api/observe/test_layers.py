"""Gradients of modules and parameters in a scan over layers: the values are those computed by hand."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hostcallback as hcb

LAYERS, WIDTH = 3, 4
_normal = iter(0.3 * jax.random.normal(jax.random.key(0), (64, WIDTH, WIDTH)))
PARAMS = {
    "attention": {name: jnp.stack([next(_normal) for _ in range(LAYERS)]) for name in ("q", "k", "v", "out")},
    "mlp": {name: jnp.stack([next(_normal) for _ in range(LAYERS)]) for name in ("up", "down")},
}
X = jnp.linspace(-1.0, 1.0, 5 * WIDTH).reshape(5, WIDTH)


def attention(params: Any, x: Any) -> Any:
    return jax.nn.softmax((x @ params["q"]) @ (x @ params["k"]).T) @ (x @ params["v"]) @ params["out"]


def mlp(params: Any, x: Any) -> Any:
    return jax.nn.relu(x @ params["up"]) @ params["down"]


def loss(params: Any, x: Any) -> Any:
    def layer(x: Any, params: Any) -> Any:
        x = x + attention(params["attention"], x)
        return x + mlp(params["mlp"], x), None

    return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)


@jax.jit
def step(params: Any, x: Any) -> Any:
    value, grads = jax.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def observed(**options: Any) -> Any:
    messages: list[Any] = []
    with hcb.outfeed_receiver():
        with hcb.observe(what=["norm"], tap_func=messages.append, **options):
            jax.block_until_ready(step(PARAMS, X))
        hcb.barrier_wait()
    [message] = messages
    return {label: value["norm"] for label, value in message.items()}


def by_hand() -> tuple[list[Any], list[Any]]:
    """The outputs of attention and mlp of each layer, and the gradients with respect to them."""

    def run(shifts: Any) -> Any:
        x, outs = X, []
        for i in range(LAYERS):
            params = jax.tree.map(lambda p, i=i: p[i], PARAMS)
            outs.append(attention(params["attention"], x) + shifts[2 * i])
            x = x + outs[-1]
            outs.append(mlp(params["mlp"], x) + shifts[2 * i + 1])
            x = x + outs[-1]
        return jnp.mean(x**2), outs

    gradients, outs = jax.grad(run, has_aux=True)([jnp.zeros_like(X)] * (2 * LAYERS))
    return outs, gradients


def test_modules_in_a_scan_over_layers_have_a_row_for_each_layer() -> None:
    norms = observed(where=["module:attention", "module:mlp"], what_of=["output", "grad"])
    outs, gradients = by_hand()
    for label, values in (
        ("attention", outs[::2]), ("mlp", outs[1::2]), ("grad attention", gradients[::2]), ("grad mlp", gradients[1::2])
    ):  # fmt: skip
        np.testing.assert_allclose(
            norms[label], [jnp.linalg.norm(v) for v in values], rtol=1e-5, err_msg=label
        )


def test_gradients_of_parameters_of_one_shape_and_line_are_told_apart() -> None:
    norms = observed(where="params/*/*", what_of=["param", "param grad"])
    grads = jax.grad(loss)(PARAMS, X)
    for module, names in PARAMS.items():
        for name, value in names.items():
            label = f"params/{module}/{name}"
            np.testing.assert_allclose(norms[label], jnp.linalg.norm(value), rtol=1e-5)
            np.testing.assert_allclose(
                norms[f"param grad {label}"], jnp.linalg.norm(grads[module][name]), rtol=1e-5, err_msg=label
            )


def gradients_observed(step: Any, *args: Any) -> dict[str, Any]:
    """The gradients of a jitted step's parameters by label."""
    messages: list[Any] = []
    with hcb.outfeed_receiver():
        with hcb.observe(where="params/*", what_of="param grad", what="value", tap_func=messages.append):
            jax.block_until_ready(jax.jit(step)(*args))
        hcb.barrier_wait()
    [message] = messages
    return dict(message)


def test_a_frozen_parameter_does_not_get_the_gradient_of_one_of_its_shape() -> None:
    def loss(trained: Any, frozen: Any, x: Any) -> Any:
        return jnp.sum((trained * (frozen * x)) ** 2)

    def step(params: Any, x: Any) -> Any:
        return jax.grad(loss)(params["trained"], params["frozen"], x)

    params = {"frozen": jnp.arange(1.0, 5.0), "trained": jnp.arange(2.0, 6.0)}
    found = gradients_observed(step, params, jnp.ones(4))
    assert [*found] == ["param grad params/trained"]
    np.testing.assert_allclose(found["param grad params/trained"], step(params, jnp.ones(4)))


def test_members_that_a_scan_trains_one_by_one_have_a_gradient_each() -> None:
    def loss(w: Any, x: Any) -> Any:
        return jnp.sum((x @ w) ** 2)

    def step(params: Any, x: Any) -> Any:
        return jax.lax.scan(lambda _, w: (None, w - 0.1 * jax.grad(loss)(w, x)), None, params["w"])[1]

    members, x = PARAMS["mlp"]["up"], X[0]
    found = gradients_observed(step, {"w": members}, x)
    np.testing.assert_allclose(
        found["param grad params/w"], [jax.grad(loss)(w, x) for w in members], rtol=1e-5
    )


def updates_of(step: Any, *args: Any, where: str = "params/**") -> tuple[dict[str, Any], Any]:
    """The updates of a jitted step's parameters by label, and what the step returns."""
    messages: list[Any] = []
    with hcb.outfeed_receiver():
        with hcb.observe(where=where, what_of="update", what="value", tap_func=messages.append):
            out = jax.block_until_ready(jax.jit(step)(*args))
        hcb.barrier_wait()
    [message] = messages
    return message, out


def gradients_of_two(params: Any, x: Any) -> Any:
    return jax.grad(lambda params: jnp.mean((x @ params["a"] @ params["b"]) ** 2))(params)


TWO = {"a": PARAMS["mlp"]["up"][0], "b": PARAMS["mlp"]["down"][0]}


def ema_of_the_new(params: Any, ema: Any, x: Any) -> Any:
    new = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients_of_two(params, x))
    return jax.tree.map(lambda p, e: p + 0.9 * (e - p), new, ema), new


def ema_of_the_old(params: Any, ema: Any, x: Any) -> Any:
    ema = jax.tree.map(lambda p, e: p + 0.9 * (e - p), params, ema)
    return ema, jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients_of_two(params, x))


def swapped(params: Any, ema: Any, x: Any) -> Any:
    grads = gradients_of_two(params, x)
    return ema, {"b": params["a"] - 0.1 * grads["a"], "a": params["b"] - 0.1 * grads["b"]}


def beside_another_sum(params: Any, ema: Any, x: Any) -> Any:
    grads = gradients_of_two(params, x)
    ahead = jax.tree.map(lambda p, g: p + g, params, grads)
    return {"ahead": ahead, "params": jax.tree.map(lambda p, g: p - 0.1 * g - 1e-3 * p, params, grads)}


def skipped_if_not_finite(params: Any, ema: Any, x: Any) -> Any:
    grads = gradients_of_two(params, x)

    @jax.jit
    def update(p: Any, g: Any) -> Any:
        return jnp.where(jnp.isfinite(g).all(), p - 0.1 * g, p)

    return jax.tree.map(update, params, grads)


@pytest.mark.parametrize(
    ("step", "new_of"),
    [
        (ema_of_the_new, lambda out: out[1]),
        (ema_of_the_old, lambda out: out[1]),
        (swapped, lambda out: {"a": out[1]["b"], "b": out[1]["a"]}),
        (beside_another_sum, lambda out: out["params"]),
        (skipped_if_not_finite, lambda out: out),
    ],
)  # fmt: skip
def test_an_update_is_that_of_its_parameter_among_results_of_one_shape(step: Any, new_of: Any) -> None:
    messages, out = updates_of(step, TWO, jax.tree.map(jnp.zeros_like, TWO), X, where="params/*")
    new = new_of(out)
    assert list(messages) == ["update params/a", "update params/b"]
    for name in "ab":
        np.testing.assert_allclose(
            messages[f"update params/{name}"], new[name] - TWO[name], atol=1e-7, err_msg=name
        )


def test_a_gradient_is_no_update() -> None:
    with pytest.raises(ValueError, match=r"where='params/\*' matches no update(.|\n)*params/a"):
        updates_of(lambda params, x: gradients_of_two(params, x), TWO, X, where="params/*")


def test_a_module_whose_operations_other_layers_run_too_has_one_cotangent() -> None:
    def norm(params: Any, x: Any) -> Any:
        mean, square = x.mean(-1, keepdims=True), (x * x).mean(-1, keepdims=True)
        centered = x - mean  # without a parameter: its backward pass must be found by where its result goes
        return centered * (jax.lax.rsqrt(square - mean * mean + 1e-5) * params["scale"]) + params["bias"]

    def of_layers(params: Any, added: Any, x: Any) -> Any:
        for layer, more in zip(params, added, strict=True):
            x = (norm(layer["norm"], x) + more) @ layer["linear"]["w"]
        return jnp.mean(x**2)

    one = {"scale": jnp.full(WIDTH, 1.1), "bias": jnp.full(WIDTH, 0.2)}
    params = [{"norm": one, "linear": {"w": next(_normal)}} for _ in range(LAYERS)]
    added = [jnp.zeros_like(X)] * LAYERS
    messages: list[Any] = []
    with hcb.outfeed_receiver():
        with hcb.observe(where="*/norm", what=["norm"], what_of="grad", tap_func=messages.append):
            jax.block_until_ready(jax.jit(jax.grad(of_layers))(params, added, X))
    (found,) = messages
    expected = {
        f"grad {i}/norm": jnp.linalg.norm(g) for i, g in enumerate(jax.grad(of_layers, 1)(params, added, X))
    }
    assert {*found} == {*expected}
    for label, value in expected.items():
        np.testing.assert_allclose(found[label]["norm"], value, rtol=1e-5)

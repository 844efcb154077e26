"""Gradients of modules and parameters in a scan over layers: the values are those computed by hand."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

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

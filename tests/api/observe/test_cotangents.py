"""`observe(what_of="grad")`: each row is the cotangent of the output of that label, as JAX computes it by itself.

Each program adds a zero to what leaves a place. The gradient of that zero is the cotangent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec as P

import hostcallback as hcb

Program = Callable[[Any, Sequence[Any], list[Any]], Any]
"""Of the weights, the zeros, and a list to which it adds the outputs of the place; returns a loss."""

X = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)
WEIGHTS = [0.5 * jax.random.normal(key, (3, 3)) for key in jax.random.split(jax.random.key(0), 3)]
ZEROS = [jnp.zeros((2, 3))] * 6


def named(function: Callable[..., Any], name: str = "layer") -> Callable[..., Any]:
    return jax.named_scope(name)(function)


def dense(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w)


def observed(program: Program, where: Any, arguments: Any = 0) -> tuple[dict[str, Any], dict[str, Any]]:
    """By label, the outputs and the cotangents of a place in a training step."""
    messages: list[Any] = []
    step = jax.jit(jax.value_and_grad(lambda ws, zeros: program(ws, zeros, []), arguments))
    with hcb.outfeed_receiver():
        with hcb.observe(where=where, what="value", what_of=["output", "grad"], tap_func=messages.append):
            jax.block_until_ready(step(WEIGHTS, ZEROS))
        hcb.barrier_wait()
    [message] = messages
    outputs = {label: value for label, value in message.items() if not label.startswith("grad ")}
    return outputs, {label[5:]: value for label, value in message.items() if label not in outputs}


def by_jax(program: Program) -> tuple[list[Any], list[Any]]:
    """The outputs, and the cotangents of these."""

    def run(zeros: Any) -> Any:
        outputs: list[Any] = []
        return program(WEIGHTS, zeros, outputs), outputs

    _, pullback, outputs = jax.vjp(run, ZEROS, has_aux=True)
    (cotangents,) = pullback(jnp.float32(1))
    return outputs, cotangents[: len(outputs)]


def assert_rows_are_of_their_outputs(
    program: Program, where: Any, *, missing: Sequence[int] = (), arguments: Any = 0
) -> None:
    outputs, cotangents = observed(program, where, arguments)
    expected = list(zip(*by_jax(program), strict=True))
    assert len(outputs) == len(expected)
    for label, output in outputs.items():
        [(i, (_, cotangent))] = [
            each for each in enumerate(expected) if np.allclose(each[1][0], output, rtol=1e-5, atol=1e-6)
        ]
        assert (i in missing) == (label not in cotangents), (label, list(cotangents))
        if i not in missing:
            np.testing.assert_allclose(cotangents.pop(label), cotangent, rtol=1e-4, atol=1e-6, err_msg=label)
    assert not cotangents


def regularized(ws: Any, zeros: Any, outputs: list[Any]) -> Any:
    y = named(dense, "encoder")(ws[0], X)
    outputs.append(y)
    return jnp.sum((y + zeros[0]) ** 2) + 0.01 * jnp.sum(ws[0] ** 2)


def used_twice(ws: Any, zeros: Any, outputs: list[Any]) -> Any:
    y = named(dense, "encoder")(ws[0], X)
    outputs.append(y)
    y = y + zeros[0]
    return jnp.sum(y**2) + jnp.sum(jnp.sin(y @ ws[1])) + jnp.sum(y * ws[2][0])


def two_outputs(ws: Any, zeros: Any, outputs: list[Any]) -> Any:
    with jax.named_scope("encoder"):
        y = jnp.tanh(X @ ws[0])
        z = jnp.sin(y @ ws[1])
    outputs += [y, z]
    return jnp.sum((y + zeros[0]) ** 2) + jnp.sum((z + zeros[1]) ** 3)


def towers(ws: Any, zeros: Any, outputs: list[Any]) -> Any:
    outputs += [named(dense, "encoder/left")(ws[0], X), named(dense, "encoder/right")(ws[1], X)]
    return jnp.sum(sum(y + zero for y, zero in zip(outputs, zeros, strict=False)) ** 2)


def several(made: Callable[[Any], Sequence[Any]]) -> Program:
    """Of a place whose outputs have one type, and are made by one operation."""

    def program(ws: Any, zeros: Any, outputs: list[Any]) -> Any:
        with jax.named_scope("encoder"):
            outputs += made(ws)
        parts = [y + zero for y, zero in zip(outputs, zeros, strict=False)]
        return jnp.mean((jnp.sin(parts[0]) * jnp.cos(parts[1]) + parts[-1]) ** 2)

    return program


def scanned(ws: Any) -> Any:
    def body(carry: Any, _: Any) -> Any:
        h, c = carry
        c = jnp.tanh(c + h @ ws[0])
        return (jnp.sin(c) @ ws[1], c), None

    return jax.lax.scan(body, (X, X), None, 3)[0]


ONE_OPERATION: dict[str, Callable[[Any], Sequence[Any]]] = {
    "split": lambda ws: jnp.split(X @ jnp.concatenate(ws, 1), 3, axis=1),
    "jit": lambda ws: jax.jit(lambda: (jnp.tanh(X @ ws[0]), jnp.tanh(X @ ws[1])))(),
    "checkpoint": lambda ws: jax.checkpoint(lambda ws: (dense(ws[0], X), X @ ws[1]))(ws),
    "cond": lambda ws: jax.lax.cond(ws[0][0, 0] > 9, lambda: (X, X), lambda: (dense(ws[0], X), X @ ws[1])),
    "scan": scanned,
    "slices": lambda ws: [(X @ jnp.concatenate(ws, 1))[:, 3 * i : 3 * i + 3] for i in range(3)],
}


@pytest.mark.parametrize("made", ONE_OPERATION.values(), ids=ONE_OPERATION.keys())
def test_outputs_of_one_operation_have_their_own_cotangents(made: Any) -> None:
    assert_rows_are_of_their_outputs(several(made), "encoder")


def in_a_shard_map(ws: Any, zeros: Any, outputs: list[Any]) -> Any:
    def shard(ws: Any, zeros: Any) -> Any:
        inside: list[Any] = []
        return regularized(ws, zeros, inside), inside

    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    loss, inside = jax.shard_map(shard, mesh=mesh, in_specs=P(), out_specs=P())(ws, zeros)
    outputs += [y[None] for y in inside]  # a row has an axis of devices
    return loss


@pytest.mark.parametrize(
    ("program", "where"),
    [(regularized, "encoder"), (used_twice, "encoder"), (two_outputs, "encoder"), (towers, "encoder/*")],
)
def test_a_place_has_the_cotangents_of_its_outputs(program: Program, where: str) -> None:
    assert_rows_are_of_their_outputs(program, where)


def test_a_place_in_a_shard_map_has_the_cotangents_of_its_outputs() -> None:
    outputs, cotangents = observed(in_a_shard_map, "encoder")
    assert list(outputs) == list(cotangents) == ["encoder"]
    np.testing.assert_allclose(cotangents["encoder"], 2 * outputs["encoder"], rtol=1e-5)


def residual(layer: Callable[..., Any], *, shared: bool = False) -> Program:
    def program(ws: Any, zeros: Any, outputs: list[Any]) -> Any:
        x = X + ws[2][:2]
        for w, zero in zip([ws[0]] * 3 if shared else ws, zeros, strict=False):
            outputs.append(layer(w, x))
            x = x + (outputs[-1] + zero)
        return jnp.sum(x**2)

    return program


def biased(w: Any, x: Any) -> Any:
    return x @ w + w[0]


def multiplied(w: Any, x: Any) -> Any:
    return 2 * x


@jax.custom_vjp
def customized(w: Any, x: Any) -> Any:
    return dense(w, x)


def customized_backward(kept: Any, cotangent: Any) -> Any:
    w, x, y = kept
    cotangent = cotangent * (1 - y * y)
    return x.T @ cotangent, cotangent @ w.T


customized.defvjp(lambda w, x: (dense(w, x), (w, x, dense(w, x))), customized_backward)


@jax.custom_vjp
def clipped(x: Any) -> Any:
    return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.01, 0.01),))


@pytest.mark.slow_variants(every=2)
@pytest.mark.parametrize("shared", [False, True], ids=["weights", "shared"])
@pytest.mark.parametrize(
    ("layer", "where"),
    [
        (named(dense), "layer"),
        (named(jax.vmap(dense, (None, 0))), "layer"),
        (jax.jit(named(dense)), "layer"),
        (jax.jit(dense), "jit:dense"),
        (jax.checkpoint(named(dense)), "layer"),
        (named(jax.checkpoint(dense)), "layer"),
        (named(biased), "layer"),
        (named(multiplied), "layer"),
        (named(customized), "layer"),
        (named(lambda w, x: clipped(x @ w)), "layer"),
        (named(lambda w, x: dense(w, clipped(x))), "layer"),
    ],
    ids=[
        "scope",
        "vmap",
        "jit",
        "jit kind",
        "remat",
        "remat in it",
        "bias",
        "linear",
        "custom",
        "clipped",
        "clipped input",
    ],
)
def test_layers_of_one_name_have_a_cotangent_each(layer: Any, where: str, shared: bool) -> None:
    assert_rows_are_of_their_outputs(residual(layer, shared=shared), where)


def wrapped(program: Program, transform: Any) -> Program:
    def run(ws: Any, zeros: Any, outputs: list[Any]) -> Any:
        def inner(ws: Any, zeros: Any) -> Any:
            inside: list[Any] = []
            return program(ws, zeros, inside), inside

        loss, inside = transform(inner)(ws, zeros)
        outputs += inside
        return loss

    return run


@pytest.mark.parametrize("transform", [jax.jit, jax.checkpoint])
@pytest.mark.parametrize("shared", [False, True], ids=["weights", "shared"])
def test_layers_have_a_cotangent_each_where_the_whole_loss_is_a_call(transform: Any, shared: bool) -> None:
    assert_rows_are_of_their_outputs(wrapped(residual(named(dense), shared=shared), transform), "layer")


def chain(ws: Any, zeros: Any, outputs: list[Any]) -> Any:
    x = X
    for w, zero in zip(ws, zeros, strict=False):
        outputs.append(named(dense)(w, x))
        x = outputs[-1] + zero + 1
    return jnp.sum(x**2)


def of_all_before(ws: Any, zeros: Any, outputs: list[Any]) -> Any:
    layer = named(lambda w, x, ys: jnp.tanh(sum(ys, x) @ w))
    x, ys = X, []
    for w, zero in zip(ws, zeros, strict=False):
        outputs.append(layer(w, x, ys))
        ys.append(outputs[-1] + zero)
        x = 1.5 * x + ys[-1]
    return jnp.sum(x**2)


def two_losses(ws: Any, zeros: Any, outputs: list[Any]) -> Any:
    return residual(named(dense))(ws, zeros, outputs) + jnp.sum(jnp.cos(outputs[-1] + zeros[2]))


@pytest.mark.parametrize("program", [chain, of_all_before, two_losses])
def test_layers_have_a_cotangent_each_in_other_networks(program: Program) -> None:
    assert_rows_are_of_their_outputs(program, "layer")


def of_nested(ws: Any, zeros: Any, outputs: list[Any]) -> Any:
    def block(w: Any, x: Any, zero: Any) -> Any:
        outputs.append(named(jnp.sin, "inner")(x @ w))
        return jnp.tanh(outputs[-1] + zero)

    x = X
    for w, zero in zip(ws, zeros, strict=False):
        x = x + named(block, "outer")(w, x, zero)
    return jnp.sum(x**2)


def test_a_place_in_layers_of_one_name_has_a_cotangent_each() -> None:
    assert_rows_are_of_their_outputs(of_nested, "inner")


def scanned(ws: Any, zeros: Any, outputs: list[Any]) -> Any:
    def body(x: Any, given: Any) -> Any:
        w, *zeros = given
        ys = []
        for zero in zeros:
            ys.append(named(dense)(w, x))
            x = x + (ys[-1] + zero)
        return x, ys

    x, ys = jax.lax.scan(body, X, (jnp.stack(ws), *zeros))
    outputs += ys
    return jnp.sum(x**2)


def test_layers_in_the_body_of_a_scan_have_a_cotangent_each() -> None:
    zeros = [jnp.zeros((3, 2, 3))] * 2

    def run(zeros: Any) -> Any:
        outputs: list[Any] = []
        return scanned(WEIGHTS, zeros, outputs), outputs

    _, pullback, expected = jax.vjp(run, zeros, has_aux=True)
    (expected_cotangents,) = pullback(jnp.float32(1))
    outputs, cotangents = observed(lambda ws, _, outputs: scanned(ws, zeros, outputs), "layer")
    assert set(outputs) == set(cotangents) == {"layer[0]", "layer[1]"}
    for i in range(2):
        np.testing.assert_allclose(outputs[f"layer[{i}]"], expected[i], rtol=1e-5)
        np.testing.assert_allclose(cotangents[f"layer[{i}]"], expected_cotangents[i], rtol=1e-4)


def frozen_first(ws: Any, zeros: Any, outputs: list[Any]) -> Any:
    x = X
    for i, (w, zero) in enumerate(zip(ws, zeros, strict=False)):
        outputs.append(named(dense)(w if i else jax.lax.stop_gradient(w), x))
        x = x + (outputs[-1] + zero)
    return jnp.sum(x**2)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, jax.checkpoint], ids=["plain", "jit", "remat"])
def test_a_layer_without_a_derivative_leaves_the_labels_of_others_alone(transform: Any) -> None:
    assert_rows_are_of_their_outputs(wrapped(frozen_first, transform), "layer", missing=[0])


def used_inside_and_outside(ws: Any, zeros: Any, outputs: list[Any]) -> Any:
    y = named(dense, "encoder")(ws[0], X)
    twice = y + zeros[0]
    loss = jnp.sum(twice**2)
    z = named(lambda w, y: jnp.sin(y @ w), "encoder")(ws[1], y)
    outputs += [y, z]
    return loss + jnp.sum((z + zeros[1]) ** 3) + jnp.sum(jnp.sin(twice))


def test_a_sum_of_cotangents_that_no_operation_computes_is_left_out() -> None:
    # Before 0.12 JAX adds the cotangent from within the place to one of those from outside of it first.
    _, cotangents = observed(used_inside_and_outside, "encoder")
    missing = [] if "encoder[0]" in cotangents else [0]
    assert missing or jax.__version_info__ >= (0, 12)
    assert_rows_are_of_their_outputs(used_inside_and_outside, "encoder", missing=missing)


def test_two_gradients_in_one_program_have_a_cotangent_each() -> None:
    def encoded(w: Any, x: Any) -> Any:
        return named(dense, "encoder")(w, x)

    def program(w: Any) -> Any:
        first = jax.value_and_grad(lambda w: jnp.sum(encoded(w, X) ** 2))(w)
        return first, jax.value_and_grad(lambda w: jnp.sum(jnp.sin(encoded(w, 2 * X))))(w)

    messages: list[Any] = []
    with hcb.outfeed_receiver():
        with hcb.observe(where="encoder", what="value", what_of=["output", "grad"], tap_func=messages.append):
            jax.block_until_ready(jax.jit(program)(WEIGHTS[0]))
        hcb.barrier_wait()
    [message] = messages
    assert list(message) == ["encoder[0]", "encoder[1]", "grad encoder[0]", "grad encoder[1]"]
    np.testing.assert_allclose(message["grad encoder[0]"], 2 * dense(WEIGHTS[0], X), rtol=1e-5)
    np.testing.assert_allclose(message["grad encoder[1]"], jnp.cos(dense(WEIGHTS[0], 2 * X)), rtol=1e-5)


def test_a_place_whose_cotangent_is_a_constant_is_said_to_be_there() -> None:
    @jax.grad
    def gradient(w: Any) -> Any:
        with jax.named_scope("loss"):
            return jnp.mean(w**2)

    with pytest.raises(
        ValueError, match=r"where='loss' matches no grad .* There is such a place, but"
    ) as raised:
        hcb.observe(jax.jit(gradient), where="loss", what_of="grad")(WEIGHTS[0])
    assert "nearest" not in str(raised.value)


def test_a_place_that_is_only_computed_again_is_said_to_be_there() -> None:
    @jax.grad
    def gradient(w: Any) -> Any:
        return jnp.sum(jax.checkpoint(named(lambda w: jnp.sin(jnp.sin(w))))(w))

    with pytest.raises(ValueError, match=r"where='layer' matches no output .* There is such a place, but"):
        hcb.observe(jax.jit(gradient), where="layer")(WEIGHTS[0])

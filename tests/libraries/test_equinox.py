"""equinox: modules are tapped whole, and taps work inside its filtered transformations."""

from __future__ import annotations

import enum
import functools
import sys
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hostcallback as hcb
from recorder import Recorder
from transforming import JVP, TRANSPOSE, Jit, no_jit


def filtered(jit: Jit) -> Jit:
    """`jit` for functions of modules: the arrays in the arguments are traced, and arrays are returned."""

    def filtered_jit(fun: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            arrays, others = eqx.partition(args, eqx.is_array)
            return jit(lambda arrays: fun(*eqx.combine(arrays, others)))(arrays)

        return call

    return filtered_jit


@pytest.fixture(
    params=[eqx.filter_jit, filtered(jax.jit), filtered(hcb.jit), no_jit],
    ids=["filter_jit", "jax.jit", "hcb.jit", "no jit"],
)
def jit(request: pytest.FixtureRequest) -> Any:
    return request.param


class Mode(enum.Enum):
    TRAIN = 1


class Model(eqx.Module):
    """Leaves of every kind: arrays, a key, activations, Python numbers, objects; and static fields."""

    mlp: eqx.nn.MLP
    dropout: eqx.nn.Dropout
    key: jax.Array
    mode: Mode
    name: str
    shape: tuple[int, ...] = eqx.field(static=True)

    def __init__(self, key: jax.Array) -> None:
        self.mlp = eqx.nn.MLP(2, 1, 4, 1, activation=jax.nn.relu, key=key)
        self.dropout = eqx.nn.Dropout(0.5)
        self.key = key
        self.mode = Mode.TRAIN
        self.name = "model"
        self.shape = (2,)

    def __call__(self, x: Any) -> Any:
        # `Dropout` branches on its fields, so they must not have become tracers.
        return self.mlp(self.dropout(x, key=self.key, inference=self.dropout.inference)).sum()


@pytest.fixture
def model() -> Model:
    return Model(jax.random.key(0))


def tapped(rec: Recorder) -> Callable[[Model, Any], Any]:
    """A loss that taps its whole model before using it."""

    def loss(model: Model, x: Any) -> Any:
        out = hcb.id_tap(rec, model)
        assert type(out) is Model
        assert out.mlp.activation is model.mlp.activation
        assert (out.mode, out.name, out.shape) == (Mode.TRAIN, "model", (2,))
        assert out.dropout.p == 0.5
        assert out.dropout.inference is False
        return out(x)

    return loss


def assert_delivered(got: Any, model: Model) -> None:
    assert type(got) is Model
    assert got.mlp.activation is model.mlp.activation
    assert got.mlp.final_activation is model.mlp.final_activation
    assert (got.mode, got.name, got.shape) == (Mode.TRAIN, "model", (2,))
    assert got.dropout.p == 0.5
    assert not got.dropout.inference
    for ours, theirs in zip(got.mlp.layers, model.mlp.layers, strict=True):
        assert type(ours.weight) is np.ndarray
        np.testing.assert_array_equal(ours.weight, theirs.weight)
        np.testing.assert_array_equal(ours.bias, theirs.bias)
    assert jnp.array_equal(jax.random.key_data(got.key), jax.random.key_data(model.key))


def test_a_module_is_tapped_whole_and_works_on_both_sides(jit: Jit, model: Model, rec: Recorder) -> None:
    x = jnp.array([1.0, 2.0])
    out = jit(tapped(rec))(model, x)
    np.testing.assert_allclose(out, model(x), rtol=1e-6)
    hcb.barrier_wait()
    (got,) = rec.values
    assert_delivered(got, model)
    np.testing.assert_allclose(got(np.array(x)), out, rtol=1e-6)


@pytest.mark.parametrize("gradient", [eqx.filter_grad, eqx.filter_value_and_grad])
def test_filter_grad_taps_the_module_and_its_cotangents(
    jit: Jit, gradient: Any, model: Model, rec: Recorder
) -> None:
    arrays = jit(lambda *args: eqx.filter(gradient(tapped(rec))(*args), eqx.is_array))
    out = arrays(model, jnp.array([1.0, 2.0]))
    grads = out[1] if gradient is eqx.filter_value_and_grad else out
    hcb.barrier_wait()
    assert rec.transforms == [(), (JVP, TRANSPOSE)]
    primal, cotangent = rec.values
    assert_delivered(primal, model)
    assert cotangent.mlp.activation is model.mlp.activation
    for ours, theirs in zip(cotangent.mlp.layers, grads.mlp.layers, strict=True):
        np.testing.assert_array_equal(ours.weight, theirs.weight)
    np.testing.assert_array_equal(cotangent.mlp.layers[1].bias, [1.0])
    assert cotangent.key.dtype == jax.dtypes.float0


def test_filter_vmap_over_the_data_sends_one_message(jit: Jit, model: Model, rec: Recorder) -> None:
    def f(model: Model, x: Any) -> Any:
        return hcb.id_tap(rec, (model, x))[1]

    jit(eqx.filter_vmap(f, in_axes=(None, 0)))(model, jnp.arange(6.0).reshape(3, 2))
    hcb.barrier_wait()
    (got, x) = rec.values[0]
    assert len(rec) == 1
    assert_delivered(got, model)
    np.testing.assert_array_equal(x, np.arange(6.0).reshape(3, 2))
    ((_, params),) = rec.transforms[0]
    assert [d for d in params["batch_dims"] if d is not None] == [0]


@pytest.mark.slow
def test_filter_vmap_over_an_ensemble_of_modules(jit: Jit, rec: Recorder) -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    models = eqx.filter_vmap(Model)(keys)
    out = jit(eqx.filter_vmap(tapped(rec), in_axes=(eqx.if_array(0), None)))(models, jnp.ones(2))
    hcb.barrier_wait()
    (got,) = rec.values
    assert got.mlp.activation is models.mlp.activation
    np.testing.assert_array_equal(got.mlp.layers[0].weight, models.mlp.layers[0].weight)
    assert got.key.shape == (3,)
    assert out.shape == (3,)


@pytest.mark.slow
def test_filter_pmap_taps_on_every_device(rec: Recorder) -> None:
    count = len(jax.devices())
    models = eqx.filter_vmap(Model)(jax.random.split(jax.random.key(0), count))
    out = eqx.filter_pmap(tapped(rec), in_axes=(eqx.if_array(0), None))(models, jnp.ones(2))
    hcb.barrier_wait()
    assert out.shape == (count,)
    assert len(rec) == count
    for index, device in enumerate(jax.devices()):
        (got,) = rec.on(device)
        assert_delivered(got, jax.tree.map(lambda x: x[index] if eqx.is_array(x) else x, models))  # noqa: B023


@pytest.mark.slow
def test_the_other_filtered_transformations(model: Model, rec: Recorder) -> None:
    x = jnp.array([1.0, 2.0])
    expected = model(x)
    loss = tapped(rec)

    assert eqx.filter_eval_shape(loss, model, x).shape == ()
    assert len(rec) == 0
    np.testing.assert_allclose(eqx.filter_closure_convert(loss, model, x)(model, x), expected, rtol=1e-6)
    grads = eqx.filter_grad(eqx.filter_checkpoint(loss))(model, x)
    tangents = jax.tree.map(lambda leaf: jnp.ones_like(leaf) if eqx.is_inexact_array(leaf) else None, model)
    out, _ = eqx.filter_jvp(loss, (model, x), (tangents, x))
    np.testing.assert_allclose(out, expected, rtol=1e-6)
    out, transpose = eqx.filter_vjp(lambda model: loss(model, x), model)
    (cotangent,) = transpose(jnp.ones_like(out))
    hcb.barrier_wait()
    assert rec.transforms == [(), (), (JVP, TRANSPOSE), (), (JVP,), (), (JVP, TRANSPOSE)]
    for got in (rec.values[2], rec.values[6]):
        np.testing.assert_allclose(got.mlp.layers[0].weight, grads.mlp.layers[0].weight, rtol=1e-6)
        np.testing.assert_allclose(got.mlp.layers[0].weight, cotangent.mlp.layers[0].weight, rtol=1e-6)
    np.testing.assert_array_equal(rec.values[4].mlp.layers[0].weight, np.ones((4, 2)))


@pytest.mark.slow_variants
def test_a_training_step_is_tapped_with_its_gradients_and_optimiser_state(jit: Jit, rec: Recorder) -> None:
    optimiser = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
        optax.masked(optax.add_decayed_weights(0.1), lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree)),
    )
    start = eqx.nn.MLP(2, 1, 4, 1, activation=jax.nn.gelu, key=jax.random.key(0))
    x = jnp.array([1.0, 2.0])

    def step(mlp: Any, state: Any) -> Any:
        grads = eqx.filter_grad(lambda mlp: mlp(x).sum())(mlp)
        updates, state = optimiser.update(grads, state, eqx.filter(mlp, eqx.is_array))
        mlp = eqx.apply_updates(mlp, updates)
        mlp, state, _ = hcb.id_tap(rec, (mlp, state, {"grads": grads}))
        return eqx.filter(mlp, eqx.is_array), state

    arrays, others = eqx.partition(start, eqx.is_array)
    state = optimiser.init(arrays)
    trained = []
    for _ in range(3):
        arrays, state = jit(step)(eqx.combine(arrays, others), state)
        trained.append((arrays, state))
    hcb.barrier_wait()
    assert len(rec) == 3
    for (mlp, got, tree), (arrays, state) in zip(rec.values, trained, strict=True):
        assert mlp.activation is start.activation
        np.testing.assert_array_equal(mlp.layers[1].weight, arrays.layers[1].weight)
        assert jax.tree.structure(got) == jax.tree.structure(state)
        for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(state), strict=True):
            np.testing.assert_array_equal(ours, theirs)
        assert type(tree["grads"].layers[0].weight) is np.ndarray
    assert int(rec.values[2][1][1].count) == 3


def test_a_tap_may_be_a_method_of_the_module(rec: Recorder) -> None:
    class Logged(eqx.Module):
        linear: eqx.nn.Linear
        name: str

        def log(self, value: Any, *, device: Any) -> None:
            rec.values.append((self.name, value, device))

        def __call__(self, x: Any) -> Any:
            return self.linear(hcb.id_tap(self.log, x))

    eqx.filter_jit(Logged(eqx.nn.Linear(2, 1, key=jax.random.key(0)), "layer"))(jnp.ones(2))
    hcb.barrier_wait()
    ((name, value, device),) = rec.values
    assert (name, device) == ("layer", jax.devices()[0])
    np.testing.assert_array_equal(value, [1.0, 1.0])


def test_a_tap_that_equinox_calls_is_on_the_line_that_called_equinox() -> None:
    def fail(x: Any) -> None:
        raise ValueError

    line = sys._getframe().f_lineno + 1
    eqx.filter_vmap(functools.partial(hcb.id_tap, fail))(jnp.arange(3.0))
    with pytest.raises(hcb.TapFunctionException) as info:
        hcb.barrier_wait()
    assert info.value.failures[0].source_line.startswith(f"{__file__}:{line} ")


@pytest.mark.slow_variants
def test_tapped_modules_leak_no_tracers(jit: Jit, model: Model, rec: Recorder) -> None:
    with jax.checking_leaks():
        arrays = jit(lambda *args: eqx.filter(eqx.filter_grad(tapped(rec))(*args), eqx.is_array))
        arrays(model, jnp.ones(2))
    hcb.barrier_wait()
    assert len(rec) == 2

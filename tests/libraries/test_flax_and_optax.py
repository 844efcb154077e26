"""flax and optax: modules, states and optimiser states are tapped whole; taps work inside flax's transformations."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import hostcallback as hcb
from recorder import Recorder
from transforming import JVP, TRANSPOSE, Jit, no_jit

with warnings.catch_warnings():
    # flax of the time of JAX 0.8 asks jax for names that are deprecated in it.
    warnings.simplefilter("ignore", DeprecationWarning)
    import flax
    from flax import linen, nnx
    from flax.training import train_state

NNX_JITS = [pytest.param(nnx.jit, id="nnx.jit"), pytest.param(no_jit, id="no jit")]


def assert_same_leaves(got: Any, expected: Any) -> None:
    """Equal arrays, typed keys among them, in the same structure."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        if jax.dtypes.issubdtype(theirs.dtype, jax.dtypes.prng_key):
            assert ours.dtype == theirs.dtype
            ours, theirs = jax.random.key_data(ours), jax.random.key_data(theirs)
        np.testing.assert_array_equal(ours, theirs)


# ---- nnx -------------------------------------------------------------------------------------------------------------


class Net(nnx.Module):
    """Parameters, batch statistics, random state with a typed key, and an activation."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(2, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.Linear(3, 1, rngs=rngs)
        self.activation = jax.nn.relu

    def __call__(self, x: Any) -> Any:
        return self.last(self.dropout(self.activation(self.norm(self.first(x)))))


X = jnp.array([[1.0, 2.0], [3.0, 5.0], [-1.0, 0.5]])


@pytest.mark.parametrize("jit", NNX_JITS)
def test_taps_inside_nnx_jit_and_grad(jit: Jit, rec: Recorder) -> None:
    def loss(net: Net, x: Any) -> Any:
        return hcb.id_tap(rec, net.first(x)).sum()

    net = Net(nnx.Rngs(0))
    expected = net.first(X)
    grads = jit(nnx.grad(loss))(net, X)
    np.testing.assert_array_equal(grads["first"]["bias"][...], [3.0, 3.0, 3.0])
    jit(nnx.value_and_grad(loss))(net, X)
    hcb.barrier_wait()
    assert rec.transforms == [(), (JVP, TRANSPOSE)] * 2
    np.testing.assert_allclose(rec.values[0], expected, rtol=1e-6)
    np.testing.assert_array_equal(rec.values[1], np.ones((3, 3)))


@pytest.mark.parametrize("jit", NNX_JITS)
def test_the_state_of_an_nnx_module_is_tapped_whole(jit: Jit, rec: Recorder) -> None:
    def f(net: Net, x: Any) -> Any:
        graph, state = nnx.split(net)
        state = hcb.id_tap(rec, state)
        return nnx.merge(graph, state).first(x)

    net = Net(nnx.Rngs(0))
    np.testing.assert_allclose(jit(f)(net, X), net.first(X), rtol=1e-6)
    hcb.barrier_wait()
    (got,) = rec.values
    assert isinstance(got, nnx.State)
    assert_same_leaves(got, nnx.state(net))


def test_a_state_is_an_argument_of_any_jit(jit: Jit, rec: Recorder) -> None:
    graph, state = nnx.split(Net(nnx.Rngs(0)))
    out = jit(lambda state: hcb.id_tap(rec, state))(state)
    assert_same_leaves(out, state)
    assert isinstance(nnx.merge(graph, out), Net)
    hcb.barrier_wait()
    assert_same_leaves(rec.values[0], state)


@pytest.mark.parametrize("jit", NNX_JITS)
def test_an_nnx_module_is_tapped_whole_and_works_on_both_sides(jit: Jit, rec: Recorder) -> None:
    def f(net: Net, x: Any) -> Any:
        out = hcb.id_tap(rec, net)
        assert type(out) is Net
        assert out.activation is jax.nn.relu
        return out.first(x)

    net = Net(nnx.Rngs(0))
    expected = net.first(X)
    np.testing.assert_allclose(jit(f)(net, X), expected, rtol=1e-6)
    hcb.barrier_wait()
    (got,) = rec.values
    assert type(got) is Net
    assert got.activation is jax.nn.relu
    assert_same_leaves(nnx.state(got), nnx.state(net))
    np.testing.assert_allclose(got.first(X), expected, rtol=1e-6)


@pytest.mark.parametrize("jit", NNX_JITS)
def test_an_nnx_training_step_is_tapped_with_its_optimiser(jit: Jit, rec: Recorder) -> None:
    net = Net(nnx.Rngs(0))
    optimiser = nnx.Optimizer(net, optax.adam(1e-2), wrt=nnx.Param)

    def step(net: Net, optimiser: Any) -> Any:
        loss, grads = nnx.value_and_grad(lambda net: net(X).sum())(net)
        optimiser.update(net, grads)
        hcb.id_tap(rec, (nnx.state(net), nnx.state(optimiser), grads))
        return loss

    train = jit(step)
    after = []
    for _ in range(2):
        train(net, optimiser)
        # Copies: the states hold the variables, which the next step changes.
        after.append(jax.tree.map(jnp.copy, (nnx.state(net), nnx.state(optimiser))))
    hcb.barrier_wait()
    assert len(rec) == 2
    for (state, optimiser_state, grads), expected in zip(rec.values, after, strict=True):
        assert_same_leaves((state, optimiser_state), expected)
        assert isinstance(grads, nnx.State)


def test_an_nnx_variable_and_a_state_in_a_vmap(rec: Recorder) -> None:
    variable = nnx.Variable(jnp.arange(3.0))
    out = hcb.id_tap(rec, {"variable": variable})
    np.testing.assert_array_equal(out["variable"][...], [0, 1, 2])
    layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    nnx.vmap(lambda layer, x: hcb.id_tap(rec, layer(x)), in_axes=(None, 0))(layer, X)
    hcb.barrier_wait()
    np.testing.assert_array_equal(rec.values[0]["variable"][...], [0, 1, 2])
    np.testing.assert_allclose(rec.values[1], layer(X), rtol=1e-6)
    assert rec.transforms == [(), (("batch", {"batch_dims": (0,)}),)]


@pytest.fixture
def variables() -> Any:
    """A scalar of an optimiser's count, and of its hyperparameters."""
    net = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    optimiser = nnx.Optimizer(net, optax.inject_hyperparams(optax.sgd)(0.5), wrt=nnx.Param)
    step = optimiser.step
    assert isinstance(step, nnx.Variable)
    step[...] = jnp.uint32(3)
    return step, optimiser.opt_state.hyperparams["learning_rate"]


@pytest.mark.parametrize("jit", NNX_JITS)
def test_an_nnx_variable_is_the_step_and_a_value_of_metrics(jit: Jit, variables: Any, tmp_path: Path) -> None:
    def f(step: Any, rate: Any) -> None:
        values = {"lr": rate, "of": {"lr": rate}, "note": hcb.text("{:d}", step)}
        hcb.metrics(values, step=step)

    with hcb.outfeed_receiver(writers=[hcb.csv(tmp_path / "metrics.csv")]):
        jit(f)(*variables)
    assert (tmp_path / "metrics.csv").read_text() == "step,lr,of/lr,note\n3,0.5,0.5,3\n"


@pytest.mark.parametrize("jit", NNX_JITS)
def test_an_nnx_variable_is_a_number_of_texts_and_the_step_of_a_check(jit: Jit, variables: Any) -> None:
    def f(step: Any, rate: Any) -> None:
        hcb.print("step {:d} {} {rate:.2f}", step, step, rate=rate, output_stream=printed)
        hcb.print("{0.shape} {0}", step, output_stream=printed)
        hcb.check(rate[...] > 1, "{:.1f} at {step}", rate, step=step)

    printed = io.StringIO()
    with hcb.outfeed_receiver(on_error="warn") as receiver:
        jit(f)(*variables)
    first, second = printed.getvalue().split("\n", 1)
    assert first == "step 3 3 0.50"
    # Of an argument whose attribute a placeholder takes, both are as it is.
    assert second.startswith(f"() {type(variables[0]).__name__}(")
    (check,) = receiver.failed_checks
    assert (check.explanation.text, check.step, check.steps) == ("0.5 at 3", 3, [3])
    assert str(check) == check.report()


@pytest.mark.parametrize("jit", NNX_JITS)
def test_a_tapped_nnx_variable_called_step_is_the_step_in_the_log(
    jit: Jit, variables: Any, rec: Recorder, tmp_path: Path
) -> None:
    with hcb.outfeed_receiver(record=tmp_path):
        jit(lambda step: hcb.id_tap(rec, {"step": step}))(variables[0])
    (got,) = rec.values
    assert type(got["step"]) is type(variables[0])
    (message,) = hcb.receiver.LogReader(tmp_path).messages()
    assert message.step == 3


# ---- linen -----------------------------------------------------------------------------------------------------------


class Layers(linen.Module):
    """Two layers, with a tap in between."""

    rec: Any

    @linen.compact
    def __call__(self, x: Any) -> Any:
        x = hcb.id_tap(self.rec, linen.Dense(3)(x), place="between")
        x = linen.Dropout(0.5, deterministic=False)(x)
        return linen.Dense(1)(x).sum()


RNGS = {"params": jax.random.key(0), "dropout": jax.random.key(1)}


@pytest.mark.parametrize("frozen", [False, True])
def test_the_parameters_of_a_linen_module_are_tapped_whole(jit: Jit, frozen: bool, rec: Recorder) -> None:
    layers = Layers(Recorder())
    variables = layers.init(RNGS, X)
    if frozen:
        variables = flax.core.freeze(variables)

    def loss(variables: Any) -> Any:
        return layers.apply(hcb.id_tap(rec, variables), X, rngs=RNGS)

    grads = jit(jax.grad(loss))(variables)
    hcb.barrier_wait()
    assert rec.transforms == [(), (JVP, TRANSPOSE)]
    assert type(rec.values[0]) is type(variables)
    assert_same_leaves(rec.values[0], variables)
    assert_same_leaves(rec.values[1], grads)


def test_taps_inside_a_linen_module_and_its_transformations(jit: Jit, rec: Recorder) -> None:
    layers = Layers(rec)
    variables = layers.init(RNGS, X)
    jit(jax.grad(lambda variables: layers.apply(variables, X, rngs=RNGS)))(variables)
    jit(lambda variables: linen.remat(Layers)(rec).apply(variables, X, rngs=RNGS))(variables)
    hcb.barrier_wait()
    assert [kwargs["place"] for kwargs in rec.kwargs] == ["between"] * 4
    assert rec.transforms == [(), (), (JVP, TRANSPOSE), ()]
    dense = variables["params"]["Dense_0"]
    for value in (rec.values[0], rec.values[1], rec.values[3]):
        np.testing.assert_allclose(value, X @ dense["kernel"] + dense["bias"], rtol=1e-6)


def test_a_train_state_is_tapped_whole(jit: Jit, rec: Recorder) -> None:
    layers = Layers(Recorder())
    params = layers.init(RNGS, X)["params"]
    start = train_state.TrainState.create(apply_fn=layers.apply, params=params, tx=optax.adam(1e-2))

    def step(state: Any) -> Any:
        grads = jax.grad(lambda p: state.apply_fn({"params": p}, X, rngs=RNGS))(state.params)
        return hcb.id_tap(rec, state.apply_gradients(grads=grads))

    state = start
    for count in range(1, 3):
        state = jit(step)(state)
        hcb.barrier_wait()
        got = rec.values[-1]
        assert isinstance(got, train_state.TrainState)
        assert int(got.step) == int(state.step) == count
        assert got.apply_fn == start.apply_fn
        assert got.tx is start.tx
        assert_same_leaves((got.params, got.opt_state), (state.params, state.opt_state))


# ---- optax -----------------------------------------------------------------------------------------------------------

OPTIMISERS = {
    "sgd": lambda: optax.sgd(0.1),
    "adamw with a schedule": lambda: optax.adamw(optax.cosine_decay_schedule(0.1, 10)),
    "chain": lambda: optax.chain(optax.clip(1.0), optax.scale_by_adam(), optax.scale(-0.1)),
    "masked": lambda: optax.masked(optax.adam(0.1), {"w": True, "b": False}),
    "partition": lambda: optax.partition(
        {"a": optax.adam(0.1), "b": optax.set_to_zero()}, {"w": "a", "b": "b"}
    ),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(
        learning_rate=optax.linear_schedule(0.1, 0.0, 10)
    ),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(0.1), every_k_schedule=2),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(0.1), 3),
    "noise": lambda: optax.add_noise(0.1, 0.5, jax.random.key(0)),
}


@pytest.mark.slow_variants(every=3)
@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_optimiser_states_are_tapped_whole_in_a_loop(jit: Jit, optimiser: str, rec: Recorder) -> None:
    tx = OPTIMISERS[optimiser]()
    params = {"w": jnp.ones((2, 2)), "b": jnp.zeros(2)}
    state = tx.init(params)

    def step(carry: Any, _: Any) -> Any:
        params, state = carry
        grads = jax.grad(lambda p: ((X @ p["w"] + p["b"]) ** 2).sum())(params)
        updates, state = tx.update(grads, state, params)
        params, state = hcb.id_tap(rec, (optax.apply_updates(params, updates), state))
        return (params, state), None

    last, _ = jit(lambda carry: lax.scan(step, carry, None, length=3))((params, state))
    hcb.barrier_wait()
    assert len(rec) == 3
    for got in rec.values:
        assert jax.tree.structure(got) == jax.tree.structure(last)
    assert_same_leaves(rec.values[-1], last)
    assert not np.array_equal(rec.values[0][0]["w"], rec.values[1][0]["w"]) or optimiser == "MultiSteps"


@pytest.mark.slow
@pytest.mark.parametrize("jit", NNX_JITS)
def test_tapped_nnx_modules_leak_no_tracers(jit: Jit, rec: Recorder) -> None:
    def loss(net: Net, x: Any) -> Any:
        return hcb.id_tap(rec, net)(x).sum()

    with jax.checking_leaks():
        jit(nnx.grad(loss))(Net(nnx.Rngs(0)), X)
    hcb.barrier_wait()
    assert rec.transforms[0] == ()

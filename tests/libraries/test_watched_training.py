"""`watch_nonfinite` around trainings of real libraries: they are the same to the bit, and a NaN is found."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import hostcallback as hcb

with warnings.catch_warnings():
    # flax of the time of JAX 0.8 asks jax for names that are deprecated in it.
    warnings.simplefilter("ignore", DeprecationWarning)
    from flax import linen, nnx

eqx = pytest.importorskip("equinox")

X = jax.random.normal(jax.random.key(1), (8, 6))
Y = jnp.ones((8, 2))
OPTIMIZER = optax.adam(1e-2)
Training = tuple[Callable[[Any], Any], Callable[[], Any]]
"""A step, which takes a batch and returns the loss, and what returns the values to compare."""


def numbers(tree: Any) -> list[np.ndarray[Any, Any]]:
    leaves = jax.tree.leaves(tree)
    keys = [jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in leaves if isinstance(leaf, jax.Array)]
    arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
    return [np.asarray(jax.random.key_data(a) if k else a) for a, k in zip(arrays, keys, strict=True)]


# ---- The trainings ---------------------------------------------------------------------------------------------------


class NnxNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(6, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.second = nnx.Linear(8, 2, rngs=rngs)
        self.calls = nnx.Variable(jnp.int32(0))

    def __call__(self, x: Any) -> Any:
        self.calls[...] += 1
        return self.second(self.dropout(jax.nn.relu(self.norm(self.first(x)))))


def nnx_training() -> Training:
    model = NnxNet(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any, x: Any) -> Any:
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean((jnp.log(x + 9)[:, :2] - model(x)) ** 2))(
            model
        )
        optimizer.update(model, grads)
        return loss

    return functools.partial(step, model, optimizer), lambda: (nnx.state(model), nnx.state(optimizer))


class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        x = linen.BatchNorm(use_running_average=False)(linen.Dense(8)(x))
        return linen.Dense(2)(linen.Dropout(0.5, deterministic=False)(linen.relu(x)))


def stepping(loss: Callable[..., Any], params: Any, **options: Any) -> Training:
    """A training with optax: `loss(params, x)`."""
    state = (params, OPTIMIZER.init(params))

    def step(state: Any, x: Any) -> Any:
        params, opt_state = state
        value, grads = jax.value_and_grad(loss)(params, x)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    jitted = jax.jit(step, **options)

    def one(x: Any) -> Any:
        nonlocal state
        state, value = jitted(state, x)
        return value

    return one, lambda: state


def linen_training() -> Training:
    net = LinenNet()
    variables = net.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, X)

    def loss(params: Any, x: Any) -> Any:
        out, _ = net.apply(
            {**variables, "params": params}, x, mutable=["batch_stats"], rngs={"dropout": jax.random.key(2)}
        )
        return jnp.mean((jnp.log(x + 9)[:, :2] - out) ** 2)

    return stepping(loss, variables["params"])


def equinox_training() -> Training:
    model = eqx.nn.MLP(6, 2, 8, 2, key=jax.random.key(0))
    opt_state = OPTIMIZER.init(eqx.filter(model, eqx.is_array))

    @eqx.filter_jit
    def step(model: Any, opt_state: Any, x: Any) -> Any:
        loss = eqx.filter_value_and_grad(
            lambda model: jnp.mean((jnp.log(x + 9)[:, :2] - jax.vmap(model)(x)) ** 2)
        )
        value, grads = loss(model)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, model)
        return eqx.apply_updates(model, updates), opt_state, value

    def one(x: Any) -> Any:
        nonlocal model, opt_state
        model, opt_state, value = step(model, opt_state, x)
        return value

    return one, lambda: (eqx.filter(model, eqx.is_array), opt_state)


def haiku_training() -> Training:
    haiku = pytest.importorskip("haiku")
    net = haiku.without_apply_rng(haiku.transform(lambda x: haiku.nets.MLP([8, 2])(x)))
    return stepping(
        lambda params, x: jnp.mean((jnp.log(x + 9)[:, :2] - net.apply(params, x)) ** 2),
        net.init(jax.random.key(0), X),
    )


def layers(dtype: Any = jnp.float32) -> Any:
    return {"w": (jax.random.normal(jax.random.key(0), (4, 6, 6)) * 0.3).astype(dtype)}


def scanned_training(**options: Any) -> Training:
    def loss(params: Any, x: Any) -> Any:
        @jax.checkpoint
        def layer(h: Any, w: Any) -> Any:
            return jnp.tanh(h @ w), None

        return jnp.mean((jnp.log(x + 9) - lax.scan(layer, x, params["w"])[0]) ** 2)

    return stepping(loss, layers(), **options)


@jax.custom_vjp
def clipped(x: Any) -> Any:
    return x


clipped.defvjp(lambda x: (x, None), lambda _, ct: (jnp.clip(ct, -0.1, 0.1),))


def custom_vjp_in_bfloat16() -> Training:
    def loss(params: Any, x: Any) -> Any:
        h = clipped(x.astype(jnp.bfloat16) @ params["w"][0])
        return jnp.mean((jnp.log(x.astype(jnp.bfloat16) + 9) - h) ** 2).astype(jnp.float32)

    return stepping(loss, layers(jnp.bfloat16))


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()), ("d",))


def sharded_training() -> Training:
    one, state = scanned_training()
    return lambda x: one(jax.device_put(x, NamedSharding(mesh(), P("d")))), state


def shard_map_training() -> Training:
    def per_device(params: Any, x: Any) -> Any:
        return lax.pmean(jnp.mean((jnp.log(x + 9) - jnp.tanh(x @ params["w"][0])) ** 2), "d")

    loss = jax.shard_map(per_device, mesh=mesh(), in_specs=(P(), P("d")), out_specs=P())
    return stepping(loss, layers())


TRAININGS = {
    "nnx": nnx_training,
    "linen": linen_training,
    "equinox": equinox_training,
    "haiku": haiku_training,
    "scan over layers with remat": scanned_training,
    "donated": functools.partial(scanned_training, donate_argnums=0),
    "custom_vjp in bfloat16": custom_vjp_in_bfloat16,
    "automatic sharding": sharded_training,
    "shard_map": shard_map_training,
}


@pytest.mark.parametrize("form", ["around the step", "context"])
@pytest.mark.parametrize("name", TRAININGS)
def test_a_watched_training_is_the_same_to_the_bit(name: str, form: str) -> None:
    plain, plain_state = TRAININGS[name]()
    losses = [plain(X + i / 10) for i in range(10)]
    step, state = TRAININGS[name]()
    if form == "context":
        with hcb.watch_nonfinite():
            watched = [step(X + i / 10) for i in range(10)]
    else:
        watched = [hcb.watch_nonfinite(step)(X + i / 10) for i in range(10)]
    hcb.barrier_wait()
    for ours, theirs in zip(numbers((watched, state())), numbers((losses, plain_state())), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def error_of(run: Callable[[], Any]) -> Any:
    """Runs programs in the context; returns the first report."""
    try:
        with hcb.outfeed_receiver(), hcb.watch_nonfinite():
            run()
    except hcb.TapFunctionException as group:
        return group.exceptions[0]
    raise AssertionError("nothing was reported")


@pytest.mark.parametrize("name", TRAININGS)
def test_the_operation_that_breaks_a_training_is_named(name: str) -> None:
    step, _ = TRAININGS[name]()
    bad = X.at[3, 1].set(-9.0)  # log(0)
    error = error_of(lambda: [step(bad if i == 3 else X) for i in range(5)])
    assert (error.primitive, error.reproduced, error.inf_count) == ("log", True, 1)
    assert error.source_line.file == __file__
    assert dict(error.check.explanation.values) == {"operand 0": "0"}


def test_a_nan_in_the_batch_is_named_by_its_path() -> None:
    step, _ = nnx_training()
    batch = X.at[3, 1].set(jnp.nan)
    assert error_of(lambda: step(batch)).primitive == "input x[3,1]"

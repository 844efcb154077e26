"""Training programs as users write them, of several libraries: run bare, and under features that change nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from program_edits import edits

X = jnp.linspace(-1.0, 1.0, 64).reshape(16, 4)
Y = 2 + jnp.cos(X[:, :3])

Batch = tuple[Any, Any]
"""Inputs, and positive targets, whose logarithm the model learns: a target of 0 breaks the training."""
BATCHES: tuple[Batch, ...] = tuple((X + 0.01 * i, Y) for i in range(10))

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Wraps a step that is jitted already."""


class Trained:
    """What a training left: the leaves of its state, its losses, and how often the user's step was called."""

    def __init__(self, state: Any, losses: list[Any], calls: int) -> None:
        """Fetches everything."""
        self.leaves = [np.asarray(_data(leaf)) for leaf in jax.tree.leaves(state) if hasattr(leaf, "dtype")]
        self.losses = [float(loss) for loss in losses]
        self.calls = calls

    def differences(self, other: Trained, max_ulp: int = 0) -> list[str]:
        """What is not the same to the last bit, or within the given number of units in the last place."""
        found = []
        if self.calls != other.calls:
            found.append(f"the step was called {other.calls} times, not {self.calls}")
        if _ulps(np.float32(self.losses), np.float32(other.losses)) > max_ulp:
            found.append(f"losses {other.losses}, not {self.losses}")
        for i, (mine, theirs) in enumerate(zip(self.leaves, other.leaves, strict=True)):
            if (ulps := _ulps(mine, theirs)) > max_ulp:
                found.append(f"leaf {i} differs by {ulps} ulp")
        return found


def _ulps(a: Any, b: Any) -> int:
    """The largest distance of two arrays in units in the last place; of integers, their difference."""
    if a.dtype != b.dtype or a.shape != b.shape:
        raise ValueError(f"got {b.dtype}{b.shape}, expected {a.dtype}{a.shape}")
    ordered = [_in_order(array) for array in (a, b)]
    return int(np.max(np.abs(ordered[0] - ordered[1]), initial=0))


def _in_order(array: Any) -> Any:
    """Integers in the order of the array's values, neighbours for neighbours; each NaN has its own."""
    bits = array.view(f"i{array.dtype.itemsize}").astype(np.int64)
    is_float = jnp.issubdtype(array.dtype, jnp.floating)
    return np.where(bits < 0, np.iinfo(f"i{array.dtype.itemsize}").min - bits - 1, bits) if is_float else bits


def _data(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


class _Counted:
    """Counts the calls of the user's function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.calls = function, 0
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.function(*args, **kwargs)


def nnx(wrap: Wrap, batches: Sequence[Batch] = BATCHES) -> Trained:
    """flax nnx: modules and an optimizer that the step changes in place, BatchNorm, Dropout with a stream of keys."""
    nnx, optax = pytest.importorskip("flax.nnx"), pytest.importorskip("optax")

    class Net(nnx.Module):  # type: ignore[misc, name-defined]
        def __init__(self, rngs: Any) -> None:
            self.first = nnx.Linear(4, 8, rngs=rngs)
            self.norm = nnx.BatchNorm(8, rngs=rngs)
            self.dropout = nnx.Dropout(0.2, rngs=rngs)
            self.second = nnx.Linear(8, 3, rngs=rngs)
            self.calls = nnx.Variable(jnp.int32(0))

        def __call__(self, x: Any) -> Any:
            self.calls[...] += 1
            return self.second(self.dropout(self.norm(nnx.relu(self.first(x)))))

    def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - jnp.log(y)) ** 2))(model)
        optimizer.update(model, grads)
        edits.log(loss=loss)
        return loss

    counted = _Counted(step)
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    jitted = wrap(nnx.jit(counted))
    losses = [jitted(model, optimizer, x, y) for x, y in batches]
    return Trained((nnx.state(model), nnx.state(optimizer)), losses, counted.calls)


def linen(wrap: Wrap, batches: Sequence[Batch] = BATCHES) -> Trained:
    """flax linen with optax: plain jax.jit, the state donated, BatchNorm, Dropout, a static argument."""
    nn, optax = pytest.importorskip("flax.linen"), pytest.importorskip("optax")

    class Net(nn.Module):  # type: ignore[misc, name-defined]
        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = nn.BatchNorm(use_running_average=False)(nn.Dense(8)(x))
            return nn.Dense(3)(nn.Dropout(0.2, deterministic=False)(nn.relu(x)))

    net, optimizer, key = Net(), optax.adam(1e-2), jax.random.key(0)
    variables = net.init({"params": key, "dropout": key}, X)
    params, stats = variables["params"], variables["batch_stats"]

    def step(params: Any, stats: Any, state: Any, x: Any, y: Any, key: Any, *, scale: float) -> Any:
        def loss_of(params: Any) -> Any:
            out, new = net.apply(
                {"params": params, "batch_stats": stats}, x, rngs={"dropout": key}, mutable=["batch_stats"]
            )
            return scale * jnp.mean((out - jnp.log(y)) ** 2), new["batch_stats"]

        (loss, stats), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        updates, state = optimizer.update(grads, state, params)
        edits.log(loss=loss)
        return optax.apply_updates(params, updates), stats, state, loss

    counted = _Counted(step)
    jitted = wrap(jax.jit(counted, donate_argnums=(0, 1, 2), static_argnames="scale"))
    state, losses = optimizer.init(params), []
    for i, (x, y) in enumerate(batches):
        params, stats, state, loss = jitted(params, stats, state, x, y, jax.random.fold_in(key, i), scale=0.5)
        losses.append(loss)
    return Trained((params, stats, state), losses, counted.calls)


def equinox(wrap: Wrap, batches: Sequence[Batch] = BATCHES) -> Trained:
    """equinox: filter_jit, an activation function among the leaves, a stateful BatchNorm."""
    eqx, optax = pytest.importorskip("equinox"), pytest.importorskip("optax")

    class Net(eqx.Module):  # type: ignore[misc, name-defined]
        mlp: Any
        norm: Any

        def __call__(self, x: Any, state: Any) -> Any:
            return self.norm(self.mlp(x), state)

    mlp = eqx.nn.MLP(4, 3, 8, 1, activation=jax.nn.tanh, key=jax.random.key(0))
    model, state = eqx.nn.make_with_state(lambda: Net(mlp, eqx.nn.BatchNorm(3, "batch", mode="batch")))()
    optimizer = optax.adam(1e-2)

    def loss_of(model: Any, state: Any, x: Any, y: Any) -> Any:
        batched = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        out, state = batched(x, state)
        return jnp.mean((out - jnp.log(y)) ** 2), state

    def step(model: Any, state: Any, of_optimizer: Any, x: Any, y: Any) -> Any:
        (loss, state), grads = eqx.filter_value_and_grad(loss_of, has_aux=True)(model, state, x, y)
        updates, of_optimizer = optimizer.update(grads, of_optimizer)
        edits.log(loss=loss)
        return eqx.apply_updates(model, updates), state, of_optimizer, loss

    counted = _Counted(step)
    jitted = wrap(eqx.filter_jit(counted))
    of_optimizer, losses = optimizer.init(eqx.filter(model, eqx.is_array)), []
    for x, y in batches:
        model, state, of_optimizer, loss = jitted(model, state, of_optimizer, x, y)
        losses.append(loss)
    return Trained(eqx.filter((model, state, of_optimizer), eqx.is_array), losses, counted.calls)


def haiku(wrap: Wrap, batches: Sequence[Batch] = BATCHES) -> Trained:
    """haiku: pure functions, parameters by module name."""
    hk, optax = pytest.importorskip("haiku"), pytest.importorskip("optax")
    net, optimizer = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([8, 3])(x))), optax.sgd(0.1)
    params = net.init(jax.random.key(0), X)

    def loss_of(params: Any, x: Any, y: Any) -> Any:
        return jnp.mean((net.apply(params, x) - jnp.log(y)) ** 2)

    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(params, x, y)
        updates, state = optimizer.update(grads, state)
        edits.log(loss=loss)
        return optax.apply_updates(params, updates), state, loss

    counted = _Counted(step)
    jitted = wrap(jax.jit(counted))
    state, losses = optimizer.init(params), []
    for x, y in batches:
        params, state, loss = jitted(params, state, x, y)
        losses.append(loss)
    return Trained((params, state), losses, counted.calls)


@jax.custom_vjp
def _clipped(x: Any) -> Any:
    return x


_clipped.defvjp(lambda x: (x, None), lambda _, cotangent: (jnp.clip(cotangent, -1.0, 1.0),))


def _attention(params: Any, x: Any) -> Any:
    with jax.named_scope("attention"):
        q, k, v = (x @ params[name] for name in "qkv")
        return jax.nn.softmax(q @ k.T) @ v @ params["out"]


def _mlp(params: Any, x: Any) -> Any:
    with jax.named_scope("mlp"):
        return (
            jax.nn.gelu(x.astype(jnp.bfloat16) @ params["up"].astype(jnp.bfloat16)).astype(x.dtype)
            @ params["down"]
        )


def _transformer_loss(params: Any, x: Any, y: Any) -> Any:
    @jax.checkpoint
    def layer(x: Any, params: Any) -> Any:
        x = x + _attention(params["attention"], x)
        return _clipped(x + _mlp(params["mlp"], x)), None

    x, _ = jax.lax.scan(layer, x, params["layers"])
    return jnp.mean((x @ params["head"] - jnp.log(y)) ** 2)


def _transformer_params(layers: int = 3, width: int = 4) -> Any:
    keys = iter(jax.random.split(jax.random.key(0), 16))
    normal = lambda *shape: 0.3 * jax.random.normal(next(keys), shape)  # noqa: E731
    return {
        "layers": {
            "attention": {name: normal(layers, width, width) for name in ("q", "k", "v", "out")},
            "mlp": {"up": normal(layers, width, 8), "down": normal(layers, 8, width)},
        },
        "head": normal(width, 3),
    }


def _transformer_step(params: Any, x: Any, y: Any) -> Any:
    def accumulate(grads: Any, batch: Any) -> Any:
        loss, more = jax.value_and_grad(_transformer_loss)(params, *batch)
        edits.log(loss=loss)
        return jax.tree.map(jnp.add, grads, more), loss

    batches = jax.tree.map(lambda a: a.reshape(2, -1, *a.shape[1:]), (x, y))
    grads, losses = edits.scan(accumulate, jax.tree.map(jnp.zeros_like, params), batches)
    return jax.tree.map(lambda p, g: p - 0.05 * g, params, grads), losses.mean()


def transformer(wrap: Wrap, batches: Sequence[Batch] = BATCHES) -> Trained:
    """A transformer in plain JAX: scan over layers, remat, custom_vjp, bfloat16, accumulation, donated parameters."""
    counted = _Counted(_transformer_step)
    jitted = wrap(jax.jit(counted, donate_argnums=0))
    params, losses = _transformer_params(), []
    for x, y in batches:
        params, loss = jitted(params, x, y)
        losses.append(loss)
    return Trained(params, losses, counted.calls)


def automatic_sharding(wrap: Wrap, batches: Sequence[Batch] = BATCHES) -> Trained:
    """The transformer with its batch divided over all devices, by the compiler."""
    mesh = Mesh(np.array(jax.devices()), ("batch",))
    divided = NamedSharding(mesh, PartitionSpec("batch"))
    everywhere = NamedSharding(mesh, PartitionSpec())
    params = jax.device_put(_transformer_params(), everywhere)
    counted = _Counted(_transformer_step)
    jitted, losses = wrap(jax.jit(counted, donate_argnums=0)), []
    for batch in batches:
        params, loss = jitted(params, *jax.device_put(batch, divided))
        losses.append(loss)
    return Trained(params, losses, counted.calls)


def sharded_by_hand(wrap: Wrap, batches: Sequence[Batch] = BATCHES) -> Trained:
    """A data-parallel step in shard_map."""
    mesh = Mesh(np.array(jax.devices()), ("batch",))
    spec = PartitionSpec("batch")

    def step(params: Any, x: Any, y: Any) -> Any:
        def on_device(params: Any, x: Any, y: Any) -> Any:
            loss, grads = jax.value_and_grad(_transformer_loss)(params, x, y)
            return jax.lax.pmean(loss, "batch"), jax.lax.pmean(grads, "batch")

        mapped = jax.shard_map(
            on_device,
            mesh=mesh,
            in_specs=(PartitionSpec(), spec, spec),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
        loss, grads = mapped(params, x, y)
        return jax.tree.map(lambda p, g: p - 0.05 * g, params, grads), loss

    counted = _Counted(step)
    jitted, params, losses = wrap(jax.jit(counted)), _transformer_params(), []
    for x, y in batches:
        params, loss = jitted(params, x, y)
        losses.append(loss)
    return Trained(params, losses, counted.calls)


def svi(wrap: Wrap, batches: Sequence[Batch] = BATCHES) -> Trained:
    """numpyro: stochastic variational inference of a regression."""
    numpyro = pytest.importorskip("numpyro")
    from numpyro import distributions as dist
    from numpyro.infer import SVI, Trace_ELBO
    from numpyro.infer.autoguide import AutoNormal

    def model(x: Any, y: Any) -> None:
        weights = numpyro.sample("weights", dist.Normal(jnp.zeros(4), 1.0).to_event(1))
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", dist.Normal(x @ weights, 0.1), obs=jnp.log(y))

    optimizer = SVI(model, AutoNormal(model), numpyro.optim.Adam(0.05), Trace_ELBO())
    state = optimizer.init(jax.random.key(0), X, Y[:, 0])

    def step(state: Any, x: Any, y: Any) -> Any:
        state, loss = optimizer.update(state, x, y)
        edits.log(loss=loss)
        return state, loss

    counted = _Counted(step)
    jitted, losses = wrap(jax.jit(counted)), []
    for x, y in batches:
        state, loss = jitted(state, x, y[:, 0])
        losses.append(loss)
    return Trained(state, losses, counted.calls)


def ode(wrap: Wrap, batches: Sequence[Batch] = BATCHES) -> Trained:
    """diffrax: the gradient of a solution of a differential equation, through its checkpointed while loop."""
    diffrax = pytest.importorskip("diffrax")

    def field(t: Any, y: Any, rate: Any) -> Any:
        with jax.named_scope("field"):
            return -rate * jnp.sin(y)

    def loss_of(rate: Any, y: Any) -> Any:
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(field), diffrax.Tsit5(), 0.0, 1.0, 0.1, jnp.ones(3), args=rate, max_steps=64
        )
        return jnp.mean((solution.ys[-1] - jnp.log(y)) ** 2)

    def step(rate: Any, y: Any) -> Any:
        loss, gradient = jax.value_and_grad(loss_of)(rate, y)
        edits.log(loss=loss)
        return rate - 0.1 * gradient, loss

    counted = _Counted(step)
    jitted, rate, losses = wrap(jax.jit(counted)), jnp.float32(2.0), []
    for _, y in batches:
        rate, loss = jitted(rate, y)
        losses.append(loss)
    return Trained(rate, losses, counted.calls)


PROGRAMS = (nnx, linen, equinox, haiku, transformer, automatic_sharding, sharded_by_hand, svi, ode)

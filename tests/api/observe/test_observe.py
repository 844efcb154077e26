"""`observe`: what it selects, what arrives, and that results are those of the function, under each transformation."""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collecting_writer import CollectingWriter
from jax.sharding import Mesh, PartitionSpec as P

import hostcallback as hcb

WEIGHTS = [jnp.linspace(-0.5, 0.6, 9).reshape(3, 3), jnp.linspace(0.4, -0.3, 9).reshape(3, 3)]
X = jnp.arange(6.0).reshape(2, 3)


def block(w: Any, x: Any) -> Any:
    with jax.named_scope("attention"):
        y = jnp.tanh(x @ w)
    with jax.named_scope("mlp"):
        return jax.nn.relu(y * 2)


def loss(ws: Any, x: Any) -> Any:
    for i, w in enumerate(ws):
        with jax.named_scope(f"layer_{i}"):
            x = block(w, x)
    return jnp.sum(x**2)


def remat_loss(ws: Any, x: Any) -> Any:
    for i, w in enumerate(ws):
        with jax.named_scope(f"layer_{i}"):
            x = jax.checkpoint(block)(w, x)
    return jnp.sum(x**2)


def step_of(loss: Callable[..., Any]) -> Callable[..., Any]:
    def step(ws: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(ws, x)
        return value, jax.tree.map(lambda w, g: w - 0.1 * g, ws, grads)

    return step


def values_of(function: Callable[..., Any], *args: Any, **options: Any) -> tuple[Any, list[dict[str, Any]]]:
    """The results of the jitted, observed function, and the messages it sent."""
    messages: list[dict[str, Any]] = []
    with hcb.outfeed_receiver():
        out = jax.jit(hcb.observe(function, tap_func=messages.append, **options))(*args)
        jax.block_until_ready(out)
        hcb.barrier_wait()
    return out, messages


def assert_same(got: Any, expected: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, got, expected)


@pytest.mark.parametrize("loss", [loss, remat_loss])
def test_activations_and_cotangents_of_a_training_step_arrive_in_one_message(loss: Any) -> None:
    step = step_of(loss)
    out, messages = values_of(step, WEIGHTS, X, where="layer_*", what="value", what_of=["output", "grad"])

    first = block(WEIGHTS[0], X)
    second, pullback = jax.vjp(lambda x: block(WEIGHTS[1], x), first)
    (cotangent,) = pullback(2 * second)
    [message] = messages
    assert list(message) == ["layer_0", "layer_1", "grad layer_1", "grad layer_0"]
    expected = [first, second, 2 * second, cotangent]
    for got, value in zip(message.values(), expected, strict=True):
        np.testing.assert_allclose(got, value, rtol=1e-5, atol=1e-6)
    assert_same(out, jax.jit(step)(WEIGHTS, X))


@pytest.mark.parametrize("loss", [remat_loss, jax.jit(remat_loss)], ids=["plain", "jitted"])
def test_a_cotangent_within_a_checkpoint_has_the_scopes_of_its_output(loss: Any) -> None:
    options = {"where": "mlp", "what": ["norm"], "what_of": ["output", "grad"]}
    _, [message] = values_of(jax.grad(loss), WEIGHTS, X, **options)
    labels = ["layer_0/mlp", "layer_1/mlp"]
    assert list(message) == [*labels, *(f"grad {label}" for label in reversed(labels))]


def test_statistics_are_those_of_numpy() -> None:
    x = jnp.array([[0.0, 1.5, -3.0], [np.nan, np.inf, 0.0]])
    scale = lambda x: jax.named_scope("scaled")(lambda x: x * 2)(x) + 1  # noqa: E731
    names = ["mean", "std", "min", "max", "norm", "zeros", "nonfinite", "histogram"]

    finite = x[:, :1].at[1].set(4.0)
    _, [message] = values_of(scale, finite, where="scaled", what=names)
    y = 2 * np.asarray(finite)
    got = message["scaled"]
    assert list(got) == names
    expected = [y.mean(), y.std(), y.min(), y.max(), np.linalg.norm(y), np.mean(y == 0), 0.0]
    np.testing.assert_allclose([got[name] for name in names[:-1]], expected, rtol=1e-6)
    assert {int(i) - 40: int(got["histogram"][i]) for i in np.flatnonzero(got["histogram"])} == {3: 1}

    _, [message] = values_of(scale, x, where="scaled", what=["nonfinite", "zeros"])
    np.testing.assert_allclose(list(message["scaled"].values()), [2 / 6, 2 / 6])


@pytest.mark.parametrize(
    ("where", "labels"),
    [
        ("attention", ["layer_0/attention", "layer_1/attention"]),
        ("layer_1/mlp", ["layer_1/mlp"]),
        ("dot_general", ["layer_0/attention/dot_general", "layer_1/attention/dot_general"]),
        ("relu", ["layer_0/mlp/relu", "layer_1/mlp/relu"]),
        (lambda site: site.primitive == "tanh", ["layer_0/attention/tanh", "layer_1/attention/tanh"]),
        (["layer_0", "primitive:reduce_sum"], ["layer_0", "reduce_sum@loss:37"]),
        ("function:block", ["block[0]", "block[1]"]),
    ],
)
def test_a_selection_taps_what_leaves_the_selected_places(where: Any, labels: list[str]) -> None:
    out, [message] = values_of(loss, WEIGHTS, X, where=where)
    if "reduce_sum" in labels[-1]:
        labels = [labels[0], f"reduce_sum@loss:{loss.__code__.co_firstlineno + 4}"]
    if labels == ["block[0]", "block[1]"]:  # nothing but the last block's result leaves both calls
        labels = ["block"]
    assert list(message) == labels
    assert_same(out, jax.jit(loss)(WEIGHTS, X))


def test_a_source_line_is_a_place() -> None:
    line = block.__code__.co_firstlineno + 2
    _, [message] = values_of(block, WEIGHTS[0], X, where=f"test_observe.py:{line}", what="value")
    [value] = message.values()
    np.testing.assert_allclose(value, np.tanh(X @ WEIGHTS[0]), rtol=1e-6)


def scanned(ws: Any, x: Any) -> Any:
    def body(x: Any, w: Any) -> Any:
        with jax.named_scope("layer"):
            return jnp.tanh(x @ w), x.sum()

    return jnp.sum(jax.lax.scan(jax.checkpoint(body), x, jnp.stack(ws))[0] ** 2)


@pytest.mark.parametrize("where", ["layer", "scan carry"])
def test_iterations_of_a_scan_are_stacked(where: str) -> None:
    grads, messages = values_of(
        jax.grad(scanned), WEIGHTS, X, where=where, what="value", what_of=["output", "grad"]
    )
    first = np.tanh(X @ WEIGHTS[0])
    second = np.tanh(first @ WEIGHTS[1])
    [message] = messages
    activations, cotangents = message.values()
    np.testing.assert_allclose(activations, [first, second], rtol=1e-5)
    if where == "layer":
        np.testing.assert_allclose(cotangents[1], 2 * second, rtol=1e-5)
    assert_same(grads, jax.jit(jax.grad(scanned))(WEIGHTS, X))


def test_iterations_of_a_while_loop_are_messages() -> None:
    def count(x: Any) -> Any:
        def body(state: Any) -> Any:
            i, x = state
            with jax.named_scope("halve"):
                x = x / 2
            return i + 1, x

        return jax.lax.while_loop(lambda state: state[0] < 3, body, (0, x))[1]

    out, messages = values_of(count, jnp.float32(8), where="halve", what="value")
    assert [float(v) for message in messages for v in message.values()] == [4.0, 2.0, 1.0]
    assert out == 1


@pytest.mark.slow_variants(every=4)
@pytest.mark.parametrize("options", [{"what": "time"}, {"where": "b"}], ids=["time", "statistics"])
@pytest.mark.parametrize("is_batched", [False, True], ids=["one", "vmap"])
@pytest.mark.parametrize("effect", ["ordered tap", "tap", "call", "debug.callback"])
def test_what_a_condition_does_on_the_host_is_done_as_often_as_without_observe(
    effect: str, is_batched: bool, options: dict[str, Any]
) -> None:
    seen: list[Any] = []

    def see(i: Any, *_: Any) -> Any:
        seen.append(np.asarray(i).tolist())
        return np.asarray(i)

    def act(i: Any) -> Any:
        if effect == "call":
            return hcb.call(see, i, result_shape=i, vmap_method="expand_dims")
        if effect == "debug.callback":
            jax.debug.callback(see, i)
        else:
            hcb.id_tap(see, i, ordered=effect == "ordered tap")
        return i

    def count(x: Any, most: Any) -> Any:
        def body(state: Any) -> Any:
            with hcb.span("b"):
                return state[0] + 1, jnp.sin(state[1])

        return jax.lax.while_loop(lambda state: act(state[0]) < most, body, (jnp.int32(0), x))

    function = jax.vmap(count) if is_batched else count
    args = (jnp.ones(2), jnp.array([1, 2])) if is_batched else (1.0, 2)
    outs, found = [], []
    for block in (contextlib.nullcontext(), hcb.observe(tap_func=lambda values: None, **options)):
        with hcb.outfeed_receiver(), block:
            outs.append(jax.block_until_ready(jax.jit(lambda *args: function(*args))(*args)))
            jax.effects_barrier()
        # The order of unordered callbacks is free.
        found.append(sorted(map(str, seen)) if effect == "debug.callback" else list(seen))
        seen.clear()
    assert found[1] == found[0]
    assert is_batched or found[0] == ([*"012"] if effect == "debug.callback" else [0, 1, 2])
    assert_same(*outs)


def test_a_branch_that_did_not_run_is_nan() -> None:
    def f(x: Any) -> Any:
        up = lambda x: jax.named_scope("up")(jnp.exp)(x)  # noqa: E731
        down = lambda x: jax.named_scope("down")(jnp.negative)(x)  # noqa: E731
        return jax.lax.cond(x > 0, up, down, x)

    _, [message] = values_of(f, jnp.float32(1), where=["up", "down"], what=["mean"])
    np.testing.assert_allclose(message["up"]["mean"], np.e, rtol=1e-6)
    assert np.isnan(message["down"]["mean"])


def test_under_vmap_there_is_one_message_of_all_lanes() -> None:
    batch = jnp.stack([X, X + 1, X + 2])
    observe = lambda tap: hcb.observe(  # noqa: E731
        lambda x: loss(WEIGHTS, x), where="layer_0", what=["max"], tap_func=tap
    )
    messages: list[Any] = []
    with hcb.outfeed_receiver():
        jax.block_until_ready(jax.jit(jax.vmap(observe(messages.append)))(batch))
        hcb.barrier_wait()
    [message] = messages
    np.testing.assert_allclose(message["layer_0"]["max"], block(WEIGHTS[0], batch).max(), rtol=1e-6)


@pytest.mark.parametrize("loss", [loss, remat_loss])
def test_cotangents_arrive_if_code_around_the_function_differentiates_it(loss: Any) -> None:
    messages: list[Any] = []
    observed = hcb.observe(
        loss, where="layer_*", what="value", what_of=["output", "grad"], tap_func=messages.append
    )
    with hcb.outfeed_receiver():
        grads = jax.block_until_ready(jax.jit(jax.grad(observed))(WEIGHTS, X))
        hcb.barrier_wait()
    [message] = messages
    assert list(message) == ["layer_0", "layer_1", "grad layer_1", "grad layer_0"]
    np.testing.assert_allclose(message["grad layer_1"], 2 * message["layer_1"], rtol=1e-6)
    assert_same(grads, jax.jit(jax.grad(loss))(WEIGHTS, X))


def test_values_in_shard_map_have_an_axis_of_devices() -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))

    def f(x: Any) -> Any:
        def shard(x: Any) -> Any:
            with jax.named_scope("double"):
                y = x * 2
            return jax.lax.psum(y.sum(), "data") + y

        return jax.shard_map(shard, mesh=mesh, in_specs=P("data"), out_specs=P("data"))(x)

    x = jnp.arange(8.0)
    out, [message] = values_of(f, x, where="double", what=["mean", "max"])
    np.testing.assert_allclose(message["double"]["mean"], [3.0, 11.0])
    np.testing.assert_allclose(message["double"]["max"], [6.0, 14.0])
    assert_same(out, jax.jit(f)(x))


def test_inside_custom_derivatives_values_arrive_and_the_users_rule_holds() -> None:
    @jax.custom_vjp
    def clipped(x: Any) -> Any:
        with jax.named_scope("inner"):
            return x * 3

    clipped.defvjp(lambda x: (clipped(x), None), lambda _, ct: (jnp.clip(ct, -1, 1),))

    @jax.custom_jvp
    def cubed(x: Any) -> Any:
        with jax.named_scope("inner2"):
            return x**3

    cubed.defjvp(lambda p, t: (cubed(p[0]), t[0] * 7))
    f = lambda x: jnp.sum(cubed(clipped(x)))  # noqa: E731
    messages: list[Any] = []
    observed = hcb.observe(f, where=["inner", "inner2"], what=["max"], tap_func=messages.append)
    with hcb.outfeed_receiver():
        value = jax.jit(observed)(X)
        (same_value, grads) = jax.jit(jax.value_and_grad(observed))(X)
        hcb.barrier_wait()
    assert [{k: float(v["max"]) for k, v in m.items()} for m in messages] == [
        {"inner": 15.0, "inner2": 3375.0}
    ] * 2
    assert value == same_value
    assert_same(grads, jax.grad(f)(X))


def test_a_selection_that_matched_one_program_may_match_nothing_in_another() -> None:
    messages: list[Any] = []
    observed = hcb.observe(
        lambda x: 3 * jax.named_scope("inner")(jnp.cos)(x), where="inner", tap_func=messages.append
    )
    with hcb.outfeed_receiver():
        jax.jit(observed)(X)
        jax.jit(lambda x: jax.eval_shape(observed, x) and jax.jvp(lambda x: (observed(x), x)[1], (x,), (x,)))(
            X
        )
        hcb.barrier_wait()
    assert len(messages) == 1


def test_metrics_writers_get_each_statistic_by_name() -> None:
    writer = CollectingWriter()
    step = jax.jit(hcb.observe(step_of(loss), where="layer_*", what=["norm"], tap_func=hcb.metrics))
    with hcb.outfeed_receiver(writers=[writer]):
        for _ in range(2):
            jax.block_until_ready(step(WEIGHTS, X))
    assert [number for number, _ in writer.rows] == [0, 1]
    assert set(writer.rows[0][1]) == {"layer_0/norm", "layer_1/norm"}
    norm = np.linalg.norm(block(WEIGHTS[0], X))
    np.testing.assert_allclose(writer.rows[1][1]["layer_0/norm"], norm, rtol=1e-5)


def test_a_switch_turns_the_taps_off() -> None:
    messages: list[Any] = []
    step = jax.jit(hcb.observe(loss, where="layer_0", tap_func=messages.append, name="switched"))
    with hcb.outfeed_receiver():
        hcb.taps["switched"].disable()
        jax.block_until_ready(step(WEIGHTS, X))
        hcb.barrier_wait()
        hcb.taps["switched"].enable()
        jax.block_until_ready(step(WEIGHTS, X))
        hcb.barrier_wait()
    assert len(messages) == 1


def test_by_default_a_table_is_printed(capsys: Any) -> None:
    with hcb.outfeed_receiver():
        jax.block_until_ready(jax.jit(hcb.observe(loss, where="layer_*"))(WEIGHTS, X))
        hcb.barrier_wait()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["value", "mean", "std", "min", "max", "norm", "zeros", "nonfinite"]
    assert [line.split()[0] for line in lines[1:]] == ["layer_0", "layer_1"]
    assert len({len(line) for line in lines}) == 1  # names stand above their columns


def test_a_selection_that_matches_nothing_names_the_nearest_scopes() -> None:
    with pytest.raises(ValueError, match=r"where='layr_0' matches no output(.|\n)*layer_0\n"):
        jax.jit(hcb.observe(loss, where="layr_0"))(WEIGHTS, X)


def test_a_place_in_an_operation_that_cannot_be_rewritten_is_named_with_its_line() -> None:
    def f(x: Any) -> Any:
        solve = lambda g, b: b / g(jnp.ones_like(b))  # noqa: E731
        with jax.named_scope("outer"):
            return jax.lax.custom_linear_solve(
                lambda y: jax.named_scope("inner")(jnp.multiply)(y, 2.0), x, solve
            )

    with pytest.raises(ValueError, match=r"where='inner' matches only inside of .*test_observe.py"):
        jax.jit(hcb.observe(f, where="inner"))(X)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({}, TypeError),
        ({"where": 3}, TypeError),
        ({"where": []}, ValueError),
        ({"where": ""}, ValueError),
        ({"where": "a", "what": ["median"]}, ValueError),
        ({"where": "a", "what_of": "tangent"}, ValueError),
        ({"where": "a", "tap_func": 3}, TypeError),
    ],
)
def test_wrong_arguments_are_refused(options: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"hcb.observe(: | needs where=, ).* at .*test_observe.py"):
        hcb.observe(loss, **options)


@jax.custom_vjp
def normed(x: Any) -> Any:
    return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1)


def normed_forward(x: Any) -> Any:
    size = jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1)
    return x / size, (x, size)


def normed_backward(kept: Any, cotangent: Any) -> Any:
    x, size = kept
    return (cotangent / size - x * jnp.mean(cotangent * x, -1, keepdims=True) / size**3,)


normed.defvjp(normed_forward, normed_backward)


def test_a_function_with_custom_derivatives_is_found_by_its_name_also_where_it_is_differentiated() -> None:
    def f(shift: Any, x: Any) -> Any:
        return jnp.sum((normed(x @ WEIGHTS[0]) + shift) ** 2)

    y = normed(X @ WEIGHTS[0])
    _, [message] = values_of(f, 0.0, X, where="normed", what="value")
    [(label, value)] = message.items()
    assert label.startswith("normed@f:")
    np.testing.assert_allclose(value, y, rtol=1e-6)
    out, [message] = values_of(
        jax.grad(f, 1), jnp.zeros(X.shape), X, where="normed", what="value", what_of=["output", "grad"]
    )
    assert list(message) == ["normed", "grad normed"]
    np.testing.assert_allclose(message["normed"], y, rtol=1e-6)
    np.testing.assert_allclose(message["grad normed"], 2 * y, rtol=1e-6)
    assert_same(out, jax.jit(jax.grad(f, 1))(jnp.zeros(X.shape), X))


def dropped_out(w: Any, x: Any) -> Any:
    with jax.named_scope("attention"):
        x = x @ w
        x = x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1)
        return jax.nn.relu(jnp.where(jax.random.bernoulli(jax.random.key(0), 0.8, x.shape), x / 0.8, 0))


def in_a_loop_of_python(layer: Any, ws: Any, x: Any) -> Any:
    for i, w in enumerate(ws):
        x = jax.named_scope(f"layer_{i}")(layer)(w, x)
    return jnp.sum(x**2)


def in_a_scan(layer: Any, ws: Any, x: Any) -> Any:
    return jnp.sum(jax.lax.scan(lambda x, w: (layer(w, x), None), x, jnp.stack(ws))[0])


@pytest.mark.parametrize("transform", [jax.grad, jax.value_and_grad])  # without the loss, and with it
@pytest.mark.parametrize("layer", [dropped_out, jax.checkpoint(dropped_out)], ids=["plain", "remat"])
@pytest.mark.parametrize("loss", [in_a_loop_of_python, in_a_scan])
def test_residuals_and_masks_of_a_scope_are_no_outputs(loss: Any, layer: Any, transform: Any) -> None:
    step = transform(lambda ws, x: loss(layer, ws, x))
    _, [message] = values_of(step, WEIGHTS, X, where="attention", what="value")
    first = dropped_out(WEIGHTS[0], X)
    expected = [first, dropped_out(WEIGHTS[1], first)]
    values = list(message.values())
    assert len(values) == (1 if loss is in_a_scan else 2), list(message)
    for got, value in zip(values[0] if loss is in_a_scan else values, expected, strict=True):
        np.testing.assert_allclose(got, value, rtol=1e-5)


def test_haiku_modules_are_found_by_their_names() -> None:
    haiku = pytest.importorskip("haiku", reason="needs haiku, of the extra `libraries`")
    net = haiku.without_apply_rng(haiku.transform(lambda x: haiku.nets.MLP([4, 2])(x)))
    params = net.init(jax.random.key(0), X)

    def f(params: Any, x: Any) -> Any:
        return jnp.sum(net.apply(params, x) ** 2)

    _, [message] = values_of(
        jax.grad(f), params, X, where="mlp/~/linear_0", what="value", what_of=["output", "grad"]
    )
    assert list(message) == ["mlp/~/linear_0", "grad mlp/~/linear_0"]
    layer = params["mlp/~/linear_0"]
    np.testing.assert_allclose(message["mlp/~/linear_0"], X @ layer["w"] + layer["b"], rtol=1e-5)
    np.testing.assert_allclose(
        np.sum(message["grad mlp/~/linear_0"], 0), jax.grad(f)(params, X)["mlp/~/linear_0"]["b"], rtol=1e-5
    )


def test_a_log_has_the_names_of_places_and_statistics(tmp_path: Path) -> None:
    def inner(x: Any) -> Any:
        with jax.named_scope("layer"):
            return jnp.tanh(x)

    with (
        hcb.outfeed_receiver(record=tmp_path),
        hcb.observe(where="layer", what=["norm", "mean"], name="seen"),
    ):
        jax.jit(lambda x: jnp.sin(inner(x)))(jnp.float32(0))
    found = hcb.read(tmp_path)["seen"].to_numpy()
    assert {"layer/norm", "layer/mean"} <= set(found)


@pytest.mark.parametrize("kind", [OrderedDict, functools.partial(defaultdict, float)])
def test_a_log_has_the_keys_of_dicts_of_other_classes(kind: Any, tmp_path: Path) -> None:
    with hcb.outfeed_receiver(record=tmp_path):
        hcb.id_tap(lambda value: None, kind({"b": jnp.float32(1), "a": jnp.float32(2)}), name="seen")
    found = hcb.read(tmp_path)["seen"].to_numpy()
    assert (float(found["b"][0]), float(found["a"][0])) == (1.0, 2.0)

"""`observe(what="time")` and `span`: which places are timed, how long they take, and that results stay the same."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collecting_writer import CollectingWriter
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import hostcallback as hcb
from hcb_command import hcb as run_hcb
from hostcallback.api.observe.readings import Segment, arranged
from hostcallback.lifecycle import receivers

W = jnp.linspace(-0.5, 0.6, 16).reshape(4, 4)
X = jnp.arange(8.0).reshape(2, 4)

NAP, MARGIN = 0.03, 0.6
"""Seconds of a nap in a program, and how much longer a loaded machine may make it."""


def times_of(
    function: Callable[..., Any], *args: Any, where: Any = None, **options: Any
) -> tuple[Any, list[Any]]:
    """The results of the jitted function in a block that measures its places, and what arrived."""
    messages: list[dict[str, Any]] = []
    options.setdefault("tap_func", messages.append)
    with hcb.outfeed_receiver(), hcb.observe(where=where, what="time", **options):
        out = jax.block_until_ready(jax.jit(function)(*args))
    return out, messages


def nap(x: Any, seconds: float = NAP) -> Any:
    """Returns `x` after some time, in the program."""

    def sleep(x: Any) -> Any:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pass
        return np.asarray(x)

    return jax.pure_callback(sleep, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="expand_dims")


def assert_same(got: Any, expected: Any) -> None:
    # An edge divides what XLA would compute in one loop, so sums are rounded differently: by their terms' size, which
    # is that of the array, however small a sum is.
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-6, atol=1e-7 * float(np.max(np.abs(other))))


def layers(x: Any) -> Any:
    for name in ("attention", "mlp"):
        with hcb.span(name):
            x = jnp.tanh(x @ W)
    return x


def test_a_span_is_as_long_as_what_runs_in_it() -> None:
    def program(x: Any) -> Any:
        x = nap(x, 0.1)
        with hcb.span("long"):
            x = nap(nap(x) * 2)
        x = nap(x + 1, 0.1)
        with hcb.span("short"):
            return nap(x)

    begun = time.time_ns()
    _, [values] = times_of(program, X)
    assert list(values) == ["long", "short", "program"]
    long, short, whole = (float(values[name]["seconds"]) for name in values)
    assert 2 * NAP <= long < 2 * NAP + MARGIN
    assert NAP <= short < NAP + MARGIN
    assert long + short + 0.2 <= whole < 3 * NAP + 0.2 + MARGIN
    starts = [int(values[name]["start_ns"]) for name in ("program", "long", "short")]
    assert begun < starts[0] + 10**6
    assert starts[1] - starts[0] >= 10**8
    assert starts[2] - starts[1] >= long * 1e9 + 10**8 - 10**6


def test_independent_places_do_not_share_time() -> None:
    def program(x: Any) -> Any:
        found = []
        for name in "abc":
            with hcb.span(name):
                found.append(nap(x + len(found)))
        return found

    _, [values] = times_of(program, X)
    ends = [int(one["start_ns"]) + float(one["seconds"]) * 1e9 for one in values.values()]
    starts = sorted(int(values[name]["start_ns"]) for name in "abc")
    assert all(end <= start + 1e6 for end, start in zip(sorted(ends)[:2], starts[1:], strict=True))
    assert all(float(values[name]["seconds"]) >= NAP for name in "abc")


def test_what_other_code_waits_for_is_not_counted() -> None:
    def program(x: Any) -> Any:
        y = nap(x, 0.1)
        with hcb.span("sum"):
            return jnp.sin(x) + y

    _, [values] = times_of(program, X)
    assert float(values["sum"]["seconds"]) < 0.09


def test_iterations_of_a_scan_are_an_axis_of_one_message() -> None:
    def program(x: Any) -> Any:
        return jax.lax.scan(lambda x, _: (layers(x), x[0]), x, None, length=5)

    out, [values] = times_of(program, X)
    assert_same(out, jax.jit(program)(X))
    assert {name: one["seconds"].shape for name, one in values.items()} == {
        "attention": (5,), "mlp": (5,), "program": ()
    }  # fmt: skip
    starts = np.stack([values["attention"]["start_ns"], values["mlp"]["start_ns"]], -1).ravel()
    assert np.all(np.diff(starts) > 0)
    assert starts.dtype == np.int64


def test_iterations_of_a_while_loop_are_messages() -> None:
    def program(x: Any) -> Any:
        return jax.lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, layers(s[1])), (0, x))[1]

    out, messages = times_of(program, X)
    assert_same(out, jax.jit(program)(X))
    assert [list(values) for values in messages] == [["attention", "mlp"]] * 3 + [["program"]]


def test_branches_have_names_of_their_own() -> None:
    def branch(x: Any, count: int) -> Any:
        with hcb.span("branch"):
            return nap(x, count * NAP)

    def program(x: Any, which: Any) -> Any:
        return jax.lax.cond(which, lambda x: branch(x, 1), lambda x: branch(x, 2), x)

    for which, name, other in ((False, "branch", "branch#2"), (True, "branch#2", "branch")):
        _, [values] = times_of(program, X, which)
        assert float(values[name]["seconds"]) >= NAP * (1 + (not which))
        assert np.isnan(values[other]["seconds"])


@pytest.mark.parametrize("is_remat", [False, True])
def test_the_backward_pass_and_what_it_recomputes_have_times_of_their_own(is_remat: bool) -> None:
    def loss(x: Any) -> Any:
        return jnp.sum((jax.checkpoint(layers) if is_remat else layers)(x))

    out, [values] = times_of(jax.grad(loss), X)
    expected = {"attention", "mlp", "backward attention", "backward mlp", "program"}
    recomputed = {"recomputed attention", "recomputed mlp"} if is_remat else set()
    assert set(values) - {"attention", "mlp"} == expected - {"attention", "mlp"} | (set(values) & recomputed)
    assert bool(set(values) & recomputed) == is_remat
    assert_same(out, jax.jit(jax.grad(loss))(X))


def test_a_span_around_a_gradient_does_not_divide_its_backward_passes() -> None:
    def loss(x: Any) -> Any:
        for name in ("attention", "mlp"):
            with jax.named_scope(name):
                x = jax.nn.relu(x @ W)  # the backward pass of a jitted function
        return jnp.sum(x)

    def step(x: Any) -> Any:
        with hcb.span("step"):
            return jax.grad(loss)(x), jax.grad(jax.checkpoint(loss))(x)

    _, [values] = times_of(step, X, where=["step", "attention", "mlp"])
    places = {"step", "step/attention", "step/mlp"}
    assert {re.sub("^(backward|recomputed) ", "", place) for place in values} == {*places, "program"}
    assert {f"backward {place}" for place in places} <= set(values)

    def same_name_inside(x: Any) -> Any:
        def inner(x: Any) -> Any:
            with jax.named_scope("step"):
                return jnp.sum(jnp.tanh(x @ W))

        with hcb.span("step"):
            return jax.grad(inner)(x)

    _, [values] = times_of(same_name_inside, X, where="step/step")
    assert "backward step/step" in values


def test_the_table_names_the_slowest_step_call_and_iteration(tmp_path: Path) -> None:
    def step(x: Any, i: Any) -> Any:
        with hcb.span("part"):
            x = jax.lax.cond(i == 12, lambda x: nap(x, 10 * NAP), lambda x: x * 2, x)
        return x

    @jax.jit
    def one(x: Any, i: Any) -> Any:
        x = step(x, i)
        hcb.metrics({"mean": jnp.mean(x)}, step=i)
        return x

    @jax.jit
    def scan(x: Any) -> Any:
        return jax.lax.scan(lambda x, i: (step(x, i), None), x, jnp.arange(10, 15))[0]

    with hcb.outfeed_receiver(record=tmp_path / "log") as receiver:
        with hcb.observe(what="time", name="steps", tap_func=lambda times: None):
            for i in range(10, 15):
                one(X, i).block_until_ready()
        with hcb.observe(what="time", name="iterations", tap_func=lambda times: None):
            scan(X).block_until_ready()
            scan(X).block_until_ready()
    rows = {(name, row.place): row for name, each in receiver.stats.times.items() for row in each}
    part, program = rows["steps", "part"], rows["steps", "program"]
    assert (part.max_at, program.max_at) == ("step 12", "step 12")
    assert 10 * NAP <= part.max <= program.max
    assert re.fullmatch("call [01], iteration 2", rows["iterations", "part"].max_at)
    assert re.search(r"part .* m?s, step 12 ", receiver.summary())
    shown = run_hcb(tmp_path, "stats", "log").stdout
    assert re.search(r"part .* m?s, step 12 ", shown)
    assert re.search(r"part .* m?s, call [01], iteration 2 ", shown)
    lines = run_hcb(tmp_path, "cat", "log", "--name", "steps").stdout.splitlines()
    assert [int(line.split()[2]) for line in lines] == [*range(10, 15)]


def test_what_is_recomputed_of_modules_is_named_so() -> None:
    params = [{"w": W, "b": X[0]}] * 2

    def layer(parameters: Any, x: Any) -> Any:
        return jnp.tanh(x @ parameters["w"] + parameters["b"])

    def loss(params: Any, x: Any) -> Any:
        for parameters in params:
            x = jax.checkpoint(layer)(parameters, x)
        return jnp.sum(x**2)

    _, [values] = times_of(jax.grad(loss), params, X, where="params/*")
    expected = {f"{name}params/{i}" for name in ("", "recomputed ", "backward ") for i in range(2)}
    assert set(values) == {*expected, "program"}


def test_a_vmap_has_one_time() -> None:
    out, [values] = times_of(jax.vmap(layers), jnp.stack([X, X + 1]))
    assert {one["seconds"].shape for one in values.values()} == {()}
    assert_same(out, jax.jit(jax.vmap(layers))(jnp.stack([X, X + 1])))


def test_devices_of_a_shard_map_have_times_each() -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("d",))

    def body(x: Any) -> Any:
        late = jax.lax.axis_index("d") == 1
        with hcb.span("work"):
            x = jax.lax.cond(late, lambda x: nap(x) + 0 * x, lambda x: x, x)
        with hcb.span("exchange"):
            return x + jax.lax.psum(x, "d")

    program = jax.shard_map(body, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    out, [values] = times_of(program, X)
    assert_same(out, jax.jit(program)(X))
    assert {one["seconds"].shape for one in values.values()} == {(2,)}
    assert values["work"]["seconds"][1] >= NAP > values["work"]["seconds"][0]


def test_nested_spans_are_places_in_places() -> None:
    def program(x: Any) -> Any:
        with hcb.span("outer"):
            x = nap(x)
            with hcb.span("inner"):
                x = nap(x)
            return nap(x)

    _, [values] = times_of(program, X)
    assert list(values) == ["outer", "outer/inner", "program"]
    assert NAP <= float(values["outer/inner"]["seconds"]) <= float(values["outer"]["seconds"]) - 2 * NAP


def test_scopes_modules_and_operations_are_places() -> None:
    def program(x: Any) -> Any:
        for i in range(2):
            with jax.named_scope(f"layers/{i}"), hcb.span("product"):
                x = x @ W
        return jnp.sin(x)

    for where, names in {
        "layers/*": ["layers/0", "layers/1"],
        ("layers/*", "product"): ["layers/0", "layers/1", "layers/0/product", "layers/1/product"],
        "primitive:dot_general": ["layers/0/product/dot_general", "layers/1/product/dot_general"],
    }.items():
        _, [values] = times_of(program, X, where=where)
        assert list(values) == [*names, "program"]
    _, [values] = times_of(
        lambda params: jnp.sin(X @ params["linear"]["w"]), {"linear": {"w": W}}, where="linear"
    )
    assert list(values) == ["linear", "program"]


def test_the_block_prints_a_table_and_the_receiver_what_came_later(
    capsys: pytest.CaptureFixture[str],
) -> None:
    step = jax.jit(layers)
    with hcb.outfeed_receiver() as receiver:
        with hcb.observe(what="time", name="once"):
            for _ in range(3):
                step(X)
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].split() == ["place", "count", "mean", "p50", "p90", "p99", "max", "share"]
        assert [line.split()[:2] for line in lines[1:]] == [
            ["attention", "3"],
            ["mlp", "3"],
            ["program", "3"],
        ]
        assert lines[3].endswith("100.0 %")
        hcb.observe(step, what="time", name="once")(X)
        assert capsys.readouterr().out == ""
    assert capsys.readouterr().out.splitlines()[1].split()[:2] == ["attention", "4"]
    [attention, _, program] = receiver.stats.times["once"]
    assert (attention.place, attention.count, program.place) == ("attention", 4, "program")
    assert 0 < attention.p50 <= attention.p90 <= attention.p99 < attention.mean * 4.1
    assert attention.share < 1 == program.share
    assert "attention" in receiver.summary()


def test_metrics_have_the_seconds_of_each_call() -> None:
    writer = CollectingWriter()

    def program(x: Any) -> Any:
        def body(x: Any, _: Any) -> Any:
            with hcb.span("part"):
                return nap(x), None

        return jax.lax.scan(body, x, None, length=2)[0]

    with hcb.outfeed_receiver(writers=[writer]), hcb.observe(what="time", tap_func=hcb.metrics):
        jax.jit(program)(X).block_until_ready()
    [(_, scalars)] = writer.rows
    assert set(scalars) == {"time/part", "time/program"}
    assert 2 * NAP <= scalars["time/part"] <= scalars["time/program"]


def test_a_span_adds_nothing_where_no_time_is_measured() -> None:
    def plain(x: Any) -> Any:
        return jnp.tanh(jnp.tanh(x @ W) @ W)

    assert str(jax.make_jaxpr(layers)(X)) == str(jax.make_jaxpr(plain)(X))


@pytest.mark.parametrize(
    ("name", "error"), [(3, TypeError), ("", ValueError), ("a/b", ValueError), ("f(x)", ValueError)]
)
def test_names_that_no_scope_can_have_are_refused(name: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"hcb\.span.*test_time\.py"):
        hcb.span(name)


def test_programs_without_such_a_place_are_refused() -> None:
    wanted = (
        r"without where= measures what hcb\.span names, and found none of 1 program: .*give where='layers/\*'"
    )
    with pytest.raises(ValueError, match=wanted):
        times_of(jnp.sin, X)
    with pytest.raises(ValueError, match=r"where='layer_\*' matches no operation[^$]*\n    attention"):
        times_of(layers, X, where="layer_*")
    with pytest.raises(ValueError, match='what="time" measures operations, and takes no what_of'):
        hcb.observe(where="x", what="time", what_of="grad")


def test_other_platforms_are_refused() -> None:
    with (
        hcb.observe(what="time"),
        pytest.raises(NotImplementedError, match=r"not yet confirmed on cuda.*\(events\)"),
    ):
        jax.jit(layers).trace(X).lower(lowering_platforms=("cuda",))


COLLECTIVES = re.compile(r"(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")


@pytest.mark.native_only
def test_devices_of_a_program_that_the_compiler_divides_have_times_each() -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("d",), axis_types=(AxisType.Auto,))
    x = jax.device_put(jnp.linspace(-1, 1, 64).reshape(8, 8), NamedSharding(mesh, P("d")))
    w = jax.device_put(jnp.linspace(-0.5, 0.6, 64).reshape(8, 8), NamedSharding(mesh, P(None, "d")))

    def step(w: Any, x: Any) -> Any:
        def body(x: Any, _: Any) -> Any:
            with hcb.span("product"):
                x = jnp.tanh(x @ w)
            return x, None

        def loss(w: Any) -> Any:
            with hcb.span("first"):
                y = jnp.sin(x @ w)
            return jnp.sum(y**2)

        x = jax.lax.scan(body, x, None, length=3)[0]
        return x, *jax.value_and_grad(loss)(w)

    def collectives(compiled: Any) -> Counter[str]:
        return Counter(COLLECTIVES.findall(compiled.as_text()))

    plain = jax.jit(step)
    expected, before = plain(w, x), collectives(plain.lower(w, x).compile())
    messages: list[Any] = []
    with hcb.outfeed_receiver(), hcb.observe(what="time", tap_func=messages.append):
        timed = jax.jit(step)
        out, after = jax.block_until_ready(timed(w, x)), collectives(timed.lower(w, x).compile())
    for one, other in zip(out, expected, strict=True):
        assert one.sharding == other.sharding
        np.testing.assert_allclose(one, other, rtol=2e-6)
    assert before
    assert after == before
    [values] = messages
    assert {name: found["seconds"].shape for name, found in values.items()} == {
        "product": (3, 2), "first": (2,), "backward first": (2,), "program": (2,)
    }  # fmt: skip
    seconds = {name: found["seconds"].reshape(-1, 2).sum(0) for name, found in values.items()}
    whole = seconds.pop("program")
    assert np.all(np.stack([*seconds.values()]) > 0)
    assert np.all(sum(seconds.values()) <= whole)
    assert np.all(np.diff(values["product"]["start_ns"], axis=0) > 0)


@pytest.mark.skipif(receivers.use_native("cpu"), reason="is about the callback transport")
def test_the_callback_transport_cannot_time_what_the_compiler_divides() -> None:
    divided = jax.device_put(X, NamedSharding(Mesh(np.array(jax.devices()[:2]), ("d",)), P("d")))
    with (
        hcb.observe(what="time"),
        pytest.raises(NotImplementedError, match="on the native transport, with the Shardy"),
    ):
        jax.jit(layers)(divided)


def test_times_go_with_taps_checks_and_other_observers(tmp_path: Path) -> None:
    def body(x: Any, i: Any) -> Any:
        with hcb.span("part"):
            hcb.tap(seen.append, i, python_scalars=True)
            hcb.check(jnp.all(jnp.isfinite(x)), "not finite")
            return jnp.tanh(x @ W) * hcb.knob("scale", 0.5), i

    def program(x: Any) -> Any:
        return hcb.scan(body, x, jnp.arange(4), stop=True, progress=False)

    seen: list[int] = []
    values: list[Any] = []
    looking = hcb.observe(where="part", what=["norm"], tap_func=values.append)
    with hcb.watch_nonfinite(), looking, hcb.capsule(tmp_path, nonfinite=True):
        out, messages = times_of(program, X)
    assert_same(out, jax.jit(program)(X))
    hcb.barrier_wait()
    assert seen == [*range(4)] * 2
    assert len(values) == 4
    assert sum("part" in message for message in messages) == 4
    assert not list(tmp_path.iterdir())


def test_donated_inputs_and_keys_go_through_places() -> None:
    def program(key: Any, x: Any) -> Any:
        with hcb.span("draw"):
            y, key = jax.random.normal(key, (4,)), jax.random.split(key)[0]
        with hcb.span("add"):
            return key, x + y

    expected = jax.jit(program)(*jax.jit(program)(jax.random.key(0), X))
    with hcb.outfeed_receiver(), hcb.observe(what="time"):
        step = jax.jit(program, donate_argnums=1)
        got = step(*step(jax.random.key(0), X + 0))
    assert got[0] == expected[0]
    assert_same(got[1], expected[1])


def test_operations_of_a_place_follow_each_other() -> None:
    def program(x: Any) -> Any:
        a = jnp.sin(x)
        b = jnp.cos(x)
        c = jnp.tan(a)
        jax.debug.callback(lambda: None, ordered=True)
        d = jnp.exp(b + c)
        jax.debug.callback(lambda: None, ordered=True)
        return jnp.log(d)

    equations = jax.make_jaxpr(program)(X).jaxpr.eqns
    names = ["sin", "cos", "tan", "debug_callback", "add", "exp", "debug_callback", "log"]
    assert [equation.primitive.name for equation in equations] == names
    places = {"sin": ("a",), "tan": ("a",), "cos": ("b",), "exp": ("b", "e"), "log": ("a",)}

    def shown(steps: Any) -> Any:
        return [
            (step.name, shown(step.steps)) if isinstance(step, Segment) else step.primitive.name
            for step in steps
        ]

    steps = arranged(equations, [places.get(name, ()) for name in names])
    assert shown(steps) == [
        "debug_callback", "debug_callback", ("a", ["sin", "tan"]), ("b", ["cos"]), "add", ("b", [("e", ["exp"])]),
        ("a", ["log"]),
    ]  # fmt: skip

"""Places where a breakpoint stops: under every jit, in loops and branches, under vmap and grad, on several devices."""

from __future__ import annotations

import itertools
import threading
import time  # noqa: F401, for the code that is evaluated in the debugger
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

import hostcallback as hcb
from hostcallback.receiver.sinks import debugger
from scripted import Script
from transforming import Jit, no_jit


def values(script: Script) -> list[float]:
    """Output of each `p float(...)`."""
    return [float(answer.splitlines()[0]) for answer in script.answers if answer[:1].isdigit()]


def test_a_program_stops_and_goes_on(jit: Jit) -> None:
    script = Script("p float(y)", "c")

    def f(x: Any) -> Any:
        y = x + 1
        hcb.breakpoint(**script.streams)
        return 2 * y

    assert float(jit(f)(jnp.float32(2))) == 6
    assert values(script) == [3]
    assert len(script.stops) == 1
    assert f"{__file__}:" in script.stops[0]


def test_a_loop_stops_at_every_step(jit: Jit) -> None:
    script = Script(*["p float(total)", "c"] * 3)

    def f(n: Any) -> Any:
        def step(total: Any, i: Any) -> Any:
            total = total + i
            hcb.breakpoint(**script.streams)
            return total, None

        return lax.scan(step, 0.0, n)[0]

    assert float(jit(f)(jnp.arange(1.0, 4))) == 6
    assert values(script) == [1, 3, 6]


def test_a_while_loop_stops_when_told_to(jit: Jit) -> None:
    script = Script("p float(i)", "c")

    def body(i: Any) -> Any:
        hcb.breakpoint(when=i == 3, **script.streams)
        return i + 1

    assert float(jit(lambda i: lax.while_loop(lambda i: i < 5, body, i))(jnp.float32(0))) == 5
    assert values(script) == [3]


def test_only_the_branch_that_runs_stops(jit: Jit) -> None:
    script = Script("p float(x)", "c")

    def positive(x: Any) -> Any:
        hcb.breakpoint(**script.streams)
        return x

    f = jit(lambda x: lax.cond(x > 0, positive, lambda x: -x, x))
    assert [float(f(jnp.float32(x))) for x in (-2, 3)] == [2, 3]
    assert values(script) == [3]


def test_vmap_stops_for_each_element(jit: Jit) -> None:
    script = Script(*["p float(x * y)", "c"] * 3)

    def f(x: Any, y: Any) -> Any:
        hcb.breakpoint(**script.streams)
        return x * y

    jax.block_until_ready(jit(jax.vmap(f, in_axes=(0, None)))(jnp.arange(1.0, 4), jnp.float32(2)))
    assert values(script) == [2, 4, 6]


def test_vmap_stops_for_the_elements_for_which_when_holds(jit: Jit) -> None:
    script = Script(*["p float(x)", "c"] * 2)

    def f(x: Any) -> Any:
        hcb.breakpoint(when=x % 2 == 1, **script.streams)
        return x

    jax.block_until_ready(jit(jax.vmap(f))(jnp.arange(5.0)))
    assert values(script) == [1, 3]
    assert [stop.split()[1] for stop in script.stops] == ["1", "2"]


@pytest.mark.parametrize("when", [False, np.False_, np.array(False), jnp.array(False)], ids=repr)
def test_a_known_when_that_does_not_hold_costs_nothing(jit: Jit, when: Any) -> None:
    def f(x: Any) -> Any:
        hcb.breakpoint(when=when)
        return x

    jit(f)(1.0)
    if jit is not no_jit:
        assert "host_call" not in str(jax.make_jaxpr(f)(1.0))


@pytest.mark.parametrize("when", [1, 1.0, jnp.ones(3, bool), "yes", jnp.int32(1)], ids=repr)
def test_when_is_a_bool_scalar(when: Any) -> None:
    with pytest.raises(TypeError, match=r"when is a .*, expected a bool scalar: .*test_programs\.py:\d+"):
        hcb.breakpoint(when=when)


@pytest.mark.slow
def test_it_may_be_differentiated_and_shows_primal_values(jit: Jit) -> None:
    script = Script(*["p float(y)", "c"] * 4)

    def f(x: Any) -> Any:
        y = x * x
        hcb.breakpoint(**script.streams)
        return y

    assert float(jit(jax.grad(f))(jnp.float32(3))) == 6
    assert float(jit(lambda x: jax.jvp(f, (x,), (x,))[1])(jnp.float32(3))) == 18
    assert float(jit(jax.grad(lambda x: f(x) * x, argnums=0))(jnp.float32(3))) == 27
    assert float(jit(jax.grad(jax.grad(f)))(jnp.float32(3))) == 2
    assert values(script) == [9] * 4


def test_grad_of_a_scan_stops_at_every_step_of_the_forward_pass(jit: Jit) -> None:
    script = Script(*["p float(c), float(k)", "c"] * 3)

    def f(x: Any) -> Any:
        k = 2 * x

        def step(c: Any, _: Any) -> Any:
            c = jnp.sin(c) * k
            hcb.breakpoint(when=k > 0, **script.streams)
            return c, None

        return lax.scan(step, x, None, length=3)[0]

    found = jit(jax.value_and_grad(f))(jnp.float32(0.5))
    assert np.isfinite(found).all()
    assert len(script.stops) == 3
    assert not script.commands


@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.everything_saveable], ids=["all", "none"])
def test_recomputation_under_checkpoint_stops_once(jit: Jit, policy: Any) -> None:
    script = Script("p float(y)", "c", "p float(y)", "c")

    def f(x: Any) -> Any:
        y = jnp.sin(x)
        hcb.breakpoint(**script.streams)
        return y * y

    x = jnp.float32(0.5)
    assert np.allclose(jit(jax.grad(jax.checkpoint(f, policy=policy)))(x), np.sin(1.0))
    assert np.allclose(values(script), [np.sin(0.5)])


def test_the_rules_of_custom_derivatives_may_stop(jit: Jit) -> None:
    script = Script(*["p float(x)", "p locals().get('t')", "c"] * 2)

    @jax.custom_jvp
    def double(x: Any) -> Any:
        return 2 * x

    @double.defjvp
    def rule(primals: Any, tangents: Any) -> Any:
        (x,), (t,) = primals, tangents
        hcb.breakpoint(**script.streams)
        return 2 * x, 2 * t

    @jax.custom_vjp
    def triple(x: Any) -> Any:
        return 3 * x

    def backward(x: Any, cotangent: Any) -> Any:
        hcb.breakpoint(**script.streams)
        return (3 * cotangent,)

    triple.defvjp(lambda x: (3 * x, x), backward)

    def f(x: Any) -> Any:
        z = jnp.sin(x)
        return double(z) * triple(x)

    jit(jax.grad(f))(jnp.float32(1))
    assert sorted(np.round(values(script), 3)) == [round(np.sin(1), 3), 1]
    assert "<not available here: a tangent, in code that is transposed>" in script.answers


def test_on_several_devices_one_stops_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    # The others arrive while one evaluates, and do not take this for code that waits for them.
    monkeypatch.setattr(debugger, "INSIDE_SEC", 60)  # a busy machine may take long for it
    script = Script(*["p (time.sleep(0.1), float(x[0]))[1]", "c"] * 4)
    together = threading.Barrier(4)

    def meet(x: Any) -> Any:
        together.wait(60)
        return x

    def f(x: Any) -> Any:
        x = hcb.call(meet, x, result_shape=x)
        hcb.breakpoint(**script.streams)
        return x + 1

    mesh, spec = Mesh(np.array(jax.devices()), ("i",)), PartitionSpec("i")
    f = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec))
    np.testing.assert_array_equal(f(jnp.arange(4.0)), np.arange(1.0, 5))
    assert sorted(values(script)) == [0, 1, 2, 3]
    assert sorted(stop.rpartition("on ")[2] for stop in script.stops) == [str(d) for d in jax.devices()]
    assert len([*itertools.groupby(script.threads)]) == 4  # no other thread read or wrote during a stop


def test_quitting_on_one_of_several_devices_ends_the_others_that_wait() -> None:
    script = Script("q", *["c"] * 4)
    together = threading.Barrier(4)

    def f(x: Any) -> Any:
        x = hcb.call(lambda x: (together.wait(60), x)[1], x, result_shape=x)
        hcb.breakpoint(**script.streams)
        return x + 1

    mesh, spec = Mesh(np.array(jax.devices()), ("i",)), PartitionSpec("i")
    f = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec))
    with pytest.raises(jax.errors.JaxRuntimeError, match="BreakpointQuit"):
        jax.block_until_ready(f(jnp.arange(4.0)))
    hcb.barrier_wait()  # the caller has the exception
    script.commands[:] = ["c"] * 4
    jax.block_until_ready(f(jnp.arange(4.0)))


def test_stops_have_their_place_among_the_taps() -> None:
    seen: list[int] = []
    script = Script("p [*seen]", "c", "p [*seen]", "c")

    def f(x: Any) -> Any:
        for i in range(2):
            hcb.id_tap(lambda x, i=i: seen.append(i), x)
            hcb.breakpoint(**script.streams)
        return x

    jax.block_until_ready(jax.jit(f)(1.0))
    assert script.answers[::2] == ["[0]", "[0, 1]"]

"""Callbacks that `hcb.accelerate()` cannot replace work as in JAX, and are listed with the reason and the line."""

from __future__ import annotations

import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback, pallas

import hostcallback as hcb
from accelerated import Calls, ran, what_stays
from hostcallback import _jax_compat as compat
from hostcallback._jax_compat import callbacks

X = np.float32(3)


def kernel(x_ref: Any, o_ref: Any) -> None:
    jax.debug.print("kernel {}", x_ref[0])
    o_ref[...] = x_ref[...] * 2


def test_prints_in_pallas_kernels_stay_jaxs() -> None:
    x = jnp.ones(4)
    f = pallas.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)

    def around(x: Any) -> Any:
        jax.debug.print("before {}", x[0])
        return f(x)

    with what_stays() as stays:
        result = ran(lambda calls: jax.jit(around)(x))
    assert sorted(result.lines) == ["before 1.0", "kernel 1.0"]
    (left,) = stays
    assert left.function == "jax.debug.print"
    assert left.reason == "it is in a Pallas kernel"
    assert left.source_line.function == "kernel"


def test_callbacks_outside_of_compiled_code_are_called_at_once() -> None:
    calls = Calls()
    with hcb.accelerate() as acceleration:
        jax.debug.callback(calls, X)
        assert calls.args == [[3.0]]
        assert float(io_callback(lambda x: x + 1, jax.ShapeDtypeStruct((), jnp.float32), X)) == 4
        jax.grad(lambda x: [jax.debug.callback(calls, x), x * 2][1])(X)
        assert len(calls.args) == 2
    assert acceleration.callbacks == []


def test_a_callback_outside_of_compiled_code_comes_after_all_messages() -> None:
    order: list[str] = []
    entered = threading.Event()

    def slow(x: Any) -> None:
        entered.set()
        for _ in range(3):
            jax.block_until_ready(jnp.sin(x))
        order.append("update")

    with hcb.accelerate():
        f = jax.jit(lambda x: [jax.debug.callback(slow, x), x + 1][1])
        x = f(X)
        for _ in range(5):
            x = f(x)
        jax.block_until_ready(x)
        jax.debug.callback(lambda: order.append("close"))
    assert order == ["update"] * 6 + ["close"]


def test_a_callback_may_print_outside_of_compiled_code(capsys: pytest.CaptureFixture[str]) -> None:
    def prints(x: Any) -> None:
        jax.debug.print("from the callback {}", x)

    with hcb.accelerate():
        jax.block_until_ready(jax.jit(lambda x: [jax.debug.callback(prints, x), x][1])(X))
        hcb.barrier_wait()
    assert capsys.readouterr().out == "from the callback 3.0\n"


def test_under_disable_jit_callbacks_are_called_at_once() -> None:
    calls = Calls()
    with hcb.accelerate(), jax.disable_jit():
        jax.jit(lambda x: [jax.debug.callback(calls, x), x][1])(X)
        assert calls.args == [[3.0]]


def test_a_vmap_outside_of_jit_calls_for_each_element() -> None:
    with hcb.accelerate():
        result = ran(lambda calls: jax.vmap(lambda x: [jax.debug.callback(calls, x), x][1])(jnp.arange(3.0)))
    assert result.calls == [[0.0], [1.0], [2.0]]


def test_a_device_named_by_sharding_is_left_to_jax() -> None:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    result = jax.ShapeDtypeStruct((), jnp.float32)
    with what_stays() as stays:
        f = jax.jit(lambda x: io_callback(lambda v: np.float32(7), result, x, sharding=sharding))
        assert float(f(X)) == 7
    (left,) = stays
    assert "sharding=" in str(left)


def test_pure_callbacks_are_not_listed_and_work() -> None:
    with hcb.accelerate() as acceleration:
        f = jax.jit(
            lambda x: jax.pure_callback(lambda v: np.float32(v + 1), jax.ShapeDtypeStruct((), jnp.float32), x)
        )
        assert float(f(X)) == 4
    assert acceleration.callbacks == []


def test_breakpoints_of_jax_are_left_to_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = iter(["p x", "c"])
    monkeypatch.setattr("builtins.input", lambda *args: next(answers))
    with what_stays() as stays:

        @jax.jit
        def f(x: Any) -> Any:
            jax.debug.breakpoint(backend="cli")
            return x + 1

        lowered = f.lower(X)
    assert "JAX's own" in str(stays[0].reason)
    assert lowered


def test_a_moved_primitive_leaves_its_callbacks_to_jax(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(callbacks._debugging, "debug_print_p")
    with hcb.accelerate() as acceleration:
        jax.make_jaxpr(lambda x: jax.debug.callback(print, x))(X)
    assert [c.function for c in acceleration.callbacks] == ["jax.debug.callback"]
    (record,) = caplog.records
    assert "jax.debug.print stays JAX's" in record.getMessage()
    assert "has no primitive debug_print_p" in record.getMessage()


def test_unknown_parameters_leave_the_callback_to_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    module, attribute, _, _ = callbacks._CALLBACKS["jax.debug.callback"]
    known = (module, attribute, frozenset({"callback", "effect"}), frozenset())
    monkeypatch.setitem(callbacks._CALLBACKS, "jax.debug.callback", known)
    with what_stays() as stays:
        result = ran(lambda calls: jax.jit(lambda x: [jax.debug.callback(calls, x), x][1])(X))
    assert result.calls == [[3.0]]
    (left,) = stays
    assert left.reason is not None
    assert (
        "this JAX is not known: debug_callback_p has the parameters callback, effect, partitioned"
        in left.reason
    )


def test_another_form_of_callback_is_left_to_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    def moved(flat: Any) -> Any:
        raise LookupError("its callback is made otherwise")

    monkeypatch.setattr(compat, "callback_parts", moved)
    with what_stays() as stays:
        result = ran(lambda calls: jax.jit(lambda x: [jax.debug.callback(calls, x), x][1])(X))
    assert result.calls == [[3.0]]
    assert [left.reason for left in stays] == ["this JAX is not known: its callback is made otherwise"]


def test_programs_traced_before_keep_their_callbacks() -> None:
    calls = Calls()
    f = jax.jit(lambda x: [jax.debug.callback(calls, x), x][1])
    jax.block_until_ready(f(X))
    with hcb.accelerate() as acceleration:
        jax.block_until_ready(f(X))
    jax.effects_barrier()
    assert len(calls.args) == 2
    assert acceleration.callbacks == []

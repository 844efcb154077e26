"""The block of `observe`: which programs it is for, on which threads, and what it says at its end."""

from __future__ import annotations

import contextlib
import gc
import logging
import weakref
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import hostcallback as hcb
from hostcallback.lowering import xray
from threads import in_another_thread, in_threads

X = jnp.arange(4.0)


def scale(x: Any) -> Any:
    return jax.named_scope("scale")(lambda x: x * 3)(x) + 1


def observing(messages: list[Any], **options: Any) -> Any:
    return hcb.observe(where="scale", what="value", tap_func=messages.append, **options)


def received(messages: list[Any]) -> int:
    hcb.barrier_wait()
    return len(messages)


MADE = {
    "observe": lambda: hcb.observe(where="scale", what="value", tap_func=print),
    "watch_nonfinite": lambda: hcb.watch_nonfinite(),
    "capsule": lambda: hcb.capsule("capsules"),
}


@pytest.mark.slow_variants
@pytest.mark.parametrize("name", MADE)
def test_a_block_that_is_never_entered_says_so(name: str, caplog: pytest.LogCaptureFixture) -> None:
    MADE[name]()
    gc.collect()
    (record,) = caplog.records
    assert f"the {name} made at " in record.getMessage()
    assert "test_observe_contexts.py:" in record.getMessage()
    assert record.getMessage().endswith(
        f"is not entered, and none of its options has an effect: with hcb.{name}(...):"
    )


@pytest.mark.slow_variants
@pytest.mark.parametrize("name", MADE)
def test_a_block_that_is_used_says_nothing(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with MADE[name]():
        pass
    MADE[name]()(jax.jit(scale))
    gc.collect()
    assert not [record for record in caplog.records if "is not entered" in record.getMessage()]


def test_programs_of_other_threads_are_observed_only_if_asked_for() -> None:
    messages: list[Any] = []
    step = jax.jit(scale)

    def elsewhere() -> None:
        in_another_thread(lambda: jax.block_until_ready(step(X)))

    with hcb.outfeed_receiver():
        with observing(messages):
            elsewhere()
            assert received(messages) == 0
            step(X)
            assert received(messages) == 1
        with observing(messages, all_threads=True):
            elsewhere()
            step(X)
        assert received(messages) == 3
        elsewhere()
        step(X)
        assert received(messages) == 3


def test_threads_have_separate_blocks() -> None:
    lists: list[list[Any]] = [[], []]
    step = jax.jit(scale)

    def run(number: int) -> None:
        with observing(lists[number]):
            for _ in range(5):
                jax.block_until_ready(step(X))

    with hcb.outfeed_receiver():
        in_threads(run, len(lists))
        hcb.barrier_wait()
    assert [len(messages) for messages in lists] == [5, 5]


def test_blocks_nest_and_a_block_is_entered_again_without_a_new_trace() -> None:
    outer: list[Any] = []
    inner: list[Any] = []
    traces = []

    @jax.jit
    def step(x: Any) -> Any:
        traces.append(1)
        return scale(x)

    with hcb.outfeed_receiver():
        context = observing(outer)
        for _ in range(3):
            with context:
                step(X)
                with observing(inner):
                    step(X)
        hcb.barrier_wait()
    assert len(outer) == 6
    assert len(inner) == 3
    assert len(traces) == 2  # once for each set of open blocks


def test_a_function_that_is_not_jitted_is_seen_operation_by_operation() -> None:
    messages: list[Any] = []
    with hcb.outfeed_receiver():
        out = hcb.observe(
            lambda x: jnp.sin(x) * 2, where="primitive:sin", what="value", tap_func=messages.append
        )(X)
        hcb.barrier_wait()
    [message] = messages
    np.testing.assert_array_equal(*message.values(), jnp.sin(X))
    np.testing.assert_array_equal(out, jnp.sin(X) * 2)


def test_without_jit_results_are_the_same() -> None:
    messages: list[Any] = []
    with jax.disable_jit(), hcb.outfeed_receiver():
        out = hcb.observe(jax.jit(scale), where="primitive:mul", tap_func=messages.append)(X)
        hcb.barrier_wait()
    np.testing.assert_array_equal(out, scale(X))
    assert len(messages) == 1


def test_leak_checks_and_transfer_guards_find_nothing() -> None:
    messages: list[Any] = []
    x = jax.device_put(np.arange(4.0, dtype=np.float32))
    with hcb.outfeed_receiver(), jax.check_tracer_leaks(), jax.transfer_guard("disallow"):
        jax.block_until_ready(hcb.observe(jax.jit(scale), where="scale", tap_func=messages.append)(x))
        jax.block_until_ready(jax.jit(hcb.observe(scale, where="scale", tap_func=messages.append))(x))
        hcb.barrier_wait()
    assert len(messages) == 2


def test_a_block_in_which_nothing_is_lowered_says_so(caplog: Any) -> None:
    compiled = jax.jit(scale).lower(X).compile()
    with caplog.at_level(logging.WARNING, logger="hostcallback"), observing([], name="aot"):
        compiled(X)
    with pytest.raises(TypeError, match=r"hcb.observe got a function that was compiled ahead of time"):
        hcb.observe(compiled, where="scale")
    assert "saw no program" in caplog.text
    assert "compiled ahead of time" in caplog.text


def test_a_function_is_compiled_ahead_of_time_with_its_taps() -> None:
    messages: list[Any] = []
    with observing(messages):
        compiled = jax.jit(scale).lower(X).compile()
    with hcb.outfeed_receiver():
        compiled(X)
        hcb.barrier_wait()
    assert len(messages) == 1


def test_exported_programs_are_left_as_they_are() -> None:
    def module() -> str:
        text = jax.export.export(jax.jit(scale))(X).mlir_module()
        return "\n".join(
            line.partition(" loc(")[0] for line in text.splitlines() if not line.startswith("#loc")
        )

    plain = module()
    with hcb.observe(where="primitive:*", tap_func=lambda values: None):
        assert module() == plain


@pytest.mark.parametrize(
    "wrap", [lambda f: hcb.observe(f, where="primitive:*"), hcb.watch_nonfinite], ids=["observe", "watch"]
)
def test_a_wrapped_function_in_an_exported_program_does_nothing_and_a_line_says_so(
    wrap: Any, caplog: pytest.LogCaptureFixture
) -> None:
    wrapped = wrap(scale)

    def program(x: Any) -> Any:
        return wrapped(x) + 1

    exported = jax.export.export(jax.jit(program))(X)
    (record,) = caplog.records
    made_by = "hcb.watch_nonfinite" if wrap is hcb.watch_nonfinite else "hcb.observe"
    assert record.getMessage().startswith(
        f"jit(program) is exported, and the {made_by} in it does nothing there"
    )
    np.testing.assert_array_equal(exported.call(X), scale(X) + 1)


def test_wrappers_are_looked_for_in_an_exported_program_without_the_lock_of_their_marks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    locked: list[bool] = []
    marks_in = xray._marks_in

    def noting(closed: Any) -> Any:
        locked.append(xray._marks_lock.locked())
        return marks_in(closed)

    monkeypatch.setattr(xray, "_marks_in", noting)
    jax.export.export(jax.jit(hcb.watch_nonfinite(scale)))(X)
    assert locked == [False]


def test_a_program_that_cannot_be_looked_into_is_exported_and_a_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(closed: Any) -> Any:
        raise KeyError("no such equation")

    with monkeypatch.context() as patch:
        patch.setattr(xray, "_marks_in", fail)
        exported = jax.export.export(jax.jit(hcb.watch_nonfinite(scale)))(X)
    (record,) = caplog.records
    assert record.getMessage() == "jit(scale) is exported, and could not be looked into; please report this"
    assert record.exc_info is not None
    np.testing.assert_array_equal(exported.call(X), scale(X))


def test_a_block_that_matches_nothing_raises_at_its_end_unless_it_raises_already() -> None:
    with pytest.raises(ValueError, match=r"where='scal' matches no output of 1 program, at (.|\n)*scale"):
        with hcb.observe(where="scal"):
            jax.jit(scale)(X)
    with pytest.raises(KeyError), hcb.observe(where="scal"):
        raise KeyError(jax.jit(scale)(X))


def test_calls_of_a_tapped_program_take_jaxs_fast_path() -> None:
    step, context = jax.jit(scale), observing([])
    with hcb.outfeed_receiver(), context:
        step(X)
        size = step._cache_size()
        for _ in range(3):
            step(X)
        assert step._cache_size() == size
        hcb.barrier_wait()


def test_programs_of_this_package_are_left_alone() -> None:
    # Those of a barrier, and those of taps outside of jit.
    with hcb.outfeed_receiver(), hcb.observe(where="primitive:*", tap_func=lambda values: None) as context:
        hcb.id_tap(lambda value: None, X)
        hcb.barrier_wait()
        assert context.seen == 0
        jax.jit(scale)(X)
        assert context.seen == 1


def test_a_block_goes_on_with_what_an_earlier_one_has_matched() -> None:
    messages: list[Any] = []
    step = jax.jit(scale)
    with hcb.outfeed_receiver():
        for epoch in range(2):
            with hcb.observe(where="scale", tap_func=messages.append, name="epochs"):
                step(X)
                if epoch:
                    jax.jit(jnp.cosh)(X)  # new, and without the place
        hcb.barrier_wait()
    assert len(messages) == 2


def test_blocks_that_nest_do_not_see_the_taps_of_each_other() -> None:
    outer: list[Any] = []
    inner: list[Any] = []
    with hcb.outfeed_receiver():
        with (
            hcb.observe(where="scale", what=["norm", "mean"], tap_func=outer.append),
            hcb.observe(where="scale", what=["norm"], tap_func=inner.append),
            hcb.watch_nonfinite(mode="every"),
        ):
            jax.jit(scale)(X)
        hcb.barrier_wait()
    assert [list(message) for message in (*outer, *inner)] == [["scale"], ["scale"]]


@pytest.mark.slow
def test_a_tap_function_is_let_go_with_the_programs() -> None:
    class Model:
        pass

    model = Model()
    alive = weakref.ref(model)
    step = jax.jit(lambda x: scale(x) * 2)
    with hcb.outfeed_receiver():
        with hcb.observe(where="scale", tap_func=lambda values, model=model: None):
            step(X)
        hcb.barrier_wait()
    del model, step
    jax.clear_caches()
    gc.collect()
    hcb.barrier_wait()
    gc.collect()
    assert alive() is None


def test_results_of_several_devices_keep_their_shardings() -> None:
    mesh = Mesh(np.array(jax.devices()), ("d",))
    x = jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, PartitionSpec("d")))
    weights = jax.device_put(jnp.eye(8), NamedSharding(mesh, PartitionSpec()))

    def step(w: Any, x: Any) -> Any:
        y = jnp.tanh(x @ w)
        return w - 0.1 * jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w), y

    plain = jax.jit(step)(weights, x)
    with hcb.outfeed_receiver(), hcb.watch_nonfinite():
        watched = jax.jit(step)(weights, x)
    assert [out.sharding for out in watched] == [out.sharding for out in plain]


def test_updates_of_complex_parameters_are_measured() -> None:
    messages: list[Any] = []
    with hcb.outfeed_receiver():
        with hcb.observe(where="p", what_of="update", tap_func=messages.append):
            jax.jit(lambda p: p + 0.1j)(jnp.array([3 + 4j], jnp.complex64))
        hcb.barrier_wait()
    np.testing.assert_allclose(messages[0]["update p"]["ratio"], 0.02, rtol=1e-5)


def test_a_forward_program_of_a_wrapper_that_wants_gradients_too_runs() -> None:
    messages: list[Any] = []
    model = hcb.observe(
        lambda x: jnp.sum(scale(x) ** 2), where="scale", what_of=["output", "grad"], tap_func=messages.append
    )
    with hcb.outfeed_receiver():
        jax.jit(model)(X)
        jax.jit(jax.value_and_grad(model))(X)
        hcb.barrier_wait()
    assert [list(message) for message in messages] == [["scale"], ["scale", "grad scale"]]


def test_blocks_are_left_in_any_order() -> None:
    seen: list[str] = []
    step = jax.jit(scale)
    first = hcb.observe(where="scale", tap_func=lambda found: seen.append("first"))
    second = hcb.observe(where="scale", what=["norm"], tap_func=lambda found: seen.append("second"))
    with contextlib.ExitStack() as stack:
        stack.enter_context(first)
        second.__enter__()
        step(X)
    hcb.barrier_wait()
    assert sorted(seen) == ["first", "second"]
    seen.clear()
    step(X)  # the second is open yet
    hcb.barrier_wait()
    assert seen == ["second"]
    second.__exit__(None, None, None)
    seen.clear()
    step(X)
    hcb.barrier_wait()
    assert not seen


def test_a_block_is_left_where_it_was_entered() -> None:
    block = hcb.observe(where="scale")
    refused: list[str] = []

    def leave() -> None:
        try:
            block.close()
        except RuntimeError as error:
            refused.append(str(error))

    with block:
        jax.jit(scale)(X)
        in_another_thread(leave)
    assert len(refused) == 1
    assert "leave it once for each time that it was entered, on the thread that entered it" in refused[0]
    with pytest.raises(RuntimeError, match="that is not open on this thread"):
        block.close()
    everywhere = hcb.observe(where="scale", all_threads=True).__enter__()
    in_another_thread(everywhere.close)
    with pytest.raises(RuntimeError, match="that is not open on this thread"):
        everywhere.close()


def test_a_wrapper_that_is_forgotten_before_its_program_is_lowered_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(xray, "MAX_MARKS", 1)

    @jax.jit
    def step(x: Any) -> Any:
        x = hcb.observe(scale, where="scale")(x)
        return hcb.observe(scale, where="scale", what=["norm"])(x)

    step(X)
    assert (
        "wrappers were made since then, so that this one is forgotten: wrap the function once" in caplog.text
    )


def test_misuse_of_a_block_is_named() -> None:
    with pytest.raises(RuntimeError, match="here a function is being traced: put the block around the call"):
        jax.jit(lambda x: hcb.observe(where="scale").__enter__())(X)
    for made, name in (
        (hcb.watch_nonfinite(), "watch_nonfinite"),
        (hcb.capsule("capsules"), "capsule"),
        (hcb.observe(what="time"), "observe"),
    ):
        with pytest.raises(
            RuntimeError, match=rf"a block of hcb\.{name} is .* as in hcb\.{name}\(f, \.\.\.\)\(x\)"
        ):
            jax.jit(lambda x, made=made: made.__enter__())(X)
    with pytest.raises(ValueError, match="what has 'tim', expected 'value', 'statistics', 'time', or a list"):
        hcb.observe(where="*", what="tim")
    with pytest.raises(ValueError, match=r"a histogram cannot be sent by tap_func=hcb.metrics"):
        hcb.observe(where="scale", what=["histogram"], tap_func=hcb.metrics)
    with pytest.raises(ValueError, match=r"where=<lambda> raised AttributeError: .* 'prim'"):
        with hcb.observe(where=lambda site: site.prim == "sin"):
            jax.jit(scale)(X)


def test_a_block_in_a_tap_function_is_for_what_the_function_runs(caplog: pytest.LogCaptureFixture) -> None:
    messages: list[Any] = []
    inner = jax.jit(scale)

    def tap_func(value: Any) -> None:
        with observing(messages):
            inner(value)

    jax.jit(lambda x: hcb.id_tap(tap_func, x))(X)
    hcb.barrier_wait()
    assert received(messages) == 1
    assert "saw no program" not in caplog.text
    inner(X)
    assert received(messages) == 1


def test_a_block_in_the_function_of_a_call_is_for_what_the_function_runs() -> None:
    inside: list[Any] = []
    around: list[Any] = []
    inner = jax.jit(scale)

    def host_func(value: Any) -> Any:
        with observing(inside):
            return np.asarray(inner(value))

    outer = jax.jit(lambda x: scale(hcb.call(host_func, x, result_shape=x)))
    with observing(around):
        outer(X)
        assert (received(inside), received(around)) == (1, 1)
        inner(X)
    assert (received(inside), received(around)) == (1, 2)


def test_blocks_elsewhere_are_not_for_what_tap_functions_run() -> None:
    values: list[Any] = []

    def tap_func(value: Any) -> None:
        values.append(value)
        jax.jit(lambda x: scale(x))(X)  # in the block it would have a message that runs it again

    with hcb.observe(where="scale", what="value", tap_func=tap_func, all_threads=True):
        jax.jit(lambda x: scale(x))(X)
        assert received(values) == 1

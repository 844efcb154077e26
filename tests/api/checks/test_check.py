"""`hcb.check` sends no message while it holds, and names the failed check, anywhere in a program."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from failing import failed, failed_once
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import hostcallback as hcb
from transforming import Jit


def positive(x: Any, **options: Any) -> Any:
    hcb.check(x > 0, "x is {x}", x=x, **options)
    return x * 2


def test_a_check_that_holds_sends_nothing(jit: Jit) -> None:
    with hcb.outfeed_receiver() as rx:
        assert float(jit(positive)(3.0)) == 6
    assert sum(stats.delivered for stats in rx.stats) == 0


def test_a_failing_check_is_named_and_the_program_goes_on(jit: Jit) -> None:
    assert float(jit(positive)(-3.0)) == -6
    check = failed_once()
    assert check.explanation.text == "x is -3.0"
    assert check.explanation.values == {"x": "-3.0"}
    assert (check.count, dict(check.by_device)) == (1, {"cpu:0": 1})
    assert "test_check.py" in check.source_line
    assert "positive" in check.source_line


@pytest.mark.parametrize("pred", [True, np.True_, np.array([True, False]), [True]], ids=repr)
def test_predicates_that_are_known_already(jit: Jit, pred: Any) -> None:
    if isinstance(pred, list):
        with pytest.raises(TypeError, match=r"hcb.check's predicate is list \[True\], expected booleans"):
            jit(lambda x: (hcb.check(pred, "known"), x)[1])(1.0)
        return
    jit(lambda x: (hcb.check(pred, "known"), x)[1])(1.0)
    if np.all(pred):
        hcb.barrier_wait()
    else:
        assert failed_once().explanation.where == "1 of 2 values are false, the first at [1]"


def test_an_array_predicate_names_the_first_value(jit: Jit) -> None:
    jit(positive)(jnp.array([[1.0, 2.0], [3.0, -4.0]]))
    explanation = failed_once().explanation
    assert explanation.where == "1 of 4 values are false, the first at [1, 1]"
    assert explanation.elements == (1, 1)
    assert explanation.text == "x is [[ 1.  2.]\n [ 3. -4.]]"


def test_an_empty_predicate_holds(jit: Jit) -> None:
    jit(positive)(jnp.zeros((0, 3)))
    hcb.barrier_wait()


def test_each_iteration_of_a_scan_is_checked(jit: Jit) -> None:
    def step(c: Any, i: Any) -> Any:
        hcb.check(i % 3 != 0, "at step {}", i)
        return c + i, i

    assert float(jit(lambda c: lax.scan(step, c, jnp.arange(10)))(0.0)[0]) == 45
    check = failed_once()
    assert check.explanation.text == "at step 0"
    assert check.count == 4
    assert check.first.time_ns <= check.last.time_ns


def test_a_failure_in_every_iteration_is_counted_though_only_the_first_and_the_last_are_read(
    jit: Jit,
) -> None:
    def step(c: Any, i: Any) -> Any:
        hcb.check(i < 0, "at step {}", i, name="every")
        hcb.check(c < 0, "c is {}", c, name="other")
        return c + 1, None

    def run() -> None:
        jit(lambda c: lax.scan(step, c, jnp.arange(500)))(jnp.float32(0))
        jit(lambda x: (hcb.check(x < 0, "alone {}", x), x)[1])(1.0)
        many = jit(lambda c: lax.fori_loop(0, 3000, lambda i, c: (hcb.check(c < 0, "many"), c + 1)[1], c))
        many(jnp.float32(0))

    with pytest.raises(hcb.TapFunctionException) as caught, hcb.outfeed_receiver() as rx:
        run()
    counts = {e.check.explanation.text: e.check.count for e in caught.value.exceptions}  # type: ignore[attr-defined]
    assert counts == {"at step 0": 500, "c is 0.0": 500, "alone 1.0": 1, "many": 3000}
    (stats,) = [stats for stats in rx.stats if stats.delivered]
    assert stats.delivered == 4001
    assert stats.dropped == 0


def test_while_conditions_and_bodies_are_checked(jit: Jit) -> None:
    def condition(c: Any) -> Any:
        hcb.check(c != 2, "condition at {}", c)
        return c < 4

    def body(c: Any) -> Any:
        hcb.check(c != 3, "body at {}", c)
        return c + 1

    jit(lambda c: lax.while_loop(condition, body, c))(0)
    assert [check.explanation.text for check in failed()] == ["condition at 2", "body at 3"]


def test_only_the_branch_that_is_taken_is_checked(jit: Jit) -> None:
    f = jit(lambda x: lax.cond(x > 5, lambda x: positive(-x), lambda x: positive(x), x))
    f(1.0)
    hcb.barrier_wait()
    f(6.0)
    assert failed_once().explanation.text == "x is -6.0"


@pytest.mark.parametrize("differentiate", [jax.grad, jax.value_and_grad, jax.hessian, jax.jacfwd])
def test_under_differentiation_the_primals_are_checked_once(jit: Jit, differentiate: Any) -> None:
    jit(differentiate(lambda x: positive(jnp.sin(x)) ** 2))(-1.0)
    check = failed_once()
    assert check.explanation.text == "x is -0.8414709568023682"
    assert check.count == 1


def test_checkpointed_code_is_checked_once(jit: Jit) -> None:
    jit(jax.grad(jax.checkpoint(lambda x: positive(jnp.sin(x)) ** 2)))(-1.0)
    assert failed_once().count == 1


def test_under_vmap_one_message_lists_the_failed_elements(jit: Jit) -> None:
    with pytest.raises(hcb.TapFunctionException) as caught, hcb.outfeed_receiver() as rx:
        jit(jax.vmap(positive))(jnp.array([1.0, -2.0, 3.0, -4.0]))
    assert sum(stats.delivered for stats in rx.stats) == 1
    explanation = caught.value.exceptions[0].check.explanation  # type: ignore[attr-defined]
    assert explanation.where == "2 of 4 batch elements failed, the first: [1]"
    assert explanation.elements == (1,)
    assert explanation.text == "x is -2.0"


def test_nested_vmaps_and_array_predicates_name_the_element_and_the_value(jit: Jit) -> None:
    x = jnp.ones((2, 3, 4)).at[1, 2, 3].set(-1)
    jit(jax.vmap(jax.vmap(positive), in_axes=1))(x.swapaxes(0, 1))
    explanation = failed_once().explanation
    assert explanation.elements == (1, 2, 3)
    assert explanation.where == (
        "1 of 6 batch elements failed, the first: [1, 2]; 1 of 4 values are false, the first at [3]"
    )


def test_an_unbatched_predicate_under_vmap(jit: Jit) -> None:
    def f(x: Any, limit: Any) -> Any:
        hcb.check(limit > 0, "limit {} for {}", limit, x)
        return x + limit

    jit(jax.vmap(f, in_axes=(0, None)))(jnp.arange(3.0), -1.0)
    assert failed_once().explanation.text == "limit -1.0 for 0.0"


def test_under_vmap_a_holding_check_in_a_scan_keeps_its_branch(jit: Jit) -> None:
    f = jit(jax.vmap(lambda c: lax.scan(lambda c, i: (positive(c), None), c, jnp.arange(3))[0]))
    f(jnp.arange(1.0, 5.0))
    hcb.barrier_wait()
    f(jnp.array([1.0, -1.0]))
    check = failed_once()
    assert (check.explanation.text, check.count) == ("x is -1.0", 3)


@pytest.mark.parametrize("count", [2, 4])
def test_in_shard_map_each_device_checks_its_part(count: int) -> None:
    mesh = Mesh(jax.devices()[:count], ("i",))
    manual = {"mesh": mesh, "in_specs": PartitionSpec("i"), "out_specs": PartitionSpec("i")}
    jax.jit(jax.shard_map(positive, **manual))(jnp.arange(count) - 0.5)
    check = failed_once()
    assert dict(check.by_device) == {"cpu:0": 1}
    assert check.explanation.text == "x is [-0.5]"


def test_in_pmap_each_device_checks_its_part() -> None:
    jax.pmap(positive)(jnp.array([1.0, -1.0, 1.0, -1.0]))
    check = failed_once()
    assert dict(check.by_device) == {"cpu:1": 1, "cpu:3": 1}


def test_where_the_compiler_partitions_each_device_checks_its_shard_without_a_collective() -> None:
    mesh = Mesh(jax.devices(), ("i",))
    x = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, PartitionSpec("i")))

    def f(x: Any) -> Any:
        hcb.check(x < 5, "x is {}", x)
        return x + 1

    compiled = jax.jit(f)
    text = compiled.lower(x).compile().as_text()  # type: ignore[attr-defined]
    calls = set(re.findall(r"(all-reduce|all-gather|collective-\w+|all-to-all|reduce-scatter)\(", text))
    assert not calls
    compiled(x)
    check = failed_once()
    assert dict(check.by_device) == {"cpu:2": 1, "cpu:3": 1}
    assert check.explanation.where in (
        "1 of 2 values are false, the first at [1]; in the device's shard, [4:6]",
        "2 of 2 values are false, the first at [0]; in the device's shard, [6:8]",
    )


def test_a_replicated_predicate_fails_on_every_device() -> None:
    mesh = Mesh(jax.devices(), ("i",))
    x = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, PartitionSpec("i")))
    jax.jit(lambda x: (hcb.check(x.sum() < 5, "sum {}", x.sum()), x)[1])(x)
    check = failed_once()
    assert dict(check.by_device) == {f"cpu:{i}": 1 for i in range(4)}
    assert check.explanation.text == "sum 28.0"


def test_only_the_named_devices_check() -> None:
    mesh = Mesh(jax.devices(), ("i",))
    manual = {"mesh": mesh, "in_specs": PartitionSpec("i"), "out_specs": PartitionSpec("i")}
    f = jax.jit(jax.shard_map(lambda x: positive(x, devices=jax.devices()[1:3]), **manual))
    f(-jnp.ones(4))
    assert dict(failed_once().by_device) == {"cpu:1": 1, "cpu:2": 1}


def test_the_first_failure_over_all_devices_comes_first() -> None:
    x = jax.device_put(1.0, jax.devices()[2])
    hcb.jit(lambda x: (hcb.check(x < 0, "first {}", x), x)[1])(x).block_until_ready()
    hcb.jit(lambda x: (hcb.check(x < 0, "second {}", x), x)[1])(2.0).block_until_ready()
    checks = failed()
    assert [check.explanation.text for check in checks] == ["first 1.0", "second 2.0"]
    assert checks[0].first.device == "cpu:2"
    assert checks[0].first.time_ns < checks[1].first.time_ns


def test_pytrees_keys_and_objects_are_arguments_as_in_print(jit: Jit) -> None:
    def f(x: Any) -> Any:
        hcb.check(x["a"] > 0, "{} {t} {x[a]}", ["text", None], x=x, t=(1, x["a"]))
        return x

    jit(f)({"a": jnp.float32(-1)})
    assert failed_once().explanation.text.startswith("['text', None] (1, -1.0) ")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((1.0, "x"), TypeError, r"predicate is float32\[\], expected booleans.*x > 0"),
        ((jnp.arange(3), "x"), TypeError, r"predicate is int32\[3\], expected booleans"),
        (("text", "x"), TypeError, r"predicate is str 'text', expected booleans"),
        ((True, 1), TypeError, r"takes a format string after the predicate, got int 1"),
        ((True, "{}"), IndexError, r"needs 1 positional argument, and"),
        ((True, "{x}"), KeyError, r"placeholder \{x\}"),
        ((True, "x", 1), ValueError, r"Unused positional arguments to `hcb.check`"),
        ((True, "{"), ValueError, r"Single '\{'"),
    ],
)
def test_bad_arguments_are_refused_with_the_line(arguments: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        jax.jit(lambda x: (hcb.check(*arguments), x)[1])(1.0)
    told = str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
    assert "test_check.py" in told


def test_unused_keywords_give_the_guidance_on_f_strings() -> None:
    with pytest.raises(ValueError, match="f-string"):
        hcb.check(True, "x is 3", x=3)


def test_devices_that_are_none_are_refused() -> None:
    with pytest.raises(TypeError, match=r"hcb.check's devices are jax.Device, got \[0\]"):
        hcb.check(True, "x", devices=[0])  # type: ignore[list-item]


def test_a_text_that_cannot_be_formatted_is_reported_as_such_and_the_stream_goes_on(jit: Jit) -> None:
    jit(lambda x: (hcb.check(x > 0, "{:c}", x), x)[1])(-1)
    jit(positive)(-3.0)
    bad, good = failed()
    assert bad.explanation.text == "{:c}"
    assert bad.explanation.problem.startswith("the message could not be formatted: ")
    assert bad.explanation.values == {"0": "-1"}
    assert good.explanation.text == "x is -3.0"

"""NaN and infinite values planted in every kind of program: the operation that made them is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P
from watching import JITS, errors_of, line_of

import hostcallback as hcb
from transforming import COMPILED, Jit

X = jnp.array([3.0, 2.0, 1.0, 0.5])


def in_scan(x: Any) -> Any:
    def step(total, y):
        return total + y, jnp.log(y - 1.5)  # scan

    return jnp.sum(lax.scan(step, 0.0, x)[1])


def in_nested_scans(x: Any) -> Any:
    def inner(c, y):
        return c, lax.scan(lambda d, z: (d, jnp.sqrt(y * z - 2.5)), 0.0, x[:2])[1]  # nested

    return jnp.sum(lax.scan(inner, 0.0, x[:3])[1])


def in_reversed_scan(x: Any) -> Any:
    return jnp.sum(lax.scan(lambda c, y: (c, jnp.log(y - 0.7)), 0.0, x, reverse=True)[1])  # reversed


def in_while(x: Any) -> Any:
    def body(state):
        i, total = state
        return i + 1, total + (x - x) / (i - 2.0)  # while

    return jnp.sum(lax.while_loop(lambda state: state[0] < 3, body, (0, x))[1])


def in_while_condition(x: Any) -> Any:
    return lax.while_loop(lambda y: jnp.log(y - 1) > 0, lambda y: y - 3, 3.2 + x[3] * 0)  # condition


def in_branch(x: Any) -> Any:
    return jnp.sum(lax.cond(x[0] > 0, lambda x: x / (x - x), lambda x: x, x))  # branch


def in_jit(x: Any) -> Any:
    return jnp.sum(jax.jit(lambda x: jnp.exp(x * 100))(x))  # jit


def in_checkpoint(x: Any) -> Any:
    return jnp.sum(jax.checkpoint(lambda x: jnp.sin(jnp.log(x - 1.5)))(x))  # checkpoint


def in_bfloat16(x: Any) -> Any:
    big = jnp.full((2, 2), 3e38, jnp.bfloat16)
    return jnp.sum((big @ big).astype(jnp.float32)) + x[0]  # bfloat16


def in_a_function_of_jax(x: Any) -> Any:
    jnp.linalg.cholesky(jnp.eye(4))  # JAX traces it for this line, and keeps the result
    return jnp.sum(jnp.linalg.cholesky(jnp.diag(x - 1)))  # cholesky


@jax.custom_jvp
def log_jvp(x: Any) -> Any:
    return jnp.log(x)  # custom_jvp


log_jvp.defjvp(lambda primals, tangents: (log_jvp(primals[0]), tangents[0] / primals[0]))


def in_custom_jvp(x: Any) -> Any:
    y = log_jvp(x - 1.5)  # custom_jvp_call
    return jnp.sum(y)


@jax.custom_vjp
def log_vjp(x: Any) -> Any:
    return jnp.log(x)  # custom_vjp


def log_forward(x: Any) -> Any:
    return jnp.log(x), x  # custom_vjp forward


def log_backward(x: Any, ct: Any) -> Any:
    return (ct / (x - x),)  # custom_vjp backward


log_vjp.defvjp(log_forward, log_backward)


def in_custom_vjp(x: Any) -> Any:
    y = log_vjp(x - 1.5)
    return jnp.sum(y)


@dataclass(frozen=True)
class Planted:
    """The first report, and the number of its failures."""

    function: Callable[[Any], Any]
    primitive: str
    mark: str
    nan_count: int = 0
    inf_count: int = 0
    iteration: tuple[int, ...] = ()
    shape: tuple[int, ...] = (4,)
    dtype: str = "float32"
    reports: int = 1


PLANTED = [
    Planted(in_scan, "log", "scan", nan_count=1, iteration=(2,), shape=(), reports=2),
    Planted(in_nested_scans, "sqrt", "nested", nan_count=1, iteration=(2, 1), shape=()),
    Planted(in_reversed_scan, "log", "reversed", nan_count=1, iteration=(3,), shape=()),
    Planted(in_while, "div", "while", nan_count=4, iteration=(2,)),
    Planted(in_while_condition, "log", "condition", nan_count=1, iteration=(1,), shape=()),
    Planted(in_branch, "div", "branch", inf_count=4),
    Planted(in_jit, "exp", "jit", inf_count=3),
    Planted(in_checkpoint, "log", "checkpoint", nan_count=2),
    Planted(in_bfloat16, "dot_general", "bfloat16", inf_count=4, shape=(2, 2), dtype="bfloat16"),
    Planted(in_a_function_of_jax, "cholesky", "cholesky", nan_count=16, shape=(4, 4)),
    Planted(in_custom_jvp, "log", "custom_jvp", nan_count=2),
    Planted(in_custom_vjp, "log", "custom_vjp", nan_count=2),
]


def describe(error: hcb.NonFiniteError) -> tuple[Any, ...]:
    assert error.source_line.file == __file__
    return (error.primitive, error.source_line.line, error.nan_count, error.inf_count, error.iteration)


@pytest.mark.slow_variants(every=4)
@pytest.mark.parametrize("jit", JITS)
@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.function.__name__)
def test_the_operation_that_made_it_is_named(planted: Planted, jit: Jit) -> None:
    errors = errors_of(lambda: jit(hcb.watch_nonfinite(planted.function))(X))
    assert [error.check.count for error in errors] == [planted.reports]
    line = line_of(__file__, planted.mark)
    expected = (planted.primitive, line, planted.nan_count, planted.inf_count, planted.iteration)
    assert describe(errors[0]) == expected
    assert (errors[0].shape, errors[0].dtype) == (planted.shape, planted.dtype)
    assert not errors[0].backward
    assert errors[0].device == "cpu:0"


@pytest.mark.slow_variants(every=4)
@pytest.mark.parametrize("jit", COMPILED)
@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.function.__name__)
def test_under_vmap_there_is_one_report_for_the_batch(planted: Planted, jit: Jit) -> None:
    batched = jnp.stack([X, X, X])
    errors = errors_of(lambda: jit(jax.vmap(hcb.watch_nonfinite(planted.function)))(batched))
    assert [error.check.count for error in errors] == [planted.reports]
    times = 1 if planted.function is in_bfloat16 else 3  # that does not depend on the batch
    line = line_of(__file__, planted.mark)
    counts = (planted.nan_count * times, planted.inf_count * times)
    assert describe(errors[0]) == (planted.primitive, line, *counts, planted.iteration)
    assert errors[0].shape == planted.shape


@pytest.mark.parametrize("jit", JITS)
def test_one_element_of_a_batch_is_enough(jit: Jit) -> None:
    f = hcb.watch_nonfinite(lambda x: jnp.log(x))
    (error,) = errors_of(lambda: jit(jax.vmap(f))(jnp.array([[1.0, 2.0], [3.0, -1.0]])))
    assert (error.nan_count, error.shape) == (1, (2,))


@pytest.mark.parametrize("jit", JITS)
def test_watched_in_the_body_of_a_scan(jit: Jit) -> None:
    def f(x):
        return lax.scan(lambda c, y: (c, hcb.watch_nonfinite(jnp.log)(y)), 0, x)[1]

    (error,) = errors_of(lambda: jit(f)(jnp.array([1.0, -1.0])))
    assert (error.primitive, error.nan_count) == ("log", 1)


@pytest.mark.parametrize("jit", COMPILED)
@pytest.mark.parametrize("check_vma", [True, False])
def test_each_device_of_a_shard_map_reports_its_own(jit: Jit, check_vma: bool) -> None:
    mesh = Mesh(np.array(jax.devices()), ("i",))

    def per_device(x):
        def step(c, _):
            return c + lax.psum(jnp.sum(x), "i") * 0, jnp.log(x - 1.5)  # shard_map

        start = jnp.sum(x)
        return lax.scan(step, start, None, length=2)[1]

    spec = P("i")
    f = jax.shard_map(per_device, mesh=mesh, in_specs=spec, out_specs=P(None, "i"), check_vma=check_vma)
    (error,) = errors_of(lambda: jit(hcb.watch_nonfinite(f))(X))
    assert describe(error) == ("log", line_of(__file__, "shard_map"), 1, 0, (0,))
    assert dict(error.check.by_device) == {"cpu:2": 2, "cpu:3": 2}
    assert error.device in ("cpu:2", "cpu:3")
    assert error.shape == (1,)


@pytest.mark.parametrize("jit", JITS)
def test_operations_a_nan_spreads_to_are_not_reported(jit: Jit) -> None:
    def f(x):
        y = jnp.log(x - 1)
        return lax.scan(lambda c, z: (jnp.sin(c * z), c + z), jnp.sum(y), jnp.exp(y))

    (error,) = errors_of(lambda: jit(hcb.watch_nonfinite(f))(X))
    assert error.primitive == "log"


@pytest.mark.parametrize("jit", JITS)
def test_several_operations_are_reported_in_program_order(jit: Jit) -> None:
    def f(x):
        a = jnp.log(x - 1)
        b = lax.scan(lambda c, y: (c, 1 / y), 0.0, x * 0)[1]
        return a, b, jnp.sqrt(-x)

    errors = errors_of(lambda: jit(hcb.watch_nonfinite(f))(X[:1] * 0))
    assert [error.primitive for error in errors] == ["log", "div"]
    errors = errors_of(lambda: jit(hcb.watch_nonfinite(f))(X[3:]))
    assert [error.primitive for error in errors] == ["log", "div", "sqrt"]


@pytest.mark.parametrize("jit", JITS)
def test_a_mask_of_infinities_is_not_reported(jit: Jit) -> None:
    def f(x):
        return jax.nn.softmax(jnp.where(x > 1, x, -jnp.inf)), jnp.max(x, initial=-jnp.inf)

    assert not errors_of(lambda: jit(hcb.watch_nonfinite(f))(X))
    assert not errors_of(lambda: jit(jax.vmap(hcb.watch_nonfinite(f)))(jnp.stack([X, X])))


@pytest.mark.parametrize("jit", JITS)
def test_a_nan_among_the_arguments_is_reported_by_name(jit: Jit) -> None:
    def f(x, *rest, scale):
        return jnp.sum(x["y"][0]) * scale + rest[1]

    def run(**options):
        watched = jit(hcb.watch_nonfinite(f, **options))
        return lambda: watched({"y": [X * jnp.nan, X]}, X, X[0] * jnp.inf, scale=jnp.float32(jnp.nan))

    errors = errors_of(run())
    assert [error.primitive for error in errors] == ["input x['y'][0]", "input rest[1]", "input scale"]
    assert str(errors[0]).startswith("input x['y'][0]: 4 NaN and 0 infinite values in float32[4], at ")
    assert not [e for e in errors_of(run(inputs=False)) if e.primitive.startswith("input")]

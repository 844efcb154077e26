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
from watching import errors_of, line_of

import hostcallback as hcb
from hostcallback.api.watch.watch import Mode

Form = Callable[..., Any]
FORMS = [
    pytest.param(lambda f, **options: jax.jit(hcb.watch_nonfinite(f, **options)), id="inside jit"),
    pytest.param(lambda f, **options: hcb.watch_nonfinite(jax.jit(f), **options), id="around jit"),
]

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


PLANTED = [
    Planted(in_scan, "log", "scan", nan_count=1, iteration=(2,), shape=()),
    Planted(in_nested_scans, "sqrt", "nested", nan_count=1, iteration=(2, 1), shape=()),
    Planted(in_reversed_scan, "log", "reversed", nan_count=1, iteration=(3,), shape=()),
    Planted(in_while, "div", "while", nan_count=4, iteration=(2,)),
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
@pytest.mark.parametrize("mode", ["results", "every"])
@pytest.mark.parametrize("jit", FORMS)
@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.function.__name__)
def test_the_operation_that_made_it_is_named(planted: Planted, jit: Form, mode: Mode) -> None:
    (error,) = errors_of(lambda: jit(planted.function, mode=mode)(X))
    line = line_of(__file__, planted.mark)
    expected = (planted.primitive, line, planted.nan_count, planted.inf_count, planted.iteration)
    assert describe(error) == expected
    assert (error.shape, error.dtype) == (planted.shape, planted.dtype)
    assert (error.backward, error.device, error.reproduced, error.check.count) == (False, "cpu:0", True, 1)


@pytest.mark.slow
@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.function.__name__)
def test_without_jit_each_operation_is_a_program(planted: Planted) -> None:
    (error, *_) = errors_of(lambda: hcb.watch_nonfinite(planted.function)(X))
    assert (error.primitive, error.reproduced) == (planted.primitive, True)
    with jax.disable_jit():
        (error, *_) = errors_of(lambda: hcb.watch_nonfinite(planted.function)(X))
    assert error.primitive == planted.primitive


@pytest.mark.slow_variants(every=4)
@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.function.__name__)
def test_under_vmap_there_is_one_report_for_the_batch(planted: Planted) -> None:
    batched = jnp.stack([X, X, X])
    (error,) = errors_of(lambda: jax.jit(jax.vmap(hcb.watch_nonfinite(planted.function)))(batched))
    times = 1 if planted.function is in_bfloat16 else 3  # that does not depend on the batch
    line = line_of(__file__, planted.mark)
    counts = (planted.nan_count * times, planted.inf_count * times)
    assert describe(error) == (planted.primitive, line, *counts, planted.iteration)
    assert error.shape == (planted.shape if times == 1 else (3, *planted.shape))


def test_one_element_of_a_batch_is_enough() -> None:
    f = hcb.watch_nonfinite(lambda x: jnp.log(x))
    (error,) = errors_of(lambda: jax.jit(jax.vmap(f))(jnp.array([[1.0, 2.0], [3.0, -1.0]])))
    assert (error.nan_count, error.shape, error.check.explanation.elements) == (1, (2, 2), (1, 1))


def test_the_report_has_the_operands_at_the_element() -> None:
    def f(x, y):
        return jnp.sum(x / y + 1)

    x, y = jnp.full((3, 4), 2.5), jnp.ones((3, 4)).at[2, 1].set(0)
    (error,) = errors_of(lambda: hcb.watch_nonfinite(jax.jit(f))(x, y))
    explained = error.check.explanation
    assert (explained.elements, dict(explained.values)) == ((2, 1), {"operand 0": "2.5", "operand 1": "0"})
    assert "1 of 12 elements are not finite, the first at [2,1]" in str(error)


def test_watched_in_the_body_of_a_scan() -> None:
    def f(x):
        return lax.scan(lambda c, y: (c, hcb.watch_nonfinite(jnp.log)(y)), 0, x)[1]

    (error,) = errors_of(lambda: jax.jit(f)(jnp.array([1.0, -1.0])))
    assert (error.primitive, error.nan_count, error.iteration) == ("log", 1, (1,))


@pytest.mark.parametrize("check_vma", [True, False])
def test_the_device_of_a_shard_map_is_named(check_vma: bool) -> None:
    mesh = Mesh(np.array(jax.devices()), ("i",))

    def per_device(x):
        def step(c, _):
            return c + lax.psum(jnp.sum(x), "i") * 0, jnp.log(x - 1.5)  # shard_map

        start = jnp.sum(x)
        return lax.scan(step, start, None, length=2)[1]

    spec = P("i")
    f = jax.shard_map(per_device, mesh=mesh, in_specs=spec, out_specs=P(None, "i"), check_vma=check_vma)
    (error,) = errors_of(lambda: hcb.watch_nonfinite(jax.jit(f))(X))
    assert describe(error) == ("log", line_of(__file__, "shard_map"), 1, 0, (0,))
    assert (error.device, error.shape, error.check.count) == ("cpu:2", (1,), 1)


@pytest.mark.parametrize("jit", FORMS)
def test_operations_a_nan_spreads_to_are_not_reported(jit: Form) -> None:
    def f(x):
        y = jnp.log(x - 1)
        return lax.scan(lambda c, z: (jnp.sin(c * z), c + z), jnp.sum(y), jnp.exp(y))

    (error,) = errors_of(lambda: jit(f)(X))
    assert error.primitive == "log"


def test_what_one_program_hands_to_the_next_is_reported_once() -> None:
    def f(x):
        return jnp.sum(jnp.sin(jnp.log(x - 5)) * 2 + 1)

    assert [error.primitive for error in errors_of(lambda: hcb.watch_nonfinite(f)(X))] == ["log"]


@pytest.mark.parametrize("jit", FORMS)
def test_several_operations_are_reported_in_program_order(jit: Form) -> None:
    def f(x):
        a = jnp.log(x - 1)
        b = lax.scan(lambda c, y: (c, 1 / y), 0.0, x * 0)[1]
        return a, b, jnp.sqrt(-x)

    errors = errors_of(lambda: jit(f)(X[3:]))
    assert [error.primitive for error in errors] == ["log", "div", "sqrt"]


@pytest.mark.parametrize("mode", ["results", "every"])
@pytest.mark.parametrize("jit", [*FORMS, pytest.param(hcb.watch_nonfinite, id="no jit")])
def test_a_mask_of_infinities_is_not_reported(jit: Form, mode: Mode) -> None:
    def f(x):
        return jax.nn.softmax(jnp.where(x > 1, x, -jnp.inf)), jnp.max(x, initial=-jnp.inf)

    def mask(x):
        return jnp.where(x > 1, x, -jnp.inf)

    assert not errors_of(lambda: jit(f, mode=mode)(X))
    assert not errors_of(lambda: jit(mask, mode=mode)(X))


def test_a_nan_made_of_a_mask_is_reported() -> None:
    def f(x):
        scores = jnp.where(x > 10, x, -jnp.inf)
        return jax.nn.softmax(scores)  # all are masked

    (error,) = errors_of(lambda: hcb.watch_nonfinite(jax.jit(f))(X))
    assert (error.primitive, error.source_line.line) == ("sub", line_of(__file__, "all are masked"))
    assert dict(error.check.explanation.values) == {"operand 0": "-inf", "operand 1": "-inf"}


@pytest.mark.parametrize("jit", FORMS)
def test_a_nan_among_the_inputs_is_reported_by_its_path_and_element(jit: Form) -> None:
    def f(x, *rest, scale):
        return jnp.sum(x["y"][0]) * scale + rest[1]

    y = X.at[2].set(jnp.nan)

    def run(**options):
        return lambda: jit(f, **options)({"y": [y, X]}, X, X[0] * jnp.inf, scale=jnp.float32(jnp.nan))

    errors = errors_of(run())
    assert {error.primitive for error in errors} == {"input x['y'][0][2]", "input rest[1]", "input scale"}
    assert str(errors[0]).startswith("input x['y'][0][2]: 1 NaN and 0 infinite values in float32[4], ")
    assert not errors_of(run(inputs=False))


def test_an_input_that_is_scanned_over_has_the_iteration() -> None:
    def f(w, batch):
        return lax.scan(lambda w, x: (w * 0.9 + x, None), w, batch["x"])[0]

    for length in (20, 4000):
        x = jnp.ones((length, 4)).at[14, 3].set(jnp.nan)
        (error,) = errors_of(lambda x=x: hcb.watch_nonfinite(jax.jit(f))(jnp.ones(4), {"x": x}))
        assert (error.primitive, error.iteration) == ("input batch['x'][14,3]", (14,))

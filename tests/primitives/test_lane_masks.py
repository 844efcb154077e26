"""`vmap` of branches and loops whose predicate it batches: only the elements that take part send and are checked.

What a program does for a batch is compared with what it does for each element by itself, without `vmap`.
"""

from __future__ import annotations

import contextlib
import io
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import hostcallback as hcb
from recorder import Recorder
from transforming import JVP, PRIMAL, TRANSPOSE, Jit, batch, delivered, delivered_parts, elements, plain

XS = jnp.array([0.5, 1.5, 2.5, 3.5, 4.5])
Tap = Callable[[Any], Any]
Program = Callable[[Tap, Any], Any]


def in_cond(tap: Tap, x: Any) -> Any:
    return lax.cond(x > 2, lambda x: tap(x) + 1, lambda x: tap(-x), x)


def in_one_branch(tap: Tap, x: Any) -> Any:
    return lax.cond(x > 2, lambda x: x, lambda x: tap(-x), x)


def in_switch(tap: Tap, x: Any) -> Any:
    return lax.switch(
        jnp.int32(x), [lambda x: tap(x), lambda x: x, lambda x: tap(2 * x), lambda x: tap(3 * x)], x
    )


def in_while(tap: Tap, x: Any) -> Any:
    return lax.while_loop(lambda c: c < 3, lambda c: tap(c) + 1, x)


def in_condition(tap: Tap, x: Any) -> Any:
    return lax.while_loop(lambda c: tap(c) < 3, lambda c: tap(-c) * -1 + 1, x)


def in_trip_count(tap: Tap, x: Any) -> Any:
    return lax.fori_loop(0, jnp.int32(x), lambda i, c: tap(c + i), x)


def in_cond_in_cond(tap: Tap, x: Any) -> Any:
    return lax.cond(x > 1, lambda x: lax.cond(x > 3, tap, lambda x: tap(-x), x), lambda x: x, x)


def in_cond_of_all_in_cond(tap: Tap, x: Any) -> Any:
    return lax.cond(x > 1, lambda x: lax.cond(XS[0] > 0, tap, lambda x: tap(-x), x), lambda x: x, x)


def in_cond_in_while(tap: Tap, x: Any) -> Any:
    return lax.while_loop(lambda c: c < 4, lambda c: lax.cond(c > 2, tap, lambda c: c, c) + 1, x)


def in_while_in_cond(tap: Tap, x: Any) -> Any:
    return lax.cond(x < 2, lambda x: in_while(tap, x), lambda x: x, x)


def in_while_in_while(tap: Tap, x: Any) -> Any:
    def body(c: Any) -> Any:
        return lax.while_loop(lambda d: d < 2 * c, lambda d: tap(d) + 1, c) + 0.5

    return lax.while_loop(lambda c: c < 4, body, x)


def in_scan_in_cond(tap: Tap, x: Any) -> Any:
    def step(c: Any, i: Any) -> Any:
        return tap(c) + i, tap(-c)

    return lax.cond(x > 2, lambda x: lax.scan(step, x, jnp.arange(3.0))[0], lambda x: x, x)


def in_cond_in_scan(tap: Tap, x: Any) -> Any:
    return lax.scan(lambda c, i: (in_cond(tap, c) - 1, i), x, jnp.arange(3.0))[0]


def in_jit_in_cond(tap: Tap, x: Any) -> Any:
    return lax.cond(x > 2, jax.jit(lambda x: tap(x)), lambda x: x, x)


def in_checkpoint_in_cond(tap: Tap, x: Any) -> Any:
    return lax.cond(x > 2, jax.checkpoint(lambda x: jnp.sin(tap(x))), lambda x: x, x)


def in_custom_jvp_in_cond(tap: Tap, x: Any) -> Any:
    @jax.custom_jvp
    def f(x: Any) -> Any:
        return tap(x)

    f.defjvp(lambda primals, tangents: (tap(-primals[0]), tangents[0] * primals[0]))
    return lax.cond(x > 2, f, lambda x: x, x)


def in_custom_vjp_in_cond(tap: Tap, x: Any) -> Any:
    @jax.custom_vjp
    def f(x: Any) -> Any:
        return tap(x)

    def forward(x: Any) -> Any:
        return tap(-x), x

    f.defvjp(forward, lambda x, ct: (tap(10 * x) * ct,))
    return lax.cond(x > 2, f, lambda x: x, x)


def in_vmap_in_cond(tap: Tap, x: Any) -> Any:
    def inner(x: Any) -> Any:
        return jax.vmap(lambda y: in_cond_in_cond(tap, x + y))(jnp.arange(2.0)).sum()

    return lax.cond(x > 2, inner, lambda x: x, x)


def in_map_in_cond(tap: Tap, x: Any) -> Any:
    return lax.cond(x > 2, lambda x: lax.map(tap, jnp.stack([x, 2 * x])).sum(), lambda x: x, x)


PROGRAMS = [  # in an order in which `slow_variants` leaves gradients of a batch of each special function
    in_cond, in_one_branch, in_custom_vjp_in_cond, in_while, in_condition, in_trip_count, in_cond_in_cond,
    in_cond_of_all_in_cond, in_cond_in_while, in_while_in_cond, in_while_in_while, in_scan_in_cond, in_cond_in_scan,
    in_checkpoint_in_cond, in_jit_in_cond, in_switch, in_vmap_in_cond, in_map_in_cond, in_custom_jvp_in_cond,
]  # fmt: skip
LOOPS = {in_while, in_condition, in_trip_count, in_cond_in_while, in_while_in_cond, in_while_in_while}
EACH = pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)


def numbers(values: Any) -> Counter[float]:
    """How often each number is among the arrays."""
    return Counter(round(float(x), 3) for value in values for x in np.ravel(value))


def tapped(program: Program, run: Callable[[Any], Any], **options: Any) -> tuple[Counter[Any], Any]:
    """What the taps of a program send, each number with its derivatives' transforms, and what `run` of it returns."""
    found: Counter[Any] = Counter()

    def note(value: Any, transforms: Any) -> None:
        of_derivatives = tuple(name for name, _ in transforms if name not in ("batch", "mask"))
        found.update((of_derivatives, number) for number in numbers([value]).elements())

    out = run(lambda x: program(lambda value: hcb.id_tap(note, value, **options), x))
    hcb.barrier_wait()
    return found, np.asarray(out)


@pytest.mark.slow_variants(every=3)
@EACH
def test_a_batch_sends_what_its_elements_send(jit: Jit, program: Program) -> None:
    alone, expected = tapped(program, lambda f: [jit(f)(x) for x in XS])
    batched, out = tapped(program, lambda f: jit(jax.vmap(f))(XS))
    assert batched == alone
    np.testing.assert_allclose(out, expected)


@pytest.mark.slow_variants(every=4)
@EACH
def test_two_vmaps_send_what_their_elements_send(program: Program) -> None:
    shifts = jnp.array([0.0, -1.0, 1.0])
    alone, _ = tapped(program, lambda f: [jax.jit(f)(x + shift) for x in XS for shift in shifts])
    for axes in [((0, None), (None, 0)), ((None, 0), (0, None))]:

        def run(f: Any, axes: Any = axes) -> Any:
            inner = jax.vmap(lambda x, shift: f(x + shift), in_axes=axes[0])
            return jax.jit(jax.vmap(inner, in_axes=axes[1]))(XS, shifts)

        assert tapped(program, run)[0] == alone


@pytest.mark.slow_variants(every=5)
@pytest.mark.parametrize(
    "program", [p for p in PROGRAMS if p not in LOOPS], ids=lambda program: program.__name__
)
@pytest.mark.parametrize("order", ["vmap of grad", "grad of vmap"])
def test_gradients_send_what_their_elements_send(program: Program, order: str) -> None:
    alone, expected = tapped(program, lambda f: [jax.jit(jax.grad(f))(x) for x in XS])

    def run(f: Any) -> Any:
        if order == "vmap of grad":
            return jax.jit(jax.vmap(jax.grad(f)))(XS)
        return jax.jit(jax.grad(lambda xs: jax.vmap(f)(xs).sum()))(XS)

    batched, out = tapped(program, run)
    np.testing.assert_allclose(out, expected, rtol=1e-6)
    assert batched == alone


@pytest.mark.slow_variants(every=4)
@pytest.mark.parametrize(
    "program", [p for p in PROGRAMS if p is not in_custom_vjp_in_cond], ids=lambda p: p.__name__
)
def test_tangents_are_sent_by_the_elements_that_take_part(program: Program) -> None:
    def slope(f: Any) -> Any:
        return lambda x: jax.jvp(f, (x,), (2.0,))[1]

    alone, expected = tapped(program, lambda f: [jax.jit(slope(f))(x) for x in XS])
    batched, out = tapped(program, lambda f: jax.jit(jax.vmap(slope(f)))(XS))
    np.testing.assert_allclose(out, expected, rtol=1e-6)
    if program not in (in_custom_jvp_in_cond, in_condition):  # their tangents are equal for all elements
        assert batched == alone


@pytest.mark.slow_variants(every=3)
@EACH
def test_callbacks_and_prints_run_for_the_elements_that_take_part(program: Program) -> None:
    def ran(run: Callable[[Any], Any]) -> tuple[Counter[float], Counter[str]]:
        calls: list[Any] = []

        def tap(value: Any) -> Any:
            hcb.callback(lambda x: calls.append(float(x)), value)
            hcb.print("{:.2f}", value)
            return value

        with contextlib.redirect_stdout(io.StringIO()) as lines:
            run(lambda x: program(tap, x))
            hcb.barrier_wait()
        return numbers(calls), Counter(lines.getvalue().split())

    assert ran(lambda f: jax.jit(jax.vmap(f))(XS)) == ran(lambda f: [jax.jit(f)(x) for x in XS])


@pytest.mark.slow_variants(every=5)
@EACH
@pytest.mark.parametrize("method", ["sequential", "expand_dims"])
def test_calls_return_what_they_return_for_each_element(program: Program, method: str) -> None:
    def run(batched: bool) -> tuple[Counter[float], Any]:
        seen: list[Any] = []

        def double(x: Any) -> Any:
            seen.append(np.array(x))
            return 2 * x

        def tap(value: Any) -> Any:
            doubled = hcb.call(
                double,
                lax.stop_gradient(value),
                result_shape=jax.ShapeDtypeStruct((), jnp.float32),
                vmap_method=method,
            )
            return doubled / 2

        def f(x: Any) -> Any:
            return program(tap, x)

        out = jax.jit(jax.vmap(f))(XS) if batched else jnp.stack([jax.jit(f)(x) for x in XS])
        hcb.barrier_wait()
        return numbers(seen), np.asarray(out)

    (calls, out), (alone, expected) = run(True), run(False)
    np.testing.assert_allclose(out, expected)
    if method == "sequential":
        assert calls == alone


def test_a_message_says_which_elements_it_has(jit: Jit, rec: Recorder) -> None:
    def f(x: Any, y: Any) -> Any:
        return lax.cond(x > 2, lambda: hcb.id_tap(rec, (x, y, 7.0))[0], lambda: x)

    y = jnp.arange(10.0).reshape(2, 5)
    jit(jax.vmap(f, in_axes=(0, 1)))(XS, y)
    transforms, value = delivered_parts(rec)[0]
    assert transforms == (batch(0, 0, None), elements([2, 3, 4]))
    assert value == ([2.5, 3.5, 4.5], plain(y.T[2:]), 7.0)
    assert len(rec.values) == 1


def test_several_vmaps_become_one_over_the_elements_that_take_part(jit: Jit, rec: Recorder) -> None:
    def f(x: Any, y: Any) -> Any:
        return lax.cond(x > y, lambda: hcb.id_tap(rec, (x, y)), lambda: (x, y))[0]

    x, y = jnp.arange(3), jnp.array([1, 0])
    jit(jax.vmap(jax.vmap(f, in_axes=(None, 0)), in_axes=(0, None)))(x, y)
    # JAX would unroll the inner vmap first. The outer vmap's indices come first.
    assert delivered_parts(rec) == [((batch(0, 0), elements([2, 1, 2], [0, 1, 1])), ([2, 1, 2], [1, 0, 0]))]


def test_a_vmap_over_which_the_predicate_does_not_vary_stays(jit: Jit, rec: Recorder) -> None:
    def f(x: Any, y: Any) -> Any:
        return lax.cond(x > 0, lambda: hcb.id_tap(rec, x * y), lambda: x)

    x, y = jnp.arange(3), jnp.array([10, 20])
    jit(jax.vmap(jax.vmap(f, in_axes=(0, None)), in_axes=(None, 0)))(x, y)
    assert delivered_parts(rec) == [((batch(0), batch(0), elements([1, 2])), [[10, 20], [20, 40]])]


def test_a_vmap_within_a_branch_sends_all_of_the_elements_that_take_part(jit: Jit, rec: Recorder) -> None:
    def f(taken: Any, x: Any) -> Any:
        inner = jax.vmap(lambda y: hcb.id_tap(rec, (y, 2 * y))[0])
        return lax.cond(taken, inner, lambda x: x, x)

    jit(jax.vmap(f))(jnp.array([True, False, True]), jnp.arange(6.0).reshape(3, 2))
    hcb.barrier_wait()
    ((once, twice),) = rec.values
    assert (once.tolist(), twice.tolist()) == ([[0, 1], [4, 5]], [[0, 2], [8, 10]])


def test_nothing_is_sent_if_no_element_takes_part(jit: Jit, rec: Recorder) -> None:
    def f(x: Any) -> Any:
        return lax.cond(x > 9, lambda x: hcb.id_tap(rec, x), lambda x: x, x)

    with hcb.outfeed_receiver() as receiver:
        jit(jax.vmap(f))(XS)
    assert len(rec) == 0
    assert sum(stats.delivered for stats in receiver.stats) == 0


def test_a_value_without_a_batch_is_sent_once_if_any_element_takes_part(jit: Jit, rec: Recorder) -> None:
    def f(x: Any) -> Any:
        return lax.cond(x > 2, lambda x: (hcb.id_tap(rec, 7), x)[1], lambda x: x, x)

    jit(jax.vmap(f))(XS)
    assert delivered_parts(rec) == [((batch(None), elements([2, 3, 4])), 7)]


def test_a_text_without_values_is_printed_for_each_element_that_takes_part(capsys: Any) -> None:
    jax.jit(jax.vmap(lambda x: lax.cond(x > 2, lambda: hcb.print("large"), lambda: None)))(XS)
    hcb.barrier_wait()
    assert capsys.readouterr().out == "large\n" * 3


def test_derivatives_keep_their_transforms(rec: Recorder) -> None:
    def f(x: Any) -> Any:
        return lax.cond(x > 2, lambda x: hcb.id_tap(rec, x) ** 2, lambda x: x, x)

    jax.jit(jax.vmap(jax.grad(f)))(XS[1:4])
    part = elements([1, 2])
    assert delivered_parts(rec) == [
        ((batch(0), part), [2.5, 3.5]),
        ((JVP, TRANSPOSE, batch(0), part), [5.0, 7.0]),
    ]


def test_one_predicate_for_all_elements_masks_nothing(rec: Recorder) -> None:
    def f(x: Any, p: Any) -> Any:
        return lax.cond(p, lambda x: hcb.id_tap(rec, x), lambda x: x, x)

    jax.jit(jax.vmap(f, in_axes=(0, None)))(XS, True)
    jax.jit(f)(1.0, True)
    assert delivered(rec) == [((batch(0),), plain(XS)), (PRIMAL, 1.0)]


def test_a_check_is_of_the_elements_that_take_part(jit: Jit) -> None:
    def root(x: Any) -> Any:
        def negative(x: Any) -> Any:
            hcb.check(x < 0, "x is {}", x)
            return x

        def positive(x: Any) -> Any:
            hcb.check(x >= 0, "x is {}", x)
            return jnp.sqrt(x)

        return lax.cond(x < 0, negative, positive, x)

    def steps(x: Any) -> Any:
        def step(x: Any) -> Any:
            hcb.check(x < 3, "{} is too large", x)
            return x + 1

        return lax.while_loop(lambda x: x < 3, step, x)

    jit(jax.vmap(root))(jnp.array([-1.0, 4.0]))
    jit(jax.vmap(steps))(XS)
    hcb.barrier_wait()

    def wrong(x: Any) -> Any:
        return lax.cond(x > 2, lambda x: (hcb.check(x < 4, "x is {}", x), x)[1], lambda x: x, x)

    jit(jax.vmap(wrong))(XS)
    with pytest.raises(hcb.TapFunctionException) as caught:
        hcb.barrier_wait()
    (error,) = caught.value.exceptions
    assert isinstance(error, hcb.CheckError)
    assert error.check.explanation.text == "x is 4.5"
    assert error.check.explanation.elements == (4,)
    assert error.check.count == 1


def test_metrics_are_of_the_elements_that_take_part() -> None:
    class Writer:
        def __init__(self) -> None:
            self.records: list[Any] = []

        def write_scalars(self, step: int, scalars: Any) -> None:
            self.records.append((step, dict(scalars)))

    def f(x: Any) -> Any:
        return lax.cond(x > 2, lambda x: (hcb.metrics({"x": x}, step=3, reduce="mean"), x)[1], lambda x: x, x)

    writer = Writer()
    with hcb.outfeed_receiver(writers=[writer]):
        jax.jit(jax.vmap(f))(XS)
    assert writer.records == [(3, {"x": 3.5})]


def test_an_error_names_the_element_in_the_whole_batch() -> None:
    def fail(x: Any) -> None:
        raise ValueError(str(x))

    jax.jit(jax.vmap(lambda x: lax.cond(x > 4, lambda: hcb.callback(fail, x), lambda: None)))(XS)
    with pytest.raises(hcb.TapFunctionException) as caught:
        hcb.barrier_wait()
    (failure,) = caught.value.failures
    assert failure.exception.__notes__[0] == "element 4 of the batch"


def test_a_tap_where_it_cannot_be_masked_is_refused() -> None:
    def f(x: Any) -> Any:
        def solve(_: Any, b: Any) -> Any:
            return hcb.id_tap(lambda value: None, b / 2)

        return lax.custom_linear_solve(lambda y: 2 * y, x, solve, symmetric=True)

    with pytest.raises(NotImplementedError, match=r"custom_linear_solve.*elements of a vmap.*jax\.lax\.map"):
        jax.vmap(lambda x: lax.cond(x > 2, f, lambda x: x, x))(XS)

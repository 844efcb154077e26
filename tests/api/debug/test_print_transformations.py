"""`hcb.print` under vmap, differentiation and on several devices matches `jax.debug.print`."""

from __future__ import annotations

import functools
import statistics
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from printing import Printed

import hostcallback as hcb
from transforming import Jit

INNER, OUTER = 2, 3


def doubly_batched(inner: int | None, outer: int | None) -> Any:
    """An array for `vmap(vmap(f, in_axes=inner), in_axes=outer)` whose elements have shape (4,)."""
    shape = [4]
    for axis, size in ((inner, INNER), (outer, OUTER)):
        if axis is not None:
            shape.insert(axis, size)
    return jnp.arange(np.prod(shape)).reshape(shape)


@pytest.mark.slow_variants
@pytest.mark.parametrize(
    ("inner", "outer"),
    [((0, None), (1, 0)), ((1, 0), (0, None)), ((0, 0), (0, 0)), ((None, 0), (0, 1)), ((0, None), (0, None))],
)
def test_nested_vmaps_print_a_line_per_element_in_jaxs_order(
    jit: Jit, inner: Any, outer: Any, printed: Printed
) -> None:
    def program(print: Any) -> None:
        def f(x: Any, y: Any) -> Any:
            print("{} {y!r}", x, y=y)
            print("only {}", y)
            return x + y.sum()

        x, y = (doubly_batched(*axes) for axes in zip(inner, outer, strict=True))
        jit(jax.vmap(jax.vmap(f, in_axes=inner), in_axes=outer))(x, y)

    assert printed.alike(program)


def test_three_vmaps_and_the_control_flow_between_them(jit: Jit, printed: Printed) -> None:
    def program(print: Any) -> None:
        def innermost(x: Any) -> Any:
            print("x={:.0f}", x)
            return x + 1

        def middle(xs: Any) -> Any:
            print("xs={}", xs)
            return lax.fori_loop(0, 2, lambda i, c: jax.vmap(innermost)(c), xs)

        jit(jax.vmap(jax.jit(jax.vmap(middle, in_axes=1)), in_axes=-1))(jnp.arange(24.0).reshape(2, 3, 4))

    lines = printed.alike(program)
    assert len(lines) == 12 + 2 * 24


def test_a_print_of_nothing_batched_prints_once_under_vmap(jit: Jit, printed: Printed) -> None:
    def program(print: Any) -> None:
        def f(x: Any, y: Any) -> Any:
            print("text")
            print("{} {}", 3, y)
            print("{}", x)
            return x

        jit(jax.vmap(f, in_axes=(0, None)))(jnp.arange(2), jnp.float32(4))

    assert printed.alike(program) == ["text", "3 4.0", "0", "1"]


def test_vmap_with_an_axis_name_and_a_collective(jit: Jit, printed: Printed) -> None:
    def f(print: Any, x: Any) -> Any:
        print("{} of {} at {}", x, lax.psum(x, "i"), lax.axis_index("i"))
        return x

    assert printed.alike(
        lambda print: jit(jax.vmap(functools.partial(f, print), axis_name="i"))(jnp.arange(3.0))
    ) == ["0.0 of 3.0 at 0", "1.0 of 3.0 at 1", "2.0 of 3.0 at 2"]


def test_vmap_with_a_spmd_axis_name(jit: Jit, printed: Printed) -> None:
    def program(print: Any) -> None:
        jit(jax.vmap(lambda x: print("{}", x), spmd_axis_name="i"))(jnp.arange(3))

    assert printed.alike(program) == ["0", "1", "2"]


def test_an_empty_batch_prints_nothing(jit: Jit, printed: Printed) -> None:
    assert printed.alike(lambda print: jit(jax.vmap(lambda x: print("{}", x)))(jnp.zeros((0, 2)))) == []


def test_each_element_prints_in_its_branch_where_vmap_batches_the_predicate_of_a_cond(
    jit: Jit, printed: Printed
) -> None:
    def branch(print: Any, sign: int, x: Any) -> Any:
        print("sign {}: {}", sign, x)
        return sign * x

    def program(print: Any, batched: bool) -> None:
        def f(p: Any, x: Any) -> Any:
            return lax.cond(
                p > 0, functools.partial(branch, print, 1), functools.partial(branch, print, -1), x
            )

        jit(jax.vmap(f, in_axes=(0 if batched else None, 0)))(
            jnp.array([1, -1]) if batched else 1, jnp.arange(2)
        )

    batched = printed.ours(program, True)
    assert batched.splitlines() == ["sign -1: 1", "sign 1: 0"]
    assert printed.ours(program, False).splitlines() == ["sign 1: 0", "sign 1: 1"]


def test_jax_prints_both_branches_for_all_elements_unordered(capsys: pytest.CaptureFixture[str]) -> None:
    # The comparison for the test above: JAX refuses an ordered print there, and leaves the order of others open.
    def f(print: Any, x: Any) -> Any:
        return lax.cond(x > 0, lambda x: (print("yes {}", x), x)[1], lambda x: (print("no {}", x), -x)[1], x)

    jax.jit(jax.vmap(functools.partial(f, hcb.print)))(jnp.array([1, -1]))
    hcb.barrier_wait()
    assert capsys.readouterr().out.splitlines() == ["no -1", "yes 1"]
    jax.jit(jax.vmap(functools.partial(f, jax.debug.print)))(jnp.array([1, -1]))
    jax.effects_barrier()
    assert sorted(capsys.readouterr().out.splitlines()) == ["no -1", "no 1", "yes -1", "yes 1"]


def test_a_while_loop_with_a_batched_condition_prints_the_elements_that_are_not_finished(
    jit: Jit, printed: Printed
) -> None:
    def f(print: Any, x: Any) -> Any:
        def body(c: Any) -> Any:
            print("{}", c)
            return c + 1

        return lax.while_loop(lambda c: c < 3, body, x)

    ours = printed.ours(lambda print: jit(jax.vmap(functools.partial(f, print)))(jnp.array([0, 2])))
    assert ours.splitlines() == ["0", "2", "1", "2"]


def test_differentiation_prints_primals_only(jit: Jit, printed: Printed) -> None:
    def program(print: Any) -> None:
        def f(x: Any) -> Any:
            y = jnp.sin(x)
            print("y={}", y)
            return y * x

        jit(jax.grad(f))(2.0)
        jit(lambda x: jax.jvp(f, (x,), (1.0,)))(2.0)
        jit(jax.hessian(f))(2.0)
        jit(jax.vmap(jax.grad(f)))(jnp.arange(2.0))
        jit(jax.grad(lambda x: jax.vmap(f)(x).sum()))(jnp.arange(2.0))
        jit(lambda x: jax.linearize(f, x)[1](1.0))(2.0)

    assert len(printed.alike(program)) == 8


def test_a_tangent_prints_under_jvp_and_is_dropped_under_transposition(jit: Jit, printed: Printed) -> None:
    def program(print: Any) -> None:
        @jax.custom_jvp
        def f(x: Any) -> Any:
            return x

        @f.defjvp
        def _(primals: Any, tangents: Any) -> Any:
            print("primal {} tangent {}", primals[0], tangents[0])
            return primals[0], 2 * tangents[0]

        jit(lambda x: jax.jvp(f, (x,), (1.0,)))(3.0)
        print("grad")
        jit(jax.grad(f))(3.0)
        jax.linear_transpose(jit(lambda x: (print("linear {}", x), 2 * x)[1]), 1.0)(3.0)

    assert printed.alike(program) == ["primal 3.0 tangent 1.0", "grad"]


def test_grad_of_a_scan_of_five_prints_five_times(jit: Jit, printed: Printed) -> None:
    # jax#16637: jax.debug.print prints once, hoisted out of the loop.
    def f(x: Any) -> Any:
        def step(c: Any, _: Any) -> Any:
            hcb.print("step {}", 1.0)
            return c * x, None

        return lax.scan(step, 1.0, None, length=5)[0]

    assert printed.ours(lambda print: jit(jax.grad(f))(2.0)) == "step 1.0\n" * 5


def test_checkpoint_prints_once(jit: Jit, printed: Printed) -> None:
    def f(x: Any) -> Any:
        hcb.print("{}", x)
        return jnp.sin(jnp.sin(x))

    assert printed.ours(lambda print: jit(jax.grad(jax.checkpoint(f)))(2.0)) == "2.0\n"


def test_a_batch_is_one_message_and_one_write(jit: Jit) -> None:
    writes: list[str] = []

    class Stream:
        def write(self, text: str) -> None:
            writes.append(text)

    to_stream = hcb.print(output_stream=Stream())
    with hcb.outfeed_receiver() as receiver:
        jit(jax.vmap(jax.vmap(lambda x: to_stream("{}", x))))(jnp.arange(6).reshape(2, 3))
    assert [text.count("\n") for text in writes] == [6]
    assert sum(stats.delivered for stats in receiver.stats) == 1


def test_a_program_does_not_grow_with_the_batch() -> None:
    def program_lines(size: int) -> int:
        program: Any = jax.jit(jax.vmap(lambda x: hcb.print("{}", x)))
        return str(program.lower(jnp.arange(size)).as_text()).count("\n")

    assert program_lines(1024) == program_lines(2)


@pytest.mark.slow
@pytest.mark.native_only
def test_vmap_over_1024_elements_compiles_as_fast_as_without_the_print() -> None:
    def compile_sec(print: Any) -> float:
        def f(x: Any) -> Any:
            for _ in range(8):
                x = jnp.tanh(x @ x) + jnp.sin(x)
            print("x {}", x)
            return x

        program = jax.jit(jax.vmap(f))
        start = perf_counter()
        program.lower(jnp.ones((1024, 4, 4))).compile()
        return perf_counter() - start

    untapped, tapped = [], []
    for i in range(12):
        untapped.append(compile_sec(lambda *args: None))
        tapped.append(compile_sec(hcb.print))
        if not i:  # the first compilation of the process
            untapped.clear(), tapped.clear()
    assert statistics.median(tapped) <= 1.5 * statistics.median(untapped)


def test_shard_map_prints_on_every_device_in_its_order(printed: Printed) -> None:
    mesh = Mesh(jax.devices(), ("i",))

    def per_device(x: Any) -> Any:
        def step(c: Any, i: Any) -> Any:
            hcb.print("{} {}", lax.axis_index("i"), i)
            return c, None

        return lax.scan(step, x, jnp.arange(50))[0]

    f = jax.jit(
        jax.shard_map(per_device, mesh=mesh, in_specs=PartitionSpec("i"), out_specs=PartitionSpec("i"))
    )
    lines = printed.ours(lambda print: f(jnp.arange(4.0))).splitlines()
    assert len(lines) == 200
    for device in range(4):
        assert [line for line in lines if line.startswith(f"{device} ")] == [
            f"{device} {i}" for i in range(50)
        ]


def test_pmap_of_vmap_prints_every_devices_elements(printed: Printed) -> None:
    f = jax.pmap(jax.vmap(lambda x: hcb.print("{} {}", lax.axis_index("d"), x)), axis_name="d")
    lines = printed.ours(lambda print: f(jnp.arange(12).reshape(4, 3))).splitlines()
    assert sorted(lines) == sorted(f"{i // 3} {i}" for i in range(12))
    for device in range(4):
        mine = [line for line in lines if line.startswith(f"{device} ")]
        assert mine == sorted(mine, key=lambda line: int(line.split()[1]))

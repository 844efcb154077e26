"""`hcb.print` prints what `jax.debug.print` prints; both run here, and what they print is compared."""

from __future__ import annotations

import collections
import functools
import io
import statistics
from collections.abc import Callable
from time import perf_counter
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

import hostcallback as hcb

Jit = Callable[[Callable[..., Any]], Callable[..., Any]]

JITS = [
    pytest.param(jax.jit, id="jax.jit"),
    pytest.param(lambda f: f, id="no jit"),
]

INNER, OUTER = 2, 3
Point = collections.namedtuple("Point", "x y")


def doubly_batched(inner: int | None, outer: int | None) -> Any:
    """An array for `vmap(vmap(f, in_axes=inner), in_axes=outer)` whose elements have shape (4,)."""
    shape = [4]
    for axis, size in ((inner, INNER), (outer, OUTER)):
        if axis is not None:
            shape.insert(axis, size)
    return jnp.arange(np.prod(shape)).reshape(shape)


class Printed:
    """Runs one program with both prints, and compares."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def ours(self, program: Callable[..., Any], *args: Any) -> str:
        """What `program(print, *args)` prints with ours."""
        self._capsys.readouterr()
        program(hcb.print, *args)
        hcb.barrier_wait()
        return self._capsys.readouterr().out

    def jaxs(self, program: Callable[..., Any], *args: Any) -> str:
        """What it prints with JAX's. Ordered, which ours is by default."""
        self._capsys.readouterr()
        program(functools.partial(jax.debug.print, ordered=True), *args)
        jax.effects_barrier()
        return self._capsys.readouterr().out

    def alike(self, program: Callable[..., Any], *args: Any) -> list[str]:
        """The lines that both print."""
        expected = self.jaxs(program, *args)
        assert self.ours(program, *args) == expected
        return expected.splitlines()


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Printed:
    return Printed(capsys)


VALUES = {
    "float32": jnp.float32(1.1),
    "negative": jnp.float32(-0.0),
    "nan": jnp.float32(np.nan),
    "bfloat16": jnp.bfloat16(1.37),
    "float16": jnp.float16(1e-7),
    "float8": jnp.asarray(0.3, jnp.float8_e4m3fn),
    "int32": jnp.int32(-42),
    "uint8": jnp.uint8(200),
    "bool": jnp.asarray(True),
    "complex64": jnp.complex64(1.5 - 2j),
    "vector": jnp.linspace(0.0, 1.0, 7),
    "bools": jnp.array([True, False]),
    "bfloat16 matrix": jnp.eye(3, dtype=jnp.bfloat16) * 1.37,
    "wide": jnp.arange(40) * 12345,
    "large": jnp.arange(2000.0).reshape(2, 1000),
    "a mebibyte": jnp.arange(1 << 18, dtype=jnp.int32),
    "empty": jnp.zeros((0, 3)),
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
@pytest.mark.parametrize("jit", JITS)
def test_every_value_prints_as_jax_prints_it(jit: Jit, value: Any, printed: Printed) -> None:
    def program(print: Any, value: Any) -> None:
        def f(x: Any) -> Any:
            print("{}|{:}|{!s}|{!r}|{!a}|{x}", x, x, x, x, x, x=x)
            print("{}", x)
            print("{} {}", [x, (x, None)], {"a": x, "b": Point(x, "text")})
            return x

        jit(f)(value)

    assert printed.alike(program, value)


def test_elements_of_less_than_a_byte_print_their_value(printed: Printed) -> None:
    # Not compared: jax.debug.print of JAX 0.8 prints them as they lie, and what lies beside them.
    assert printed.ours(
        lambda _: jax.jit(lambda x: hcb.print("{} {!r}", x, x))(jnp.asarray(-3, jnp.int4))
    ) == ("-3 Array(-3, dtype=int4)\n")


@pytest.mark.parametrize("jit", JITS)
def test_a_key_prints_as_a_key(jit: Jit, printed: Printed) -> None:
    # jax.debug.print prints its data instead under jit.
    key = jax.random.key(7)
    assert printed.ours(lambda _: jit(lambda k: hcb.print("{} {k.shape}", k, k=k))(key)) == f"{key} ()\n"


SPECS = [
    "{:.2f}", "{:10.3e}|", "{:>12}|", "{:<12}|", "{:+}", "{:g}", "{:%}", "{:d}", "{:05d}", "{:x}", "{:,}", "{:^9b}",
    "{:{}}|",
]  # fmt: skip


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("jit", JITS)
def test_format_specifications_apply_to_scalars_as_jax_applies_them(
    jit: Jit, spec: str, printed: Printed
) -> None:
    integral = spec[-2] in "dxb"
    width = (8,) if "{}" in spec[1:] else ()

    def program(print: Any) -> None:
        value = jnp.int32(1234567) if integral else jnp.float32(1234.5678)
        jit(lambda x: print(spec, x, *width))(value)
        jit(jax.vmap(lambda x: print("v={v" + spec[1:] if not width else "v={v}", v=x)))(value[None])

    assert printed.alike(program)


@pytest.mark.parametrize("jit", JITS)
def test_elements_attributes_and_conversions_are_those_of_jax_arrays(jit: Jit, printed: Printed) -> None:
    def program(print: Any) -> None:
        def f(x: Any, tree: Any) -> Any:
            print(
                "{x[0]} {x[1]!r} {x.shape} {x.dtype} {x.T} {0[a]} {0[b].y!r} {x.nbytes:>{w}}", tree, x=x, w=6
            )
            return x

        jit(f)(jnp.arange(3.0), {"a": jnp.int32(1), "b": Point(jnp.arange(2), jnp.zeros((2, 2)))})

    (first, second) = printed.alike(program)
    assert first.startswith("0.0 Array(1., dtype=float32) (3,) float32 [0. 1. 2.] 1 Array([[0., 0.],")
    assert second.endswith("    12")


@pytest.mark.parametrize("jit", JITS)
def test_what_is_no_array_stays_on_the_host_and_prints_as_it_is(jit: Jit, printed: Printed) -> None:
    marker = object()

    def program(print: Any) -> None:
        print_all = "{} {!r} {} {} {} {name!r} {n:03d} {flag}"
        jit(
            lambda x: print(print_all, marker, "text", None, [len, x], b"bytes", name="name", n=7, flag=True)
        )(jnp.float32(1))

    assert printed.alike(program)


def test_objects_that_jax_refuses_print_too(printed: Printed) -> None:
    assert printed.ours(
        lambda print: jax.jit(lambda x: print("{} {} {}", x, {7}, np.array(["text"])))(1)
    ) == ("1 {7} ['text']\n")


@pytest.mark.parametrize("jit", JITS)
def test_a_module_prints_as_jax_prints_it(jit: Jit, printed: Printed) -> None:
    linear = eqx.filter(eqx.nn.Linear(2, 3, key=jax.random.key(0)), eqx.is_array)
    printed.alike(lambda print: jit(lambda m: print("{} {m!r}", m.weight, m=m))(linear))


@pytest.mark.parametrize("jit", JITS)
def test_a_text_without_arguments_prints_each_time(jit: Jit, printed: Printed) -> None:
    def program(print: Any) -> None:
        def step(x: Any, _: Any) -> Any:
            print("tick")
            print("")
            print("{{}}")
            return x + 1, None

        jit(lambda x: lax.scan(step, x, None, length=3)[0])(0)

    assert printed.alike(program) == ["tick", "", "{{}}"] * 3


@pytest.mark.parametrize("jit", JITS)
def test_braces_that_are_escaped_before_a_placeholder_are_formatted(jit: Jit, printed: Printed) -> None:
    # jax.debug.print takes such a string for one without placeholders and prints "{{x}} = {} 1".
    assert printed.ours(lambda print: jit(lambda x: print("{{x}} = {}", x))(1)) == "{x} = 1\n"


@pytest.mark.parametrize("jit", JITS)
def test_numpys_print_options_are_those_of_the_trace(jit: Jit, printed: Printed) -> None:
    def program(print: Any) -> None:
        f = jit(lambda x: print("{} {!r} {!s} {:.5f}", x, x, x, x[0]))
        with np.printoptions(precision=2, suppress=True, threshold=3, edgeitems=1, linewidth=40):
            f(jnp.array([1.23456, 1e-7, 3.0, 4.0, 5.0]))
        if jit is not JITS[1].values[0]:
            f(jnp.array([9.87654, 1e-7, 3.0, 4.0, 5.0]))

    assert printed.alike(program)[0].startswith("[1.23 ... 5.  ]")


def test_print_options_of_the_trace_leave_those_of_the_process_alone(printed: Printed) -> None:
    before = np.get_printoptions()
    with np.printoptions(precision=1):
        first = jax.jit(lambda x: hcb.print("{}", x))
        assert printed.ours(lambda print: first(jnp.array([1.23]))) == "[1.2]\n"
    second = jax.jit(lambda x: hcb.print("{}", x))
    assert printed.ours(lambda print: second(jnp.array([1.23]))) == "[1.23]\n"
    assert np.get_printoptions() == before


@pytest.mark.parametrize(
    ("inner", "outer"),
    [((0, None), (1, 0)), ((1, 0), (0, None)), ((0, 0), (0, 0)), ((None, 0), (0, 1)), ((0, None), (0, None))],
)
@pytest.mark.parametrize("jit", JITS)
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


@pytest.mark.parametrize("jit", JITS)
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


@pytest.mark.parametrize("jit", JITS)
def test_a_print_of_nothing_batched_prints_once_under_vmap(jit: Jit, printed: Printed) -> None:
    def program(print: Any) -> None:
        def f(x: Any, y: Any) -> Any:
            print("text")
            print("{} {}", 3, y)
            print("{}", x)
            return x

        jit(jax.vmap(f, in_axes=(0, None)))(jnp.arange(2), jnp.float32(4))

    assert printed.alike(program) == ["text", "3 4.0", "0", "1"]


@pytest.mark.parametrize("jit", JITS)
def test_vmap_with_an_axis_name_and_a_collective(jit: Jit, printed: Printed) -> None:
    def f(print: Any, x: Any) -> Any:
        print("{} of {} at {}", x, lax.psum(x, "i"), lax.axis_index("i"))
        return x

    assert printed.alike(
        lambda print: jit(jax.vmap(functools.partial(f, print), axis_name="i"))(jnp.arange(3.0))
    ) == ["0.0 of 3.0 at 0", "1.0 of 3.0 at 1", "2.0 of 3.0 at 2"]


@pytest.mark.parametrize("jit", JITS)
def test_vmap_with_a_spmd_axis_name(jit: Jit, printed: Printed) -> None:
    def program(print: Any) -> None:
        jit(jax.vmap(lambda x: print("{}", x), spmd_axis_name="i"))(jnp.arange(3))

    assert printed.alike(program) == ["0", "1", "2"]


@pytest.mark.parametrize("jit", JITS)
def test_an_empty_batch_prints_nothing(jit: Jit, printed: Printed) -> None:
    assert printed.alike(lambda print: jit(jax.vmap(lambda x: print("{}", x)))(jnp.zeros((0, 2)))) == []


@pytest.mark.parametrize("jit", JITS)
def test_both_branches_of_a_cond_print_where_vmap_batches_its_predicate(jit: Jit, printed: Printed) -> None:
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
    assert batched.splitlines() == ["sign -1: 0", "sign -1: 1", "sign 1: 0", "sign 1: 1"]
    assert printed.ours(program, False).splitlines() == ["sign 1: 0", "sign 1: 1"]


def test_jax_prints_both_branches_as_well_unordered(capsys: pytest.CaptureFixture[str]) -> None:
    # The comparison for the test above: JAX refuses an ordered print there, and leaves the order of others open.
    def f(print: Any, x: Any) -> Any:
        return lax.cond(x > 0, lambda x: (print("yes {}", x), x)[1], lambda x: (print("no {}", x), -x)[1], x)

    jax.jit(jax.vmap(functools.partial(f, hcb.print)))(jnp.array([1, -1]))
    hcb.barrier_wait()
    ours = capsys.readouterr().out.splitlines()
    jax.jit(jax.vmap(functools.partial(f, jax.debug.print)))(jnp.array([1, -1]))
    jax.effects_barrier()
    assert sorted(ours) == sorted(capsys.readouterr().out.splitlines())


@pytest.mark.parametrize("jit", JITS)
def test_a_while_loop_with_a_batched_condition_prints_every_element_each_time(
    jit: Jit, printed: Printed
) -> None:
    def f(print: Any, x: Any) -> Any:
        def body(c: Any) -> Any:
            print("{}", c)
            return c + 1

        return lax.while_loop(lambda c: c < 3, body, x)

    ours = printed.ours(lambda print: jit(jax.vmap(functools.partial(f, print)))(jnp.array([0, 2])))
    assert ours.splitlines() == ["0", "2", "1", "3", "2", "3"]


@pytest.mark.parametrize("jit", JITS)
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


@pytest.mark.parametrize("jit", JITS)
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


@pytest.mark.parametrize("jit", JITS)
def test_grad_of_a_scan_of_five_prints_five_times(jit: Jit, printed: Printed) -> None:
    # jax#16637: jax.debug.print prints once, hoisted out of the loop.
    def f(x: Any) -> Any:
        def step(c: Any, _: Any) -> Any:
            hcb.print("step {}", 1.0)
            return c * x, None

        return lax.scan(step, 1.0, None, length=5)[0]

    assert printed.ours(lambda print: jit(jax.grad(f))(2.0)) == "step 1.0\n" * 5


@pytest.mark.parametrize("jit", JITS)
def test_checkpoint_prints_once(jit: Jit, printed: Printed) -> None:
    def f(x: Any) -> Any:
        hcb.print("{}", x)
        return jnp.sin(jnp.sin(x))

    assert printed.ours(lambda print: jit(jax.grad(jax.checkpoint(f)))(2.0)) == "2.0\n"


@pytest.mark.parametrize("jit", JITS)
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


@pytest.mark.parametrize("jit", JITS[:1])
def test_a_program_does_not_grow_with_the_batch(jit: Jit) -> None:
    def program_lines(size: int) -> int:
        program: Any = jit(jax.vmap(lambda x: hcb.print("{}", x)))
        return str(program.lower(jnp.arange(size)).as_text()).count("\n")

    assert program_lines(1024) == program_lines(2)


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


@pytest.mark.parametrize("jit", JITS[:1])
def test_shard_map_prints_on_every_device_in_its_order(jit: Jit, printed: Printed) -> None:
    mesh = Mesh(jax.devices(), ("i",))

    def per_device(x: Any) -> Any:
        def step(c: Any, i: Any) -> Any:
            hcb.print("{} {}", lax.axis_index("i"), i)
            return c, None

        return lax.scan(step, x, jnp.arange(50))[0]

    f = jit(jax.shard_map(per_device, mesh=mesh, in_specs=PartitionSpec("i"), out_specs=PartitionSpec("i")))
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


@pytest.mark.parametrize("jit", JITS)
def test_the_two_call_form_takes_the_options_first(jit: Jit, printed: Printed) -> None:
    out = io.StringIO()
    printer = hcb.print(
        ordered=False, partitioned=True, skip_format_check=True, output_stream=out, name="mine"
    )
    assert printer("nothing") is None

    def f(x: Any) -> Any:
        # Options are names like any other in the second call.
        printer("{} {ordered} {name} {fmt} {output_stream}", x, ordered=x, name="n", fmt="f", output_stream=2)
        assert hcb.print("one call {x}", x=x, ordered=True) is None
        return x

    assert printed.ours(lambda _: jit(f)(1)) == "one call 1\n"
    assert out.getvalue() == "nothing\n1 1 n f 2\n"


def test_the_first_of_two_calls_refuses_what_is_no_option() -> None:
    with pytest.raises(
        TypeError,
        match=r"unexpected arguments in the two-call form: args=\(\) kwargs={'x': 1}.*test_print.py:\d+",
    ):
        hcb.print(x=1)  # type: ignore[call-overload]


@pytest.mark.parametrize("jit", JITS)
def test_skipping_the_format_check_lets_arguments_follow_the_text(jit: Jit, printed: Printed) -> None:
    def program(print: Any) -> None:
        jit(lambda x: print("values:", x, [x], skip_format_check=True))(jnp.arange(3))
        jit(lambda x: print("{} is enough", x, x, skip_format_check=True))(jnp.float32(1))

    assert printed.alike(program) == ["values: [0 1 2] [Array([0, 1, 2], dtype=int32)]", "1.0 is enough"]


MISTAKES = {
    "unused positional": (
        ("no placeholder", 1),
        {},
        r"Unused positional arguments to `hcb.print`: \[.* at .*test_print.py",
    ),
    "unused keyword": (
        (f"an f-string {1.0}",),
        {"x": 1},
        r"Unused keyword arguments to `hcb.print`: \['x'\]. You may be passing an f-string \(i.e, `f\"\{x\}\"`\) into",
    ),
    "missing positional": (
        ("{} {}", 1),
        {},
        r"'\{\} \{\}' has a placeholder for positional argument 1.* got 1 of",
    ),
    "missing keyword": (
        ("{y}",),
        {"x": 1},
        r"'\{y\}' has a placeholder \{y\}, and hcb.print got 'x': pass y=",
    ),
    "unclosed": (("{", 1), {}, r"Single '\{' encountered"),
    "numbering": (("{} {0}", 1), {}, r"cannot switch from "),
    "attribute": (("{x.nothing}",), {"x": 1}, r"nothing"),
}


@pytest.mark.parametrize(("args", "kwargs", "words"), MISTAKES.values(), ids=MISTAKES)
@pytest.mark.parametrize("jit", JITS)
def test_a_wrong_format_is_refused_as_jax_refuses_it_with_the_users_line(
    jit: Jit, args: Any, kwargs: Any, words: str
) -> None:
    fmt, *values = args
    with pytest.raises(Exception) as jaxs:  # noqa: PT011, whatever JAX raises is expected of ours
        jit(lambda values, kwargs: jax.debug.print(fmt, *values, **kwargs))(values, kwargs)
    with pytest.raises(type(jaxs.value), match=words) as info:
        jit(lambda values, kwargs: hcb.print(fmt, *values, **kwargs))(values, kwargs)
    assert "test_print.py:" in "".join([str(info.value), *getattr(info.value, "__notes__", ())])


@pytest.mark.parametrize("fmt", [3.0, b"bytes", jnp.arange(2)])
def test_a_format_that_is_no_text_is_refused_with_the_cure(fmt: Any) -> None:
    with pytest.raises(
        TypeError, match=r"hcb.print takes a format string first, got .*'\{\}', x\), at .*test_print.py"
    ):
        hcb.print(fmt)


def test_keyword_arguments_without_any_placeholder_are_refused_also_unchecked() -> None:
    with pytest.raises(ValueError, match=r"has no placeholders and hcb.print got keyword arguments \['x'\]"):
        hcb.print("text", x=1, skip_format_check=True)


def test_a_stream_that_cannot_write_is_refused() -> None:
    with pytest.raises(TypeError, match=r"needs a write\(str\) method, got str 'log.txt'.*test_print.py"):
        hcb.print(output_stream="log.txt")("text")  # type: ignore[call-overload]


@pytest.mark.parametrize("jit", JITS)
def test_an_element_that_cannot_be_formatted_is_reported_and_the_others_print(
    jit: Jit, printed: Printed, capsys: pytest.CaptureFixture[str]
) -> None:
    class Picky:
        def __format__(self, spec: str) -> str:
            picky.count += 1
            if picky.count % 2:
                raise ValueError(f"count {picky.count}")
            return "fine"

    picky: Any = Picky()
    picky.count = 0
    jit(jax.vmap(lambda x: hcb.print("{} {}", x, picky)))(jnp.arange(4))
    with pytest.raises(hcb.TapFunctionException) as info:
        hcb.barrier_wait()
    assert capsys.readouterr().out == "1 fine\n3 fine\n"
    assert [str(error) for error in info.value.exceptions] == ["count 1", "count 3"]
    assert [failure.tap for failure in info.value.failures] == ["print"] * 2
    assert "test_print.py" in info.value.failures[0].source_line


def test_a_format_that_does_not_fit_the_value_is_reported_with_the_tap(printed: Printed) -> None:
    jax.jit(lambda x: hcb.print("{:d}", x))(1.5)
    with pytest.raises(hcb.TapFunctionException) as info:
        hcb.barrier_wait()
    (error,) = info.value.exceptions
    assert isinstance(error, ValueError)
    assert "test_print.py" in error.__notes__[0]


def test_prints_and_taps_keep_the_order_of_the_program(printed: Printed) -> None:
    @hcb.jit
    def f(x: Any) -> Any:
        def step(c: Any, _: Any) -> Any:
            hcb.print("a {}", c)
            hcb.id_print(c)
            hcb.print("b {}", c)
            return c + 1, None

        return lax.scan(step, x, None, length=20)[0]

    expected = [line for i in range(20) for line in (f"a {i}", f"{i}", f"b {i}")]
    assert printed.ours(lambda print: f(0)).splitlines() == expected

"""Integers of more than 32 bits that are known when traced arrive as they are, also without `jax_enable_x64`."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collecting_writer import CollectingWriter
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import hostcallback as hcb
from accelerated import both

LARGE = 6_000_000_000
MESH = Mesh(np.array(jax.devices()), ("d",))
KINDS = pytest.mark.parametrize("kind", [int, np.int64, np.uint64], ids=lambda kind: kind.__name__)


def in_scan(f: Callable[[], Any]) -> Callable[[Any], Any]:
    return lambda x: lax.scan(lambda c, _: [f(), (c, None)][1], x, length=1)[0]


def for_some_lanes(f: Callable[[], Any]) -> Callable[[Any], Any]:
    return jax.vmap(lambda x: lax.cond(x > 0, lambda: [f(), x][1], lambda: x))


@KINDS
def test_metrics_and_their_steps(kind: Any) -> None:
    writer = CollectingWriter()
    with hcb.outfeed_receiver(writers=[writer]):
        hcb.metrics({"tokens": kind(LARGE)}, step=kind(LARGE + 1))
        jax.jit(lambda x: hcb.metrics({"x": x}, step=kind(LARGE + 2)))(1.0)
        hcb.metrics({"h": hcb.histogram(np.array([LARGE, 1]))}, step=0)
    assert writer.rows == [(LARGE + 1, {"tokens": float(LARGE)}), (LARGE + 2, {"x": 1.0})]
    assert writer.histograms[0][1]["h"][0].tolist() == [LARGE, 1]


def test_members_of_enums_of_numbers_are_metrics_and_steps() -> None:
    phase = enum.IntEnum("phase", {"warm_up": 1, "train": LARGE})
    rate = enum.Enum("rate", {"high": 0.5}, type=float)
    writer = CollectingWriter()
    with hcb.outfeed_receiver(writers=[writer]):
        jax.jit(lambda x: hcb.metrics({"phase": phase.train, "rate": rate.high, "x": x}, step=phase.warm_up))(
            2.0
        )
    assert writer.rows == [(1, {"phase": float(LARGE), "rate": 0.5, "x": 2.0})]


@KINDS
@pytest.mark.parametrize(
    "transform",
    [
        lambda f: jax.jit(lambda x: [f(), x][1]),
        lambda f: jax.jit(in_scan(f)),
        lambda f: in_scan(f),
        lambda f: jax.jit(jax.grad(lambda x: [f(), x.sum()][1])),
        lambda f: jax.jit(for_some_lanes(f)),
        lambda f: jax.jit(jax.shard_map(lambda x: [f(), x][1], mesh=MESH, in_specs=P("d"), out_specs=P("d"))),
    ],
    ids=["jit", "scan", "scan without jit", "grad", "mask", "shard_map"],
)
def test_taps_under_transformations(transform: Any, kind: Any) -> None:
    got: list[Any] = []
    x = jax.device_put(jnp.arange(4.0), NamedSharding(MESH, P("d")))
    jax.block_until_ready(transform(lambda: hcb.callback(got.append, kind(LARGE)))(x))
    hcb.barrier_wait()
    assert {int(value) for value in got} == {LARGE}


def test_prints_of_numbers_and_arrays(capsys: pytest.CaptureFixture[str]) -> None:
    x = np.array([1, -LARGE])
    hcb.print("{} {} {n}", LARGE, x, n=np.int64(LARGE))
    hcb.barrier_wait()
    assert capsys.readouterr().out == f"{LARGE} {x} {LARGE}\n"


def test_steps_of_checks() -> None:
    with hcb.outfeed_receiver(on_error="warn") as receiver:
        jax.jit(lambda x: hcb.check(x > 0, "not positive", step=np.int64(LARGE)))(-1.0)
        hcb.barrier_wait()
    assert [check.steps for check in receiver.failed_checks] == [[LARGE]]


def test_the_results_of_taps_are_what_was_given() -> None:
    value = {"a": LARGE, "b": np.int64(LARGE)}
    assert hcb.id_tap(lambda v: None, value) == value
    assert hcb.id_tap(lambda v: None, np.int64(5)).dtype == np.int32  # as JAX makes of it
    hcb.barrier_wait()


def test_host_functions_of_calls() -> None:
    result = jax.ShapeDtypeStruct((), jnp.float32)
    f = jax.jit(
        lambda: hcb.call(lambda v: np.float32(v // 1_000_000_000), np.int64(LARGE), result_shape=result)
    )
    assert f() == 6


def test_more_than_64_bits_are_refused_with_the_line() -> None:
    with pytest.raises(
        OverflowError,
        match=r"arg\['a'\] is a Python integer of more than 64 bits: .* at .*test_large_integers",
    ):
        hcb.metrics({"a": 2**64}, step=0)
    with pytest.raises(
        ValueError, match=r"expected an integer from -2\*\*63 to 2\*\*63 - 1, at .*test_large_integers"
    ):
        hcb.metrics({"a": 1}, step=2**63)
    with pytest.raises(ValueError, match=r"hcb.check: step is .*9223372036854775808"):
        hcb.check(True, "no", step=np.uint64(2**63))


def test_accelerated_callbacks_get_jaxs_integers() -> None:
    def program(calls: Any) -> Any:
        def f() -> Any:
            jax.debug.print("{}", np.int64(LARGE), ordered=True)
            jax.debug.callback(calls, np.array([LARGE, 1]), ordered=True)
            return 0

        return jax.jit(f)()

    jaxs, ours = both(program)
    assert ours == jaxs
    assert ours.lines == [str(np.int64(LARGE).astype(np.int32))]


@pytest.mark.parametrize("how", ["in order", "in turn"])
def test_a_count_that_crosses_2_to_the_31_is_one_column(how: str) -> None:
    counts = [5, 2**31 - 1, 2**31, 2**40]
    counts = counts if how == "in order" else [counts[k] for k in (2, 0, 3, 1)]
    with hcb.capture() as taps:
        for count in counts:
            hcb.metrics({"tokens": count, "loss": 0.5}, step=3, name="train")
            hcb.barrier_wait()  # a batch for each
    columns = taps["train"].to_numpy()
    assert columns["tokens"].tolist() == counts
    assert (columns["tokens"].dtype, columns["loss"].dtype) == (np.int64, np.float32)
    (table,) = taps["train"].tables()
    assert "tokens int64[]" in table.layout_text

"""The elements that take part where vmap batches the predicate of a branch or loop: over devices, in logs and rules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import hostcallback as hcb
from hostcallback import receiver
from hostcallback.receiver.sinks.factory import texts_of
from hostcallback.receiver.taplog.reading.logged_message import LoggedMessage
from hostcallback.receiver.taplog.render import as_dict
from recorder import Recorder
from transforming import batch, delivered_parts, elements, plain


def sharded(xs: Any) -> Any:
    mesh = Mesh(np.array(jax.devices()), ("d",))
    return jax.device_put(xs, NamedSharding(mesh, PartitionSpec("d")))


EIGHT = jnp.arange(8.0)


@pytest.mark.parametrize("sharding", ["global", "local"])
def test_a_partitioned_batch_sends_the_elements_that_take_part(sharding: str, rec: Recorder) -> None:
    def f(x: Any) -> Any:
        tap = lambda x: hcb.id_tap(rec, x, sharding=sharding)  # noqa: E731
        return lax.cond(x > 2, tap, lambda x: x, x)

    jax.jit(jax.vmap(f))(sharded(EIGHT))
    jax.jit(jax.vmap(f))(sharded(-EIGHT))  # no element takes part
    found = [((batch(0), elements([3, 4, 5, 6, 7])), [3.0, 4.0, 5.0, 6.0, 7.0])]
    assert delivered_parts(rec) == found * (1 if sharding == "global" else len(jax.devices()))


def test_each_device_of_shard_map_sends_its_elements(rec: Recorder) -> None:
    def f(x: Any) -> Any:
        return lax.while_loop(lambda x: x < 4, lambda x: hcb.id_tap(rec, x) + 1, x)

    mesh = Mesh(np.array(jax.devices()), ("d",))
    spec = PartitionSpec("d")
    jax.jit(jax.shard_map(jax.vmap(f), mesh=mesh, in_specs=spec, out_specs=spec))(EIGHT)
    hcb.barrier_wait()
    sent = [x for values in rec.values for x in values.tolist()]
    assert sorted(sent) == sorted(float(x) for start in range(4) for x in range(start, 4))


@pytest.mark.slow_variants
@pytest.mark.parametrize("partitioned", [False, True])
def test_logs_have_the_elements_that_take_part(partitioned: bool, tmp_path: Path) -> None:
    def f(x: Any) -> Any:
        def branch(x: Any) -> Any:
            hcb.print("x is {}", x)
            return hcb.id_tap(lambda value: None, x, name="large")

        return lax.cond(x > 4, branch, lambda x: x, x)

    with hcb.outfeed_receiver(record=tmp_path / "log"):
        for _ in range(20):  # alike messages are read together, but for a mask
            jax.jit(jax.vmap(f))(sharded(EIGHT) if partitioned else EIGHT)
    logged = [r for r in receiver.LogReader(tmp_path / "log").values() if isinstance(r, LoggedMessage)]
    taps = [r for r in logged if r.message.consumer.name == "large"]
    texts = [texts_of(r.tap.described, r.message) for r in logged if "print" in r.message.consumer.name]
    if not partitioned:  # else each device's shards are shown
        assert [plain(r.value) for r in taps] == [[5.0, 6.0, 7.0]] * 20
        assert as_dict(taps[0])["transforms"] == [
            ["batch", {"batch_dims": [0]}], ["mask", {"elements": [[5, 6, 7]]}]
        ]  # fmt: skip
    assert (
        sorted(line for lines in texts for line in lines)
        == ["x is 5.0"] * 20 + ["x is 6.0"] * 20 + ["x is 7.0"] * 20
    )
    assert sorted(x for r in taps for x in plain(r.value)) == [5.0] * 20 + [6.0] * 20 + [7.0] * 20
    columns = hcb.read(tmp_path / "log")["large"].to_numpy()
    assert plain(columns["large"]) == [[5.0, 6.0, 7.0]] * 20
    seen: list[Any] = []
    receiver.replay(tmp_path / "log", bind={"large": lambda value: seen.append(plain(value))})
    assert seen == [[5.0, 6.0, 7.0]] * 20


@pytest.mark.native_only  # JAX does not export Python callbacks
def test_an_exported_program_sends_the_elements_that_take_part(capsys: Any, rec: Recorder) -> None:
    def f(x: Any) -> Any:
        def branch(x: Any) -> Any:
            hcb.print("x is {}", x)
            return hcb.id_tap(rec, x, name="large")

        return lax.cond(x > 4, branch, lambda x: x, x)

    exported = jax.export.export(jax.jit(jax.vmap(f)), disabled_checks=hcb.export_checks())(EIGHT)
    jax.export.deserialize(exported.serialize()).call(EIGHT)
    assert delivered_parts(rec) == [((batch(0), elements([5, 6, 7])), [5.0, 6.0, 7.0])]
    assert capsys.readouterr().out == "x is 5.0\nx is 6.0\nx is 7.0\n"


def test_rules_see_the_elements_that_take_part(rec: Recorder) -> None:
    def f(x: Any) -> Any:
        return lax.cond(x > 4, lambda x: hcb.id_tap(rec, x, name="masked"), lambda x: x, x)

    asked: list[Any] = []
    hcb.taps["masked"].when(lambda value: bool(asked.append(plain(value)) or True))
    try:
        jax.jit(jax.vmap(f))(EIGHT)
        hcb.barrier_wait()
    finally:
        hcb.taps["masked"].reset()
    assert asked == [[5.0, 6.0, 7.0]]


def test_other_sinks_of_a_receiver_get_the_elements_that_take_part() -> None:
    found: list[Any] = []
    with hcb.outfeed_receiver(sinks=[lambda message: found.append(plain(list(message.arrays)))]):
        jax.jit(jax.vmap(lambda x: lax.cond(x > 4, lambda x: hcb.id_tap(lambda v: None, x), lambda x: x, x)))(
            EIGHT
        )
    assert found == [[[5.0, 6.0, 7.0]]]

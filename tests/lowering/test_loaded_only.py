"""The package is loaded, and JAX's own functions and programs without taps are what they are without it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec as P

import hostcallback as hcb
from python_process import python_output, run_python
from recorder import Recorder

hcb.id_tap  # noqa: B018  # the first use of a public name loads the lowering rules


@contextmanager
def lowerings() -> Iterator[list[str]]:
    """The programs that JAX lowers meanwhile."""
    names: list[str] = []
    on = [True]

    def listen(event: str, _: float, **what: Any) -> None:
        if on and event == "/jax/core/compile/jaxpr_to_mlir_module_duration":
            names.append(what.get("fun_name", ""))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield names
    finally:
        on.clear()  # the public interface only clears the listeners of everyone


def exported_double(**how: Any) -> Any:
    return jax.export.export(jax.jit(lambda x: x * 2, **how))(jnp.arange(8.0))


def test_an_exported_program_may_be_used_over_two_meshes() -> None:
    devices = np.array(jax.devices()[:2])
    rows = NamedSharding(Mesh(devices.reshape(1, 2), ("a", "b")), P(None, "b"))
    columns = NamedSharding(Mesh(devices.reshape(2, 1), ("c", "d")), P("c", None))

    @jax.jit
    def product(x: Any, w: Any) -> Any:
        return x @ w

    x, w = np.arange(32.0).reshape(4, 8), np.arange(16.0).reshape(8, 2)
    program = jax.jit(product, in_shardings=(rows, columns), out_shardings=rows)
    exported = jax.export.export(program)(x, w)
    found = exported.call(jax.device_put(x, rows), jax.device_put(w, columns))
    np.testing.assert_allclose(found, x @ w)


def test_an_exported_program_may_be_lowered_for_an_abstract_mesh() -> None:
    exported = exported_double()
    mesh = AbstractMesh((2,), ("a",))
    x = jax.ShapeDtypeStruct((8,), np.float32, sharding=NamedSharding(mesh, P("a")))
    lowered = jax.jit(exported.call).trace(x).lower(lowering_platforms=("cpu",))
    assert "call_exported" in lowered.as_text()


def test_an_exported_program_is_lowered_once_for_all_devices() -> None:
    exported = exported_double()
    program = jax.jit(lambda x: exported.call(x))
    inputs = [jax.device_put(jnp.arange(8.0), device) for device in jax.devices()]
    with lowerings() as names:
        for x in inputs:
            np.testing.assert_array_equal(program(x), 2 * np.arange(8.0))
    assert len(names) == 1, names


@pytest.mark.native_only  # Python callbacks are not exported
def test_a_tapped_exported_program_knows_its_devices_beside_one_without_taps(rec: Recorder) -> None:
    mesh = Mesh(np.array(jax.devices()), ("a",))
    x = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P("a")))
    tapped = jax.jit(lambda x: hcb.id_tap(rec, x, name="next_to", sharding="local"))
    tapped_program = jax.export.export(tapped, disabled_checks=hcb.export_checks())(x)
    plain_program = jax.export.export(jax.jit(lambda x: x * 2))(x)
    np.testing.assert_array_equal(
        jax.jit(lambda x: tapped_program.call(plain_program.call(x)))(x), 2 * np.arange(8.0)
    )
    hcb.barrier_wait()
    assert sorted(value.tolist() for value in rec.values) == [[4.0 * i, 4.0 * i + 2] for i in range(4)]


REPLACED = """
import sys
import jax, jax.export
from jax.experimental import io_callback, pallas

def names():
    found = {}
    for module in [name for name in sys.modules if name.partition(".")[0] == "jax"]:
        for name, value in vars(sys.modules[module]).items():
            found[f"{module}.{name}"] = value
            if isinstance(value, type) and value.__module__.startswith("jax."):
                found |= {f"{module}.{name}.{attribute}": of for attribute, of in vars(value).items()}
    return found

before = names()
import hostcallback as hcb
hcb.id_tap
for name, value in names().items():
    was = before.get(name, value)
    if was is not value and callable(was):
        lost = [attribute for attribute in dir(was) if not hasattr(value, attribute)]
        print(name, *lost)
"""


def test_a_function_in_place_of_one_of_jaxs_has_all_that_it_has() -> None:
    replaced = [line.split() for line in python_output("-c", REPLACED, timeout_sec=120).splitlines()]
    assert any("_cached_lowering_to_hlo" in name for name, *_ in replaced), replaced
    assert not [line for line in replaced if len(line) > 1]


@pytest.mark.slow
def test_counting_lowerings_counts() -> None:
    program = """if True:
        import jax, hostcallback as hcb
        hcb.id_tap
        from jax._src.interpreters import pxla
        f = jax.jit(lambda x: x + 1)
        before = pxla._cached_lowering_to_hlo.cache_info()
        f(1.0), f(2.0)
        after = pxla._cached_lowering_to_hlo.cache_info()
        print(after.misses - before.misses)
        pxla._cached_lowering_to_hlo.cache_clear()
        print(pxla._cached_lowering_to_hlo.cache_info().currsize)
    """
    done = run_python("-c", program, timeout_sec=120)
    assert done.stdout.split() == ["1", "0"], done.stderr

"""`jax.export` of tapped programs: exported in one process, run in another where consumers are bound by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import hostcallback as hcb
from checkout import python_path
from python_process import python_output, run_python
from recorder import Recorder

PROGRAM = Path(__file__).with_name("exported_program.py")

native_only = pytest.mark.native_only  # JAX does not export Python callbacks


def run_program(*arguments: str) -> str:
    done = run_python(PROGRAM, *arguments, timeout_sec=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the exporting process's function ran" not in done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    assert run_program("write", str(folder)) == ""
    return folder


def sections(output: str) -> dict[str, list[str]]:
    """The lines under each `== program how` heading."""
    parts = re.split(r"^== (.*)$", output, flags=re.MULTILINE)
    return {head: body.strip().splitlines() for head, body in zip(parts[1::2], parts[2::2], strict=True)}


@pytest.mark.slow
@native_only
def test_consumers_bound_by_name_get_the_tap_functions_arguments(folder: Path) -> None:
    found = sections(run_program("bound", str(folder)))
    assert len(found) == 9 * 2
    for head, lines in found.items():
        if head.startswith("scan"):
            expected = []
            for i in range(3):
                c = np.arange(8.0) + i
                expected += [
                    f"tap {{'pair': Pair(first={(2 * c).tolist()}, second=None), 'size': [8], "
                    f"'step': ({i}, 'text')}} () {{'run': 7, 'extra': 1}}",
                    "what: sum",
                    f"{c.sum():.0f}.",
                    f"step {i}: {c[0]}",
                ]
            assert lines == [*expected, f"result {(np.arange(8.0) + 3).tolist()}"], head
        elif head.startswith("grad"):
            batch = ("batch", {"batch_dims": (0,)})
            assert lines == [
                f"tap {np.arange(8.0).tolist()} {(batch,)} {{}}",
                f"tap {(2 * np.arange(8.0)).tolist()} {(('jvp', {}), ('transpose', {}), batch)} {{}}",
                f"result {(2 * np.arange(8.0)).tolist()}",
            ], head
        else:
            assert lines == [
                *(f"tap {float(i)} () {{'name_of': 'element'}}" for i in range(8)),
                f"result {np.arange(8.0).tolist()}",
            ], head


@pytest.mark.slow
@native_only
def test_unbound_consumers_are_reported_with_the_tap_its_line_and_the_cure(folder: Path) -> None:
    found = sections(run_program("run", str(folder)))
    for head, lines in found.items():
        text = "\n".join(lines)
        name = {"scan": "state", "grad": "loss", "each": "record"}[head.partition("-")[0]]
        assert lines[-1].startswith("result "), head
        assert f"messages of the exported tap {name!r} (exported from " in text, head
        assert "exported_program.py:" in text, head
        assert f"hostcallback.bind({name!r}, function)" in text, head
        assert text.count("UnboundConsumerError") == 1, head  # however many messages there were
        if head.startswith("scan"):  # taps without a function work all the same
            assert [line for line in lines if line.startswith("step ")] == [
                f"step {i}: {float(i)}" for i in range(3)
            ], head


@native_only
@pytest.mark.parametrize("jit", [jax.jit])
def test_an_exported_program_run_by_its_own_process_calls_the_tap_function(jit: Any, rec: Recorder) -> None:
    f = jit(lambda x: hcb.id_tap(rec, x * 2, name="own"))
    exported = jax.export.export(f, disabled_checks=hcb.export_checks())(jnp.arange(3.0))
    exported.call(jnp.arange(3.0))
    hcb.barrier_wait()
    np.testing.assert_array_equal(rec.values, [[0.0, 2.0, 4.0]])
    bound = Recorder()
    hcb.bind("own", bound)
    try:
        exported.call(jnp.arange(3.0))
        hcb.barrier_wait()
    finally:
        hcb.unbind("own")
    assert (len(rec), len(bound)) == (1, 1)
    exported.call(jnp.arange(3.0))
    hcb.barrier_wait()
    assert (len(rec), len(bound)) == (2, 1)


@native_only
def test_the_error_of_a_bound_function_is_reported_with_the_taps_line() -> None:
    def fail(x: Any) -> None:
        raise ValueError("no")

    exported = jax.export.export(
        jax.jit(lambda x: hcb.id_tap(print, x, name="failing")), disabled_checks=hcb.export_checks()
    )(jnp.float32(1))
    hcb.bind("failing", fail)
    try:
        exported.call(jnp.float32(1))
        with pytest.raises(hcb.TapFunctionException) as caught:
            hcb.barrier_wait()
    finally:
        hcb.unbind("failing")
    (failure,) = caught.value.failures
    assert failure.tap == "failing"
    assert "test_export.py:" in failure.source_line
    assert isinstance(failure.exception, ValueError)
    assert failure.exception.__traceback__ is not None
    assert failure.exception.__traceback__.tb_frame.f_code.co_name == "fail"


@native_only
def test_local_shards_of_an_exported_program_come_with_their_place() -> None:
    got: dict[int, Any] = {}
    mesh = Mesh(jax.devices(), ("i",))
    x = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P("i")))
    exported = jax.export.export(
        jax.jit(lambda x: hcb.id_tap(print, x, name="part", sharding="local")),
        disabled_checks=hcb.export_checks(),
    )(x)
    hcb.bind("part", lambda part, *, device, index: got.update({device.id: (part.tolist(), index)}))
    try:
        exported.call(x)
        hcb.barrier_wait()
    finally:
        hcb.unbind("part")
    assert got == {i: ([2.0 * i, 2.0 * i + 1], ((slice(2 * i, 2 * i + 2),),)) for i in range(4)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3, print), "takes the name of a tap first, got int 3"),
        (("a", 3), "takes a function to call on the host, got int 3"),
    ],
)
def test_bind_documents_its_arguments(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        hcb.bind(*arguments)


@pytest.mark.slow
def test_python_callbacks_are_not_exported() -> None:
    program = """if True:
        import jax, hostcallback as hcb
        f = jax.jit(lambda x: hcb.id_tap(print, x))
        jax.export.export(f, disabled_checks=hcb.export_checks())(1.0)
    """
    done = run_python("-c", program, timeout_sec=90, HOSTCALLBACK_TRANSPORT="callback")
    assert done.returncode == 1
    report = r"NotImplementedError: the tap print at <string>:3 .* exported for CPU and GPUs, on the native"
    assert re.search(report, done.stderr)


@pytest.mark.native_only  # the others are not exported at all
def test_symbolic_shapes_are_refused_with_the_line_and_the_cure() -> None:
    (size,) = jax.export.symbolic_shape("n")
    f = jax.jit(lambda x: hcb.id_tap(print, x, name="symbolic"))
    with pytest.raises(
        NotImplementedError, match=r"tap symbolic at .*test_export.py.*symbolic shapes.*each shape"
    ):
        jax.export.export(f, disabled_checks=hcb.export_checks())(jax.ShapeDtypeStruct((size,), np.float32))


@pytest.mark.native_only  # the others are not exported at all
@pytest.mark.parametrize("bound", [False, True])
def test_checks_of_an_exported_program_are_reported_or_bound(bound: bool) -> None:
    def f(x: Any) -> Any:
        hcb.check(x > 0, "x is {}", x, name="exported check")
        return x * 2

    exported = jax.export.export(jax.jit(f), disabled_checks=hcb.export_checks())(np.float32(1))
    f = None  # type: ignore[assignment]
    program = jax.export.deserialize(exported.serialize())
    seen: list[Any] = []
    if bound:
        hcb.bind("exported check", lambda x: seen.append(float(x)))
    try:
        assert float(program.call(np.float32(3))) == 6
        hcb.barrier_wait()
        program.call(np.float32(-3))
        if bound:
            hcb.barrier_wait()
            assert seen == [-3]
        else:
            with pytest.raises(hcb.TapFunctionException) as caught:
                hcb.barrier_wait()
            (error,) = caught.value.exceptions
            assert isinstance(error, hcb.CheckError)
            assert error.check.explanation.text == "x is -3.0"
    finally:
        hcb.unbind("exported check")


def tapped(x: Any) -> Any:
    return hcb.id_tap(print, x * 2, name="refused")


@native_only
@pytest.mark.parametrize("devices", [1, 2])
def test_an_export_without_permission_for_the_taps_names_the_line_and_the_cure(devices: int) -> None:
    mesh = Mesh(np.array(jax.devices()[:devices]), ("i",))
    x = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P("i")))
    where = f"{__file__}:{tapped.__code__.co_firstlineno + 1}"
    cure = r"pass disabled_checks=hcb\.export_checks\(\)"
    with pytest.raises(
        ValueError, match=f"a tap at {re.escape(where)}.*hostcallback.*_tap.*{cure}"
    ) as caught:
        jax.export.export(jax.jit(tapped))(x)
    assert "no compatibility guarantees" in str(caught.value.__cause__)  # JAX's own text


@native_only
def test_a_refused_export_of_a_program_without_taps_has_jaxs_text() -> None:
    def f(x: Any) -> Any:
        return jax.ffi.ffi_call("someone_elses_call", jax.ShapeDtypeStruct((), np.float32))(x)

    with pytest.raises(ValueError, match=r"^Cannot serialize code with custom calls") as caught:
        jax.export.export(jax.jit(f), disabled_checks=hcb.export_checks())(jnp.float32(1))
    assert "export_checks" not in str(
        caught.value
    )  # JAX 0.12 names the calls that are allowed, ours among them
    # Both in one program: the taps are allowed, the other call is not.
    with pytest.raises(ValueError, match=r"^Cannot serialize code.*\n.*@someone_elses_call"):
        jax.export.export(jax.jit(lambda x: f(tapped(x))), disabled_checks=hcb.export_checks())(
            jnp.float32(1)
        )


@native_only
def test_a_loop_with_a_progress_bar_is_exported_and_shows_it(capfd: pytest.CaptureFixture[str]) -> None:
    def f(x: Any) -> Any:
        return hcb.scan(lambda c, y: (c + y, None), x, jnp.ones(1000), progress="exported")[0]

    exported = jax.export.export(jax.jit(f), disabled_checks=hcb.export_checks())(jnp.float32(0))
    f = None  # type: ignore[assignment]
    assert jax.export.deserialize(exported.serialize()).call(jnp.float32(1)) == 1001
    hcb.barrier_wait()
    assert "1000/1000" in capfd.readouterr().err


@native_only
@pytest.mark.parametrize("options", [{"progress": "exported"}, {"progress": False, "stop": True}])
def test_a_loop_to_a_symbolic_bound_is_exported(
    options: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    def f(x: Any) -> Any:
        return jax.tree.leaves(hcb.fori_loop(0, x.shape[0], lambda i, c: c + x[i], 0.0, **options))[0]

    (size,) = jax.export.symbolic_shape("n")
    of_any_size = jax.ShapeDtypeStruct((size,), np.float32)
    exported = jax.export.export(jax.jit(f), disabled_checks=hcb.export_checks())(of_any_size)
    assert [exported.call(jnp.ones(n)).item() for n in (3, 7)] == [3, 7]
    hcb.barrier_wait()
    assert ("7/7" in capfd.readouterr().err) == bool(options["progress"])


@native_only
def test_a_loop_with_a_progress_bar_is_not_exported_on_several_devices() -> None:
    mesh = Mesh(np.array(jax.devices()), ("i",))
    x = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P("i")))

    def f(x: Any) -> Any:
        return hcb.scan(lambda c, y: (c + y, None), x, jnp.ones(10), progress="exported")[0]

    with pytest.raises(NotImplementedError, match=r"clock would be a Python callback.*one CPU"):
        jax.export.export(jax.jit(f), disabled_checks=hcb.export_checks())(x)


RUN_EXPORTED = """
import sys
import jax, jax.export, jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import hostcallback as hcb
hcb.bind("sum", lambda value: print("got", float(value)))
with open(sys.argv[1], "rb") as file:
    exported = jax.export.deserialize(bytearray(file.read()))
mesh = jax.make_mesh((2, 2), ("i", "j"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
jax.jit(exported.call)(jax.device_put(jnp.arange(4.0), NamedSharding(mesh, P("i"))))
hcb.barrier_wait()
"""


@native_only
def test_another_process_runs_taps_that_are_all_in_a_shard_map_over_some_axes(tmp_path: Path) -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("i", "j"))
    x = jax.device_put(jnp.arange(4.0), NamedSharding(mesh, P("i")))
    f = jax.shard_map(
        lambda x: [hcb.tap(print, x.sum(), name="sum"), x][1],
        mesh=mesh, in_specs=P("i"), out_specs=P("i"), axis_names={"i"},
    )  # fmt: skip
    exported = jax.export.export(jax.jit(f), disabled_checks=hcb.export_checks())(x)
    (tmp_path / "program").write_bytes(exported.serialize())
    lines = python_output("-c", RUN_EXPORTED, tmp_path / "program", PYTHONPATH=python_path()).splitlines()
    assert sorted(lines) == ["got 1.0", "got 5.0"]

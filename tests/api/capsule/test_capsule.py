"""Capsules of steps that fail: by a check, a tap function, a NaN; what they hold, and running them again."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import hostcallback as hcb
from checkout import ROOT
from hostcallback.api import capsule_contents
from hostcallback.api.capsule.programs import arrays_of, digests
from hostcallback.api.capsule.reproduce import Reproduction, operation_that_failed, reproduce
from hostcallback.receiver import Capsule
from hostcallback.receiver.cli import main
from hostcallback.receiver.taplog.reading.reader import LogReader
from python_process import run_python

# Programs with taps are exported on the native transport only.
native = pytest.mark.native_only


@pytest.fixture(autouse=True)
def nothing_deferred() -> Iterator[None]:
    yield
    try:
        hcb.barrier_wait()
    except hcb.TapFunctionException as error:
        pytest.fail(f"left behind: {error}")


def run(step: Any, *calls: tuple[Any, ...], **options: Any) -> list[Any]:
    """Calls a step; the failures are expected."""
    with pytest.raises(hcb.TapFunctionException), hcb.outfeed_receiver(**options):
        results = [step(*call) for call in calls]
    return results


def only(folder: Path) -> Capsule:
    (path,) = folder.glob("*.hcb")
    assert not list(folder.glob(".*"))
    return Capsule(path)


def layer(params: dict[str, Any], x: Any) -> Any:
    return jnp.tanh(x @ params["w"] + params["b"])


def train(params: dict[str, Any], x: Any, rate: float) -> tuple[dict[str, Any], Any]:
    """A step of a small network, whose loss is checked."""

    def loss_of(params: dict[str, Any]) -> Any:
        loss = (layer(params, x) ** 2).mean()
        hcb.check(loss < 0.9, "the loss is {}", loss)
        return loss

    loss, grads = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p + rate * g, params, grads), loss


PARAMS = {"w": jnp.full((4, 4), 0.1), "b": jnp.zeros(4)}


def batches(count: int) -> list[np.ndarray[Any, Any]]:
    return [np.full((3, 4), 0.5 + 2 * i, np.float32) for i in range(count)]


@native
def test_the_first_call_that_fails_a_check_is_seen_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOSTCALLBACK_TEST_KEPT", "12")
    monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", "[::]:1234")
    for number, address in enumerate(("train-1.example:7070", "a=1,b=10.0.0.1:80", "grpc://x")):
        monkeypatch.setenv(f"HOSTCALLBACK_TEST_ADDRESS_{number}", address)
        monkeypatch.setenv(f"XLA_TEST_{number}", address)
    step = hcb.capsule(jax.jit(train, donate_argnums=0), tmp_path)
    expected = [(jax.tree.map(jnp.copy, PARAMS), batch, 0.01) for batch in batches(6)]
    with caplog.at_level(logging.ERROR):
        results = run(step, *expected)
    losses = [float(loss) for _, loss in results]
    first = next(i for i, loss in enumerate(losses) if loss >= 0.9)
    assert 0 < first < 5
    capsule = only(tmp_path)
    assert (capsule.name, capsule.failure.kind) == ("train", "check")
    assert float(capsule.failure.text.removeprefix("the loss is ")) == losses[first]
    assert f"hcb reproduce {capsule.path}" in caplog.text
    assert [entry.path for entry in capsule.inputs] == ["params/b", "params/w", "x", "rate"]
    np.testing.assert_array_equal(capsule.array(capsule.inputs[2]), batches(6)[first])
    assert "test_capsule.py" in capsule.report
    assert capsule.about["versions"]["jax"] == jax.__version__
    kept = capsule.about["environment"]
    assert kept["HOSTCALLBACK_TEST_KEPT"] == "12"
    assert not [name for name in kept if name.startswith("XLA_TEST") or "ADDRESS" in name]
    again = reproduce(capsule)
    assert again.is_exact
    assert again.same == capsule.failure
    assert float(again.results[-1]) == losses[first]


def test_numpy_arguments_that_are_filled_again_are_those_of_the_call(tmp_path: Path) -> None:
    step = hcb.capsule(jax.jit(train), tmp_path)
    batch = np.zeros((3, 4), np.float32)

    def filled(value: float) -> Any:
        batch[:] = value
        return batch

    # JAX may read the array until the call has ended.
    run(lambda value: jax.block_until_ready(step(PARAMS, filled(value), 0.01)), (1,), (30,), (2,), (3,))
    capsule = only(tmp_path)
    assert np.all(capsule.array(capsule.inputs[2]) == 30)


def refuse_seven(value: Any) -> None:
    if value == 7:
        raise ValueError("seven is refused")


def tapped(x: Any, key: Any, *, scale: int) -> Any:
    noise = jax.random.uniform(key, x.shape)
    hcb.tap(refuse_seven, x[0], name="first")
    return (x + noise) * scale


@native
def test_a_tap_that_raises(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    step = hcb.capsule(jax.jit(tapped, static_argnames="scale"), tmp_path, exceptions=True)
    key = jax.random.key(3)
    calls = [(jnp.full(2, float(n)), key) for n in range(9)]
    with pytest.raises(hcb.TapFunctionException), hcb.outfeed_receiver(record=tmp_path / "log"):
        results = [step(*call, scale=2) for call in calls]
    capsule = only(tmp_path)
    assert capsule.failure.kind == "tap exception"
    assert [float(capsule.array(entry).flat[0]) for entry in capsule.inputs][:1] == [7.0]
    assert [entry.path for entry in capsule.inputs] == ["x", "key"]
    assert capsule.failure.text == "ValueError: seven is refused"
    assert any('"first"' in line for line in capsule.messages)
    assert f"To see it again: hcb reproduce {capsule.path}" in caplog.text
    again = reproduce(capsule)  # this process has the tap's function
    assert again.is_exact
    np.testing.assert_array_equal(again.results[0], results[7])


@native
def test_large_inputs_are_in_the_capsule_once_and_not_in_the_log(tmp_path: Path) -> None:
    @jax.jit
    def step(w: Any) -> Any:
        hcb.check(jnp.isfinite(w[0]), "w is {}", w[0])
        hcb.id_tap(lambda _: None, w, name="weights")
        return w + jnp.log(w[0])

    def train(w: Any) -> None:
        with (
            hcb.outfeed_receiver(record=tmp_path / "log"),
            hcb.capsule(tmp_path / "capsules", nonfinite=True),
        ):
            for _ in range(40):
                w = step(w)

    with pytest.raises(hcb.TapFunctionException) as raised:
        train(jnp.zeros(20_000))
    counts = {type(error): error.check.count for error in raised.value.exceptions}
    assert counts == {hcb.NonFiniteError: 40, hcb.CheckError: 39}
    files = sorted((tmp_path / "capsules").iterdir())
    assert [file.stat().st_size < 2_000_000 for file in files] == [True, True]
    sent = [m for m in LogReader(tmp_path / "log").messages() if m.message.consumer.name == "capsule:step"]
    assert len(sent) == 40
    assert {(a.shape, a.whole_shape) for a in (m.message.arrays[0] for m in sent)} == {((16,), (20_000,))}
    weights = next(m for m in LogReader(tmp_path / "log").messages() if m.message.consumer.name == "weights")
    assert weights.message.arrays[0].shape == (20_000,)  # other taps are logged whole


def test_the_folder_and_the_function_in_the_wrong_order(tmp_path: Path) -> None:
    with pytest.raises(
        TypeError, match=r"second argument is the folder, got function .*hcb.capsule\(step, 'capsules'\)"
    ):
        hcb.capsule(str(tmp_path), lambda x: x)  # type: ignore[call-overload]


def test_a_folder_that_is_a_file_is_refused_at_once(tmp_path: Path) -> None:
    file = tmp_path / "afile"
    file.write_text("x")
    for arguments in ((lambda x: x, file), (file,)):
        with pytest.raises(
            NotADirectoryError, match=r"afile is a file, expected a folder.*at .*test_capsule\.py"
        ):
            hcb.capsule(*arguments)


def test_a_folder_in_which_nothing_can_be_written_is_refused_at_once_and_one_that_can_is_not_made(
    tmp_path: Path,
) -> None:
    for arguments in ((lambda x: x, "/proc/capsules"), ("/proc/capsules",)):
        with pytest.raises(
            OSError, match=r"hcb\.capsule cannot write this: .*give a path that.*test_capsule\.py"
        ):
            hcb.capsule(*arguments)
    with hcb.capsule(tmp_path / "new" / "folder"):
        jax.jit(jnp.log)(1.0)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_lost_later_costs_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "capsules"
    step = hcb.capsule(jax.jit(lambda x: jnp.log(x)), folder, nonfinite=True)
    folder.write_text("x")
    run(step, (jnp.float32(-1),))
    (record,) = [record for record in caplog.records if "could not be written" in record.getMessage()]
    assert record.exc_info is None
    assert record.getMessage().endswith(
        "could not be written: File exists: give a folder that you may write to and that has room"
    )


@native
def test_the_inputs_of_a_tap_that_raises_are_gone_by_default(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    step = hcb.capsule(jax.jit(tapped, static_argnames="scale"), tmp_path)
    with pytest.raises(hcb.TapFunctionException), hcb.outfeed_receiver():
        _ = [step(jnp.full(2, float(n)), jax.random.key(3), scale=2) for n in range(9)]
    capsule = only(tmp_path)
    assert capsule.failure.text == "ValueError: seven is refused"
    assert "the tap got: array(7., dtype=float32)" in capsule.report
    assert any("exceptions=True" in text for text in capsule.left_out)
    (logged,) = [record.getMessage() for record in caplog.records if "hcb reproduce" in record.getMessage()]
    assert "without the inputs of the call, which hcb.capsule(..., exceptions=True) keeps" in logged
    assert logged.endswith(f"hcb reproduce --show {capsule.path}")
    assert main(["reproduce", str(capsule.path)]) == 2
    assert "exceptions=True" in capsys.readouterr().err


IN_ANOTHER_PROCESS = """
import sys
from hostcallback.receiver.cli import main
tap, check, module = sys.argv[1:]
for arguments in ([tap], [tap, "--bind", f"first={module}:refuse_seven"], [check], [check, "--python", "again.py"]):
    print("status", main(["reproduce", *arguments]), flush=True)
exec(open("again.py").read())
"""


@native
@pytest.mark.slow
def test_another_process_sees_the_same_failures(tmp_path: Path) -> None:
    tap = hcb.capsule(jax.jit(tapped, static_argnames="scale"), tmp_path / "tap", exceptions=True)
    with pytest.raises(hcb.TapFunctionException), hcb.outfeed_receiver():
        tap(jnp.full(2, 7.0), jax.random.key(3), scale=2)
    run(hcb.capsule(jax.jit(train), tmp_path / "check"), (PARAMS, np.full((3, 4), 9, np.float32), 0.01))
    files = [str(only(tmp_path / name).path) for name in ("tap", "check")]
    (tmp_path / "consumers.py").write_text(
        "def refuse_seven(value):\n    if value == 7:\n        raise ValueError('seven is refused')\n"
    )
    command = ["-c", IN_ANOTHER_PROCESS, *files, "consumers"]
    result = run_python(*command, cwd=tmp_path, timeout_sec=120, PYTHONPATH=str(ROOT), XLA_FLAGS="")
    lines = result.stdout.splitlines()
    assert [line for line in lines if line.startswith("status")] == [
        "status 1",
        "status 0",
        "status 0",
        "status 0",
    ]
    assert any("the tap first got array(7., dtype=float32)" in line for line in lines), result.stderr
    assert sum(line.startswith("reproduced: ") for line in lines) == 2
    assert "CheckError: the loss is 0.9" in result.stderr, "the script ends with the failure"


def attend(params: Any, x: Any) -> Any:
    scores = x @ params["q"] @ (x @ params["k"]).T
    with jax.named_scope("softmax"):
        weights = jnp.exp(scores) / jnp.exp(scores).sum(-1, keepdims=True)
    return (weights @ x).sum()


def attention_step(params: Any, x: Any) -> Any:
    loss, grads = jax.value_and_grad(attend)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


@native
def test_a_nan_is_found_in_the_operation_that_made_it(tmp_path: Path) -> None:
    params = {"q": jnp.eye(4), "k": jnp.eye(4)}
    step = hcb.capsule(jax.jit(attention_step), tmp_path, nonfinite=True)
    xs = [np.full((5, 4), size, np.float32) for size in (0.1, 1.0, 60.0, 70.0)]
    run(step, *[(params, x) for x in xs])
    capsule = only(tmp_path)
    assert capsule.failure.kind == "nonfinite"
    assert np.all(capsule.array(capsule.inputs[-1]) == 60)
    again: Reproduction = reproduce(capsule)
    assert again.is_exact
    assert again.same == capsule.failure
    first = operation_that_failed(digests(capsule), capsule.failure)
    assert first is not None
    assert digests(capsule)[first].name.startswith("exp ")


@native
def test_inputs_on_several_devices_are_kept_by_shard(tmp_path: Path) -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "model"))
    x = jax.device_put(
        np.arange(32, dtype=np.float32).reshape(4, 8), NamedSharding(mesh, PartitionSpec("data", "model"))
    )
    rows = jax.device_put(np.arange(4, dtype=np.int8), NamedSharding(mesh, PartitionSpec(("model", "data"))))

    def checked(x: Any, rows: Any) -> Any:
        hcb.check(x.sum() < 100, "the sum is {}", x.sum())
        return x * rows[:, None]

    step = hcb.capsule(jax.jit(checked), tmp_path)
    (result,) = run(step, (x, rows))
    capsule = only(tmp_path)
    found = arrays_of(capsule)
    assert found[0].sharding.spec == x.sharding.spec
    np.testing.assert_array_equal(found[0], x)
    np.testing.assert_array_equal(found[1], rows)
    again = reproduce(capsule)
    assert again.is_exact
    np.testing.assert_array_equal(again.results[0], result)


@native
def test_what_is_too_large_is_left_out_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = hcb.capsule(jax.jit(train), tmp_path, max_bytes=70)
    run(step, (PARAMS, np.full((3, 4), 9, np.float32), 0.01))
    capsule = only(tmp_path)
    kept = {entry.path: not entry.left_out for entry in capsule.inputs}
    assert kept == {"params/b": True, "params/w": False, "x": True, "rate": True}
    assert any("params/w (64 bytes)" in text for text in capsule.left_out)
    assert main(["reproduce", str(capsule.path)]) == 2
    assert "params/w: the inputs kept are limited to 70 bytes (max_bytes=)" in capsys.readouterr().err
    assert main(["reproduce", "--show", str(capsule.path)]) == 0
    assert "LEFT OUT" in capsys.readouterr().out


def test_a_program_that_cannot_be_exported_leaves_its_inputs(tmp_path: Path) -> None:
    def step(x: Any) -> Any:
        jax.debug.callback(lambda value: None, x)
        hcb.check(x < 1, "x is {}", x)
        return x

    run(hcb.capsule(jax.jit(step), tmp_path), (jnp.float32(2),))
    capsule = only(tmp_path)
    assert float(capsule.array(capsule.inputs[0])) == 2
    (why,) = [text for text in capsule.left_out if text.startswith("the program:")]
    with pytest.raises(hcb.receiver.CapsuleError, match=r"jax\.export refuses it"):
        reproduce(capsule)
    assert "jax.export refuses it" in why


@pytest.mark.parametrize(
    "where",
    [pytest.param(None, marks=pytest.mark.slow), lambda operation: operation.primitive == "sqrt"],
    ids=["the same calls", "other operations"],
)
def test_calls_under_a_watch_are_counted_once_and_have_their_inputs(tmp_path: Path, where: Any) -> None:
    step = jax.jit(lambda x: jnp.log(x))
    with (
        pytest.raises(hcb.TapFunctionException, match=r"1 check.* failed, 3 time"),
        hcb.outfeed_receiver(),
        hcb.capsule(tmp_path, nonfinite=True),
        hcb.watch_nonfinite(where=where),
    ):
        _ = [step(jnp.float32(number)) for number in (3, 2, 1, -1, -2, -3)]
    capsule = only(tmp_path)
    assert capsule.failure.kind == "nonfinite"
    assert float(capsule.array(capsule.inputs[0])) == -1


@native
def test_packages_that_are_not_installed_and_writers_that_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(name: str) -> str:
        if name == "hostcallback":  # a checkout on the path
            raise capsule_contents.PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(capsule_contents, "version", missing)
    fails = (PARAMS, np.full((3, 4), 9, np.float32), 0.01)
    run(hcb.capsule(jax.jit(train), tmp_path / "missing"), fails)
    assert "hostcallback" not in only(tmp_path / "missing").about["versions"]
    monkeypatch.setattr(capsule_contents, "version", lambda name: 1 / 0)
    run(hcb.capsule(jax.jit(train), tmp_path / "failing"), fails)
    assert "could not be written" in caplog.text
    assert not list((tmp_path / "failing").iterdir())
    gc.collect()  # warns of archives that are still open


def test_an_unused_step_is_freed(tmp_path: Path) -> None:
    class Function:
        def __call__(self, x: Any) -> Any:
            return x + 1

    function = Function()
    step = hcb.capsule(jax.jit(function), tmp_path)
    step(jnp.float32(0))
    hcb.barrier_wait()
    freed = weakref.ref(function)
    del function, step
    jax.clear_caches()
    hcb.barrier_wait()
    gc.collect()
    assert freed() is None


@native
def test_within_a_trace_the_program_around_it_leaves_the_capsule(tmp_path: Path) -> None:
    step = hcb.capsule(train, tmp_path)

    @jax.jit
    def outer(x: Any) -> Any:
        return step(PARAMS, x, 0.01)[1] * 2

    run(outer, (jnp.full((3, 4), 9.0),))
    capsule = only(tmp_path)
    assert (capsule.name, [entry.path for entry in capsule.inputs][-1]) == ("outer", "x")
    assert reproduce(capsule).is_exact


def test_few_capsules_are_written_however_many_calls_fail(tmp_path: Path) -> None:
    def step(x: Any) -> Any:
        hcb.tap(lambda value: 1 / 0, x)
        return x

    held = hcb.capsule(jax.jit(step), tmp_path, max_capsules=2, exceptions=True)
    run(held, *[(jnp.float32(n),) for n in range(8)])
    found = [Capsule(path) for path in sorted(tmp_path.iterdir())]
    assert [float(capsule.array(capsule.inputs[0])) for capsule in found] == [0, 1]


def test_misuse_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(TypeError, match=r"takes a function or a folder, got int 3"):
        hcb.capsule(3)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'nonfinit': did you mean nonfinite=\?"):
        hcb.capsule(train, nonfinit=True)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="max_capsules is 0, expected a whole number of at least 1"):
        hcb.capsule(train, max_capsules=0)
    hcb.capsule(lambda x: x + 1, tmp_path)(jnp.ones(2))
    assert "no program of a jitted function in <lambda>: operations outside of jit" in caplog.text


@pytest.mark.parametrize("how", ["check", "tap"])
def test_a_failure_outside_of_jit_says_that_it_leaves_no_capsule(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    step = jax.jit(lambda x: x + 1)

    def fails(x: Any) -> None:
        raise RuntimeError("odd")

    with hcb.capsule(tmp_path / "capsules"):
        for _ in range(3):
            x = step(jnp.float32(3))
            if how == "check":
                hcb.check(x < 1, "x is {}", x)
            else:
                hcb.tap(fails, x)
        with pytest.raises(hcb.TapFunctionException):
            hcb.barrier_wait()
    told = [line for line in caplog.messages if line.startswith("hcb.capsule")]
    assert len(told) == 1, told
    assert f"keeps nothing of the failed {how} at " in told[0]
    assert not (tmp_path / "capsules").exists()

"""The drop-in's `id_tap` under every transformation: counts, values and `transforms` of host_callback 0.4.34."""

from __future__ import annotations

import enum
import functools
import inspect
import threading
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from hostcallback import host_callback as hcb
from transforming import Jit

FLOAT0 = jax.dtypes.float0


class Received:
    """A tap function with host_callback's signature; keeps its arguments."""

    def __init__(self) -> None:
        self.args: list[Any] = []
        self.transforms: list[Any] = []
        self.devices: list[Any] = []
        self._lock = threading.Lock()  # receiver threads of several devices call it

    def __call__(self, arg: Any, transforms: Any, *, device: Any = None) -> None:
        with self._lock:
            self.args.append(arg)
            self.transforms.append(transforms)
            self.devices.append(device)

    def lists(self) -> list[Any]:
        """The values as nested Python lists."""
        return [jax.tree.map(np.ndarray.tolist, arg) for arg in self.args]


@pytest.fixture
def got() -> Received:
    return Received()


def batch(*dims: int | None) -> tuple[str, dict[str, Any]]:
    return ("batch", {"batch_dims": dims})


def test_names_and_signatures_match_the_module() -> None:
    signatures = {
        "id_tap": "(tap_func, arg, *, result=None, tap_with_device=False, device_index=0, callback_flavor=..., "
        "**kwargs)",
        "id_print": "(arg, *, result=None, tap_with_device=False, device_index=0, output_stream=None, threshold=None, "
        "callback_flavor=..., **kwargs)",
        "call": "(callback_func, arg, *, result_shape=None, call_with_device=False, device_index=0, "
        "callback_flavor=...)",
        "barrier_wait": "(logging_name=None)",
        "stop_outfeed_receiver": "()",
    }
    for name, expected in signatures.items():
        signature = inspect.signature(getattr(hcb, name))
        shown = [
            p.replace(annotation=p.empty, default=... if isinstance(p.default, enum.Enum) else p.default)
            for p in signature.parameters.values()
        ]
        plain = str(signature.replace(parameters=shown, return_annotation=signature.empty))
        assert plain.replace("Ellipsis", "...") == expected
        if "callback_flavor" in signature.parameters:
            assert signature.parameters["callback_flavor"].default is hcb.CallbackFlavor.IO_CALLBACK
    assert [flavor.name for flavor in hcb.CallbackFlavor] == ["IO_CALLBACK", "PURE", "DEBUG"]
    assert hcb.TapFunctionException is hcb.CallbackException


def test_nothing_warns_of_deprecation(got: Received) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hcb.id_tap(got, 1.0)
        hcb.id_print(1.0, output_stream=_Discard())
        hcb.barrier_wait()
        hcb.stop_outfeed_receiver()


class _Discard:
    def write(self, text: str) -> None:
        pass


def test_transforms_is_a_list_passed_by_position(jit: Jit, got: Received) -> None:
    jit(lambda x: hcb.id_tap(got, x * 2))(3.0)
    hcb.barrier_wait()
    assert got.lists() == [6.0]
    assert got.transforms == [[]]
    assert type(got.args[0]) is np.ndarray


def test_pytrees_arrive_as_they_were(jit: Jit, got: Received) -> None:
    jit(lambda x: hcb.id_tap(got, {"pair": (x, [x + 1, None]), "constant": 1}))(jnp.arange(2))
    hcb.barrier_wait()
    assert got.lists() == [{"pair": ([0, 1], [[1, 2], None]), "constant": 1}]


def test_the_result_is_returned_instead_of_the_argument(jit: Jit, got: Received) -> None:
    out = jit(lambda x: hcb.id_tap(got, x, result=(x + 1, x + 2)))(1.0)
    hcb.barrier_wait()
    assert [float(x) for x in out] == [2.0, 3.0]
    assert got.lists() == [1.0]


def test_none_can_be_tapped_and_its_result_be_unused(jit: Jit, got: Received) -> None:
    def f(x: Any) -> Any:
        hcb.id_tap(got, None)
        return hcb.id_tap(got, None, result=x)

    assert float(jit(f)(3.0)) == 3.0
    hcb.barrier_wait()
    assert got.args == [None, None]


def test_the_device_is_passed_only_if_asked_for() -> None:
    given: list[dict[str, Any]] = []

    def tap(arg: Any, transforms: Any, **kwargs: Any) -> None:
        given.append(kwargs)

    hcb.id_tap(tap, 1.0)
    hcb.id_tap(tap, 1.0, tap_with_device=True)
    hcb.barrier_wait()
    assert given == [{}, {"device": jax.devices()[0]}]


def test_keyword_arguments_are_refused_with_the_modules_words(got: Received) -> None:
    with pytest.raises(TypeError, match=r"Support for \*\*kwargs in ``id_tap`` has been removed"):
        hcb.id_tap(got, 1.0, what="x")


def test_keyword_arguments_can_be_applied_before(got: Received) -> None:
    def tap(arg: Any, transforms: Any, what: str) -> None:
        got((arg, what), transforms)

    hcb.id_tap(functools.partial(tap, what="activation"), 1.0)
    hcb.barrier_wait()
    assert got.args == [(1.0, "activation")]


def test_a_non_function_is_refused() -> None:
    with pytest.raises(TypeError, match="Expected a callable value, got 3"):
        hcb.id_tap(3, 1.0)  # type: ignore[arg-type]


def test_jvp_taps_primals_only(jit: Jit, got: Received) -> None:
    jit(lambda x, t: jax.jvp(lambda x: hcb.id_tap(got, x * 2.0) * 3.0, (x,), (t,)))(5.0, 0.1)
    hcb.barrier_wait()
    assert got.lists() == [10.0]
    assert got.transforms == [[]]


def test_grad_taps_primals_only(jit: Jit, got: Received) -> None:
    grad = jit(jax.grad(lambda x: x * hcb.id_tap(got, hcb.id_tap(got, x * 2.0) * 3.0)))(5.0)
    hcb.barrier_wait()
    assert float(grad) == 60.0
    assert got.lists() == [10.0, 30.0]
    assert got.transforms == [[], []]


def test_the_process_wide_switch_for_tangents_does_not_reach_it(
    got: Received, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOSTCALLBACK_TAP_TANGENTS", "1")
    jax.grad(lambda x: hcb.id_tap(got, x) ** 2)(5.0)
    hcb.barrier_wait()
    assert got.lists() == [5.0]


def test_grad_of_grad_taps_the_primal_once(got: Received) -> None:
    assert float(jax.grad(jax.grad(lambda x: x * (hcb.id_tap(got, x * 2.0) * 3.0)))(5.0)) == 12.0
    hcb.barrier_wait()
    assert got.lists() == [10.0]


def test_integer_leaves_pass_through_jvp_and_vjp(got: Received) -> None:
    def f(x: Any, n: Any) -> Any:
        x, n = hcb.id_tap(got, (x, n))
        return x * n

    primal, tangent = jax.jvp(f, (2.0, 3), (0.2, np.zeros((), FLOAT0)))
    assert (float(primal), round(float(tangent), 6)) == (6.0, 0.6)
    assert float(jax.grad(f)(2.0, 3)) == 3.0
    _, pullback = jax.vjp(lambda x: hcb.id_tap(got, x, result=x), (jnp.ones(2), jnp.arange(2)))
    (cotangents,) = pullback((jnp.ones(2), np.zeros(2, FLOAT0)))
    assert cotangents[1].dtype == FLOAT0
    hcb.barrier_wait()
    assert got.lists() == [(2.0, 3), (2.0, 3), ([1.0, 1.0], [0, 1])]


def test_a_tap_in_transposed_code_taps_the_cotangent(got: Received) -> None:
    (cotangent,) = jax.linear_transpose(lambda x: 2.0 * hcb.id_tap(got, 3.0 * x), 1.0)(1.0)
    hcb.barrier_wait()
    assert float(cotangent) == 6.0
    assert got.lists() == [2.0]
    assert got.transforms == [[("transpose", {})]]


def test_vmap_taps_the_batch_once(jit: Jit, got: Received) -> None:
    x = 3.0
    jit(jax.vmap(lambda y: hcb.id_tap(got, (x, y))))(jnp.array([4.0, 5.0]))
    hcb.barrier_wait()
    assert got.lists() == [(3.0, [4.0, 5.0])]
    assert got.transforms == [[batch(None, 0)]]


def test_nested_vmaps_stack_innermost_first(got: Received) -> None:
    def rows(xs: Any, y: Any) -> Any:
        return jax.vmap(lambda x, y: hcb.id_tap(got, x + y), in_axes=(0, None))(xs, y)

    jax.vmap(rows, in_axes=(None, 0))(jnp.arange(3), jnp.arange(2))
    hcb.barrier_wait()
    assert got.lists() == [[[0, 1, 2], [1, 2, 3]]]
    assert got.transforms == [[batch(0), batch(0)]]


def test_vmap_of_grad_and_grad_of_vmap_tap_the_primals(got: Received) -> None:
    def f(x: Any) -> Any:
        return 2.0 * hcb.id_tap(got, 3.0 * x)

    jax.vmap(jax.grad(f))(jnp.arange(2.0))
    jax.grad(lambda x: jax.vmap(f)(x).sum())(jnp.arange(2.0))
    hcb.barrier_wait()
    assert got.lists() == [[0.0, 3.0]] * 2
    assert got.transforms == [[batch(0)]] * 2


def test_each_message_has_separate_transforms(got: Received) -> None:
    def spoil(arg: Any, transforms: Any) -> None:
        got(arg, list(transforms))
        transforms[0][1].clear()
        transforms.clear()

    f = jax.jit(jax.vmap(lambda x: hcb.id_tap(spoil, x)))
    f(jnp.arange(2))
    f(jnp.arange(2))
    hcb.barrier_wait()
    assert [[name for name, _ in transforms] for transforms in got.transforms] == [["batch"], ["batch"]]


def test_control_flow_taps_in_program_order(jit: Jit) -> None:
    seen: list[Any] = []

    def tap(where: str) -> Callable[..., Any]:
        return lambda x, transforms: seen.append((where, x.tolist()))

    def body(c: Any, x: Any) -> Any:
        x = hcb.id_tap(tap("body"), x)
        x = lax.cond(
            x % 2 == 0,
            lambda x: hcb.id_tap(tap("even"), x + 1),
            lambda x: hcb.id_tap(tap("odd"), -1, result=x + 1),
            x,
        )
        return c, hcb.id_tap(tap("end"), x)

    def f(n: Any) -> Any:
        n = lax.while_loop(
            lambda n: hcb.id_tap(tap("pred"), n < 2), lambda n: hcb.id_tap(tap("next"), n + 1), n
        )
        _, xs = lax.scan(body, n, jnp.arange(2))
        return hcb.id_tap(tap("last"), xs)

    jit(f)(1)
    hcb.barrier_wait()
    loop = [("pred", True), ("next", 2), ("pred", False)]
    scan = [("body", 0), ("even", 1), ("end", 1), ("body", 1), ("odd", -1), ("end", 2)]
    assert seen == [*loop, *scan, ("last", [1, 2])]


def test_custom_jvp_inside_a_scan(jit: Jit, got: Received) -> None:
    @jax.custom_jvp
    def f(x: Any) -> Any:
        return x * hcb.id_tap(got, x)

    @f.defjvp
    def f_jvp(primals: Any, tangents: Any) -> Any:
        (x,), (x_dot,) = primals, tangents
        return f(x), 3.0 * x * hcb.id_tap(got, x_dot)

    def total(xs: Any) -> Any:
        return lax.scan(lambda carry, x: (carry + f(x), None), 0.0, xs)[0]

    grad = jit(jax.grad(total))(jnp.array([1.0, 2.0]))
    hcb.barrier_wait()
    assert grad.tolist() == [3.0, 6.0]
    # The tangent is tapped where it is transposed: backwards.
    assert got.lists() == [1.0, 2.0, 6.0, 3.0]
    assert got.transforms == [[], [], [("transpose", {})], [("transpose", {})]]


def test_custom_vjp_inside_a_scan(jit: Jit, got: Received) -> None:
    @jax.custom_vjp
    def f(x: Any) -> Any:
        return x * hcb.id_tap(got, x)

    f.defvjp(lambda x: (f(x), 3.0 * x), lambda residual, ct: (residual * hcb.id_tap(got, ct),))

    def total(xs: Any) -> Any:
        return lax.scan(lambda carry, x: (carry + f(x), None), 0.0, xs)[0]

    grad = jit(jax.grad(total))(jnp.array([1.0, 2.0]))
    hcb.barrier_wait()
    assert grad.tolist() == [3.0, 6.0]
    assert got.lists() == [1.0, 2.0, 1.0, 1.0]
    assert got.transforms == [[]] * 4


def test_every_device_of_a_pmap_taps_for_itself(got: Received) -> None:
    devices = jax.local_devices()[:2]
    jax.pmap(lambda x: hcb.id_tap(got, x, tap_with_device=True), devices=devices)(jnp.arange(2.0))
    hcb.barrier_wait()
    assert sorted(zip([d.id for d in got.devices], got.lists(), strict=True)) == [(0, 0.0), (1, 1.0)]


@pytest.mark.slow
def test_odeint_under_grad_can_be_tapped(got: Received) -> None:
    from jax.experimental.ode import odeint

    def loss(k: Any) -> Any:
        def decay(x: Any, t: Any, k: Any) -> Any:
            return -k * hcb.id_tap(got, x)

        return odeint(decay, 1.0, jnp.linspace(0, 0.001, num=2), k)[-1]

    jax.grad(loss)(1.0)
    hcb.barrier_wait()
    assert got.lists()[0] == 1.0


def test_the_dce_sink_takes_results_and_returns_nothing(got: Received) -> None:
    def f(x: Any) -> Any:
        assert hcb.id_tap_dce_sink(hcb.id_tap(got, x), hcb.id_tap(got, x + 1)) is None
        return x

    jax.jit(f)(1.0)
    hcb.barrier_wait()
    assert got.lists() == [1.0, 2.0]


@pytest.mark.parametrize("device_index", [0, 1])
def test_partitioned_arrays_arrive_whole_and_from_the_requested_device(
    device_index: int, got: Received
) -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("d",))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))

    def f(x: Any) -> Any:
        return hcb.id_tap(got, x * 2, tap_with_device=True, device_index=device_index)

    jax.jit(f, in_shardings=rows, out_shardings=rows)(jnp.arange(4))
    hcb.barrier_wait()
    assert got.lists() == [[0, 2, 4, 6]]
    assert got.devices == [jax.devices()[device_index]]


def test_the_device_index_means_nothing_where_each_device_runs_its_own(got: Received) -> None:
    jax.pmap(lambda x: hcb.id_tap(got, x, tap_with_device=True, device_index=1))(jnp.arange(2))
    hcb.id_tap(got, 2, tap_with_device=True, device_index=1)
    hcb.barrier_wait()
    assert sorted(zip([d.id for d in got.devices], got.lists(), strict=True)) == [(0, 0), (0, 2), (1, 1)]

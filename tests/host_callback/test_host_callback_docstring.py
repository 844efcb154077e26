"""The examples in the documentation of host_callback 0.4.34 run with nothing but the import changed.

The documentation abridges their output; here it is the module's full output. One example differs, see `checkpoint`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from hostcallback import host_callback as hcb
from hostcallback.host_callback import barrier_wait, call, id_tap

Capture = pytest.CaptureFixture[str]


def printed(capsys: Capture) -> str:
    hcb.barrier_wait()
    return capsys.readouterr().out


# Using call to call a host function and return results to device


def test_call_a_numpy_function() -> None:
    # This function runs on the host
    def host_eig(m: np.ndarray) -> np.ndarray:
        return np.linalg.eigvals(m)

    # This function is used in JAX
    def device_fun(m: Any) -> Any:
        return hcb.call(
            host_eig,
            m,
            # Given an input of shape (..., d, d), eig output has shape (..., d)
            result_shape=jax.ShapeDtypeStruct(m.shape[:-1], m.dtype),
        )

    # Complex, since newer numpy returns complex eigenvalues of real matrices too.
    m = np.diag(np.array([1, 2, 3], np.complex64)) * np.ones((2, 1, 1), np.complex64)
    np.testing.assert_array_equal(jax.jit(device_fun)(m), [[1.0, 2.0, 3.0]] * 2)


def test_call_inside_pmap_is_told_the_device(capsys: Capture) -> None:
    def host_sin(x: Any, *, device: Any) -> Any:
        # The ``device`` argument is passed due to ``call_with_device=True`` below.
        print(f"Invoking host_sin with {x.shape} on {device}\n", end="")
        return np.sin(x)

    # Use pmap to run the computation on two devices
    result = jax.pmap(
        lambda x: hcb.call(
            host_sin,
            x,
            result_shape=x,
            # Ask that the `host_sin` function be passed `device=dev`
            call_with_device=True,
        )
    )(np.ones((2, 4), dtype=np.float32))

    np.testing.assert_allclose(result, np.sin(np.ones((2, 4))), rtol=1e-6)
    # prints (in arbitrary order)
    assert sorted(printed(capsys).splitlines()) == [
        f"Invoking host_sin with (4,) on {device}" for device in jax.devices()[:2]
    ]


# Using id_tap to call a Python function on the host, with no returned values


def test_a_few_examples() -> None:
    calls: list[Any] = []

    def host_func(arg: Any, transforms: Any = None, **kwargs: Any) -> None:
        calls.append((jax.tree.map(float, arg), transforms, kwargs))

    x, y = 1.0, 10.0

    # calls host_func(2x, []) on host
    id_tap(host_func, 2 * x)

    # calls host_func((2x, 3x), [])
    id_tap(host_func, (2 * x, 3 * x))  # The argument can be a pytree

    # calls host_func(2x, [], device=jax.devices()[0])
    id_tap(host_func, 2 * x, tap_with_device=True)  # Pass the device to the tap

    # calls host_func(2x, [], what='activation')
    id_tap(functools.partial(host_func, what="activation"), 2 * x)

    # calls host_func(dict(x=x, y=y), what='data')
    id_tap(lambda tap, transforms: host_func(tap, what="data"), {"x": x, "y": y})

    barrier_wait()
    assert calls == [
        (2.0, [], {}),
        ((2.0, 3.0), [], {}),
        (2.0, [], {"device": jax.devices()[0]}),
        (2.0, [], {"what": "activation"}),
        ({"x": 1.0, "y": 10.0}, None, {"what": "data"}),
    ]


# Using barrier_wait to wait until all callbacks have executed


def test_barrier_wait() -> None:
    accumulator = []

    def host_log(arg: Any, transforms: Any) -> None:
        # We just record the arguments in a list
        accumulator.append(arg)

    def device_fun(x: Any) -> None:
        id_tap(host_log, x)
        id_tap(host_log, 2.0 * x)

    jax.jit(device_fun)(1.0)
    jax.jit(device_fun)(1.0)

    # At this point, we have started two computations, each with two
    # taps, but they may not have yet executed.
    barrier_wait()
    # Now we know that all the computations started before `barrier_wait`
    # on all devices, have finished, and all the callbacks have finished
    # executing.
    assert [float(arg) for arg in accumulator] == [1.0, 2.0, 1.0, 2.0]


def test_waiting_for_the_result_of_calls_instead() -> None:
    accumulator = []

    def host_log(arg: Any) -> float:
        # We just record the arguments in a list
        accumulator.append(arg)
        return 0.0  # return something

    def device_fun(x: Any) -> Any:
        y = call(host_log, x, result_shape=jax.ShapeDtypeStruct((), np.float32))
        z = call(host_log, 2.0 * x, result_shape=jax.ShapeDtypeStruct((), np.float32))
        return y + z  # return something that uses both results

    res1 = jax.jit(device_fun)(1.0)
    res2 = jax.jit(device_fun)(1.0)
    res1.block_until_ready()
    res2.block_until_ready()
    assert [float(arg) for arg in accumulator] == [1.0, 2.0, 1.0, 2.0]


# Behavior under parallelization transformations


def power3_on_a_device(x: Any) -> Any:
    y = x * x
    hcb.id_print((x, y), what="x,x^2", tap_with_device=True)
    return y * x


def test_pmap(capsys: Capture) -> None:
    devices = jax.local_devices()[:2]
    jax.pmap(power3_on_a_device, devices=devices)(np.array([3.0, 4.0]))
    first, second = (f"device: {device} what: x,x^2\n" for device in devices)
    text = printed(capsys)
    assert text in (f"{first}( 3. 9. )\n{second}( 4. 16. )\n", f"{second}( 4. 16. )\n{first}( 3. 9. )\n")


def test_pjit_taps_the_whole_operand_once(capsys: Capture) -> None:
    # pjit.pjit is called jax.jit now, and a sharding names its mesh.
    mesh = jax.sharding.Mesh(jax.local_devices()[:2], ["d"])
    sharding = jax.sharding.NamedSharding(mesh, P("d"))
    jax.jit(power3_on_a_device, in_shardings=sharding, out_shardings=sharding)(np.array([3.0, 4.0]))
    assert printed(capsys) == f"device: {jax.devices()[0]} what: x,x^2\n( [3. 4.] [ 9. 16.] )\n"


# Behavior under JAX autodiff transformations


def power3(x: Any) -> Any:
    y = x * x
    # Print both 'x' and 'x^2'. Must pack as a tuple.
    hcb.id_print((x, y), what="x,x^2")
    return y * x


def test_primals_only(capsys: Capture) -> None:
    power3(3.0)
    jax.jvp(power3, (3.0,), (0.1,))
    jax.grad(power3)(3.0)
    assert printed(capsys) == "what: x,x^2\n( 3. 9. )\n" * 3


def test_print_tangents(capsys: Capture) -> None:
    @jax.custom_jvp
    def print_tangents(arg: Any) -> Any:
        return None

    @print_tangents.defjvp
    def print_tangents_jvp(primals: Any, tangents: Any) -> Any:
        (arg_dot,) = tangents
        hcb.id_print(arg_dot, what="tangents")
        return primals, tangents

    def power3_with_tangents(x: Any) -> Any:
        y = x * x
        # Print both 'x' and 'x^2'. Must pack as a tuple.
        hcb.id_print((x, y), what="x,x^2")
        print_tangents((x, y))
        return y * x

    jax.jvp(power3_with_tangents, (3.0,), (0.1,))
    assert printed(capsys) == "what: x,x^2\n( 3. 9. )\nwhat: tangents\n( 0.1 0.6 )\n"


@jax.custom_vjp
def print_cotangents(arg: Any) -> Any:
    # Must return the argument for which we want the cotangent.
    return arg


# f_fwd: a -> (b, residual)
def print_cotangents_fwd(arg: Any) -> Any:
    return print_cotangents(arg), None


# f_bwd: (residual, CT b) -> [CT a]
def print_cotangents_bwd(residual: Any, ct_b: Any) -> Any:
    hcb.id_print(ct_b, what="cotangents")
    return (ct_b,)


print_cotangents.defvjp(print_cotangents_fwd, print_cotangents_bwd)


def power3_with_cotangents(x: Any) -> Any:
    y = x * x
    # Print both 'x' and 'x^2'. Must pack as a tuple.
    hcb.id_print((x, y), what="x,x^2")
    (x1, y1) = print_cotangents((x, y))
    # Must use the output of print_cotangents
    return y1 * x1


def test_print_cotangents(capsys: Capture) -> None:
    jax.grad(power3_with_cotangents)(3.0)
    assert printed(capsys) == "what: x,x^2\n( 3. 9. )\nwhat: cotangents\n( 9. 3. )\n"


def test_checkpoint(capsys: Capture) -> None:
    jax.grad(lambda x: power3(jax.checkpoint(power3)(x)))(3.0)
    # There it printed the first again, when the residuals were rematerialised. Here a tap fires once, see migrating.md.
    assert printed(capsys) == "what: x,x^2\n( 3. 9. )\nwhat: x,x^2\n( 27. 729. )\n"


# Behavior under jax.vmap


def test_vmap(capsys: Capture) -> None:
    jax.vmap(power3)(np.array([2.0, 3.0]))
    jax.vmap(jax.grad(power3_with_cotangents))(np.array([2.0, 3.0]))
    batch = "transforms: [('batch', {'batch_dims': (0, 0)})] what:"
    assert printed(capsys) == (
        f"{batch} x,x^2\n( [2. 3.] [4. 9.] )\n"
        f"{batch} x,x^2\n( [2. 3.] [4. 9.] )\n"
        f"{batch} cotangents\n( [4. 9.] [2. 3.] )\n"
    )


# Using call to call a JAX function on another device, with reverse-mode autodiff support


def call_jax_other_device(jax_outside_fun: Any, arg: Any, *, device: Any) -> Any:
    def run_jax_outside_fun(arg: Any) -> Any:
        return jax.jit(jax_outside_fun)(jax.device_put(arg, device))

    @jax.custom_vjp
    def make_call(arg: Any) -> Any:
        return hcb.call(run_jax_outside_fun, arg, result_shape=jax.eval_shape(jax_outside_fun, arg))

    def make_call_vjp_fwd(arg: Any) -> Any:
        return make_call(arg), arg  # Return the primal argument as the residual

    def make_call_vjp_bwd(arg: Any, ct_res: Any) -> Any:
        def jax_outside_vjp_fun(arg_and_ct: Any) -> Any:
            arg, ct = arg_and_ct
            _, f_vjp = jax.vjp(jax_outside_fun, arg)
            (ct_in,) = f_vjp(ct)
            return ct_in

        return (call_jax_other_device(jax_outside_vjp_fun, (arg, ct_res), device=device),)

    make_call.defvjp(make_call_vjp_fwd, make_call_vjp_bwd)
    return make_call(arg)


def test_call_a_jax_function_on_another_device() -> None:
    outside_device = jax.devices("cpu")[1]

    def f_outside(x: Any) -> Any:
        return 2.0 * call_jax_other_device(lambda x: x * x * x, x, device=outside_device)

    assert float(jax.jit(f_outside)(5.0)) == 250.0
    assert float(jax.grad(f_outside)(5.0)) == 150.0
    assert float(jax.grad(jax.grad(f_outside))(5.0)) == 60.0


def test_call_a_jax_function_on_another_device_with_pytrees() -> None:
    outside_device = jax.devices("cpu")[1]

    def f_jax(x: Any) -> Any:
        return 3.0 * jnp.sin(x["a"]) + jnp.sin(x["b"])

    def f_outside(x: Any) -> Any:
        return call_jax_other_device(f_jax, x, device=outside_device)

    x = {"a": 3.0, "b": 4.0}
    expected, found = jax.grad(f_jax)(x), jax.grad(f_outside)(x)
    np.testing.assert_allclose([found["a"], found["b"]], [expected["a"], expected["b"]], rtol=1e-6)

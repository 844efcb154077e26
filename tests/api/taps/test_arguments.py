"""The other arguments of taps: their effects, refused values, and the messages."""

from __future__ import annotations

from typing import Any

import jax
import pytest

import hostcallback as hcb
from recorder import Recorder


def test_result_is_returned_instead_of_the_argument(rec: Recorder) -> None:
    assert float(hcb.jit(lambda x: hcb.id_tap(rec, x, result=x * 10))(2.0)) == 20.0
    hcb.barrier_wait()
    assert rec.floats() == [2.0]


def test_a_tap_function_gets_transforms_and_device_only_if_it_names_them() -> None:
    seen: list[Any] = []
    hcb.jit(lambda x: hcb.id_tap(lambda v: seen.append(float(v)), x))(1.0)
    hcb.jit(lambda x: hcb.id_tap(lambda v, device: seen.append(device), x))(1.0)
    hcb.jit(lambda x: hcb.id_tap(lambda v, transforms, **kw: seen.append((transforms, kw)), x, a=1))(1.0)
    hcb.jit(lambda x: hcb.id_tap(lambda v, device: seen.append(device), x, device="mine"))(1.0)
    hcb.barrier_wait()
    assert seen == [1.0, jax.devices()[0], ((), {"a": 1}), "mine"]


def test_a_tap_function_that_is_not_callable_is_refused() -> None:
    with pytest.raises(
        TypeError, match=r"id_tap takes a function .* got float 3.0: call id_tap\(tap_func, arg\)"
    ):
        hcb.id_tap(3.0, print)  # type: ignore[arg-type]


def test_an_output_stream_without_write_is_refused() -> None:
    with pytest.raises(TypeError, match=r"needs a write\(str\) method, got str 'log.txt'"):
        hcb.id_print(1.0, output_stream="log.txt")  # type: ignore[arg-type]


def test_an_unknown_transport_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from hostcallback.lifecycle import receivers as transport

    monkeypatch.setenv("HOSTCALLBACK_TRANSPORT", "pigeon")
    with pytest.raises(
        ValueError, match=r"HOSTCALLBACK_TRANSPORT='pigeon': expected 'native', 'callback' or nothing"
    ):
        transport.use_native.__wrapped__("cpu")

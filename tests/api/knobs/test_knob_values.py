"""What a knob may be and may be set to."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hostcallback as hcb
from hostcallback.receiver.runtime import knobs as registry


def test_a_knob_has_its_default_until_it_is_set(name: str, jit: Any) -> None:
    f = jit(lambda x: x * hcb.knob(name, 2.0))
    assert f(3.0) == 6
    hcb.knobs[name] = 5
    assert f(3.0) == 15
    assert hcb.knobs[name] == 5
    assert hcb.knob(name, 2.0) == 5


def test_setting_a_knob_compiles_nothing(name: str) -> None:
    traced = []

    @jax.jit
    def f(x: Any) -> Any:
        traced.append(x)
        return x * hcb.knob(name, 2.0)

    values = []
    for value in (1, 2, 3):
        hcb.knob(name, 2.0)
        hcb.knobs[name] = value
        values.append(float(f(1.0)))
    assert values == [1, 2, 3]
    assert len(traced) == 1


@pytest.mark.parametrize(
    ("default", "value"),
    [
        (True, False),
        (3, -4),
        (1.5, 2.25),
        (1 + 2j, 3 - 1j),
        (np.int8(3), -128),
        (np.uint16(3), 65535),
        (np.arange(6.0).reshape(2, 3), np.full((2, 3), 7.0)),
        (np.zeros((0, 3), np.float32), np.zeros((0, 3))),
        (jnp.bfloat16(1.5), 2.5),
        (jnp.float8_e4m3fn(1.5), 2.0),
        (np.array([True, False, True]), [False, False, True]),
    ],
    ids=str,
)
def test_knobs_of_every_kind(name: str, default: Any, value: Any) -> None:
    f = jax.jit(lambda: hcb.knob(name, default))
    first = f()
    assert first.dtype == jnp.asarray(default).dtype
    assert first.shape == np.shape(default)
    np.testing.assert_array_equal(np.asarray(first), np.asarray(jnp.asarray(default)))
    hcb.knobs[name] = value
    np.testing.assert_array_equal(np.asarray(f()), np.asarray(value).astype(first.dtype))


def test_a_python_number_gives_way_to_the_dtype_of_what_it_meets(name: str) -> None:
    assert jax.jit(lambda x: x * hcb.knob(name, 0.5))(jnp.bfloat16(2)).dtype == jnp.bfloat16
    assert jax.jit(lambda x: x * hcb.knob(name + "n", np.float32(0.5)))(jnp.bfloat16(2)).dtype == np.float32


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (1.5, ValueError, "is from 0 to 1, got 1.5"),
        (-1, ValueError, "is from 0 to 1, got -1"),
        (float("nan"), ValueError, "cannot be NaN"),
        (1e300, ValueError, "does not fit"),
        ([0.1, 0.2], ValueError, r"has the shape \(\), got \(2,\)"),
        ("0.1", TypeError, "is float32, got '0.1'"),
        (True, TypeError, "is float32, got True"),
        (1j, TypeError, "is float32, got 1j"),
        (None, TypeError, "is float32, got None"),
    ],
)
def test_a_value_that_is_not_allowed_changes_nothing(
    name: str, value: Any, error: type[Exception], text: str
) -> None:
    hcb.knob(name, 0.5, min=0, max=1)
    with pytest.raises(error, match=text):
        hcb.knobs[name] = value
    assert hcb.knobs[name] == 0.5


def test_the_bounds_are_allowed_values_of_every_dtype(name: str) -> None:
    for dtype in (np.float16, jnp.bfloat16, np.float32):
        knob = f"{name}{np.dtype(dtype).name}"
        hcb.knob(knob, dtype(0.5), min=0.1, max=0.9)
        hcb.knobs[knob] = 0.1
        hcb.knobs[knob] = 0.9


def test_an_integer_takes_whole_numbers_that_fit(name: str) -> None:
    hcb.knob(name, np.int8(3))
    hcb.knobs[name] = 1e2
    assert hcb.knobs[name] == 100
    for value, error in ((1.5, TypeError), (128, ValueError), (-129, ValueError)):
        with pytest.raises(error):
            hcb.knobs[name] = value


@pytest.mark.parametrize(
    ("default", "shown"),
    [
        (np.float32(3e-4), 0.0003),
        (np.float16(0.1), 0.1),
        (jnp.bfloat16(0.1), 0.100098),
        (np.array([1e-3, 2.5], np.float32), [0.001, 2.5]),
        (np.float32(1e30), 1e30),
        (np.int32(7), 7),
        (True, True),
        (np.complex64(0.1 + 2j), "(0.1+2j)"),
    ],
)
def test_a_value_is_shown_as_short_as_its_dtype_allows(name: str, default: Any, shown: Any) -> None:
    hcb.knob(name, default)
    (described,) = (knob for knob in registry.knobs.described() if knob["name"] == name)
    assert (described["value"], described["default"]) == (shown, shown)
    assert f"{name}={np.asarray(default)!s}" in repr(hcb.knobs)
    if not isinstance(shown, str):
        hcb.knobs[name] = shown  # what is shown can be set, and changes nothing
        assert (hcb.knobs[name] == np.asarray(default)).all()


def test_an_unknown_name_gets_the_nearest(name: str) -> None:
    hcb.knob(name, 0.5)
    with pytest.raises(hcb.UnknownKnobError, match=rf"no knob is called '{name}x': there are '{name}'"):
        hcb.knobs[name + "x"] = 1
    with pytest.raises(KeyError):
        _ = hcb.knobs[name + "x"]
    assert name in hcb.knobs
    assert name + "x" not in hcb.knobs
    assert name in list(hcb.knobs)
    assert dict(hcb.knobs)[name] == 0.5


def test_two_knobs_of_one_name_must_be_declared_alike(name: str) -> None:
    hcb.knob(name, 0.5, max=1)
    hcb.knob(name, 0.5, max=1)
    with pytest.raises(TypeError, match="a knob has one type"):
        hcb.knob(name, 1, max=1)
    with pytest.raises(TypeError, match="a knob has one type"):
        hcb.knob(name, np.zeros(2, np.float32), max=1)
    with pytest.raises(ValueError, match="depend on which program is traced first"):
        hcb.knob(name, 0.25, max=1)
    with pytest.raises(ValueError, match="depend on which program is traced first"):
        hcb.knob(name, 0.5)
    del hcb.knobs[name]
    assert hcb.knob(name, 0.25) == 0.25
    assert jax.jit(lambda x: x * hcb.knob(name, 0.25))(4.0) == 1
    hcb.knobs[name] = 0.75
    del hcb.knobs[name]
    assert hcb.knob(name, 0.25) == 0.25, "another start"


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"default": "a"}, TypeError, "expected a number"),
        ({"default": None}, TypeError, "expected a number"),
        ({"default": np.zeros(2000)}, ValueError, "at most 4,096 are allowed"),
        ({"default": jnp.int4(1)}, TypeError, "less than a byte"),
        ({"default": float("nan")}, ValueError, "cannot be NaN"),
        ({"default": 2.0, "max": 1}, ValueError, "at most 1, got"),
        ({"default": 2j, "max": 1}, ValueError, "has no bounds"),
        (
            {"default": 2.0, "min": 3, "max": 1},
            ValueError,
            r"the knob '.+' has min=3 and max=1, .* not in order",
        ),
        ({"default": 2.0, "read": "step"}, ValueError, "expected one of 'always', 'call'"),
        ({"default": 2.0, "maximum": 1}, TypeError, "maximum"),
    ],
    ids=str,
)
def test_a_declaration_that_is_not_allowed_is_refused_with_the_line(
    name: str, arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text) as raised:
        hcb.knob(name, **arguments)
    assert "test_knob_values.py" in str(raised.value)
    assert name not in hcb.knobs


def test_a_knob_is_no_attribute() -> None:
    with pytest.raises(
        AttributeError, match=r"hcb\.knobs\['rate'\] = 0\.5 sets the knob .* at .*test_knob_values\.py"
    ):
        hcb.knobs.rate = 0.5
    with pytest.raises(AttributeError, match=r"hcb\.knobs\['rate'\] is the knob of that name"):
        hcb.knobs.rate  # noqa: B018 - it raises


def test_a_traced_default_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match="is traced, and a knob's first value must be known"):
        jax.jit(lambda x: hcb.knob(name, x))(1.0)


@pytest.mark.parametrize("default", [3_000_000_000, np.int64(2**40), 1e39])
def test_a_default_that_does_not_fit_is_refused(name: str, default: Any) -> None:
    with pytest.raises(ValueError, match=r"does not fit into .*32, which JAX makes of it"):
        hcb.knob(name, default)

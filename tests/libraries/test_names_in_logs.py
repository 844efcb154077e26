"""Logs have the names that the leaves of modules, states and dataclasses have in the program."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import hostcallback as hcb
from hostcallback.receiver.cli import main

with warnings.catch_warnings():
    # flax of the time of JAX 0.8 asks jax for names that are deprecated in it.
    warnings.simplefilter("ignore", DeprecationWarning)
    import flax
    from flax import nnx


class Layer(eqx.Module):
    linear: eqx.nn.Linear
    gain: jax.Array
    _shift: jax.Array
    size: int = eqx.field(static=True)


@flax.struct.dataclass
class Struct:
    weight: jax.Array
    nothing: None
    bias: jax.Array
    name: str = flax.struct.field(pytree_node=False)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Registered:
    step: jax.Array
    params: dict[str, jax.Array]


@jax.tree_util.register_pytree_node_class
class Unnamed:
    def __init__(self, *children: Any) -> None:
        self.children = children

    def tree_flatten(self) -> tuple[Any, None]:
        return self.children, None

    @classmethod
    def tree_unflatten(cls, _: None, children: Any) -> Unnamed:
        return cls(*children)


def layer(x: jax.Array) -> Any:
    linear = eqx.nn.Linear(1, 1, use_bias=False, key=jax.random.key(0))
    return Layer(eqx.tree_at(lambda one: one.weight, linear, x.reshape(1, 1)), x, x + 1, size=3)


def state(x: jax.Array) -> Any:
    model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    model.kernel = nnx.Param(x.reshape(1, 1))
    return nnx.state(model)


def alike(*names: str) -> Any:
    """A class whose children have these keys, which may be equal."""

    @jax.tree_util.register_pytree_with_keys_class
    class Alike:
        def __init__(self, *parts: Any) -> None:
            self.parts = parts

        def tree_flatten_with_keys(self) -> Any:
            keys = map(jax.tree_util.GetAttrKey, names)
            return tuple(zip(keys, self.parts, strict=True)), None

        @classmethod
        def tree_unflatten(cls, _: Any, parts: Any) -> Any:
            return cls(*parts)

    return Alike


KINDS: list[tuple[Callable[[jax.Array], Any], list[str]]] = [
    (layer, ["linear/weight", "gain", "_shift"]),
    (lambda x: [layer(x)], ["0/linear/weight", "0/gain", "0/_shift"]),
    (lambda x: Struct(x, None, x + 1, name="struct"), ["weight", "bias"]),
    (lambda x: Registered(jnp.int32(7), {"w": x}), ["step", "params/w"]),
    (state, ["bias/value", "kernel/value"]),
    (lambda x: {"a": alike("_x", "_x")(x, x), "b": x}, ["a/0", "a/1", "b"]),
    (lambda x: {"a": alike("y", "y")(x, x), "b": x}, ["a/0", "a/1", "b"]),
    (lambda x: {"a": Unnamed(x, Struct(x, None, x, name=""))}, ["a/0", "a/1/weight", "a/1/bias"]),
]


@pytest.mark.parametrize(
    ("make", "names"),
    KINDS,
    ids=[
        "equinox",
        "in a list",
        "flax.struct",
        "dataclass",
        "nnx.State",
        "equal private names",
        "equal names",
        "without names",
    ],
)
def test_leaves_have_their_names(
    make: Callable[[jax.Array], Any], names: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    got: list[Any] = []
    program = jax.jit(lambda x: hcb.id_tap(got.append, make(x), name="seen"))
    for log, x in (("a", 1.0), ("b", 2.0)):
        with hcb.outfeed_receiver(record=tmp_path / log):
            program(jnp.float32(x))
    assert (
        type(got[0]).__name__ == type(make(jnp.float32(1))).__name__
    )  # the tap function gets the object itself
    assert set(names) <= set(hcb.read(tmp_path / "a")["seen"].to_numpy())
    assert main(["cat", str(tmp_path / "a")]) == 0
    shown = capsys.readouterr().out
    assert all(name.rpartition("/")[2] in shown for name in names)
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    shown = capsys.readouterr().out
    assert any(f"  {name}: A 1.0" in shown or f"  {name}[0, 0]: A 1.0" in shown for name in names)


def test_the_step_of_a_state_is_the_step_of_its_message(tmp_path: Path) -> None:
    with hcb.outfeed_receiver(record=tmp_path):
        jax.jit(lambda x: hcb.id_tap(lambda state: None, Registered(jnp.int32(7), {"w": x}), name="state"))(
            1.0
        )
    assert hcb.read(tmp_path)["state"].to_numpy()["step"].tolist() == [7]

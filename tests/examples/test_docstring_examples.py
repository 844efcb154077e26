"""Every public docstring ends with an example, and all of them run, one after the other in one process."""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import pathlib
import re
import sys
import textwrap
import types
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import pytest
import scipy.special

import hostcallback as hcb
from hostcallback import receiver

PUBLIC = {
    f"{prefix}.{name}": getattr(package, name)
    for prefix, package, more in (("hcb", hcb, hcb._NAMED_AS_BUILTINS), ("receiver", receiver, ()))
    for name in (*package.__all__, *more)
    if name != "Sink"  # a type alias, which has no docstring
}


def example_of(value: Any) -> str:
    """The code of the last section of a docstring; empty if that is no example."""
    text = inspect.getdoc(value) or ""
    _, found, code = text.rpartition("Example:\n")
    return textwrap.dedent(code) if found and not re.search(r"^\S", code, re.MULTILINE) else ""


def names() -> dict[str, Any]:
    """What the examples take for given."""
    loss = jnp.float32(0.5)

    def train() -> None:
        layer = jax.named_scope("layers/0")(jnp.tanh)
        step = jax.jit(lambda x: hcb.tap(lambda value: None, {"loss": layer(x), "step": 3}, name="loss"))
        jax.block_until_ready(step(loss))

    return {
        "hcb": hcb, "contextlib": contextlib, "receiver": receiver, "jax": jax, "jnp": jnp, "io": io,
        "logging": logging, "scipy": scipy,
        "pathlib": pathlib, "warnings": warnings, "x": jnp.arange(3.0), "loss": loss, "step": jnp.int32(3),
        "train": train, "grads": jnp.ones(3), "decoded": jnp.ones((1, 4, 4, 3)), "best": loss,
        "history": [], "losses": [], "log": lambda *values: None, "f": lambda x: x, "train_step": lambda x: x + 1,
        "loss_of": lambda x: x**2,
        "prometheus_client": types.SimpleNamespace(start_http_server=lambda port: None),
    }  # fmt: skip


@pytest.fixture
def workplace(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    with hcb.outfeed_receiver(record="run/taps"):
        names()["train"]()
    yield
    hcb.control_file(None)
    hcb.taps["*"].reset()
    hcb.enable_checks()
    hcb.unbind("loss")


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_a_public_docstring_ends_with_an_example(name: str) -> None:
    assert example_of(PUBLIC[name])


@pytest.mark.slow
def test_all_examples_run(workplace: None) -> None:
    failed = {}
    for name, value in {id(value): (name, value) for name, value in PUBLIC.items()}.values():
        code = compile(example_of(value), f"<example of {name}>", "exec")
        with warnings.catch_warnings():
            try:
                exec(code, names())
                hcb.barrier_wait()
            except Exception as error:
                failed[name] = error
    assert not failed

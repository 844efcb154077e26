"""Real logs, and servers of the page over them."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import hostcallback as hcb

STEPS = 500


@jax.jit
def train(start: Any) -> Any:
    """Prints a loss, formats a text, sends a vector; the check fails at step 7, and the loss of step 9 is NaN."""

    def step(number: Any, x: Any) -> Any:
        loss = jnp.where(number == 9, jnp.nan, 1.0 / (1.0 + x))
        hcb.id_print({"step": number, "loss": loss}, name="train")
        hcb.print("at {x}", x=x)
        hcb.id_print({"step": number, "w": jnp.arange(64.0) * x}, name="weights")
        hcb.check(number != 7, "seven came, x is {x}", x=x)
        return x + 1.0

    return jax.lax.fori_loop(0, STEPS, step, start)


@pytest.fixture(scope="session")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log of a run of `train`."""
    folder = tmp_path_factory.mktemp("ui") / "taps"
    with hcb.outfeed_receiver(record=folder, sinks=[lambda message: None], on_error="warn"):
        train(jnp.float32(0)).block_until_ready()
    return folder


@jax.jit
def tell(number: Any) -> Any:
    """Prints, logs a note and a warning; the check fails at step 2."""
    hcb.id_tap(lambda value: None, {"step": number}, name="steps")
    hcb.print("printed {n}", n=number)
    hcb.log("noted {n}", n=number)
    hcb.log(level=logging.WARNING)("warned {n}", n=number)
    hcb.check(number != 2, "failed {n}", n=number)
    return number + 1


@pytest.fixture(scope="session")
def told(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log of `tell`: of steps 0 to 4 on the first device, and of steps 10 to 14 on the second."""
    folder = tmp_path_factory.mktemp("told") / "taps"
    with hcb.outfeed_receiver(record=folder, on_error="warn"):
        for device, first in zip(jax.devices()[:2], (0, 10), strict=True):
            number = jax.device_put(jnp.int32(first), device)
            for _ in range(5):
                number = tell(number)
            number.block_until_ready()
    return folder


@pytest.fixture
def sockets() -> Iterator[Path]:
    """A folder for control sockets. Not below `tmp_path`: the names of sockets are limited to 107 bytes."""
    with tempfile.TemporaryDirectory() as short:
        yield Path(short)


@contextlib.contextmanager
def _serving() -> Iterator[Callable[..., Any]]:
    httpx = pytest.importorskip("httpx", reason="these tests need httpx")
    pytest.importorskip("starlette", reason="the page needs hostcallback[ui]")
    from hostcallback.receiver.ui.server.serving import Listening, serve_logs

    with contextlib.ExitStack() as closing:

        def start(*logs: Path, **options: Any) -> Any:
            server = closing.enter_context(contextlib.closing(serve_logs(logs, Listening(**options))))
            client = closing.enter_context(
                httpx.Client(base_url=server.address.partition("#")[0], timeout=20)
            )
            client.address = server.address
            client.headers["Authorization"] = f"Bearer {server.address.partition('token=')[2]}"
            return client

        yield start


@pytest.fixture
def serve() -> Iterator[Callable[..., Any]]:
    """Serves logs; returns a client that has the token, and whose attribute `address` is that of the page."""
    with _serving() as start:
        yield start


@pytest.fixture(scope="module")
def client(log: Path) -> Iterator[Any]:
    """A client of one server over `log`, for the tests of a module that change nothing in it."""
    with _serving() as start:
        yield start(log)

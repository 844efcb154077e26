"""The benchmarks of libraries that show progress bars, unedited, with `hcb.accelerate()` and without.

Every step updates every bar. The clock stops when the last step was counted. Each library runs in a separate process,
whose standard error, where the bars are, is a pipe. A library that is not installed has no row.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback

import hostcallback as hcb
from tools.bench.handlers import bare_callback, handed_callback
from tools.bench.row import Figure, Row, measure
from tools.bench.separate_process import rows_of_process

STEPS = 2_000
UNIT = "us/step"


def jax_tqdm(rounds: int) -> list[Row]:
    """A scan of little work with `jax_tqdm.scan_tqdm(print_rate=1)`: an ordered `jax.debug.callback` in each step."""
    return _rows("jax_tqdm", rounds)


def diffrax(rounds: int) -> list[Row]:
    """`diffrax.diffeqsolve` of one equation with `TqdmProgressMeter(refresh_steps=1)`.

    Each step has a `pure_callback`, which stays JAX's; `accelerate` replaces the callbacks that begin and end the
    meter. The floor is the meter's own function, called as often: it refreshes the bar in each step.
    """
    return _rows("diffrax", rounds)


def numpyro(rounds: int) -> list[Row]:
    """Two chains of numpyro's HMC on two devices with `progress_rate=1`: an `io_callback` with a result in each step.

    numpyro compiles in every run, so the clock starts when the first chain tells its bar that it begins. The floors are
    chains whose bars are updated in the last step only, the updates of two bars alone, and a callback of a few lines of
    C, which calls on XLA's thread, where a function that uses JAX could wait without end. For comparison there is one
    that hands each call to a Python thread, which calls the function from a program, so that it may use JAX.
    """
    return _rows("numpyro", rounds, devices=2)


def blackjax(rounds: int) -> list[Row]:
    """A scan of blackjax's HMC in `blackjax.progress_bar(print_rate=1)`, which jax-tap calls with every step."""
    return _rows("blackjax", rounds, module="jaxtap")


def _rows(library: str, rounds: int, *, module: str | None = None, devices: int = 1) -> list[Row]:
    for needed in (library, module or library):
        if importlib.util.find_spec(needed) is None:
            print(f"{library}: no row: {needed} is missing (pip install -e '.[libraries]')", file=sys.stderr)
            return []
    return rows_of_process(__name__, f"{library}_here", rounds, devices=devices)


def jax_tqdm_here(rounds: int) -> list[Row]:
    """`jax_tqdm`, in this process."""
    from jax_tqdm import scan_tqdm

    def step(carry: Any, number: Any) -> Any:
        return carry * 1.0001 + number, None

    def scan(step: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
        return lambda x: lax.scan(step, x, jnp.arange(STEPS))[0]

    programs = _compiled(scan(scan_tqdm(STEPS, print_rate=1)(step)), scan(step), jnp.float32(0))
    return _versus("jax-tqdm's bar in a scan, `print_rate=1`, accelerated", measure(programs, rounds))


def diffrax_here(rounds: int) -> list[Row]:
    """`diffrax`, in this process."""
    import diffrax

    term = diffrax.ODETerm(lambda t, y, args: -y)

    def solve(meter: Any) -> Callable[[Any], Any]:
        limits = {"t0": 0.0, "t1": 1.0, "dt0": 1 / STEPS, "max_steps": 2 * STEPS}
        return lambda y: diffrax.diffeqsolve(term, diffrax.Tsit5(), y0=y, progress_meter=meter, **limits).ys

    meter = diffrax.TqdmProgressMeter(refresh_steps=1)
    programs = _compiled(solve(meter), solve(diffrax.NoProgressMeter()), jnp.float32(1))

    def updates() -> float:
        start, bar = perf_counter(), meter._init_bar()
        for step in range(STEPS):
            meter._step_bar(bar, np.float32(step / STEPS))
        meter._close_bar(bar)
        return _since(start)

    figures = measure([*programs, updates], rounds)
    return _versus("diffrax's `TqdmProgressMeter(refresh_steps=1)`, accelerated", figures, 1 / 5)


def blackjax_here(rounds: int) -> list[Row]:
    """`blackjax`, in this process."""
    import blackjax

    inverse_mass = jnp.ones(2)
    kernel = blackjax.hmc(lambda x: -0.5 * (x**2).sum(), 0.1, inverse_mass, num_integration_steps=3)

    def sample(state: Any) -> Any:
        keys = jax.random.split(jax.random.key(0), STEPS)
        return lax.scan(lambda state, key: kernel.step(key, state)[:1] * 2, state, keys)[0]

    def barred(state: Any) -> Any:
        return sample(state)

    state = kernel.init(jnp.zeros(2))
    plain = jax.jit(sample).lower(state).compile()
    with blackjax.progress_bar(print_rate=1) as progress:
        accelerated, slow, _ = _compiled(barred, barred, state)

        def last_step(program: Callable[[], float]) -> float:
            progress.current_step = 0
            time = program()
            assert (progress.current_step, progress.n_steps) == (STEPS - 1, STEPS)
            return time

        sides = [lambda: last_step(accelerated), lambda: last_step(slow), lambda: _step_us(plain, state)]
        figures = measure(sides, rounds)
    return _versus("blackjax's bar, `print_rate=1`, by jax-tap, accelerated", figures)


def numpyro_here(rounds: int) -> list[Row]:
    """`numpyro`, in this process."""
    os.environ.pop("CI", None)  # with which numpyro shows no bar
    import numpyro
    from numpyro.infer import HMC, MCMC
    from tqdm.auto import tqdm

    updates: list[float] = []
    update = tqdm.update

    def timed_update(bar: Any, n: float = 1) -> Any:
        updates.append(perf_counter())
        return update(bar, n)

    tqdm.update = timed_update  # type: ignore[method-assign]

    def model() -> None:
        numpyro.sample("x", numpyro.distributions.Normal(0, 1))

    def run(rate: int = 1) -> float:
        updates.clear()
        kernel, half = HMC(model, num_steps=3), STEPS // 2
        mcmc = MCMC(kernel, num_warmup=half, num_samples=half, num_chains=2, progress_rate=rate)
        mcmc.run(jax.random.key(0))
        jax.block_until_ready(mcmc.get_samples())
        jax.effects_barrier()
        # Each chain calls once with zero at its begin, once per `rate` steps, and once at its end.
        assert len(updates) == 2 * (STEPS // rate + 2)
        return _since(updates[0])

    def run_accelerated() -> float:
        with hcb.accelerate() as acceleration:
            time = run()
        assert [callback.reason for callback in acceleration.callbacks] == [None] * 3
        return time

    def run_with(callback: Callable[..., Any]) -> float:
        numpyro.util.io_callback = callback
        try:
            return run()
        finally:
            numpyro.util.io_callback = io_callback

    def update_bars() -> float:
        bars = [tqdm(range(STEPS), position=chain) for chain in range(2)]
        start = perf_counter()
        for _ in range(STEPS):
            for chain, bar in enumerate(bars):
                bar.set_description(f"Running chain {chain}", refresh=False)
                update(bar, 1)
        for bar in bars:
            bar.close()
        return _since(start)

    sides = [run_accelerated, run, partial(run, STEPS), update_bars, partial(run_with, bare_callback)]
    sides.append(partial(run_with, handed_callback))
    figures = measure(sides, rounds)
    return _versus("numpyro's bars of two chains, `progress_rate=1`, accelerated", figures, 1 / 5)


def _compiled(barred: Callable[[Any], Any], plain: Callable[[Any], Any], x: Any) -> list[Callable[[], float]]:
    """With its bar accelerated, and as it is, and without; each returns the time of a step."""
    slow = jax.jit(barred).lower(x).compile()
    bare = jax.jit(plain).lower(x).compile()
    jax.clear_caches()  # nothing that was traced for them is used again
    with hcb.accelerate() as acceleration:
        fast = jax.jit(barred).lower(x).compile()
    assert acceleration.callbacks
    return [lambda: _step_us(fast, x), lambda: _step_us(slow, x), lambda: _step_us(bare, x)]


def _step_us(program: Callable[[Any], Any], x: Any) -> float:
    start = perf_counter()
    jax.block_until_ready(program(x))
    jax.effects_barrier()
    return _since(start)


def _since(start: float) -> float:
    return (perf_counter() - start) / STEPS * 1e6


def _versus(name: str, figures: Sequence[Figure], bound: float | None = None) -> list[Row]:
    accelerated, itself, *floors = figures
    rows = [accelerated.versus(itself, name, UNIT, "itself, not accelerated", bound)]
    names = (
        "without the bar",
        "the bar's updates alone",
        "a C function that calls the update",
        "a Python thread that calls it from a program",
    )
    rows += [
        accelerated.versus(figure, "the same", UNIT, peer, None)
        for figure, peer in zip(floors, names, strict=False)
    ]
    return rows

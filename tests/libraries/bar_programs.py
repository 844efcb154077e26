"""Programs of libraries with progress bars: `python bar_programs.py PROGRAM accelerated|plain blocking|leaving`.

The last line on standard output is a JSON object: the results, the callbacks that were taken over or not, and each bar
that tqdm has made, as it was when the results were ready. `leaving` ends the program without waiting for anything.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tqdm.std
from jax import lax

import hostcallback as hcb

WAIT_SEC = 60.0
STEPS = 300


class WatchedBars:
    """Looks on while tqdm makes bars, shows and closes them."""

    def __init__(self) -> None:
        self.bars: list[tqdm.std.tqdm] = []
        self.closed: list[tqdm.std.tqdm] = []
        self.shown_late = 0
        self.made = threading.Event()
        watched: Any = tqdm.std.tqdm
        make, close, display = watched.__init__, watched.close, watched.display

        def watched_make(bar: Any, *args: Any, **kwargs: Any) -> None:
            self.bars.append(bar)
            make(bar, *args, **kwargs)
            self.made.set()

        def watched_close(bar: Any) -> None:
            close(bar)
            if not any(bar is other for other in self.closed):
                self.closed.append(bar)

        def watched_display(bar: Any, *args: Any, **kwargs: Any) -> Any:
            self.shown_late += any(bar is other for other in self.closed)
            return display(bar, *args, **kwargs)

        watched.__init__, watched.close, watched.display = watched_make, watched_close, watched_display

    def described(self) -> list[dict[str, Any]]:
        """State of each bar: position, total, and whether it was closed."""
        return [
            {"n": float(bar.n), "total": bar.total, "closed": any(bar is other for other in self.closed)}
            for bar in self.bars
        ]


Block = Callable[[Any], Any]


def jax_tqdm_scan(block: Block, bars: WatchedBars) -> Any:
    from jax_tqdm import scan_tqdm

    @scan_tqdm(STEPS, print_rate=1)
    def step(carry: Any, number: Any) -> Any:
        return carry * 1.001 + number, carry

    scan = jax.jit(lambda x: lax.scan(step, x, jnp.arange(STEPS)))
    return [block(scan(jnp.float32(x)))[0] for x in range(3)]


def jax_tqdm_loop(block: Block, bars: WatchedBars) -> Any:
    from jax_tqdm import PBar, loop_tqdm

    @loop_tqdm(STEPS, print_rate=7)
    def body(number: Any, carry: Any) -> Any:
        return carry + number

    loop = jax.jit(lambda x: lax.fori_loop(0, STEPS, body, PBar(id=1, carry=x)).carry)
    return block(loop(jnp.float32(1)))


def _diffrax_solve(y0: Any, meter: Any, steps: int = 200) -> Any:
    import diffrax

    term = diffrax.ODETerm(lambda t, y, args: -y)
    return diffrax.diffeqsolve(
        term, diffrax.Tsit5(), 0.0, 1.0, 1 / steps, y0, max_steps=2 * steps, progress_meter=meter
    ).ys


def diffrax_tqdm(block: Block, bars: WatchedBars) -> Any:
    import diffrax

    meter = diffrax.TqdmProgressMeter(refresh_steps=1)
    solve = jax.vmap(lambda y0: _diffrax_solve(y0, meter))
    return [
        block(_diffrax_solve(jnp.float32(1), meter)),
        block(jax.jit(jax.grad(lambda y0: solve(y0).sum()))(jnp.arange(3.0))),
    ]


def diffrax_text(block: Block, bars: WatchedBars) -> Any:
    import diffrax

    return block(_diffrax_solve(jnp.float32(1), diffrax.TextProgressMeter(minimum_increase=0.1)))


def numpyro_chains(block: Block, bars: WatchedBars) -> Any:
    import numpyro
    from numpyro.infer import MCMC, NUTS

    def model() -> None:
        numpyro.sample("x", numpyro.distributions.Normal(0, 1))

    mcmc = MCMC(NUTS(model), num_warmup=100, num_samples=200, num_chains=2, progress_rate=1)
    mcmc.run(jax.random.key(0))
    return block(mcmc.get_samples(group_by_chain=True)["x"])[:, -1]


def blackjax_nuts(block: Block, bars: WatchedBars) -> Any:
    import blackjax

    nuts = blackjax.nuts(lambda x: -0.5 * (x**2).sum(), step_size=0.1, inverse_mass_matrix=jnp.ones(2))
    state = nuts.init(jnp.zeros(2))

    def step(state: Any, key: Any) -> Any:
        state, _ = nuts.step(key, state)
        return state, state.position

    with blackjax.progress_bar(print_rate=1) as progress:
        _, positions = block(lax.scan(step, state, jax.random.split(jax.random.key(0), STEPS)))
        at = [progress.current_step + 1, progress.n_steps]
        # Its thread looks ten times a second whether there is something to show.
        assert bars.made.wait(WAIT_SEC)
    return [at, positions[-1]]


PROGRAMS = {
    program.__name__: program
    for program in (jax_tqdm_scan, jax_tqdm_loop, diffrax_tqdm, diffrax_text, numpyro_chains, blackjax_nuts)
}


def main(name: str, how: str, end: str) -> None:
    """Runs one program."""
    acceleration = hcb.accelerate() if how == "accelerated" else None
    bars = WatchedBars()
    if end == "leaving":
        PROGRAMS[name](lambda x: x, bars)
        return
    results = PROGRAMS[name](jax.block_until_ready, bars)
    ready = bars.described()
    jax.effects_barrier()
    callbacks = [] if acceleration is None else [str(callback) for callback in acceleration.callbacks]
    found = {
        "results": [np.asarray(leaf).tolist() for leaf in jax.tree.leaves(results)],
        "bars": ready,
        "at the barrier": bars.described(),
        "shown late": bars.shown_late,
        "callbacks": callbacks,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])

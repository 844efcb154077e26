"""evosax: the README's ask and tell with CMA-ES, in a scan."""

import jax
import jax.numpy as jnp
from evosax.algorithms import CMA_ES

from program_edits import edits


def main():
    strategy = CMA_ES(population_size=16, solution=jnp.zeros(4))
    params = strategy.default_params
    key = jax.random.key(0)
    state = strategy.init(key, jnp.ones(4), params)

    def step(carry, key):
        state, params = carry
        ask_key, tell_key = jax.random.split(key)
        population, state = strategy.ask(ask_key, state, params)
        fitness = jnp.sum((population - 0.5) ** 2, axis=-1)
        state, metrics = strategy.tell(tell_key, population, fitness, state, params)
        edits.log(best=fitness.min())
        return (state, params), metrics["best_fitness"]

    @jax.jit
    def evolve(key, state, params):
        return edits.scan(step, (state, params), jax.random.split(key, 40))

    (state, _), best = edits.wrap(evolve)(key, state, params)
    print("best", best[-1])
    return state, best

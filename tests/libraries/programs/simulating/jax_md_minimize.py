"""jax-md: the energy of soft spheres in a periodic box, minimised by FIRE, then simulated."""

import jax
from jax_md import energy, minimize, simulate, space

from program_edits import edits


def main():
    displacement, shift = space.periodic(4.0)
    positions = jax.random.uniform(jax.random.PRNGKey(0), (20, 2), maxval=4.0)
    energy_fn = energy.soft_sphere_pair(displacement)
    init, apply = minimize.fire_descent(energy_fn, shift)

    @jax.jit
    def relax(state):
        def step(state, _):
            state = apply(state)
            edits.log(energy=energy_fn(state.position))
            return state, energy_fn(state.position)

        return edits.scan(step, state, length=50)

    state, energies = edits.wrap(relax)(init(positions))
    init_nve, apply_nve = simulate.nve(energy_fn, shift, 1e-3)
    moving = init_nve(jax.random.PRNGKey(1), state.position, kT=0.1)
    moving = jax.jit(lambda s: jax.lax.fori_loop(0, 20, lambda _, s: apply_nve(s), s))(moving)
    print("energy", energies[0], energies[-1])
    return state.position, energies, moving.position, moving.momentum

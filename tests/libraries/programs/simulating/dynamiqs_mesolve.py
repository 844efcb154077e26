"""dynamiqs: the README's lossy quantum oscillator, and the gradient of its photon number."""

import dynamiqs as dq
import jax
import jax.numpy as jnp

from program_edits import edits


def main():
    dq.set_progress_meter(False)
    n, alpha = 8, 1.0
    a = dq.destroy(n)
    ts = jnp.linspace(0, 1.0, 5)

    def population(omega, kappa, amplitude):
        hamiltonian = omega * dq.dag(a) @ a
        result = dq.mesolve(hamiltonian, [jnp.sqrt(kappa) * a], dq.coherent(n, amplitude), ts)
        number = dq.expect(dq.number(n), result.states[-1]).real
        edits.log(number=number)
        return number

    step = edits.wrap(jax.jit(jax.value_and_grad(population, argnums=(0, 1, 2))))
    number, gradients = step(1.0, 0.1, alpha)
    print("photons", number)
    return number, gradients

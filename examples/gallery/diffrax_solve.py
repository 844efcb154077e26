"""The steps of a diffrax solve.

diffrax chooses the step size inside a `while_loop`. A tap in the vector field sees each evaluation, without a change
in the library. Needs `pip install 'hostcallback[libraries]'`.
"""

import diffrax
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import hostcallback as hcb

seen = []


def van_der_pol(t, y, mu):
    hcb.id_tap(lambda at: seen.append((float(at["t"]), *at["y"])), {"t": t, "y": y})
    return jnp.array([y[1], mu * (1 - y[0] ** 2) * y[1] - y[0]])


@jax.jit
def solve(y0):
    return diffrax.diffeqsolve(
        diffrax.ODETerm(van_der_pol),
        diffrax.Tsit5(),
        t0=0.0, t1=20.0, dt0=0.01, y0=y0, args=5.0,
        stepsize_controller=diffrax.PIDController(rtol=1e-4, atol=1e-6),
    )  # fmt: skip


with hcb.outfeed_receiver():
    solution = solve(jnp.array([2.0, 0.0]))
times, position, _ = np.array(seen).T
print(
    f"{int(solution.stats['num_accepted_steps'])} steps accepted, {int(solution.stats['num_rejected_steps'])} rejected"
)
print(f"{len(seen)} evaluations of the vector field")

figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(7, 4.5), layout="constrained")
above.plot(times, position, ".", markersize=2)
above.set(ylabel="position")
below.hist(times, bins=100)
below.set(xlabel="time", ylabel="evaluations")
figure.savefig("steps.png", dpi=90)

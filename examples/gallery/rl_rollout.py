"""Rollouts of a reinforcement learner under vmap.

Sixteen pendulums are simulated as one `vmap` of a `scan`. One message per step carries all lanes, as an array with a
leading axis.
"""

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jax import lax

import hostcallback as hcb

LANES, STEPS = 16, 200
angles, rewards = [], []


def note(state):
    angles.append(state["angle"])  # shape [16]: one element per lane
    rewards.append(state["reward"])


def rollout(angle, gain):
    def step(state, _):
        angle, speed = state
        torque = jnp.clip(-gain * angle - speed, -12, 12)  # the policy
        speed = speed + 0.05 * (9.81 * jnp.sin(angle) + torque)
        angle = angle + 0.05 * speed
        hcb.id_tap(note, {"angle": angle, "reward": -(angle**2) - 0.001 * torque**2})
        return (angle, speed), None

    return lax.scan(step, (angle, 0.0), None, length=STEPS)[0]


gains = jnp.linspace(4, 20, LANES)
with hcb.outfeed_receiver() as receiver:
    jax.jit(jax.vmap(rollout, in_axes=(None, 0)))(0.6, gains)
total = np.sum(rewards, axis=0)
print(f"{sum(device.delivered for device in receiver.stats)} messages for {LANES * STEPS} steps of lanes")
print(f"the best gain is {gains[int(total.argmax())]:.1f}, with a return of {total.max():.2f}")

plt.figure(figsize=(7, 3.5), layout="constrained")
for lane, path in enumerate(np.stack(angles, axis=1)):
    plt.plot(path, color=plt.cm.viridis(lane / LANES), linewidth=1)
plt.xlabel("step"), plt.ylabel("angle (rad)"), plt.title("dark: low gain, bright: high gain")
plt.savefig("rollouts.png", dpi=90)

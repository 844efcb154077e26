"""Shards of four devices.

A tap of a sharded array gets the whole array once, without a collective. With `sharding="local"` it gets each shard as
the device sends it, and the shard's place in the array.
"""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"  # four devices, on any machine

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import hostcallback as hcb

mesh = jax.make_mesh((2, 2), ("x", "y"))
sharded = NamedSharding(mesh, PartitionSpec("x", "y"))
owner = np.full((64, 64), -1)


def whole(array):
    print(f"the whole array once: {array.shape}")


def shard(array, *, device, index):
    owner[index[0]] = device.id  # one entry for each array of the tapped value


@jax.jit
def wave(grid):
    grid = jnp.sin(grid * 0.2)
    hcb.id_tap(whole, grid)
    hcb.id_tap(shard, grid, sharding="local")
    return grid


with hcb.outfeed_receiver():
    field = wave(jax.device_put(jnp.add.outer(jnp.arange(64.0), jnp.arange(64.0)), sharded))
print("the devices of the corners:", owner[0, 0], owner[0, -1], owner[-1, 0], owner[-1, -1])

figure, (left, right) = plt.subplots(1, 2, figsize=(7, 3.5), layout="constrained")
left.imshow(field)
left.set_title("values")
right.imshow(owner, cmap="tab10", vmin=0, vmax=9)
right.set_title("the device of each shard")
figure.savefig("shards.png", dpi=90)

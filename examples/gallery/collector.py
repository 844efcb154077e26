"""Two processes and a collector.

Two processes forward their taps. The collector, a process without JAX, stores the messages of both in one log.
"""

import os
import socket
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt

import hostcallback as hcb

Path("worker.py").write_text("""
import os, sys
import jax.numpy as jnp
from jax import lax
import hostcallback as hcb

rate = float(sys.argv[2])

def step(x, i):
    hcb.tap(lambda value: None, {"step": i, "x": x}, name=f"worker{sys.argv[1]}")
    return x * rate, None

with hcb.outfeed_receiver(forward=os.environ["COLLECTOR"], spool=f"spool{sys.argv[1]}"):
    lax.scan(step, 1.0, jnp.arange(50))
""")
with socket.socket() as free:
    free.bind(("localhost", 0))
    address = f"localhost:{free.getsockname()[1]}"

collect = [
    sys.executable,
    "-m",
    "hostcallback.receiver.cli",
    "collect",
    "--listen",
    address,
    "--log",
    "collected",
]
environment = {**os.environ, "COLLECTOR": address, "HOSTCALLBACK_RUN": "gallery"}
with subprocess.Popen(collect, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as collector:
    try:
        workers = [
            subprocess.Popen([sys.executable, "worker.py", str(n), rate], env=environment)
            for n, rate in enumerate(("0.95", "0.9"))
        ]
        # The end of a worker's receiver waits until the collector has everything.
        assert [worker.wait(60) for worker in workers] == [0, 0]
    finally:
        collector.terminate()

log = hcb.read("collected/gallery")
plt.figure(figsize=(7, 3.5), layout="constrained")
for name in ("worker0", "worker1"):
    columns = log[name].to_numpy()
    print(f"{name}: {len(columns['x'])} messages, the last x is {columns['x'][-1]:.4f}")
    plt.plot(columns["step"], columns["x"], label=name)
plt.xlabel("step"), plt.ylabel("x"), plt.legend()
plt.savefig("collected.png", dpi=90)

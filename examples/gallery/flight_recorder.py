"""The flight recorder after a kill.

A child process kills itself with SIGKILL in the middle of a loop. With a flight recorder, the last messages of each
device are in a file, and `hcb recover` reads them.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

Path("victim.py").write_text("""
import os, signal
import jax
import jax.numpy as jnp
import hostcallback as hcb

@jax.jit
def step(i, x):
    hcb.print("step {} x {}", i, x)
    return x * 1.5

x = jnp.float32(1)
for i in range(20):
    x = step(i, x)
x.block_until_ready()
os.kill(os.getpid(), signal.SIGKILL)  # no time for anything
""")
environment = {**os.environ, "HOSTCALLBACK_FLIGHT_RECORDER": "flights"}
victim = subprocess.run(
    [sys.executable, "victim.py"], env=environment, capture_output=True, text=True, check=False
)
print("the process ended by", signal.Signals(-victim.returncode).name)

recover = [sys.executable, "-m", "hostcallback.receiver.cli", "recover", "flights"]
recovered = subprocess.run(recover, capture_output=True, text=True, check=True).stdout.splitlines()
print("the last lines that hcb recover shows, without their times:")
print(*(line.partition("  ")[2] for line in recovered[-5:]), sep="\n")

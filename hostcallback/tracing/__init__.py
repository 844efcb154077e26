"""The data of a tap at trace time: its call site, its leaves, its ids, and the objects that it retains.

JAX may cache a program until the process ends, so a tap must not retain more than it needs: `stack_frames` decides
which of the user's objects it keeps and which it references weakly. Ids are equal in all processes that trace the same
program (its `Fingerprint`).
"""

import jax  # noqa: F401 - first, because its import imports modules of this package

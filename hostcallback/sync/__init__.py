"""Waits for dispatched programs, of any thread.

No Python runs at a dispatch, so there is no list of running programs. `inflight` chooses between three ways to find
out that they have ended: sentinels in a thread's execution stream, fences that take all slots of a CPU
device (`fence`), and the live arrays. A separate thread dispatches them, because a dispatch that finds no slot
cannot be interrupted. docs/design/barrier.md has the reasons.
"""

import jax  # noqa: F401 - first, because its import imports modules of this package

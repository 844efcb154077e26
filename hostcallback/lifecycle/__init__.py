"""State of the process and its devices: receivers, bounds of waits, reentrant calls.

The receivers of a platform's devices start when the first program for it is lowered, and live until the process
exits. No Python runs when a tapped program is dispatched, so nothing here is called per dispatch.
docs/design/threads.md lists the threads.
"""

import jax  # noqa: F401 - first, because its import imports modules of this package

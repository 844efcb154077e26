"""The tap and call primitives, and JAX's transformations of them.

All taps share one primitive, whose rules do not know the purpose of a tap: prints, callbacks and checks differ in
their sinks only. Some rules of JAX for loops and checkpoints lose or repeat effects; `partial_evaluation` replaces
them. docs/design/primitives.md has the reasons, docs/transformations.md the resulting messages.
"""

import jax  # noqa: F401 - first, because its import imports modules of this package

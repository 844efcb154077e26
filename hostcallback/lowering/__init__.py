"""Lowering rules: the programs that taps and calls compile to.

Lowering registers the tap's consumer and builds the constant prefix of its frames, so that an emission only copies
the prefix and the arrays. A compiled program holds a lease on each of its consumers (as a keepalive of JAX). Why the
tap effect is discharged: docs/design/fast-dispatch.md; how taps of partitioned programs work:
docs/design/sharded-taps.md.
"""

import jax  # noqa: F401 - first, because its import imports modules of this package

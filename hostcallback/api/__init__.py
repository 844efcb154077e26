"""The public functions, one module per group: taps, prints, checks, receivers, barriers.

They check arguments, find the user's line, and bind primitives. `hostcallback.lowering` compiles the primitives, and
`hostcallback.receiver` handles the messages after they left the device. Importing any module of this package also
loads the lowering rules and the handler of process exit.
"""

import hostcallback.api.process_exit
import hostcallback.lowering.cells
import hostcallback.lowering.device_ops
import hostcallback.lowering.embedded
import hostcallback.lowering.emission
import hostcallback.primitives.batched_predicates
import hostcallback.primitives.effects
import hostcallback.primitives.experimental_rules
import hostcallback.receiver.runtime.interactive

# isort: split
# Last: the modules above import JAX first.
import hostcallback.api.outputs.notebook_cells  # noqa: F401

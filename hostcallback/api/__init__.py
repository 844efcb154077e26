"""The public functions: taps, prints, checks, receivers, barriers; a module each.

They check arguments, find the user's line, and bind primitives. What a program compiles to is in
`hostcallback.lowering`, and what happens to a message after it left the device is in
`hostcallback.receiver`. Any module of this package also loads the lowering rules and the handler of process exit.
"""

import hostcallback.api.shutdown
import hostcallback.lowering.call
import hostcallback.lowering.custom_partitioning
import hostcallback.lowering.discharge
import hostcallback.lowering.pallas
import hostcallback.lowering.tap
import hostcallback.primitives.experimental_rules  # noqa: F401

"""Every private or version-dependent JAX name this package uses, with the versions and the reason.

Checked on JAX 0.8.0, 0.10.2 and 0.12.0.1 by all tests, on 0.8.3 and 0.9.2 by tests of dispatch, loops and calls. No
other module of hostcallback imports `jax._src` or `jaxlib`, or asks for the version of JAX: `from hostcallback import
_jax_compat as compat` has all that they need. What differs between the versions is in `versions`.
"""

from hostcallback._jax_compat.callbacks import *  # noqa: F403 - each name stands in its module, once
from hostcallback._jax_compat.dispatch import *  # noqa: F403
from hostcallback._jax_compat.lowering import *  # noqa: F403
from hostcallback._jax_compat.partitioning import *  # noqa: F403
from hostcallback._jax_compat.source_info import *  # noqa: F403
from hostcallback._jax_compat.sync import *  # noqa: F403
from hostcallback._jax_compat.tracing import *  # noqa: F403
from hostcallback._jax_compat.types import *  # noqa: F403
from hostcallback._jax_compat.versions import *  # noqa: F403

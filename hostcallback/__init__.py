"""hostcallback: the tap runtime for JAX.

Device code inside `jit`, `scan`, `vmap`, `grad`, `shard_map` emits tagged messages; per-device receiver threads
decode them and call Python tap functions.

The import is small. A name is loaded when it is first used. JAX is not imported: what the package changes in JAX is
there as soon as JAX is.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from hostcallback._one_copy import refuse_second_copy
from hostcallback._with_jax import once_jax_is_imported
from hostcallback.receiver.public_names import PublicNames

__version__ = "0.4.0.dev0"

_NAMED_AS_BUILTINS = ("breakpoint", "csv", "print")
"""Public names that `from hostcallback import *` leaves out: Python and its library have them too."""


def _load_api() -> None:
    importlib.import_module("hostcallback.api")  # the rules of all primitives, the exit handler


def _before(module: str) -> None:
    if not module.startswith("hostcallback.receiver."):
        _load_api()


_names = PublicNames(
    __name__,
    unstarred=_NAMED_AS_BUILTINS,
    before=_before,
    renamed={"Head": "TruncatedArray", "otlp_exporter": "otlp"},
)

if not TYPE_CHECKING:  # else a name that does not exist would be one of type Any
    __getattr__ = _names.load


def __dir__() -> list[str]:
    return [*_names.listed(), "host_callback"]


def _change_jax() -> None:
    # Taps are dispatched fast under every jit, and programs with taps that were exported can be read.
    importlib.import_module("hostcallback.primitives.effects")
    from hostcallback.primitives import effects
    from hostcallback.receiver import environment

    effects.load_api = _load_api

    if environment.ACCELERATE.text():
        importlib.import_module("hostcallback.api.accelerate")
    if any(variable.text() for variable in (environment.CAPSULES, environment.OBSERVE, environment.WATCH)):
        importlib.import_module("hostcallback.api.whole_process").open_asked()


refuse_second_copy(__file__)
once_jax_is_imported(_change_jax, needs="hostcallback._jax_compat")

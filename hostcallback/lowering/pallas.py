"""Taps in Pallas kernels: interpreted kernels may have taps, and compiled kernels with taps are refused.

JAX 0.8 to 0.12 treats a kernel as a function without effects. In interpret mode a kernel becomes a loop over its grid
in the surrounding program. This module adds the kernel's tap effects to the equation, so that JAX passes their token
through that loop.
"""

from __future__ import annotations

import functools
from typing import Any

from hostcallback import _jax_compat as compat
from hostcallback.primitives import late_rules
from hostcallback.primitives.call import call_p
from hostcallback.primitives.effects import TapEffect
from hostcallback.primitives.tap import tap_p


def _let_taps_in(name: str, module: Any) -> None:
    """Adds the tap effects of kernels to the primitive that runs them, if this JAX version has the primitive."""
    primitive = getattr(module, name, None)
    if primitive is not None:
        compat.add_effects(primitive, _tap_effects)


def _tap_effects(params: dict[str, Any]) -> set[Any]:
    kernels = compat.kernel_jaxprs(params)
    effects = {effect for kernel in kernels for effect in kernel.effects if isinstance(effect, TapEffect)}
    if effects and not params.get("interpret"):
        raise NotImplementedError(_refusal(kernels))
    return effects


def _refusal(kernels: Any) -> str:
    equation = next(compat.equations_of(kernels, (tap_p, call_p)))
    spec = equation.params["tap" if equation.primitive is tap_p else "call"]
    what = "tap" if equation.primitive is tap_p else "call of"
    return (
        f"the {what} {spec.name} at {spec.source_line} is in a Pallas kernel that is compiled, and from inside of one "
        "nothing reaches the host: run the kernel with interpret=True, let it write the values to an output and tap "
        "that behind pallas_call, or use pl.debug_print"
    )


for module_name, primitive_name in compat.KERNEL_PRIMITIVES:
    late_rules.when_imported(module_name, functools.partial(_let_taps_in, primitive_name))

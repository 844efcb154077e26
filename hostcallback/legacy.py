"""The drop-in for `jax.experimental.host_callback`: its flags, and errors for the names of its internals."""

from __future__ import annotations

import fnmatch
import opcode
from types import FrameType
from typing import Any

from hostcallback import _jax_compat as compat
from hostcallback.receiver.log import logger

INLINE = compat.define_flag(
    "jax_host_callback_inline",
    False,
    "Taps of the drop-in module that are outside of jit and of every transformation run on the calling thread.",
    lambda value: None,
)


def _accept(name: str, default: bool | int, why: str) -> None:
    def say(value: Any) -> None:
        if value != default:
            logger.info("%s=%s has no effect: %s", name, value, why)

    compat.define_flag(name, default, f"Has no effect: {why}.", say)


_accept(
    "jax_host_callback_max_queue_byte_size",
    256_000_000,
    "HOSTCALLBACK_RING_BYTES and HOSTCALLBACK_BLOCK_BUDGET_BYTES bound what a device may have queued",
)
_accept("jax_host_callback_outfeed", False, "no transport uses XLA's outfeed")
_accept("jax_host_callback_legacy", False, "taps always do what that module's documentation says")


_TAP_PRIMITIVE = (
    "in a jaxpr a tap is an equation whose primitive is called 'tap', a call one of 'host_call'; their rules for "
    "transformations are registered already"
)
_NO_DEPENDENCE = (
    "taps are effects, which neither JAX nor XLA drops: use the result of id_tap, or nothing at all"
)
_RECEIVERS = (
    "receivers start by themselves; hostcallback.outfeed_receiver() scopes them, and barrier_wait() waits and reports "
    "what callbacks raised"
)
_XLA = (
    "taps are not operations of XLA's client library: annotate values with jax.Array, devices with jax.Device"
)

# The names of JAX 0.4.34 and of earlier versions that packages were written for. The first matching pattern applies.
_REPLACEMENTS = {
    "id_tap_dep_p": _NO_DEPENDENCE,
    "id_tap_dce_p": _NO_DEPENDENCE,
    "id_p": _NO_DEPENDENCE,
    "id_tap_p": _TAP_PRIMITIVE,
    "outside_call_p": _TAP_PRIMITIVE,
    "outfeed_receiver": _RECEIVERS,
    "_callback_handler_data": _RECEIVERS,
    "_CallbackHandlerData": _RECEIVERS,
    "_callback_input_received": _RECEIVERS,
    "_initialize_outfeed_receiver": _RECEIVERS,
    "_outfeed_receiver": _RECEIVERS,
    "_register_callback": "hand the function to id_tap or call, which register it where it is lowered",
    "_CallbackWrapper": "hand the function to id_tap or call, equal ones share a consumer",
    "_print_tap_*": "id_print(x, output_stream=...) prints, in one write per message",
    "_print_consumer": "id_print(x, output_stream=...) prints, in one write per message",
    "_deprecated_*": "the name without '_deprecated_' is not deprecated here",
    "_call": "call(callback_func, arg, result_shape=...)",
    "_inline_host_callback": "jax.config.update('jax_host_callback_inline', True)",
    "_use_outfeed": "no transport uses XLA's outfeed, on any platform",
    "_raise_if_using_outfeed_*": "no transport uses XLA's outfeed, on any platform",
    "_HOST_CALLBACK_*": "the flags are jax.config's: jax.config.update('jax_host_callback_inline', True)",
    "_outside_call_*": _TAP_PRIMITIVE,
    "_rewrite_*": "no program is rewritten, and JAX threads the token of ordered taps",
    "_with_sharding_proto": "where the compiler partitions a program a tap follows the sharding of its operands",
    "_add_transform": "a tap function gets its transformations as its second argument",
    "_aval_is_empty": "arrays without elements are sent like others: ask array.size == 0",
    "_instantiate_zeros": "jax.interpreters.ad.instantiate_zeros",
    "_values_to_avals": "jax.tree.map(jax.typeof, values)",
    "_deprecation_msg": "nothing here is deprecated",
    "_deprecations": "nothing here is deprecated",
    "xops": _XLA,
    "Xla*": _XLA,
    "DType": _XLA,
}


def missing_name_error(module: str, name: str, asker: FrameType | None) -> Exception:
    """Returns the error for a missing name of a module, with the replacement of an internal of the outfeed.

    Args:
        module: the module's name.
        name: the missing name.
        asker: the frame that looks the name up. For `from module import name`, Python would replace an AttributeError
            by an ImportError without its text, so an ImportError is returned.
    """
    text = f"module {module!r} has no attribute {name!r}"
    replacement = replacement_of(name)
    if replacement is None:
        return AttributeError(text, name=name)
    text += f", an internal of the outfeed of jax.experimental.host_callback. In its place: {replacement}"
    if asker is not None and asker.f_code.co_code[asker.f_lasti] == opcode.opmap["IMPORT_FROM"]:
        return ImportError(text, name=module)
    return AttributeError(text, name=name)


def replacement_of(name: str) -> str | None:
    """Returns the replacement of an internal; None for a name that was never one."""
    return next((text for pattern, text in _REPLACEMENTS.items() if fnmatch.fnmatchcase(name, pattern)), None)

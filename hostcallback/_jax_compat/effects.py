"""Effects of programs, and the runtime tokens that order the programs a thread dispatches with them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from types import FrameType
from typing import Any

import jax
from jax._src import (
    callback as _callback,  # _OrderedIOEffect
    dispatch as _dispatch,  # runtime_tokens: a thread's dispatched computations can be waited on by them
    effects as _effects,  # effect types can be registered nowhere else
)

Effect: Any = _effects.Effect


def register_effect(effect_type: type[Any], *, ordered: bool) -> None:
    """Allows an effect in every place where JAX checks effects; an ordered one also on several devices.

    Without it, control flow, checkpoints, custom derivatives and lowering refuse programs with the effect (0.8 to
    0.12).
    """
    allowed = [
        _effects.lowerable_effects,
        _effects.control_flow_allowed_effects,
        _effects.remat_allowed_effects,
        _effects.custom_derivatives_allowed_effects,
        _effects.partial_eval_kept_effects,
    ]
    if ordered:
        allowed += [_effects.ordered_effects, _effects.shardable_ordered_effects]
    for types in allowed:
        types.add_type(effect_type)


def has_effect(closed: Any, effect_type: type[Any]) -> bool:
    """Whether a closed jaxpr, or an equation, has an effect of that type."""
    return any(isinstance(effect, effect_type) for effect in closed.effects)


def has_input_effect(closed: Any) -> bool:
    """Whether a closed jaxpr reads or writes references that it takes as arguments."""
    return any(isinstance(effect, _effects.JaxprInputEffect) for effect in closed.effects)


def has_ordered_io_effect(closed: Any) -> bool:
    """Whether a closed jaxpr has an ordered `io_callback`: JAX refuses loops with one under vmap (0.8 to 0.12)."""
    return _callback._OrderedIOEffect in closed.effects


def add_effects(primitive: Any, effects_of: Callable[[dict[str, Any]], set[Any]]) -> None:
    """Gives the equations of one of JAX's primitives more effects: those that `effects_of` finds for its parameters.

    Without it, the primitives of kernels and of custom partitioning hide the effects of the programs they hold (0.8 to
    0.12): the program around them has no token for the taps in there.
    """
    evaluate = primitive.abstract_eval  # which returns effects as well, however it was registered

    @functools.wraps(evaluate)
    def evaluate_with_effects(*avals: Any, **params: Any) -> Any:
        avals_out, effects = evaluate(*avals, **params)
        more = effects_of(params)
        return avals_out, {*effects, *more} if more else effects

    primitive.def_effectful_abstract_eval(evaluate_with_effects)


def tokens_are_set(ctx: Any) -> bool:
    """Whether a lowering rule has set the tokens of its equation's ordered effects."""
    return ctx.tokens_out is not None


def pass_tokens(ctx: Any) -> None:
    """Hands an equation's tokens on as they are."""
    ctx.set_tokens_out(ctx.tokens_in)


def thread_tokens() -> dict[str, Any]:
    """The calling thread's runtime tokens: a dict that lives as long as the thread and stays current.

    `RuntimeTokenSet` is a `threading.local` (0.4 to 0.12); its `current_tokens` maps each ordered effect to
    the token of the last computation that the thread dispatched with it.
    """
    return _dispatch.runtime_tokens.__dict__


def asks_for_token(frame: FrameType | None) -> bool:
    """Whether a frame belongs to JAX's search for a token at the start of a dispatch.

    `RuntimeTokenSet.get_token_input` (0.8 to 0.12) calls the effect's hash. Other places do, too: without this test,
    an error for the next call could be raised while a program is traced or lowered.
    """
    for _ in range(4):
        if frame is None:
            return False
        if frame.f_code.co_name == "get_token_input":
            return True
        frame = frame.f_back
    return False


def ordered_tokens(tokens: dict[str, Any], effect: Any) -> list[jax.Array]:
    """The array to wait on for what a thread dispatched with the ordered `effect`: one or none."""
    buffer = getattr(dict(tokens.get("current_tokens", {})).get(effect), "_buf", None)
    return [] if buffer is None else [buffer]


def drop_token(tokens: dict[str, Any], effect: Any) -> None:
    """Makes a thread's next computation with `effect` begin with a new token.

    Without it, the token of a program that failed goes into the next program with the effect (0.8 to 0.12), which then
    fails with the same error.
    """
    tokens.get("current_tokens", {}).pop(effect, None)


def wait_for_runtime_tokens(tokens: dict[str, Any]) -> None:
    """Waits for the last program with any effect that a thread dispatched to each device; whether it failed or not."""
    for token in list(tokens.get("output_runtime_tokens", {}).values()):
        # The token of a failed program raises the program's error, which the user of its results gets.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            token.block_until_ready()


def drop_failed_runtime_tokens(tokens: dict[str, Any]) -> None:
    """Waits for the thread's programs, and forgets those that failed.

    Without it, `jax.effects_barrier` and the exit of the process raise what they failed with once more (0.8 to 0.12).
    """
    runtime_tokens = tokens.get("output_runtime_tokens", {})
    for device, token in list(runtime_tokens.items()):
        try:
            token.block_until_ready()
        except jax.errors.JaxRuntimeError:
            del runtime_tokens[device]

"""A scan in blocks whose results are tested; the first block that fails runs again, instrumented, in the program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from hostcallback import _jax_compat as compat
from hostcallback.api.nonfinite.instrument import instrumented
from hostcallback.api.nonfinite.operation import Operation
from hostcallback.api.nonfinite.result_tests import any_not_finite
from hostcallback.api.nonfinite.silence import NotRepeatableError
from hostcallback.api.nonfinite.watcher import Watcher, report
from hostcallback.tracing.source_line import user_source_line

BLOCK = 64
"""Iterations of a block. The carry is kept and tested once per block, and a block that fails runs again."""

_NOT_REPRODUCED = "not reproduced: the same iterations, run again with checks, made finite results"


def watched_scan(
    f: Callable[..., Any], init: Any, xs: Any, length: int, options: dict[str, Any]
) -> tuple[Any, Any]:
    """`jax.lax.scan(f, init, xs, length, **options)`, which reports the first operation whose result is not finite.

    Raises:
        ValueError: `f` calls a host function whose results it uses: a second run would repeat the call.
    """
    if not length:
        empty: tuple[Any, Any] = lax.scan(f, init, xs, length, **options)
        return empty
    blocks = _Blocks(f, options)
    indices = jnp.arange(length, dtype=jnp.int32)
    whole = length // BLOCK * BLOCK
    # In a reversed scan the last block has the first elements.
    rest = slice(0, length - whole) if blocks.reverse else slice(whole, length)
    body = slice(length - whole, length) if blocks.reverse else slice(0, whole)
    state, parts = (init, jnp.bool_(False)), []
    if whole:
        rows = jax.tree.map(lambda x: x[body].reshape((-1, BLOCK, *x.shape[1:])), (indices, xs))
        state, ys = lax.scan(blocks.run, state, rows, reverse=blocks.reverse)
        parts.append(jax.tree.map(lambda y: y.reshape((-1, *y.shape[2:])), ys))
    if whole < length:
        state, ys = blocks.run(state, jax.tree.map(lambda x: x[rest], (indices, xs)))
        parts.append(ys)
    if len(parts) == 1:
        return state[0], parts[0]
    ordered = parts[::-1] if blocks.reverse else parts
    return state[0], jax.tree.map(lambda *ys: jnp.concatenate(ys), *ordered)


class _Blocks:
    def __init__(self, f: Callable[..., Any], options: dict[str, Any]) -> None:
        self._f = f
        self._options = options
        self._line = user_source_line()
        self.reverse = bool(options.get("reverse"))

    def run(self, state: Any, block: Any) -> Any:
        carry, found = state
        indices, xs = block
        new, ys = self._scan(carry, xs, len(indices))
        failed = everywhere(any_not_finite((new, ys)))
        is_first = jnp.logical_and(failed, jnp.logical_not(found))
        operands = lax.stop_gradient((is_first, carry, xs, indices))
        lax.cond(is_first, self._run_again, lambda *_: None, *operands)
        return (new, jnp.logical_or(found, failed)), ys

    def _scan(self, carry: Any, xs: Any, length: int) -> Any:
        return lax.scan(self._f, carry, xs, length, **self._options)

    def _run_again(self, is_first: Any, carry: Any, xs: Any, indices: Any) -> None:
        def block(carry: Any, xs: Any) -> Any:
            return self._scan(carry, xs, len(indices))

        # Where vmap batches the predicate, this runs for each block.
        watcher = Watcher(lambda operation: True, "", is_first)
        try:
            results = instrumented(
                block, (carry, xs), {}, watcher, inputs=True, iterations=[indices[0]], line=self._line
            )
        except NotRepeatableError as error:
            raise ValueError(
                f"hcb.scan(watch=True) runs iterations again, which would repeat {error}: watch without the callback, "
                f"or watch each operation with hcb.watch_nonfinite, at {self._line}"
            ) from None
        gone = jnp.logical_and(is_first, jnp.logical_not(everywhere(any_not_finite(results))))
        operation = Operation("a result of the scan", self._line, "", (), np.dtype(np.float32), False, "")
        counts = (jnp.int32(0), jnp.int32(0))
        report([operation], [gone], [counts], [indices[0]], cotangent=False, note=_NOT_REPRODUCED)


def everywhere(flag: Any) -> Any:
    """Whether the flag is true on any device of a `shard_map`, whose devices must run the same branch."""
    axes = tuple(compat.varying_axes([jax.typeof(flag)]))
    return lax.pmax(flag.astype(jnp.int32), axes) > 0 if axes else flag

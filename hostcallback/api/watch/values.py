"""Values of a walked program: the common operations by NumPy, whether values are finite, and texts about them.

To compile each operation by itself takes longer than to compile a whole program. Values that NumPy makes differ from
compiled ones in the last bits, as those of operations run one by one do anyway. Like XLA's, numbers that are too small
for their type's usual form become zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy import special  # type: ignore[import-untyped]

from hostcallback._jax_compat.types import Aval, JaxprEqn, aval_of


def numpy_of(value: Any) -> np.ndarray[Any, Any]:
    """Returns a value as a NumPy array; keys and references become an empty array."""
    return np.asarray(value) if is_plain(value) else np.zeros((), np.int32)


def is_plain(value: Any) -> bool:
    if isinstance(value, jax.Array):
        return not jnp.issubdtype(value.dtype, jax.dtypes.extended)
    if isinstance(value, np.ndarray | np.generic | float | complex | int):
        return True
    # A constant of a program is an array of numpy with a type of JAX's, which is no subclass in JAX 0.8.
    return hasattr(value, "__array__") and not isinstance(value, jax.Ref)


def bad_of(value: Any) -> Any:
    """A mask of the elements that are not finite; None if all are finite."""
    if not is_plain(value):
        return None
    array = np.asarray(value)
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        return None
    if array.dtype.name == "bfloat16":  # NumPy takes such numbers one by one
        exponent = np.uint16(0x7F80)
        bad = (array.view(np.uint16) & exponent) == exponent
    else:
        bad = ~np.isfinite(array)
    return bad if bad.any() else None


def first_of(bad: np.ndarray[Any, Any]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(int(np.argmax(bad)), np.shape(bad)))


def operands_at(
    operands: Iterable[np.ndarray[Any, Any]], shape: tuple[int, ...], element: tuple[int, ...]
) -> dict[str, str]:
    texts = {}
    for number, operand in enumerate(operands):
        if operand.shape == shape:
            texts[f"operand {number}"] = _text(operand[element])
        elif operand.size == 1:
            texts[f"operand {number}"] = _text(operand.reshape(())[()])
        elif operand.size and operand.dtype.kind not in "OSUV":
            plain = operand.astype(np.complex128 if np.iscomplexobj(operand) else np.float64)
            low, high = (
                (abs(plain).min(), abs(plain).max()) if np.iscomplexobj(plain) else (plain.min(), plain.max())
            )
            dims = ",".join(map(str, operand.shape))
            texts[f"operand {number}"] = f"{operand.dtype}[{dims}] from {low:.6g} to {high:.6g}"
    return texts


def _text(value: Any) -> str:
    number = value.item() if hasattr(value, "item") else value
    if isinstance(number, float):
        return f"{number:.6g}" if math.isfinite(number) else str(number)
    return str(value)


Array = np.ndarray[Any, Any]

_OF_FLOATS: dict[str, Callable[..., Any]] = {
    "abs": np.abs, "acos": np.arccos, "asin": np.arcsin, "atan": np.arctan, "atan2": np.arctan2, "ceil": np.ceil,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high), "cos": np.cos, "div": np.divide,
    "erf": special.erf, "exp": np.exp, "exp2": np.exp2, "expm1": np.expm1, "floor": np.floor, "is_finite": np.isfinite,
    "log": np.log, "log1p": np.log1p, "logistic": lambda x: 1 / (1 + np.exp(-x)), "neg": np.negative, "pow": np.power,
    "rem": np.fmod, "rsqrt": lambda x: 1 / np.sqrt(x), "sign": np.sign, "sin": np.sin, "sqrt": np.sqrt,
    "square": np.square, "tan": np.tan, "tanh": np.tanh,
}  # fmt: skip
_OF_ANY_NUMBERS: dict[str, Callable[..., Any]] = {
    "add": np.add, "add_any": np.add, "max": np.maximum, "min": np.minimum, "mul": np.multiply, "sub": np.subtract,
    "eq": np.equal, "ge": np.greater_equal, "gt": np.greater, "le": np.less_equal, "lt": np.less,
    "ne": np.not_equal, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert,
    **dict.fromkeys(("copy", "copy_p", "name", "pvary"), lambda x: x),
}  # fmt: skip
_REDUCED: dict[str, Callable[..., Any]] = {
    "reduce_and": np.all, "reduce_max": np.max, "reduce_min": np.min, "reduce_or": np.any, "reduce_prod": np.prod,
    "reduce_sum": np.sum,
}  # fmt: skip
_MOVED: dict[str, Callable[[Array, dict[str, Any]], Any]] = {
    "broadcast_in_dim": lambda x, p: _broadcast(x, p["shape"], p["broadcast_dimensions"]),
    "expand_dims": lambda x, p: np.expand_dims(x, tuple(p["dimensions"])),
    "reshape": lambda x, p: x.reshape(p["new_sizes"]),
    "rev": lambda x, p: np.flip(x, tuple(p["dimensions"])),
    "slice": lambda x, p: x[
        tuple(map(slice, p["start_indices"], p["limit_indices"], p["strides"] or [1] * x.ndim))
    ],
    "squeeze": lambda x, p: np.squeeze(x, tuple(p["dimensions"])),
    "transpose": lambda x, p: np.transpose(x, p["permutation"]),
}
_COMMON = {
    "bool", "bfloat16", "float16", "float32", "float64", "int32", "int64", "uint32", "int8", "uint8",
}  # fmt: skip


def evaluated(equation: JaxprEqn, values: Sequence[Any]) -> Array | None:
    """Returns the only result of an equation with these operands; None if there is no rule for it."""
    if not all(_is_common(atom.aval) for atom in (*equation.invars, *equation.outvars)):
        return None
    name, params = equation.primitive.name, equation.params
    if len(equation.outvars) != 1 or (name != "iota" and not values):
        return None
    operands = [np.asarray(x, aval_of(v).dtype) for x, v in zip(values, equation.invars, strict=True)]
    dtype = np.dtype(aval_of(equation.outvars[0]).dtype)
    with np.errstate(all="ignore"):
        out = _evaluated(name, params, operands, dtype)
    if out is None:
        return None
    out = np.asarray(out, dtype)
    return out if name in _MOVED else _without_denormals(out)


def _evaluated(name: str, params: dict[str, Any], operands: list[Array], dtype: np.dtype[Any]) -> Any:
    if name == "iota":
        return _iota(params) if not operands else None
    first, is_float = operands[0], all(jnp.issubdtype(x.dtype, jnp.floating) for x in operands)
    if name in _OF_ANY_NUMBERS:
        return _OF_ANY_NUMBERS[name](*operands)
    if name in _MOVED:
        return _MOVED[name](first, params) if len(operands) == 1 else None
    if name == "convert_element_type":
        return None if is_float and not jnp.issubdtype(dtype, jnp.floating) else first.astype(dtype)
    if name == "select_n":
        is_choice_of_two = first.dtype == np.bool_ and len(operands) == 3
        return np.where(first, operands[2], operands[1]) if is_choice_of_two else None
    if name == "concatenate":
        return np.concatenate(operands, params["dimension"])
    if name in ("reduce_and", "reduce_or") and first.dtype != np.bool_:
        return None
    if name in _REDUCED:
        wide = first.astype(np.float32) if first.dtype.itemsize == 2 and is_float else first
        axes = tuple(params["axes"])
        return _REDUCED[name](wide, axis=axes) if all(wide.shape[axis] for axis in axes) else None
    if not is_float:
        return None
    if name in _OF_FLOATS:
        return _OF_FLOATS[name](*operands)
    if name == "integer_pow":
        return first ** params["y"]
    return _dot_general(first, operands[1], params) if name == "dot_general" else None


def _is_common(aval: Aval) -> bool:
    return getattr(getattr(aval, "dtype", None), "name", "") in _COMMON


def _iota(params: dict[str, Any]) -> Array:
    shape, dimension = params["shape"], params["dimension"]
    numbers = np.arange(shape[dimension]).astype(params["dtype"])
    return _broadcast(numbers, shape, (dimension,))


def _broadcast(x: Array, shape: Sequence[int], dimensions: Sequence[int]) -> Array:
    kept = [1] * len(shape)
    for number, dimension in enumerate(dimensions):
        kept[dimension] = x.shape[number]
    return np.broadcast_to(x.reshape(kept), tuple(shape))


def _dot_general(x: Array, y: Array, params: dict[str, Any]) -> Array:
    (x_contracted, y_contracted), (x_batch, y_batch) = params["dimension_numbers"]
    if x.dtype.itemsize == 2 or y.dtype.itemsize == 2:
        x, y = x.astype(np.float32), y.astype(np.float32)
    x_free = [i for i in range(x.ndim) if i not in (*x_contracted, *x_batch)]
    y_free = [i for i in range(y.ndim) if i not in (*y_contracted, *y_batch)]
    batch = [x.shape[i] for i in x_batch]
    inner = math.prod(x.shape[i] for i in x_contracted)
    left = np.transpose(x, [*x_batch, *x_free, *x_contracted]).reshape(*batch, -1, inner) if x.size else None
    right = np.transpose(y, [*y_batch, *y_contracted, *y_free]).reshape(*batch, inner, -1) if y.size else None
    shape = [*batch, *(x.shape[i] for i in x_free), *(y.shape[i] for i in y_free)]
    if left is None or right is None:
        return np.zeros(shape, x.dtype)
    product: Array = np.matmul(left, right).reshape(shape)
    return product


def _without_denormals(x: Array) -> Array:
    if x.dtype not in (np.float32, np.float64):
        return x
    size = np.abs(x)
    small = size < np.finfo(x.dtype).tiny
    return np.where(small, x.dtype.type(0), x) if small.any() else x

"""One layer of arrays that hold all layers, inside a loop over layers."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.typing import DTypeLike

_BITS = {1: jnp.uint8, 2: jnp.uint16}


def is_narrow(dtype: DTypeLike) -> bool:
    """Whether XLA on a CPU widens such an array as a whole before it cuts a layer."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize in _BITS


def layer_at(stack: Any, i: jax.Array) -> Any:
    """Layer `i` of a pytree of stacked arrays.

    A narrow float is cut out of bytes, behind a barrier that keeps the bytes in the
    loop as well: XLA on a CPU would widen all layers before the loop, to temporaries
    of 2.3 times the stack (tests/test_transformer_tkg_memory.py). Each has its own:
    behind a common one all would vary over every mesh axis that any of them does.
    """

    def row(x):
        x, own = lax.optimization_barrier((x, i)) if is_narrow(x.dtype) else (x, i)
        return _row(x, own)

    return jax.tree.map(row, stack)


def _row(x: jax.Array, i: jax.Array) -> jax.Array:
    if not is_narrow(x.dtype):
        return lax.dynamic_index_in_dim(x, i, keepdims=False)
    return _narrow_row_p.bind(x, i, axis=0)


# Bits have no derivative, and a rule of `jax.custom_jvp` is forgotten by a scan that is
# differentiated in reverse: second derivatives would silently be 0. Those of a
# primitive are not.
_narrow_row_p = Primitive("narrow_row")


@functools.partial(jax.jit, static_argnames="axis")
def _cut(x: jax.Array, i: jax.Array, *, axis: int) -> jax.Array:
    raw = lax.bitcast_convert_type(x, _BITS[x.dtype.itemsize])
    row = lax.dynamic_index_in_dim(raw, i, axis, keepdims=False)
    return lax.bitcast_convert_type(row, x.dtype)


def _jvp(primals, tangents, *, axis):
    (x, i), (dx, _) = primals, tangents
    out = _narrow_row_p.bind(x, i, axis=axis)
    if isinstance(dx, ad.Zero):
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())
    return out, lax.dynamic_index_in_dim(dx, i, axis, keepdims=False)


def _batch(operands, dims, *, axis):
    (x, i), (of_x, of_i) = operands, dims
    if of_i is not None:
        cut = functools.partial(lax.dynamic_index_in_dim, axis=axis, keepdims=False)
        return jax.vmap(cut, dims)(x, i), 0
    axis += of_x <= axis
    return _narrow_row_p.bind(x, i, axis=axis), of_x - (of_x > axis)


_narrow_row_p.def_impl(_cut)
_narrow_row_p.def_abstract_eval(
    lambda x, i, *, axis: _cut.trace(x, i, axis=axis).out_avals
)
ad.primitive_jvps[_narrow_row_p] = _jvp
batching.primitive_batchers[_narrow_row_p] = _batch
mlir.register_lowering(_narrow_row_p, mlir.lower_fun(_cut, multiple_results=False))

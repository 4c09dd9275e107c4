"""Summing, token by token, rows that experts on other devices returned.

    out[t] = sum over r with index[r] == t of rows[r]

The transpose reads instead of summing: `d rows[r] = d out[index[r]]`. A row whose index
names no token is never read, whatever it holds.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType
from jaxtyping import Array, Float, Int

from neuronjax.kernels.dtypes import accumulator
from neuronjax.kernels.shard_common import uniform

# 16-bit columns behind a packed row: an int32 index, its low half first.
INDEX_COLUMNS = 2


def packed_index(packed: Float[Array, "rows width"]) -> Int[Array, " rows"]:
    """The token index of each packed row.

    The bits are integers before they are cut out: small indices are subnormal numbers
    as floats, which XLA takes for zero, and some are NaN, which it moves as another.
    """
    words = lax.bitcast_convert_type(packed, jnp.uint16).astype(jnp.uint32)
    low, high = words[:, -INDEX_COLUMNS], words[:, -INDEX_COLUMNS + 1]
    return lax.bitcast_convert_type(low | high << jnp.uint32(16), jnp.int32)


def topk_reduce_fwd(
    rows: Float[Array, "rows d_model"],
    index: Int[Array, " rows"],
    *,
    name: str,
    tokens: int,
    static: bool = False,
    **hints: Any,
) -> tuple[Float[Array, "tokens d_model"]]:
    """Returns `(out,)`, summed in float32, or float64 for float64, and rounded once.

    Rows are added in their order. One pass adds the n-th row of every token: there are
    as many passes as a token has rows at most. `static` scatters instead.
    """
    acc, place = accumulator(rows.dtype), _places(index, tokens)
    total = jnp.zeros((tokens, rows.shape[1]), acc, device=_sharding(rows))
    total = uniform(total, rows, index)[0]
    if static:
        out = total.at[place].add(
            rows.astype(acc), mode="drop", out_sharding=_sharding(rows)
        )
        return (out.astype(rows.dtype),)
    if rows.shape[0] == 0:
        return (total.astype(rows.dtype),)
    order, first, count = _matches(place, tokens)

    def add(n: Any, total: jax.Array) -> jax.Array:
        row = order.at[first + n].get(mode="fill", fill_value=0)
        picked = _picked(rows, row).astype(acc)
        return total + jnp.where((n < count)[:, None], picked, 0)

    most = jnp.max(count, initial=0)
    return (lax.fori_loop(jnp.int32(0), most, add, total).astype(rows.dtype),)


def topk_reduce_bwd(
    d_out: Float[Array, "tokens d_model"],
    index: Int[Array, " rows"],
    *,
    name: str,
    **settings: Any,
) -> tuple[Float[Array, "rows d_model"]]:
    """Returns `(d_rows,)`: zero for a row that names no token."""
    place = _places(index, d_out.shape[0])
    return (_picked(d_out, place),)


def _places(index: jax.Array, tokens: int) -> jax.Array:
    """The token of each row, `tokens` where there is none."""
    return jnp.where((index >= 0) & (index < tokens), index, jnp.int32(tokens))


def _matches(place: jax.Array, tokens: int) -> tuple[jax.Array, ...]:
    """Rows in the order of their tokens; where each token's begin, and how many."""
    number = lax.iota(jnp.int32, place.shape[0])
    number = uniform(number, place)[0]
    _, order = lax.sort((place, number), num_keys=1, is_stable=True)
    count = uniform(jnp.zeros(tokens + 1, jnp.int32), place)[0]
    # Counted: a binary search would need to know how many rows there are.
    count = count.at[place].add(1)[:tokens]
    return order, lax.cumsum(count) - count, count


def _picked(x: jax.Array, row: jax.Array) -> jax.Array:
    """`x[row]`; zeros where there is no such row."""
    return x.at[row].get(mode="fill", fill_value=0, out_sharding=_sharding(x))


def _sharding(x: jax.Array):
    """On an explicit mesh, that of `x`: results lie as its columns do."""
    sharding = jax.typeof(x).sharding
    return sharding if AxisType.Explicit in sharding.mesh.axis_types else None


def topk_reduce_plain(rows, index, *, name: str, tokens: int, **hints: Any):
    """The sum over rows as the equation has it: each row asked which token it is."""
    acc = accumulator(rows.dtype)
    token = jnp.arange(tokens, dtype=index.dtype)[:, None]
    hit = (index == token)[..., None]
    return (jnp.sum(jnp.where(hit, rows.astype(acc), 0), axis=1).astype(rows.dtype),)


def topk_reduce_plain_bwd(d_out, index, *, name: str, **settings: Any):
    """The transpose of the sum over rows."""
    token = jnp.arange(d_out.shape[0], dtype=index.dtype)[:, None]
    hit = (index == token)[..., None]
    acc = accumulator(d_out.dtype)
    terms = jnp.where(hit, d_out.astype(acc)[:, None], 0)
    return (jnp.sum(terms, axis=0).astype(d_out.dtype),)

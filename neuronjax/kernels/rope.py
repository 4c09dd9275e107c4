"""Rotary position embedding: a 2 x 2 map of channel pairs, forwards and backwards.

Su et al. 2021, RoFormer, equation 34, https://arxiv.org/abs/2104.09864. The tables are
data: they need not satisfy `cos**2 + sin**2 = 1`, and the backward is the transposed
map, not the inverse rotation.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from neuronjax.kernels.dtypes import accumulator
from neuronjax.kernels.shard_common import contract


def split_pairs(x: jax.Array, axis: int, interleaved: bool) -> tuple[Any, Any]:
    """The first and the second channel of each rotated pair, each half as wide."""
    if interleaved:
        half = x.shape[axis] // 2
        paired = x.reshape(*x.shape[:axis], half, 2, *x.shape[axis + 1 :])
        first, second = jnp.split(paired, 2, axis + 1)
        return first.squeeze(axis + 1), second.squeeze(axis + 1)
    first, second = jnp.split(x, 2, axis)
    return first, second


def join_pairs(
    first: jax.Array, second: jax.Array, axis: int, interleaved: bool
) -> jax.Array:
    """Writes pairs back to the rows that `split_pairs` took them from."""
    if interleaved:
        paired = jnp.stack([first, second], axis + 1)
        both = 2 * first.shape[axis]
        return paired.reshape(*first.shape[:axis], both, *first.shape[axis + 1 :])
    return jnp.concatenate([first, second], axis)


def _tables(table: jax.Array, full: bool, acc: Any, heads: int) -> tuple[Any, Any]:
    """The table's columns for the first and the second channel, with a head axis."""
    wide = jnp.expand_dims(table.astype(acc), heads)
    if full:
        first, second = jnp.split(wide, 2, -1)
        return first, second
    return wide, wide


def _layout(full: bool) -> tuple[int, int]:
    """Which axis of `x` holds the channels and which the heads."""
    return (3, 1) if full else (0, 2)


def rope_fwd(
    x: Float[Array, "..."],
    cos: Float[Array, "..."],
    sin: Float[Array, "..."],
    *,
    name: str,
    full: bool,
    interleaved: bool,
    **hints: Any,
) -> tuple[Float[Array, "..."]]:
    """Returns `(y,)`: `first*cos - second*sin` and `second*cos + first*sin`.

    `full=False`: `x` is `[head_dim, batch, heads, seq]`, tables `[head_dim/2, batch,
    seq]`. `full=True`: `x` is `[batch, heads, seq, head_dim]`, tables `[batch, seq,
    head_dim]`, all columns of which count. `hints` place buffers and change no value.
    """
    axis, heads = _layout(full)
    acc = accumulator(x.dtype)
    first, second = split_pairs(x.astype(acc), axis, interleaved)
    (cos1, cos2), (sin1, sin2) = (_tables(t, full, acc, heads) for t in (cos, sin))
    turned = first * cos1 - second * sin1, second * cos2 + first * sin2
    return (join_pairs(*turned, axis, interleaved).astype(x.dtype),)


def rope_bwd(
    x: Float[Array, "..."],
    cos: Float[Array, "..."],
    sin: Float[Array, "..."],
    dy: Float[Array, "..."],
    *,
    name: str,
    full: bool,
    interleaved: bool,
    **hints: Any,
) -> tuple[Float[Array, "..."], Float[Array, "..."], Float[Array, "..."]]:
    """Returns `(dx, dcos, dsin)`: the transposed map; tables sum over heads."""
    axis, heads = _layout(full)
    acc = accumulator(x.dtype)
    first, second = split_pairs(x.astype(acc), axis, interleaved)
    d_first, d_second = split_pairs(dy.astype(acc), axis, interleaved)
    (cos1, cos2), (sin1, sin2) = (_tables(t, full, acc, heads) for t in (cos, sin))
    turned = d_first * cos1 + d_second * sin2, d_second * cos2 - d_first * sin1
    dx = join_pairs(*turned, axis, interleaved)
    dcos = _table_gradient(first * d_first, second * d_second, full, heads)
    dsin = _table_gradient(-second * d_first, first * d_second, full, heads)
    return dx.astype(x.dtype), dcos.astype(cos.dtype), dsin.astype(sin.dtype)


def _table_gradient(first, second, full: bool, heads: int):
    first, second = first.sum(heads), second.sum(heads)
    return jnp.concatenate([first, second], -1) if full else first + second


def rope_plain(
    x: Float[Array, "..."],
    cos: Float[Array, "..."],
    sin: Float[Array, "..."],
    *,
    name: str,
    full: bool,
    interleaved: bool,
    **hints: Any,
) -> tuple[Float[Array, "..."]]:
    """The same as `rope_fwd`, a matrix per pairing: `y = x * cos + (R x) * sin`."""
    axis, heads = _layout(full)
    acc = accumulator(x.dtype)
    half = x.shape[axis] // 2
    eye, quarter_turn = jnp.eye(half, dtype=acc), jnp.array([[0, -1], [1, 0]], acc)
    turn = jnp.kron(eye, quarter_turn) if interleaved else jnp.kron(quarter_turn, eye)
    if not full:
        pair = jnp.arange(2 * half) // 2 if interleaved else jnp.arange(2 * half) % half
        cos, sin = cos[pair], sin[pair]
    cos, sin = (jnp.expand_dims(t.astype(acc), heads) for t in (cos, sin))
    spec = "ij,bnsj->bnsi" if full else "ij,jbns->ibns"
    turned = contract(spec, turn, x.astype(acc), like=x.astype(acc))
    return ((x.astype(acc) * cos + turned * sin).astype(x.dtype),)

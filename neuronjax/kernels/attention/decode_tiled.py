"""Decode attention on tiles: contractions run over partitions and chunks directly.

Queries and keys lie on the head dimension, values on their slots; the output lies on
the value dimension, the statistics on the new tokens.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from neuronjax.kernels.attention.blocks import unseen
from neuronjax.kernels.attention.decode import row_max
from neuronjax.kernels.dtypes import accumulator

Tile = Float[Array, "_ _ batch _ _"]

PARTITIONS = 128


def attention_decode_tiled_fwd(
    q: Tile,
    k_active: Tile | None,
    v_active: Tile | None,
    k_prior: Tile,
    v_prior: Tile,
    lengths: Int[Array, "_ _"],
    *,
    name: str,
    **_hints: Any,
) -> tuple[Tile, Tile, Tile]:
    """Returns the tiles `out`, negative row max and 1 / row sum.

    `q` is `[p, c, batch, num_heads, seq]`, keys `[p, c, batch, num_kv_heads, slots]`,
    values `[p, c, batch, num_kv_heads, value_dim]` with their slots on `(p, c)`. `out`
    is `[p, c, batch, num_heads, seq]` with the value dimension on `(p, c)`. What is
    seen, and rows that see nothing, are as in `attention_decode_fwd`.
    """
    acc, seq = accumulator(q.dtype), q.shape[-1]
    rows = q.reshape(*q.shape[:3], k_prior.shape[3], -1, seq)
    slot = jnp.arange(k_prior.shape[4], dtype=lengths.dtype)
    causal = jnp.arange(seq)[:, None] >= jnp.arange(seq)
    filled = lax.collapse(lengths, 0, 2)[:, None, None, None, None]
    parts: list[tuple[Any, Any, Any]] = [(k_prior, v_prior, slot < filled)]
    if k_active is not None:
        parts.append((k_active, v_active, causal[None, None, None]))
    scores = [_scores(rows, key, seen, acc) for key, _, seen in parts]
    top, held = row_max(scores)
    weights = [jnp.exp(z - held) for z in scores]
    total = sum(p.sum(-1, keepdims=True) for p in weights)
    any_seen = total != 0  # NaN is seen
    total = jnp.where(any_seen, total, 1)
    pairs = zip(weights, parts, strict=True)
    out = sum(_weigh(p, value, seen, acc) for p, (_, value, seen) in pairs) / total
    out = jnp.where(any_seen, out, 0).astype(q.dtype)
    neg_max = jnp.where(any_seen, -top, jnp.inf)
    recip = jnp.where(any_seen, jnp.exp(top - held) / total, 1)
    out = jnp.moveaxis(lax.collapse(out, 1, 3), 3, 0)
    neg_max, recip = (
        jnp.moveaxis(lax.collapse(x, 1, 3), 2, 0) for x in (neg_max, recip)
    )
    return _split_first(out), _split_first(neg_max), _split_first(recip)


def _scores(rows, key, seen, acc):
    # Only a key's own slot is spoilt by what is not finite in it.
    z = jnp.einsum("pcbngt,pcbns->bngts", rows, key, preferred_element_type=acc)
    return jnp.where(seen, z, unseen(acc))


def _weigh(p, value, seen, acc):
    """Weights times values, whose slots lie on (partition, chunk)."""
    finite = jnp.isfinite(value)
    spoilt = jnp.where(finite.all(-1), 0, jnp.nan).astype(acc)
    tidy = jnp.where(finite, value, 0)
    split = p.astype(value.dtype).reshape(*p.shape[:4], *value.shape[:2])
    out = jnp.einsum("bngtpc,pcbnv->bngtv", split, tidy, preferred_element_type=acc)
    marks = jnp.moveaxis(spoilt, (2, 3), (0, 1))
    marks = lax.collapse(marks, 2, 4)[:, :, None, None]
    return out + jnp.where(seen, marks, 0).sum(-1, keepdims=True)


def _split_first(x: jax.Array) -> jax.Array:
    partitions = min(x.shape[0], PARTITIONS)
    return x.reshape(partitions, -1, *x.shape[1:])

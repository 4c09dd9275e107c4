"""One layer of a decode step: attention block, residual, feed-forward, residual."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from neuronjax.kernels.dtypes import accumulator
from neuronjax.primitives.attention_block_tkg.macro import attention_block_tkg_kernel
from neuronjax.primitives.transformer_tkg.caches import after, written
from neuronjax.primitives.transformer_tkg.residual import Links, added, own_half


class Tokens(NamedTuple):
    """What every layer knows about the new tokens.

    Attributes:
        cos: `[head_dim/2, batch, seq]`.
        sin: `[head_dim/2, batch, seq]`.
        mask: `[slots, batch, num_heads, seq]`, boolean; the last `seq` slots are the
            new tokens. One head stands for all.
        position: `[batch, 1]`, the slot of the first new token; `None` writes nothing.
    """

    cos: Any
    sin: Any
    mask: Any
    position: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeLayer:
    """The weights of one layer on one core of one rank.

    `G` key/value heads a rank, `n` query heads for each.

    Attributes:
        gamma: `[1, d_model]`, the gain of the norm in front of attention.
        w_qkv: `[d_model, G*(n + 2)*head_dim]`: for one key/value head after another its
            query heads, the key head and the value head.
        w_out: `[G*n*head_dim, d_model]`, rows in the order of the query heads; with two
            cores the core's own half of the columns.
        feed_forward: takes the residual `[batch, seq, d_model]`, gives the rank's part
            of `[batch*seq, d_model]`: `DenseFeedForward` or `ExpertsFeedForward`.
        eps: added to the mean square of the norm in front of attention.
    """

    gamma: jax.Array
    w_qkv: jax.Array
    w_out: jax.Array
    feed_forward: Callable[[jax.Array], jax.Array]
    eps: float = dataclasses.field(metadata=dict(static=True))


def decode_layer(
    h: jax.Array,
    layer: DecodeLayer,
    caches: tuple[jax.Array, jax.Array],
    tokens: Tokens,
    links: Links,
    *,
    update: bool,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """One layer: the residual behind it, and its caches.

    Args:
        h: `[batch, seq, d_model]`, alike on all ranks and cores.
        layer: its weights.
        caches: keys `[batch, G, head_dim, slots]`, values `[batch, G, slots,
            head_dim]`.
        tokens: what is known about the new tokens.
        links: the ranks and cores.
        update: return the caches with the new tokens in them; else the new tokens,
            keys `[batch, G, head_dim, seq]` and values `[batch, G, seq, head_dim]`.
    """
    alone = caches[1].shape[1] == 1
    part, kept = _attention(h, layer, caches, tokens, links, update and alone)
    h = added(h, part, links)
    if update and not alone:
        # Behind the sum, which is typed alike on both cores, as the caches are.
        kept = written(caches, kept, after(h, tokens.position))
    return added(h, own_half(layer.feed_forward(h), links), links), kept


def _attention(h, layer, caches, tokens, links, update):
    """The rank's part of the attention block, and what its caches hold or shall.

    Only the block of one key/value head updates its caches.
    """
    groups = caches[1].shape[1]

    def block(w_qkv, w_out, mask, k_cache, v_cache):
        return attention_block_tkg_kernel(
            *(h, w_qkv, k_cache, v_cache, mask),
            rmsnorm_X_enabled=True,
            rmsnorm_X_eps=layer.eps,
            rmsnorm_X_gamma=layer.gamma,
            cos=tokens.cos,
            sin=tokens.sin,
            K_cache_transposed=True,
            update_cache=update,
            kv_cache_update_idx=tokens.position if update else None,
            W_out=w_out,
            lnc_axis=links.lnc,
        )

    mask = _mask(tokens.mask, layer, caches)
    if groups == 1:
        part, k, v = block(layer.w_qkv, layer.w_out, mask, *caches)
        return part, ((k, v) if update else (k.swapaxes(0, 1)[:, None], v))
    given = (
        _by_group(layer.w_qkv, 1, groups),
        _by_group(layer.w_out, 0, groups),
        _by_group(mask, 2, groups),
        *caches,
    )
    # One macro for all of them: it maps over key/value heads.
    parts, k, v = jax.vmap(block, (1, 0, 2, 1, 1))(*given)
    part = parts.astype(accumulator(parts.dtype)).sum(0).astype(parts.dtype)
    return part, (k.transpose(2, 0, 1, 3), v[:, :, 0].swapaxes(0, 1))


def _mask(mask, layer, caches):
    """The mask with an axis of all query heads."""
    num_heads = layer.w_qkv.shape[1] // caches[1].shape[-1] - 2 * caches[1].shape[1]
    return jnp.broadcast_to(mask, (*mask.shape[:2], num_heads, mask.shape[3]))


def _by_group(x, axis, groups):
    """`x` with its axis of heads divided into groups of them and the rest."""
    return x.reshape(*x.shape[:axis], groups, -1, *x.shape[axis + 1 :])

"""Masks of decode attention between token order and the orders that a chip keeps."""

import jax.numpy as jnp
from jaxtyping import Array, Shaped

from neuronjax.kernels.attention.decode_masks import (
    PARTITIONS,
    block_order_len,
    rows_of_tokens,
    slot_cores,
    tokens_at,
)
from neuronjax.primitives.attention.mask_rules import MaskOrder, order_facts
from neuronjax.primitives.contracts import contracted
from neuronjax.primitives.options import member


@contracted(order_facts)
def mask_to_token_order(
    mask: Shaped[Array, "slots batch num_heads seq"],
    order: MaskOrder | str,
    *,
    block_len: int = 0,
    lnc: int = 1,
    enable_fa_s_prior_tiling: bool = True,
) -> Array:
    r"""A mask whose rows lie as a chip keeps them, with its rows in token order.

    A chip keeps the slots as `[128, n]`, partition `p` and tile `f`; row `128 f + p` of
    the mask is the token

    - `SEQUENTIAL`: `128 f + p`, token order itself;
    - `STRIDED`: `n p + f`, where `n = slots / 128`;
    - `BLOCK`: `128 b (f // b) + b p + f % b`, where `b` is the greatest divisor of
      `block_len` with which each core, and each tile of 8192 slots, holds a multiple of
      128 pieces of `b` slots.

    Args:
        mask: `[curr_sprior, B, Hq, s]`, any dtype.
        order: a `MaskOrder` or its name.
        block_len: slots of a cache block, for `BLOCK`; 0 for the others.
        lnc: cores of a logical core, 1 or 2. Two share the slots from 256 on, unless
            they share the sequences: where `B` is even and `B * Hq * s > 128` or there
            are fewer slots.
        enable_fa_s_prior_tiling: whether the chip walks the slots in tiles of 8192.

    Returns:
        The mask in token order, as `attention_tkg` takes it.

    Raises:
        ValueError: sizes do not fit the order.

    Source:
        aws-neuron/nki-library, `core/attention/gen_mask_tkg.py`.

    Example:
        >>> import jax.numpy as jnp
        >>> rows = jnp.arange(256).reshape(256, 1, 1, 1)
        >>> mask_from_token_order(rows, "STRIDED").ravel()[:3].tolist()
        [0, 2, 4]
        >>> mask_from_token_order(rows, "BLOCK", block_len=16).ravel()[:3].tolist()
        [0, 2, 4]
    """
    tokens = _tokens(mask, order, block_len, lnc, enable_fa_s_prior_tiling)
    return jnp.take(mask, jnp.argsort(tokens), axis=0)


@contracted(order_facts)
def mask_from_token_order(
    mask: Shaped[Array, "slots batch num_heads seq"],
    order: MaskOrder | str,
    *,
    block_len: int = 0,
    lnc: int = 1,
    enable_fa_s_prior_tiling: bool = True,
) -> Array:
    """A mask in token order, with its rows as a chip keeps them.

    The inverse of `mask_to_token_order`, with the same arguments and errors.

    Args:
        mask: `[curr_sprior, B, Hq, s]` in token order, any dtype.
        order: a `MaskOrder` or its name.
        block_len: slots of a cache block, for `BLOCK`.
        lnc: cores of a logical core, 1 or 2.
        enable_fa_s_prior_tiling: whether the chip walks the slots in tiles of 8192.

    Returns:
        The mask in the chip's order. `reshape(n, 128, B, Hq, s)` and a swap of the
        first two axes give the tile that `gen_mask_tkg` returns.

    Raises:
        ValueError: sizes do not fit the order.

    Source:
        aws-neuron/nki-library, `core/attention/gen_mask_tkg.py`.
    """
    tokens = _tokens(mask, order, block_len, lnc, enable_fa_s_prior_tiling)
    return jnp.take(mask, tokens, axis=0)


def _tokens(mask, order, block_len, lnc, tiled) -> Array:
    """The token of each row, `[slots]`."""
    slots, batch, num_heads, seq = mask.shape
    kind = member(MaskOrder, order)
    piece = 0
    if kind is MaskOrder.BLOCK:
        cores = slot_cores(slots, batch * num_heads * seq, batch, lnc)
        piece = block_order_len(slots, block_len, cores, tiled)
    strided = kind is MaskOrder.STRIDED
    return rows_of_tokens(tokens_at(slots // PARTITIONS, piece=piece, strided=strided))

"""What the fused decode blocks are told about new tokens, from how many came before."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from neuronjax.primitives.known import known


class NewTokens(NamedTuple):
    """Tables, mask and slots of new tokens, as `attention_block_tkg` takes them.

    Attributes:
        cos: `[head_dim/2, batch, seq]`; `None` for no rotation, and so `sin`.
        sin: like `cos`.
        mask: `[slots, batch, 1, seq]`; the last `seq` slots are the new tokens.
        position: `[batch, 1]`, the slot of the first one; -1 writes nothing.
    """

    cos: Float[Array, "half batch seq"] | None
    sin: Float[Array, "half batch seq"] | None
    mask: Bool[Array, "slots batch 1 seq"]
    position: Int[Array, "batch 1"]


def new_tokens(
    layer: str,
    tables: tuple[Array | None, Array | None],
    lengths: Int[Array, " batch"],
    seq: int,
    slots: int,
) -> NewTokens:
    """Describes `seq` tokens behind `lengths[b]` ones in a cache of `slots`.

    A row without room for them is written nothing, and sees its first `slots - seq`
    slots and the new tokens.

    Args:
        layer: its name, for the message.
        tables: `cos` and `sin`, `[batch, seq, head_dim]`, whose halves are equal.
        lengths: `[batch]`, how many tokens came before.
        seq: new tokens of each row.
        slots: slots of the cache.

    Raises:
        ValueError: lengths are known while tracing and a row has no room.
    """
    prior, held = slots - seq, known(lengths)
    if prior < 0 or (held is not None and ((held < 0) | (held > prior)).any()):
        got = lengths.shape if held is None else held.tolist()
        raise ValueError(
            f"nn.{layer}: lengths must lie in [0, {prior}] so that {seq} new tokens "
            f"fit in {slots} slots, got {got}"
        )
    lengths = lengths.astype(jnp.int32)
    slot, new = jnp.arange(prior, dtype=jnp.int32), jnp.arange(seq, dtype=jnp.int32)
    before = jnp.broadcast_to(
        (slot[:, None] < lengths)[:, :, None, None], (prior, lengths.shape[0], 1, seq)
    )
    causal = jnp.broadcast_to(
        (new[:, None] <= new)[:, None, None], (seq, *before.shape[1:])
    )
    fits = (lengths >= 0) & (lengths <= prior)
    cos, sin = tables
    return NewTokens(
        _half(cos),
        _half(sin),
        jnp.concatenate([before, causal]),
        jnp.where(fits, lengths, -1)[:, None],
    )


def _half(table: Array | None) -> Array | None:
    """The first half of a table's columns, in front."""
    if table is None:
        return None
    return jnp.moveaxis(table[..., : table.shape[-1] // 2], -1, 0)

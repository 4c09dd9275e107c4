"""What the decode block reads and returns, by name."""

from types import SimpleNamespace
from typing import Any, NamedTuple


class Operands(NamedTuple):
    """The operands of the block in their order; an absent one is `None`.

    `b` sequences, `n` query heads, `s` new tokens, `d` width of a head, `h` width of
    the model, `c` visible slots. With `kvdp` ranks, caches, mask, table and position
    belong to the rank's own sequences, and the mask covers the heads of all ranks.

    Attributes:
        x: `[b, s, h]`.
        x_gain: `[1, h]`.
        w_qkv: `[h, (n + 2)*d]`: query heads, then the key head, then the value head.
        bias_qkv: `[1, (n + 2)*d]`.
        qkv_scale: the scales of a quantized `w_qkv`.
        qkv_in_scale: what activations are divided by in front of it (STATIC).
        q_pre_gain: `[1, d]`, of the norm in front of the rotation.
        k_pre_gain: `[1, d]`.
        cos: `[d/2, b, s]`.
        sin: `[d/2, b, s]`.
        q_post_gain: `[1, d]`, of the norm behind the rotation.
        k_post_gain: `[1, d]`.
        k_cache: `[b, slots, d]`, `[b, d, slots]`, or `[blocks, block_len, d]`; a unit
            axis at position 1 may stand for the head.
        v_cache: `[b, slots, d]` or `[blocks, block_len, d]`, likewise.
        mask: `[c, b, n, s]`, boolean.
        table: `[b, c/block_len]`, the blocks of each sequence.
        position: `[b, 1]`, the slot of the first new token.
        sink: `[n, 1]`.
        softmax_scale: `[]`, where it is an array.
        k_scale: one value, repeated; with `v_scale` keys and values are quantized.
        v_scale: the same.
        w_out: `[n*d, h]`.
        bias_out: `[1, h]`.
        out_scale: the scales of a quantized `w_out`.
        out_in_scale: what heads are divided by in front of it (STATIC).
    """

    x: Any
    x_gain: Any
    w_qkv: Any
    bias_qkv: Any
    qkv_scale: Any
    qkv_in_scale: Any
    q_pre_gain: Any
    k_pre_gain: Any
    cos: Any
    sin: Any
    q_post_gain: Any
    k_post_gain: Any
    k_cache: Any
    v_cache: Any
    mask: Any
    table: Any
    position: Any
    sink: Any
    softmax_scale: Any
    k_scale: Any
    v_scale: Any
    w_out: Any
    bias_out: Any
    out_scale: Any
    out_in_scale: Any

    @property
    def head_dim(self) -> int:
        return self.v_cache.shape[-1]

    @property
    def num_heads(self) -> int:
        return self.w_qkv.shape[1] // self.head_dim - 2


def output_names(**config: Any) -> tuple[str, ...]:
    """The outputs that a config gives: three, then the stored statistics."""
    c = SimpleNamespace(**config)
    names = ["x_out", "k_out", "v_out"]
    names += ["rstd"] if c.x_eps is not None else []
    names += ["q_pre_rstd", "k_pre_rstd"] if c.pre_eps is not None else []
    names += ["q_post_rstd", "k_post_rstd"] if c.post_eps is not None else []
    names += [] if c.skip_attention else ["attention", "neg_max", "recip"]
    return tuple(names)

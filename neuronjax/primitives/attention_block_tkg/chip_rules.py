"""The chip's limits of decode block calls, which have no mathematical meaning."""

import jax
import jax.numpy as jnp
import numpy as np

from neuronjax.primitives.attention_block_tkg.rows import (
    arguments,
    blocks,
    fp8,
    projecting,
    row,
    zeros,
)
from neuronjax.primitives.contracts import Size
from neuronjax.primitives.tile import PARTITIONS

row(
    "chip_even",
    "the chip takes an even D, got {D}",
    lambda c: c.D % 2,
    example=arguments(
        W_qkv=zeros(8, 12), K_cache=zeros(1, 6, 3), V_cache=zeros(1, 6, 3)
    ),
    tag="hw",
)
row(
    "chip_width",
    "the chip takes H in multiples of 128 for X, got {X.shape}",
    size=Size("H", lambda c: c.H, multiple=PARTITIONS),
    example=arguments(),
    tag="hw",
)
row(
    "chip_head_dim",
    "the chip takes D up to 128, got {D}",
    size=Size("D", lambda c: c.D, maximum=PARTITIONS),
    example=arguments(
        W_qkv=zeros(8, 520), K_cache=zeros(1, 6, 130), V_cache=zeros(1, 6, 130)
    ),
    tag="hw",
)
row(
    "chip_head_norm",
    "the chip's norms of queries and keys take D = 128, got {D}",
    lambda c: (
        (c.rmsnorm_QK_pre_rope_enabled or c.rmsnorm_QK_post_rope_enabled)
        and c.D != PARTITIONS
    ),
    example=arguments(rmsnorm_QK_pre_rope_enabled=True),
    tag="hw",
)
row(
    "chip_tokens",
    "the chip takes out_in_sb and skip_attention up to B*S = 128, got {B}*{S}",
    lambda c: (c.out_in_sb or c.is_skipped) and c.B * c.S > PARTITIONS,
    example=arguments(
        X=zeros(129, 1, 8),
        K_cache=zeros(129, 6, 4),
        V_cache=zeros(129, 6, 4),
        attention_mask=zeros(4, 129, 2, 1, dtype=np.int32),
        kv_cache_update_idx=zeros(129, 1, dtype=np.uint32),
        out_in_sb=True,
    ),
    tag="hw",
)
row(
    "chip_table",
    "the chip takes an active_blocks_table of uint32, got {active_blocks_table.dtype}",
    lambda c: c.blocked and c.active_blocks_table.dtype != jnp.uint32,
    example=blocks(active_blocks_table=zeros(1, 2, dtype=np.int32)),
    tag="hw",
)
row(
    "chip_fp8_query",
    "the chip's attention over fp8 caches takes X in two bytes, got {X.dtype}",
    lambda c: c.fp8 and c.X.dtype.itemsize > 2,
    example=fp8(),
    tag="hw",
)
row(
    "chip_transposed",
    "the chip takes N*H up to 163840 for transposed_out, in float32 81920, got {N}*{H}",
    lambda c: (
        c.transposed_out and c.N * c.H > (81920 if c.X.dtype.itemsize > 2 else 163840)
    ),
    example=projecting(
        X=jax.ShapeDtypeStruct((1, 1, 65536), np.float32),
        W_qkv=jax.ShapeDtypeStruct((65536, 16), np.float32),
        W_out=jax.ShapeDtypeStruct((8, 65536), np.float32),
        transposed_out=True,
    ),
    tag="hw",
)

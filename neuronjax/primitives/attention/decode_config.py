"""The sizes and layouts of one decode attention call, by the vendor's names."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class AttnTKGConfig:
    """Sizes and layouts of one `attention_tkg` call, by the vendor's names.

    Attributes:
        bs: sequences.
        q_head: query heads, which share one key/value head.
        s_active: new tokens a sequence.
        curr_sprior: cache slots in use; the last `s_active` stand for the new tokens.
        full_sprior: slots of the cache; no limit of a block cache.
        d_head: width of a head.
        block_len: slots of a cache block; 0 for a flat cache.
        tp_k_prior: the cached keys are `[.., slots, d]` instead of `[.., d, slots]`;
            those of a block cache always are.
        strided_mm1: order of the chip's first matmul; changes no value.
        use_pos_id: the prior part is visible below the first position id; `mask` then
            covers the new tokens alone.
        fuse_rope: rotate `q` and `k_active` and divide `q` by `sqrt(d_head)`.
        use_gpsimd_sb2sb: how cores exchange; changes no value.
        qk_in_sb: `q` is `[d, B*Hq*s]` and `k_active` `[d, B*s]`.
        k_out_in_sb: the rotated keys come back as `[d, B*s]`.
        out_in_sb: the output is `[d, B*Hq*s]`.
        enable_fa_s_prior_tiling: how the chip tiles the cache; changes no value.
        stale_slots_visible: with `start_pos_ids`, query `t` sees the cache up to its
            own position id and not only to that of the first new token. The slots in
            between hold old tokens. It is what the vendor's reference computes.
    """

    bs: int
    q_head: int
    s_active: int
    curr_sprior: int
    full_sprior: int
    d_head: int
    block_len: int = 0
    tp_k_prior: bool = False
    strided_mm1: bool = True
    use_pos_id: bool = False
    fuse_rope: bool = False
    use_gpsimd_sb2sb: bool = True
    qk_in_sb: bool = False
    k_out_in_sb: bool = False
    out_in_sb: bool = False
    enable_fa_s_prior_tiling: bool = True
    stale_slots_visible: bool = False

"""The rules of decode block calls: one row each, for the function and the emitter."""

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np

from neuronjax.primitives.attention.decode_facts import wrong_block
from neuronjax.primitives.attention_block_tkg.facts import (
    BOTH,
    EMITTER,
    GAINS,
    SCALES,
    misplaced,
    ranks,
    traced,
)
from neuronjax.primitives.attention_block_tkg.rows import (
    are_given,
    arguments,
    blocks,
    projecting,
    row,
    zeros,
)
from neuronjax.primitives.contracts import add, told
from neuronjax.primitives.flags import only_flags
from neuronjax.primitives.mesh_axes import bound_size
from neuronjax.primitives.tile import PARTITIONS, MemrefTile


def differs(name: str, wanted: Callable[[SimpleNamespace], tuple]):
    """Whether an operand is given in another shape than the wanted one."""

    def differs(c: SimpleNamespace) -> bool:
        return c.shapes[name] not in (None, wanted(c))

    return differs


add(*only_flags(*BOTH))


def _odd_gains(c: SimpleNamespace) -> str:
    shapes = {name: c.shapes[name] for name in GAINS}
    odd = {name: x for name, x in shapes.items() if x not in (None, (1, c.D))}
    return " and ".join(f"{name} of {shape}" for name, shape in odd.items())


row(
    "arrays",
    "{absent}",
    lambda c: vars(c).setdefault("absent", misplaced(c)),
    example=lambda function: arguments(W_qkv=MemrefTile.from_tensor(zeros(8, 16)))(
        function
    ),
    stage=0,
)
row(
    "ranks",
    "{rank}",
    lambda c: vars(c).setdefault("rank", ranks(c)),
    example=arguments(K_cache=zeros(1, 2, 6, 4)),
    stage=0,
)
row(
    "settings",
    "X_hidden_dim_actual, KVDP and lnc must be integers, and each eps a finite number "
    "of at least 0, known while tracing, got {setting}",
    lambda c: vars(c).setdefault("setting", traced(c)),
    example=arguments(rmsnorm_X_eps=-1.0),
    stage=0,
)
row(
    "empty",
    "no axis of X and V_cache may be empty, got {X.shape} and {V_cache.shape}",
    lambda c: 0 in (*c.X.shape, *c.V_cache.shape),
    example=arguments(X=zeros(0, 1, 8)),
    stage=1,
)
row(
    "dtype",
    "operands must be floating and at least 16 bits wide, got {odd}",
    lambda c: c.odd,
    example=arguments(X=zeros(1, 1, 8, dtype=np.int32)),
    stage=1,
)
row(
    "integers",
    "{odd_integer}",
    lambda c: c.odd_integer,
    example=arguments(kv_cache_update_idx=zeros(1, 1)),
    stage=1,
)
row(
    "kvdp_size",
    "KVDP must be at least 1, got {KVDP}",
    lambda c: int(c.KVDP) < 1,
    example=arguments(KVDP=0),
    stage=1,
)
row(
    "kvdp_batch",
    "KVDP must divide the batch of X, got KVDP = {KVDP} and B = {B}",
    lambda c: c.B % c.group,
    example=arguments(KVDP=2, KVDP_replica_group="ranks"),
    stage=1,
)
row(
    "kvdp_group",
    "KVDP > 1 needs KVDP_replica_group, the name of the mesh axis whose devices are "
    "the ranks: call inside its shard_map, with as many devices as KVDP = {KVDP}, got "
    "{KVDP_replica_group!r} of size {group_size}",
    # One that is given for KVDP = 1 would be ignored.
    lambda c: (
        (c.group > 1 or c.KVDP_replica_group is not None) and c.group_size != c.group
    ),
    example=arguments(X=zeros(2, 1, 8), KVDP=2, cos=None, KVDP_replica_group=None),
    stage=1,
)
row(
    "width",
    "W_qkv must have H = {H} rows, as many as X [B, S, H] has columns, got "
    "{W_qkv.shape}; the chip's layout of X, [128, B*S, H/128], is not taken",
    lambda c: c.W_qkv.shape[0] != c.H,
    example=arguments(W_qkv=zeros(9, 16)),
)
row(
    "columns",
    "W_qkv must have (N + 2)*D columns, N >= 1 query heads, one key and one value head "
    "of D = {D}, the width of V_cache, got {W_qkv.shape}",
    lambda c: c.W_qkv.shape[1] % c.D or c.N < 1,
    example=arguments(W_qkv=zeros(8, 8)),
)
row(
    "even",
    "D, the width of a head, must be even to be rotated, got {D}",
    lambda c: c.D % 2 and None not in (c.cos, c.sin),
    example=arguments(
        W_qkv=zeros(8, 12),
        K_cache=zeros(1, 6, 3),
        V_cache=zeros(1, 6, 3),
        cos=zeros(1, 1, 1),
        sin=zeros(1, 1, 1),
    ),
)
row(
    "hidden_actual",
    "X_hidden_dim_actual must lie between 1 and H = {H}, got {X_hidden_dim_actual}",
    lambda c: (
        c.X_hidden_dim_actual is not None and not 1 <= c.X_hidden_dim_actual <= c.H
    ),
    example=arguments(X_hidden_dim_actual=9),
)
row(
    "gain",
    "a gain needs its norm: rmsnorm_X_gamma is for rmsnorm_X_enabled, each W_Q and W_K "
    "for its rmsnorm_QK_*_rope_enabled",
    lambda c: (
        (c.rmsnorm_X_gamma is not None and not c.rmsnorm_X_enabled)
        or (any(are_given(c, *GAINS[:2])) and not c.rmsnorm_QK_pre_rope_enabled)
        or (any(are_given(c, *GAINS[2:])) and not c.rmsnorm_QK_post_rope_enabled)
    ),
    example=arguments(rmsnorm_X_gamma=zeros(1, 8)),
)
row(
    "gain_shape",
    "rmsnorm_X_gamma must have shape (1, H) = (1, {H}), got {shapes[rmsnorm_X_gamma]}",
    differs("rmsnorm_X_gamma", lambda c: (1, c.H)),
    example=arguments(rmsnorm_X_enabled=True, rmsnorm_X_gamma=zeros(8)),
)
row(
    "head_gain_shape",
    "every W_Q and W_K of a QK norm must have shape (1, D) = (1, {D}), got {odd_gains}",
    told("odd_gains", _odd_gains),
    example=arguments(
        rmsnorm_QK_pre_rope_enabled=True, rmsnorm_QK_pre_rope_W_Q=zeros(4)
    ),
)
row(
    "bias_shape",
    "bias_qkv must have shape (1, (N + 2)*D) = {bias_wanted}, got {shapes[bias_qkv]}",
    lambda c: (
        vars(c).setdefault("bias_wanted", (1, c.W_qkv.shape[1]))
        != (c.shapes["bias_qkv"] or c.bias_wanted)
    ),
    example=arguments(bias_qkv=zeros(16)),
)
row(
    "tables",
    "cos and sin must have shape (D/2, B, S) = ({D}/2, {B}, {S}), got {shapes[cos]} "
    "and {shapes[sin]}",
    lambda c: any(
        c.shapes[name] not in (None, (c.D // 2, c.B, c.S)) for name in ("cos", "sin")
    ),
    example=arguments(cos=zeros(4, 1, 1), sin=zeros(4, 1, 1)),
)
row(
    "cache_batch",
    "flat caches must hold B/KVDP = {own} sequences, got V_cache of shape "
    "{V_cache.shape}",
    lambda c: not c.blocked and c.v_shape[0] != c.own,
    example=arguments(K_cache=zeros(2, 6, 4), V_cache=zeros(2, 6, 4)),
)
row(
    "cache_shape",
    "K_cache must have shape {k_wanted} for V_cache of shape {V_cache.shape}, one head "
    "axis of size 1 aside, got {K_cache.shape}",
    lambda c: c.k_shape != c.k_wanted,
    example=arguments(K_cache_transposed=True),
)
row(
    "table_values",
    "active_blocks_table must name blocks of the caches, below {V_cache.shape[0]}, or "
    "-1 for none, got {odd_block}",
    lambda c: (
        c.blocked
        and vars(c).setdefault(
            "odd_block", wrong_block(c.active_blocks_table, c.V_cache.shape[0])
        )
        is not None
    ),
    example=blocks(active_blocks_table=np.full((1, 2), 9, np.uint32)),
)
row(
    "block_shape",
    "block caches must have one shape [num_blocks, block_len, D], got {K_cache.shape} "
    "and {V_cache.shape}",
    lambda c: c.blocked and c.K_cache.shape != c.V_cache.shape,
    example=blocks(K_cache=zeros(3, 2, 4)),
)
row(
    "block_transposed",
    "a block cache holds keys [num_blocks, block_len, D]: K_cache_transposed is for "
    "flat caches",
    lambda c: c.blocked and c.K_cache_transposed,
    example=blocks(K_cache_transposed=True),
)
row(
    "mask",
    "attention_mask must be given unless skip_attention is set",
    lambda c: c.attention_mask is None and not c.is_skipped,
    example=arguments(attention_mask=None),
)
row(
    "mask_shape",
    "attention_mask must have shape [S_ctx, B/KVDP, KVDP*N, S] = [S_ctx, {own}, "
    "{all_heads}, {S}], got {shapes[attention_mask]}",
    lambda c: (
        c.attention_mask is not None
        and (c.shapes["attention_mask"] or ())[1:] != (c.own, c.all_heads, c.S)
    ),
    example=arguments(attention_mask=zeros(4, 1, 1, 1, dtype=np.int32)),
)
row(
    "visible",
    "S_ctx, the first axis of attention_mask, must lie between S = {S} and the slots "
    "of a flat cache, {capacity}, got {visible}",
    lambda c: (
        c.attention_mask is not None
        and not c.blocked
        and not c.S <= c.visible <= c.capacity
    ),
    example=arguments(attention_mask=zeros(7, 1, 2, 1, dtype=np.int32)),
)
row(
    "table",
    "active_blocks_table must have shape [B/KVDP, S_ctx/block_len], B/KVDP = {own}, "
    "S_ctx = {visible}, at least S, block_len = {v_shape[1]}, got "
    "{shapes[active_blocks_table]}",
    lambda c: (
        c.blocked
        and c.attention_mask is not None
        and (
            c.visible < c.S
            or c.visible % c.v_shape[1] != 0
            or c.shapes["active_blocks_table"] != (c.own, c.visible // c.v_shape[1])
        )
    ),
    example=blocks(active_blocks_table=zeros(1, 3, dtype=np.uint32)),
)
row(
    "sink_shape",
    "sink must have shape (N, 1) = ({N}, 1), or with KVDP that of all ranks' heads, "
    "got {shapes[sink]}",
    lambda c: c.shapes["sink"] not in (None, (c.N, 1), (c.all_heads, 1)),
    example=arguments(sink=zeros(2)),
)
row(
    "softmax_scale",
    "softmax_scale must be a finite number, a scalar array or None, got {odd_factor}",
    lambda c: c.odd_factor,
    example=arguments(softmax_scale=np.ones(2, np.float32)),
)
row(
    "index",
    "kv_cache_update_idx must be given to update the cache, of shape (B/KVDP, 1) = "
    "({own}, 1), got {shapes[kv_cache_update_idx]}",
    lambda c: c.update_cache and c.shapes["kv_cache_update_idx"] != (c.own, 1),
    example=arguments(kv_cache_update_idx=zeros(1, dtype=np.uint32)),
)
row(
    "index_range",
    "kv_cache_update_idx must leave room for S = {S} tokens within {capacity} slots, "
    "or be 0xFFFFFFFF for no write, got {outside}",
    lambda c: c.outside,
    example=arguments(kv_cache_update_idx=np.full((1, 1), 6, np.uint32)),
    stage=3,
)
row(
    "out_needs_weight",
    "transposed_out, bias_out and scales of the output need W_out",
    lambda c: (
        c.W_out is None
        and (c.transposed_out or any(are_given(c, "bias_out", *SCALES["out"])))
    ),
    example=arguments(transposed_out=True),
)
row(
    "out_shape",
    "W_out must have shape (N*D, H) = ({N}*{D}, {out_width}) and bias_out (1, "
    "{out_width}), got {shapes[W_out]} and {shapes[bias_out]}",
    lambda c: (
        c.shapes["W_out"] not in (None, (c.N * c.D, c.out_width))
        or c.shapes["bias_out"] not in (None, (1, c.out_width))
    ),
    example=arguments(W_out=zeros(4, 8)),
)
row(
    "out_cores",
    "transposed_out lays H out on 128 rows and lnc cores, lnc at least 1: H must be a "
    "multiple of 128*lnc, got H = {out_width} and lnc = {cores}",
    lambda c: (
        c.transposed_out
        and c.W_out is not None
        and (c.cores < 1 or c.out_width % (PARTITIONS * c.cores))
    ),
    example=projecting(transposed_out=True),
)
row(
    "lnc_axis",
    "lnc_axis must name a mesh axis, inside its shard_map, whose cores hold their own "
    "columns of W_out, which must be given, got {lnc_axis!r}",
    lambda c: (
        c.lnc_axis is not None and (c.W_out is None or bound_size(c.lnc_axis) is None)
    ),
    functions=(EMITTER,),
    example=projecting(lnc_axis="lnc"),
)

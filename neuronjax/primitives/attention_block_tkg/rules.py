"""The rules of decode block calls: one row each, for the function and the emitter."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np

from neuronjax.kernels.quantization.fp8 import E4M3
from neuronjax.primitives import contracts
from neuronjax.primitives.attention_block_tkg.facts import (
    BOTH,
    GAINS,
    SCALES,
    misplaced,
    ranks,
    traced,
)
from neuronjax.primitives.contracts import Contract, Size
from neuronjax.primitives.options import QuantizationType, members
from neuronjax.primitives.tile import PARTITIONS, MemrefTile

_DECODE_KINDS = ("NONE", "STATIC", "ROW")


def _row(rule: str, message: str, *args, **kwargs) -> None:
    """Enters a row; its stage is the second unless named."""
    stage = kwargs.pop("stage", 2)
    rule, text = f"attention_block_tkg.{rule}", "{function}: " + message
    contracts.add(Contract(rule, BOTH, text, *args, stage=stage, **kwargs))


def _zeros(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


def arguments(**changes: Any) -> Callable[[str], dict[str, Any]]:
    """Arguments that keep the rules but for `changes`: one sequence, two heads of 4."""

    def build(function: str) -> dict[str, Any]:
        given: dict[str, Any] = dict(
            X=_zeros(1, 1, 8),
            W_qkv=_zeros(8, 16),
            K_cache=_zeros(1, 6, 4),
            V_cache=_zeros(1, 6, 4),
            attention_mask=_zeros(4, 1, 2, 1, dtype=np.int32),
            kv_cache_update_idx=_zeros(1, 1, dtype=np.uint32),
        )
        given |= changes
        return {key: x for key, x in given.items() if x is not None}

    return build


def _blocks(**changes: Any):
    """The same with caches of three blocks of four slots, two of them visible."""
    caches: dict[str, Any] = dict.fromkeys(("K_cache", "V_cache"), _zeros(3, 4, 4))
    table = _zeros(1, 2, dtype=np.uint32)
    mask = _zeros(8, 1, 2, 1, dtype=np.int32)
    given = dict(caches, active_blocks_table=table, attention_mask=mask)
    return arguments(**(given | changes))


def _fp8(**changes: Any):
    """The same with fp8 caches and their scales."""
    cache, one = _zeros(1, 6, 4, dtype=E4M3), np.ones((1, 1), np.float32)
    given = dict(K_cache=cache, V_cache=cache, k_scale=one, v_scale=one)
    return arguments(**(given | changes))


def _projecting(**changes: Any):
    """The same with an output projection."""
    return arguments(**(dict(W_out=_zeros(8, 8)) | changes))


def _differs(name: str, wanted: Callable[[SimpleNamespace], tuple]):
    """Whether an operand is given in another shape than the wanted one."""

    def differs(c: SimpleNamespace) -> bool:
        return c.shapes[name] not in (None, wanted(c))

    return differs


def _repeats(shape: Any, columns: int) -> bool:
    """Whether a scale is one row, or one row repeated on all partitions."""
    return shape in ((1, columns), (PARTITIONS, columns))


def _given(c: SimpleNamespace, *names: str) -> list[bool]:
    return [getattr(c, name) is not None for name in names]


_row(
    "arrays",
    "{absent}",
    lambda c: vars(c).setdefault("absent", misplaced(c)),
    example=lambda function: arguments(W_qkv=MemrefTile.from_tensor(_zeros(8, 16)))(
        function
    ),
    stage=0,
)
_row(
    "ranks",
    "{rank}",
    lambda c: vars(c).setdefault("rank", ranks(c)),
    example=arguments(K_cache=_zeros(1, 2, 6, 4)),
    stage=0,
)
_row(
    "settings",
    "X_hidden_dim_actual, KVDP and lnc must be integers, and each eps a finite number "
    "of at least 0, known while tracing, got {setting}",
    lambda c: vars(c).setdefault("setting", traced(c)),
    example=arguments(rmsnorm_X_eps=-1.0),
    stage=0,
)
_row(
    "quantization",
    f"quantization_type_qkv and quantization_type_out must be one of "
    f"{', '.join(_DECODE_KINDS)}, of {members(QuantizationType)}, got "
    "{quantization_type_qkv} and {quantization_type_out}",
    lambda c: any(
        getattr(kind, "name", None) not in _DECODE_KINDS
        for kind in (c.qkv_kind, c.out_kind)
    ),
    example=arguments(quantization_type_qkv="MX"),
    stage=1,
)
_row(
    "empty",
    "no axis of X and V_cache may be empty, got {X.shape} and {V_cache.shape}",
    lambda c: 0 in (*c.X.shape, *c.V_cache.shape),
    example=arguments(X=_zeros(0, 1, 8)),
    stage=1,
)
_row(
    "dtype",
    "operands must be floating and at least 16 bits wide, got {odd}",
    lambda c: c.odd,
    example=arguments(X=_zeros(1, 1, 8, dtype=np.int32)),
    stage=1,
)
_row(
    "scale_dtype",
    "scales must be float32, got {odd_scale}",
    lambda c: c.odd_scale,
    example=_fp8(k_scale=np.ones((1, 1), jnp.bfloat16)),
    stage=1,
)
_row(
    "integers",
    "{odd_integer}",
    lambda c: c.odd_integer,
    example=arguments(kv_cache_update_idx=_zeros(1, 1)),
    stage=1,
)
_row(
    "kvdp_size",
    "KVDP must be at least 1, got {KVDP}",
    lambda c: int(c.KVDP) < 1,
    example=arguments(KVDP=0),
    stage=1,
)
_row(
    "kvdp_batch",
    "KVDP must divide the batch of X, got KVDP = {KVDP} and B = {B}",
    lambda c: c.B % c.group,
    example=arguments(KVDP=2, KVDP_replica_group="ranks"),
    stage=1,
)
_row(
    "kvdp_group",
    "KVDP > 1 needs KVDP_replica_group, the name of the mesh axis whose devices are "
    "the ranks: call inside its shard_map, with as many devices as KVDP = {KVDP}, got "
    "{KVDP_replica_group!r} of size {group_size}",
    lambda c: c.group > 1 and c.group_size != c.group,
    example=arguments(X=_zeros(2, 1, 8), KVDP=2, cos=None, KVDP_replica_group=None),
    stage=1,
)
_row(
    "width",
    "W_qkv must have H = {H} rows, as many as X [B, S, H] has columns, got "
    "{W_qkv.shape}; the chip's layout of X, [128, B*S, H/128], is not taken",
    lambda c: c.W_qkv.shape[0] != c.H,
    example=arguments(W_qkv=_zeros(9, 16)),
)
_row(
    "columns",
    "W_qkv must have (N + 2)*D columns, N >= 1 query heads, one key and one value head "
    "of D = {D}, the width of V_cache, got {W_qkv.shape}",
    lambda c: c.W_qkv.shape[1] % c.D or c.N < 1,
    example=arguments(W_qkv=_zeros(8, 8)),
)
_row(
    "even",
    "D, the width of a head, must be even to be rotated, got {D}",
    lambda c: c.D % 2 and None not in (c.cos, c.sin),
    example=arguments(
        W_qkv=_zeros(8, 12),
        K_cache=_zeros(1, 6, 3),
        V_cache=_zeros(1, 6, 3),
        cos=_zeros(1, 1, 1),
        sin=_zeros(1, 1, 1),
    ),
)
_row(
    "hidden_actual",
    "X_hidden_dim_actual must lie between 1 and H = {H}, got {X_hidden_dim_actual}",
    lambda c: (
        c.X_hidden_dim_actual is not None and not 1 <= c.X_hidden_dim_actual <= c.H
    ),
    example=arguments(X_hidden_dim_actual=9),
)
_row(
    "gain",
    "a gain needs its norm: rmsnorm_X_gamma is for rmsnorm_X_enabled, each W_Q and W_K "
    "for its rmsnorm_QK_*_rope_enabled",
    lambda c: (
        (c.rmsnorm_X_gamma is not None and not c.rmsnorm_X_enabled)
        or (any(_given(c, *GAINS[:2])) and not c.rmsnorm_QK_pre_rope_enabled)
        or (any(_given(c, *GAINS[2:])) and not c.rmsnorm_QK_post_rope_enabled)
    ),
    example=arguments(rmsnorm_X_gamma=_zeros(1, 8)),
)
_row(
    "gain_shape",
    "rmsnorm_X_gamma must have shape (1, H) = (1, {H}), got {shapes[rmsnorm_X_gamma]}",
    _differs("rmsnorm_X_gamma", lambda c: (1, c.H)),
    example=arguments(rmsnorm_X_enabled=True, rmsnorm_X_gamma=_zeros(8)),
)
_row(
    "head_gain_shape",
    "every W_Q and W_K of a QK norm must have shape (1, D) = (1, {D})",
    lambda c: any(c.shapes[name] not in (None, (1, c.D)) for name in GAINS),
    example=arguments(
        rmsnorm_QK_pre_rope_enabled=True, rmsnorm_QK_pre_rope_W_Q=_zeros(4)
    ),
)
_row(
    "bias_shape",
    "bias_qkv must have shape (1, (N + 2)*D) = {bias_wanted}, got {shapes[bias_qkv]}",
    lambda c: (
        vars(c).setdefault("bias_wanted", (1, c.W_qkv.shape[1]))
        != (c.shapes["bias_qkv"] or c.bias_wanted)
    ),
    example=arguments(bias_qkv=_zeros(16)),
)
_row(
    "tables",
    "cos and sin must have shape (D/2, B, S) = ({D}/2, {B}, {S}), got {shapes[cos]} "
    "and {shapes[sin]}",
    lambda c: any(
        c.shapes[name] not in (None, (c.D // 2, c.B, c.S)) for name in ("cos", "sin")
    ),
    example=arguments(cos=_zeros(4, 1, 1), sin=_zeros(4, 1, 1)),
)
_row(
    "cache_batch",
    "flat caches must hold B/KVDP = {own} sequences, got V_cache of shape "
    "{V_cache.shape}",
    lambda c: not c.blocked and c.v_shape[0] != c.own,
    example=arguments(K_cache=_zeros(2, 6, 4), V_cache=_zeros(2, 6, 4)),
)
_row(
    "cache_shape",
    "K_cache must have shape {k_wanted} for V_cache of shape {V_cache.shape}, one head "
    "axis of size 1 aside, got {K_cache.shape}",
    lambda c: c.k_shape != c.k_wanted,
    example=arguments(K_cache_transposed=True),
)
_row(
    "block_shape",
    "block caches must have one shape [num_blocks, block_len, D], got {K_cache.shape} "
    "and {V_cache.shape}",
    lambda c: c.blocked and c.K_cache.shape != c.V_cache.shape,
    example=_blocks(K_cache=_zeros(3, 2, 4)),
)
_row(
    "block_transposed",
    "a block cache holds keys [num_blocks, block_len, D]: K_cache_transposed is for "
    "flat caches",
    lambda c: c.blocked and c.K_cache_transposed,
    example=_blocks(K_cache_transposed=True),
)
_row(
    "cache_dtype",
    "{odd_cache}",
    lambda c: c.odd_cache,
    example=_fp8(V_cache=_zeros(1, 6, 4)),
)
_row(
    "kv_scales",
    "k_scale and v_scale must be given together",
    lambda c: len(set(_given(c, "k_scale", "v_scale"))) > 1,
    example=arguments(k_scale=np.ones((1, 1), np.float32)),
    stage=1,
)
_row(
    "kv_scale_shape",
    "k_scale and v_scale must have shape (1, 1) or (128, 1), got {shapes[k_scale]} and "
    "{shapes[v_scale]}",
    lambda c: (
        c.fp8
        and not all(_repeats(c.shapes[name], 1) for name in ("k_scale", "v_scale"))
    ),
    example=_fp8(k_scale=np.ones((4,), np.float32)),
)
_row(
    "mask",
    "attention_mask must be given unless skip_attention is set",
    lambda c: c.attention_mask is None and not c.is_skipped,
    example=arguments(attention_mask=None),
)
_row(
    "mask_shape",
    "attention_mask must have shape [S_ctx, B/KVDP, KVDP*N, S] = [S_ctx, {own}, "
    "{all_heads}, {S}], got {shapes[attention_mask]}",
    lambda c: (
        c.attention_mask is not None
        and (c.shapes["attention_mask"] or ())[1:] != (c.own, c.all_heads, c.S)
    ),
    example=arguments(attention_mask=_zeros(4, 1, 1, 1, dtype=np.int32)),
)
_row(
    "visible",
    "S_ctx, the first axis of attention_mask, must lie between S = {S} and the slots "
    "of a flat cache, {capacity}, got {visible}",
    lambda c: (
        c.attention_mask is not None
        and not c.blocked
        and not c.S <= c.visible <= c.capacity
    ),
    example=arguments(attention_mask=_zeros(7, 1, 2, 1, dtype=np.int32)),
)
_row(
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
    example=_blocks(active_blocks_table=_zeros(1, 3, dtype=np.uint32)),
)
_row(
    "sink_shape",
    "sink must have shape (N, 1) = ({N}, 1), or with KVDP that of all ranks' heads, "
    "got {shapes[sink]}",
    lambda c: c.shapes["sink"] not in (None, (c.N, 1), (c.all_heads, 1)),
    example=arguments(sink=_zeros(2)),
)
_row(
    "softmax_scale",
    "softmax_scale must be a number, a scalar array or None, got shape {scale_shape}",
    lambda c: c.scale_shape != (),
    example=arguments(softmax_scale=np.ones(2, np.float32)),
)
_row(
    "index",
    "kv_cache_update_idx must be given to update the cache, of shape (B/KVDP, 1) = "
    "({own}, 1), got {shapes[kv_cache_update_idx]}",
    lambda c: c.update_cache and c.shapes["kv_cache_update_idx"] != (c.own, 1),
    example=arguments(kv_cache_update_idx=_zeros(1, dtype=np.uint32)),
)
_row(
    "index_range",
    "kv_cache_update_idx must leave room for S = {S} tokens within {capacity} slots, "
    "or be 0xFFFFFFFF for no write, got {outside}",
    lambda c: c.outside,
    example=arguments(kv_cache_update_idx=np.full((1, 1), 6, np.uint32)),
    stage=3,
)
_row(
    "qkv_scales",
    "weight_dequant_scale_qkv must be given exactly for quantization_type_qkv STATIC "
    "and ROW, input_dequant_scale_qkv exactly for STATIC, got {qkv_kind.name}",
    lambda c: (
        _given(c, *SCALES["qkv"])
        != [c.qkv_kind.name != "NONE", c.qkv_kind.name == "STATIC"]
    ),
    example=arguments(quantization_type_qkv="ROW"),
)
_row(
    "qkv_scale_shape",
    "weight_dequant_scale_qkv must have 1 or 128 rows of {qkv_columns} columns (ROW: "
    "one a column of W_qkv, STATIC: 3, for query, key and value), and "
    "input_dequant_scale_qkv shape (1, 1) or (128, 1)",
    lambda c: (
        vars(c).setdefault(
            "qkv_columns", c.W_qkv.shape[1] if c.qkv_kind.name == "ROW" else 3
        )
        and any(
            c.shapes[name] is not None and not _repeats(c.shapes[name], columns)
            for name, columns in zip(SCALES["qkv"], (c.qkv_columns, 1), strict=True)
        )
    ),
    example=arguments(
        quantization_type_qkv="STATIC",
        weight_dequant_scale_qkv=np.ones((128, 1), np.float32),
        input_dequant_scale_qkv=np.ones((128, 1), np.float32),
    ),
)
_row(
    "out_needs_weight",
    "transposed_out, bias_out and scales of the output need W_out",
    lambda c: (
        c.W_out is None
        and (c.transposed_out or any(_given(c, "bias_out", *SCALES["out"])))
    ),
    example=arguments(transposed_out=True),
)
_row(
    "out_shape",
    "W_out must have shape (N*D, H) = ({N}*{D}, {H}) and bias_out (1, {H}), got "
    "{shapes[W_out]} and {shapes[bias_out]}",
    lambda c: (
        c.shapes["W_out"] not in (None, (c.N * c.D, c.H))
        or c.shapes["bias_out"] not in (None, (1, c.H))
    ),
    example=arguments(W_out=_zeros(4, 8)),
)
_row(
    "out_scales",
    "weight_dequant_scale_out must be given exactly for quantization_type_out STATIC "
    "and ROW, input_dequant_scale_out exactly for STATIC, got {out_kind.name}",
    lambda c: (
        c.W_out is not None
        and _given(c, *SCALES["out"])
        != [c.out_kind.name != "NONE", c.out_kind.name == "STATIC"]
    ),
    example=_projecting(quantization_type_out="STATIC"),
)
_row(
    "out_scale_shape",
    "weight_dequant_scale_out must have shape (1, 1) or (128, 1), for ROW (1, H) or "
    "(128, H), H = {H}, and input_dequant_scale_out (1, 1) or (128, 1)",
    lambda c: any(
        c.shapes[name] is not None and not _repeats(c.shapes[name], columns)
        for name, columns in zip(
            SCALES["out"], (c.H if c.out_kind.name == "ROW" else 1, 1), strict=True
        )
    ),
    example=_projecting(
        quantization_type_out="ROW",
        weight_dequant_scale_out=np.ones((8,), np.float32),
    ),
)
_row(
    "out_cores",
    "transposed_out lays H out on 128 rows and lnc cores, lnc at least 1: H must be a "
    "multiple of 128*lnc, got H = {H} and lnc = {cores}",
    lambda c: (
        c.transposed_out
        and c.W_out is not None
        and (c.cores < 1 or c.H % (PARTITIONS * c.cores))
    ),
    example=_projecting(transposed_out=True),
)
_row(
    "chip_even",
    "the chip takes an even D, got {D}",
    lambda c: c.D % 2,
    example=arguments(
        W_qkv=_zeros(8, 12), K_cache=_zeros(1, 6, 3), V_cache=_zeros(1, 6, 3)
    ),
    tag="hw",
)
_row(
    "chip_width",
    "the chip takes H in multiples of 128 for X, got {X.shape}",
    size=Size("H", lambda c: c.H, multiple=PARTITIONS),
    example=arguments(),
    tag="hw",
)
_row(
    "chip_head_dim",
    "the chip takes D up to 128, got {D}",
    size=Size("D", lambda c: c.D, maximum=PARTITIONS),
    example=arguments(
        W_qkv=_zeros(8, 520), K_cache=_zeros(1, 6, 130), V_cache=_zeros(1, 6, 130)
    ),
    tag="hw",
)
_row(
    "chip_head_norm",
    "the chip's norms of queries and keys take D = 128, got {D}",
    lambda c: (
        (c.rmsnorm_QK_pre_rope_enabled or c.rmsnorm_QK_post_rope_enabled)
        and c.D != PARTITIONS
    ),
    example=arguments(rmsnorm_QK_pre_rope_enabled=True),
    tag="hw",
)
_row(
    "chip_tokens",
    "the chip takes out_in_sb and skip_attention up to B*S = 128, got {B}*{S}",
    lambda c: (c.out_in_sb or c.is_skipped) and c.B * c.S > PARTITIONS,
    example=arguments(
        X=_zeros(129, 1, 8),
        K_cache=_zeros(129, 6, 4),
        V_cache=_zeros(129, 6, 4),
        attention_mask=_zeros(4, 129, 2, 1, dtype=np.int32),
        kv_cache_update_idx=_zeros(129, 1, dtype=np.uint32),
        out_in_sb=True,
    ),
    tag="hw",
)
_row(
    "chip_table",
    "the chip takes an active_blocks_table of uint32, got {active_blocks_table.dtype}",
    lambda c: c.blocked and c.active_blocks_table.dtype != jnp.uint32,
    example=_blocks(active_blocks_table=_zeros(1, 2, dtype=np.int32)),
    tag="hw",
)

"""The rules of the decode transformer's calls: one row each."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from neuronjax.primitives import contracts
from neuronjax.primitives.contracts import Contract, told
from neuronjax.primitives.kinds import is_count, is_flag, is_number
from neuronjax.primitives.transformer_tkg.facts import (
    AXES,
    FUNCTION,
    half_scaled,
    misplaced,
    odd_groups,
    odd_position,
)

_SHAPES: dict[str, tuple[int, ...]] = dict(
    W_qkvs=(8, 16),
    W_outs=(8, 8),
    W_gates=(8, 6),
    W_ups=(8, 6),
    W_downs=(6, 8),
    W_gamma_qkvs=(1, 8),
    W_gamma_mlps=(1, 8),
    K_caches=(1, 1, 4, 6),
    V_caches=(1, 1, 6, 4),
)


def _row(rule: str, message: str, violated=None, **kwargs: Any) -> None:
    text = "{function}: " + message
    rule = f"{FUNCTION}.{rule}"
    contracts.add(Contract(rule, (FUNCTION,), text, violated, **kwargs))


def _zeros(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


def _arguments(**changes: Any) -> Callable[[str], dict[str, Any]]:
    """Arguments that keep the rules but for `changes`: one layer, two heads of 4."""

    def build(function: str) -> dict[str, Any]:
        given: dict[str, Any] = {name: [_zeros(*_SHAPES[name])] for name in AXES}
        given |= dict(
            X=_zeros(1, 1, 8),
            RoPE_cos=_zeros(2, 1, 1),
            RoPE_sin=_zeros(2, 1, 1),
            mask_cache=_zeros(4, 1, 2, 1, dtype=np.int32),
            mask_active=None,
            position_ids=_zeros(1, 1, dtype=np.int32),
            num_layers=1,
        )
        return given | changes

    return build


def _is_setting(value: Any) -> bool:
    return is_number(value) and 0 <= value < math.inf


_row(
    "num_layers",
    "num_layers must be a positive integer, known while tracing, got {num_layers!r}",
    lambda c: not is_count(c.num_layers),
    example=_arguments(num_layers=0),
    stage=0,
)
_row(
    "arguments",
    "{misplaced}",
    lambda c: is_count(c.num_layers) and told("misplaced", misplaced)(c),
    example=_arguments(W_ups=[]),
    stage=0,
)
_row(
    "settings",
    "eps and clamp_bound must be finite numbers of at least 0 and sbuf_residual_and_cc "
    "True or False, known while tracing, got {eps}, {clamp_bound} and "
    "{sbuf_residual_and_cc}",
    lambda c: (
        not (_is_setting(c.eps) and _is_setting(c.clamp_bound))
        or not is_flag(c.sbuf_residual_and_cc)
    ),
    example=_arguments(clamp_bound=-1.0),
)
_row(
    "empty",
    "no axis of X and of the caches may be empty, got {X.shape} and S_max = {S_max}",
    lambda c: 0 in (*c.X.shape, c.G, c.D, c.S_max),
    example=_arguments(X=_zeros(0, 1, 8)),
)
_row(
    "heads",
    "W_qkvs must have G*(n + 2)*D columns, n >= 1 query heads for each of the G = {G} "
    "key/value heads of D = {D} that V_caches have, got {columns}",
    lambda c: not c.whole_heads or c.n < 1,
    example=_arguments(W_qkvs=[_zeros(8, 12)], V_caches=[_zeros(1, 2, 6, 4)]),
)
_row(
    "groups",
    "replica_groups needs {odd_groups}, got {replica_groups}",
    told("odd_groups", odd_groups),
    example=_arguments(replica_groups=[[0, 1]]),
)
_row(
    "cores",
    "lnc_axis must name a mesh axis of the 2 cores of a rank, other than axis, and be "
    "called inside its shard_map, with an even H, got {lnc_axis!r} of size {lnc_size} "
    "and H = {H}",
    lambda c: (
        c.lnc_axis is not None and (c.lnc_size != 2 or c.lnc_axis == c.axis or c.H % 2)
    ),
    example=_arguments(lnc_axis="lnc"),
)
_row(
    "shapes",
    "with B, S, H = {B}, {S}, {H}, G = {G}, n = {n} and D = {D}: {unlike}",
    lambda c: c.unlike,
    example=_arguments(W_outs=[_zeros(8, 9)]),
    stage=2,
)
_row(
    "dtype",
    "operands must be floating and at least 16 bits wide, masks boolean or integer, "
    "positions integer, got {odd}",
    lambda c: c.odd,
    example=_arguments(X=_zeros(1, 1, 8, dtype=np.int32)),
    stage=2,
)
_row(
    "tables",
    "RoPE_cos and RoPE_sin must have shape (D/2, B, S) = ({D}/2, {B}, {S}), got "
    "{shapes[RoPE_cos]} and {shapes[RoPE_sin]}",
    lambda c: any(
        c.shapes[name] != (c.D // 2, c.B, c.S) or c.D % 2
        for name in ("RoPE_cos", "RoPE_sin")
    ),
    example=_arguments(RoPE_cos=_zeros(4, 1, 1)),
    stage=2,
)
_row(
    "mask",
    "mask_cache must have shape [S_ctx, B, N, S] = [S_ctx, {B}, {N} or 1, {S}], S_ctx "
    "from S to S_max = {S_max}, got {mask_cache.shape}",
    lambda c: (
        c.mask_cache.shape[1:] not in [(c.B, heads, c.S) for heads in (1, c.N)]
        or not c.S <= c.S_ctx <= c.S_max
    ),
    example=_arguments(mask_cache=_zeros(7, 1, 2, 1, dtype=np.int32)),
    stage=2,
)
_row(
    "mask_active",
    "mask_active must have shape [S, B, N, S] = [{S}, {B}, {N} or 1, {S}], got "
    "{mask_active.shape}",
    lambda c: (
        c.mask_active is not None
        and c.mask_active.shape not in [(c.S, c.B, heads, c.S) for heads in (1, c.N)]
    ),
    example=_arguments(mask_active=_zeros(4, 1, 2, 1, dtype=np.int32)),
    stage=2,
)
_row(
    "position_shape",
    "position_ids must have shape (B, 1) or (B, S), B = {B} and S = {S}, got "
    "{position_ids.shape}",
    lambda c: (
        c.position_ids is not None
        and c.position_ids.shape not in ((c.B, 1), (c.B, c.S))
    ),
    example=_arguments(position_ids=_zeros(1, 2, dtype=np.int32)),
    stage=2,
)
_row(
    "scales",
    "a layer is quantized with all of W_gate_scales, W_up_scales and W_down_scales, or "
    "with none of them, got some for {half_scaled}",
    told("half_scaled", half_scaled),
    example=_arguments(W_up_scales=[_zeros(1, 6)]),
    stage=2,
)
_row(
    "position",
    "position_ids must {odd_position}",
    told("odd_position", odd_position),
    example=_arguments(position_ids=np.full((1, 1), 6, np.int32)),
    stage=3,
)
_row(
    "parts",
    "{refused}",
    told("refused", lambda c: c.refusals()["math"]),
    example=_arguments(
        **{
            f"W_{side}s": [_zeros(*_SHAPES[f"W_{side}s"], dtype=np.int8)]
            for side in ("gate", "up", "down")
        },
        **{
            f"W_{side}_scales": [_zeros(1, 8 if side == "down" else 6)]
            for side in ("gate", "up", "down")
        },
    ),
    stage=3,
)
_row(
    "chip_parts",
    "{refused_on_chip}",
    told("refused_on_chip", lambda c: c.refusals()["hw"]),
    example=_arguments(),
    tag="hw",
    stage=3,
)
_row(
    "chip_heads",
    "the chip takes one key/value head a rank, got G = {G}",
    lambda c: c.G != 1,
    example=_arguments(
        W_qkvs=[_zeros(8, 24)],
        W_outs=[_zeros(8, 8)],
        K_caches=[_zeros(1, 2, 4, 6)],
        V_caches=[_zeros(1, 2, 6, 4)],
    ),
    tag="hw",
    stage=3,
)

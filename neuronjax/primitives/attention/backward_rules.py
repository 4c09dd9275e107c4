"""The rules of the attention backward."""

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np

from neuronjax.primitives.attention.operand_kinds import (
    is_mask,
    is_scale,
    is_soft_cap,
    is_wide_float,
    not_array,
)
from neuronjax.primitives.contracts import Contract, Size, add, told
from neuronjax.primitives.flags import only_flags
from neuronjax.primitives.kinds import is_number
from neuronjax.primitives.tile import MemrefTile

BWD, KERNEL = ("attention_bwd",), ("backwards_attention_kernel",)
UNIT_SCALE = "Backwards Attention BIR kernel only supports softmax scale = 1.0"
NO_DROPOUT = (
    "Backwards Attention BIR kernel does not currently support non zero dropout prob"
)
_FLOATS = ("q", "out", "d_out", "neg_max", "recip", "sink", "bias")
_OPERANDS = ("sinks_ref", "bound_min", "bound_max", "bias_ref")
_NEEDED = ("q_ref", "k_ref", "v_ref", "o_ref", "dy_ref", "lse_ref")
_ARRAYS = ("q_ref", "k_ref", "v_ref", "o_ref", "dy_ref")


def _odd_kind(call: SimpleNamespace) -> str:
    """The first operand of the wrong kind of dtype, described."""
    for name in _FLOATS:
        x = getattr(call, name)
        if not is_wide_float(x):
            return f"{name} must be floating, got {x.dtype}"
    return "" if is_mask(call.mask) else f"mask must not be, got {call.mask.dtype}"


def _odd_floats(call: SimpleNamespace) -> str:
    """Those of sinks, bias and log-sum-exp that have another dtype, described."""
    odd = [n for n in ("sinks_ref", "bias_ref") if not is_wide_float(getattr(call, n))]
    if call.lse_ref.dtype not in (jnp.float32, jnp.float64):
        odd.append("lse_ref")
    return " and ".join(f"{name} of {getattr(call, name).dtype}" for name in odd)


def _arguments(**changes: Any):
    def build(function: str) -> dict[str, Any]:
        rows, keys = (1, 4, 8, 128), (1, 2, 8, 128)
        shapes: dict[str, Any] = dict.fromkeys(("q_ref", "o_ref", "dy_ref"), rows)
        shapes |= dict(k_ref=keys, v_ref=keys, lse_ref=(1, 4, 128, 1)) | changes
        return _zeros(shapes)

    return build


def _kernel(**changes: Any):
    def build(function: str) -> dict[str, Any]:
        shapes: dict[str, Any] = dict(q=(4, 8, 3), k=(2, 8, 5), v=(2, 5, 6))
        shapes |= dict.fromkeys(("out", "d_out"), (4, 3, 6))
        shapes |= dict.fromkeys(("neg_max", "recip"), (4, 3, 1))
        return _zeros(shapes | changes)

    return build


def _zeros(given: dict[str, Any]) -> dict[str, Any]:
    return {
        key: np.zeros(value, np.float32) if isinstance(value, tuple) else value
        for key, value in given.items()
    }


add(
    *only_flags(*BWD, *KERNEL),
    Contract(
        "attention_bwd.rank",
        BWD,
        "{function}: q_ref, k_ref and v_ref must have 4 axes [B, heads, d, seq], got "
        "{q_ref.shape}, {k_ref.shape} and {v_ref.shape}",
        lambda c: {x.ndim for x in (c.q_ref, c.k_ref, c.v_ref)} != {4},
        example=_arguments(q_ref=(4, 8, 128)),
        stage=0,
    ),
    Contract(
        "attention_bwd.empty",
        BWD,
        "{function}: no axis of q_ref and k_ref may be empty, got {q_ref.shape} and "
        "{k_ref.shape}",
        lambda c: 0 in c.q_ref.shape or 0 in c.k_ref.shape,
        example=_arguments(q_ref=(1, 4, 0, 128)),
        stage=0,
    ),
    Contract(
        "attention_bwd.dtypes",
        BWD,
        "{function}: q_ref, k_ref, v_ref, o_ref and dy_ref must have one floating "
        "dtype, got {q_ref.dtype}, {k_ref.dtype}, {v_ref.dtype}, {o_ref.dtype} and "
        "{dy_ref.dtype}",
        lambda c: (
            len({getattr(c, name).dtype for name in _ARRAYS}) != 1
            or not is_wide_float(c.q_ref)
        ),
        example=_arguments(dy_ref=np.zeros((1, 4, 8, 128), jnp.bfloat16)),
        stage=0,
    ),
    Contract(
        "attention_bwd.group",
        BWD,
        "{function}: heads of q_ref must be a multiple of those of k_ref, got {heads} "
        "and {kv_heads}",
        lambda c: c.heads % c.kv_heads != 0,
        example=_arguments(k_ref=(1, 3, 8, 128)),
    ),
    Contract(
        "attention_bwd.shapes",
        BWD,
        "{function}: {misfit}",
        lambda c: c.misfit,
        example=_arguments(v_ref=(1, 2, 8, 64)),
    ),
    Contract(
        "attention_bwd.lse_shape",
        BWD,
        "{function}: lse_ref must have shape [B, Hq, 128, Sq / 128], where Sq is a "
        "multiple of 128, or [B, Hq, Sq, 1], got {lse_ref.shape} for Sq = {q_seq}",
        lambda c: c.lse_misfit,
        example=_arguments(lse_ref=(1, 4, 128, 2)),
    ),
    Contract(
        "attention_bwd.chip_q_seq",
        BWD,
        "{function}: the chip takes Sq in multiples of 128, got {value}",
        size=Size("q_seq", lambda c: c.q_seq, multiple=128, minimum=128),
        example=_arguments(
            **dict.fromkeys(("q_ref", "o_ref", "dy_ref"), (1, 4, 8, 100)),
            lse_ref=(1, 4, 100, 1),
        ),
        tag="hw",
    ),
    Contract(
        "attention_bwd.sinks",
        BWD,
        "{function}: sinks_ref must have shape [{batch}, {heads}] or "
        "[{batch}, {heads}, number of sinks], got {sinks_ref.shape}",
        lambda c: c.sinks_misfit,
        example=_arguments(sinks_ref=(1, 2)),
    ),
    Contract(
        "attention_bwd.bias",
        BWD,
        "{function}: bias_ref must have shape [1 or {scores[0]}, 1 or {scores[1]}, 1 "
        "or {scores[2]}], got {bias_ref.shape}",
        lambda c: c.bias_misfit,
        example=_arguments(bias_ref=(2, 1, 1)),
    ),
    Contract(
        "attention_bwd.floats",
        BWD,
        "{function}: sinks_ref and bias_ref must have floating dtypes, and lse_ref "
        "float32 (float64 beside float64), got {odd_floats}",
        told("odd_floats", _odd_floats),
        example=_arguments(sinks_ref=np.zeros((1, 4), np.int32)),
    ),
    Contract(
        "attention_bwd.scale_kind",
        BWD,
        "{function}: softmax_scale must be a finite real number, a scalar array or "
        "None, got {softmax_scale!r}",
        lambda c: not is_scale(c.softmax_scale),
        example=_arguments(softmax_scale="1"),
        stage=0,
    ),
    Contract(
        "attention_bwd.settings",
        BWD,
        "{function}: sliding_window must be an integer or None and logits_soft_cap a "
        "number or None, known while tracing, got {sliding_window!r} and "
        "{logits_soft_cap!r}",
        lambda c: (
            not isinstance(c.sliding_window, int | np.integer | None)
            or not is_number(c.logits_soft_cap, None)
        ),
        example=_arguments(sliding_window=1.5, use_causal_mask=True),
        stage=0,
    ),
    Contract(
        "attention_bwd.arrays",
        BWD,
        "{function}: {not_array}",
        lambda c: vars(c).setdefault(
            "not_array", not_array(c, _NEEDED, True) or not_array(c, _OPERANDS)
        ),
        example=_arguments(sinks_ref=[0.0]),
        stage=-1,
    ),
    Contract(
        "attention_bwd.bounds",
        BWD,
        "{function}: bound_min and bound_max must be given together",
        lambda c: (c.bound_min is None) != (c.bound_max is None),
        example=_arguments(bound_min=(128,)),
        stage=0,
    ),
    Contract(
        "attention_bwd.window",
        BWD,
        "{function}: sliding_window must be at least 0, and needs use_causal_mask, got "
        "{sliding_window} and {use_causal_mask}",
        lambda c: (
            (c.sliding_window or 0) < 0
            or (bool(c.sliding_window) and not c.use_causal_mask)
        ),
        example=_arguments(sliding_window=8),
    ),
    Contract(
        "attention_bwd.soft_cap",
        BWD,
        "{function}: logits_soft_cap must lie in [1e-30, 1e30], or be None, got "
        "{logits_soft_cap}",
        lambda c: not is_soft_cap(c.logits_soft_cap),
        example=_arguments(logits_soft_cap=0.0),
    ),
    Contract(
        "attention_bwd.chip_bounds",
        BWD,
        "{function}: the chip takes bounds of float32, got {bound_min.dtype} and "
        "{bound_max.dtype}",
        lambda c: (
            c.bound_min is not None
            and {c.bound_min.dtype, c.bound_max.dtype} != {jnp.dtype("float32")}
        ),
        example=_arguments(
            **dict.fromkeys(("bound_min", "bound_max"), np.zeros(128, np.int32))
        ),
        tag="hw",
    ),
    Contract(
        "attention_bwd.scale",
        BWD,
        "{function}: softmax_scale must be a number, a scalar array or None, got shape "
        "{softmax_scale.shape}",
        lambda c: getattr(c.softmax_scale, "shape", ()) != (),
        example=_arguments(softmax_scale=np.ones(2, np.float32)),
    ),
    Contract(
        "attention_bwd.chip_square",
        BWD,
        "{function}: the chip takes a causal mask for q_seq = kv_seq alone, got "
        "{q_seq} and {kv_seq}",
        lambda c: c.use_causal_mask and c.q_seq != c.kv_seq,
        example=_arguments(
            use_causal_mask=True, k_ref=(1, 2, 8, 256), v_ref=(1, 2, 8, 256)
        ),
        tag="hw",
    ),
    Contract(
        "attention_bwd.chip_head_dim",
        BWD,
        "{function}: the chip splits d evenly over ceil(d / 128) tiles, got {d}",
        lambda c: c.d % -(-c.d // 128) != 0,
        example=_arguments(
            **dict.fromkeys(("q_ref", "o_ref", "dy_ref"), (1, 2, 129, 128)),
            **dict.fromkeys(("k_ref", "v_ref"), (1, 2, 129, 128)),
            lse_ref=(1, 2, 128, 1),
        ),
        tag="hw",
    ),
    Contract(
        "backwards_attention.scale",
        KERNEL,
        UNIT_SCALE,
        lambda c: c.softmax_scale != 1.0,
        example=_kernel(softmax_scale=0.5),
        stage=0,
        literal=True,
    ),
    Contract(
        "backwards_attention.dropout",
        KERNEL,
        NO_DROPOUT,
        lambda c: c.dropout_prob != 0.0,
        example=_kernel(dropout_prob=0.1),
        stage=0,
        literal=True,
    ),
    Contract(
        "backwards_attention.rank",
        KERNEL,
        "{function}: q, k and v must have 3 axes, heads first, got {q.shape}, "
        "{k.shape} and {v.shape}",
        lambda c: {len(x.shape) for x in (c.q, c.k, c.v)} != {3},
        example=_kernel(q=(1, 4, 8, 3)),
        stage=0,
    ),
    Contract(
        "backwards_attention.group",
        KERNEL,
        "{function}: heads of q must be a multiple of those of k, got {heads} and "
        "{kv_heads}",
        lambda c: c.heads % c.kv_heads != 0,
        example=_kernel(k=(3, 8, 5)),
    ),
    Contract(
        "backwards_attention.shapes",
        KERNEL,
        "{function}: {misfit}",
        lambda c: c.misfit,
        example=_kernel(out=(4, 3, 5)),
    ),
    Contract(
        "backwards_attention.tensors",
        KERNEL,
        "{function}: operands must be tensors, and none empty",
        lambda c: any(
            isinstance(x, MemrefTile) or 0 in x.shape
            for x in (c.q, c.k, c.v, c.out, c.d_out)
            if x is not None
        ),
        example=_kernel(q=(4, 8, 0)),
        stage=0,
    ),
    Contract(
        "backwards_attention.dtypes",
        KERNEL,
        "{function}: q, k and v must have one floating dtype, got {q.dtype}, {k.dtype} "
        "and {v.dtype}; {odd_kind}",
        lambda c: (
            vars(c).setdefault("odd_kind", _odd_kind(c))
            or {c.k.dtype, c.v.dtype} != {c.q.dtype}
        ),
        example=_kernel(mask=(1, 1, 5)),
        stage=0,
    ),
    Contract(
        "backwards_attention.statistics",
        KERNEL,
        "{function}: neg_max and recip must be float32 (float64 beside float64), got "
        "{neg_max.dtype} and {recip.dtype}",
        lambda c: any(
            x.dtype not in (jnp.float32, jnp.float64) for x in (c.neg_max, c.recip)
        ),
        example=_kernel(neg_max=np.zeros((4, 3, 1), jnp.bfloat16)),
        stage=0,
    ),
    Contract(
        "backwards_attention.scores",
        KERNEL,
        "{function}: mask and bias must have shape [1 or {scores[0]}, 1 or "
        "{scores[1]}, 1 or {scores[2]}], got {spread}",
        lambda c: c.spread,
        example=_kernel(mask=np.ones((1, 2, 5), bool)),
    ),
)

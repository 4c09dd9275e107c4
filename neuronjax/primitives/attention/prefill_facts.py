"""What the rules of prefill attention read, and the choice of the NAME."""

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp

from neuronjax.context import settings
from neuronjax.primitives.known import known
from neuronjax.primitives.tile import PARTITIONS, MemrefTile

SWAPPED, TILED = "AttentionMMSoftmaxMM", "TiledNativeKernelAttention"
_FORMS = ("AttentionMMSoftmaxMMWithoutSwap", "CausalAttentionMMSoftmaxMMWithoutSwap")
UNTILED = (SWAPPED, *_FORMS, *(f"V2{name}" for name in _FORMS))


def attention_name(is_causal: bool, tp_k: bool, generation: str) -> str:
    """The untiled NAME: by the layout of k, causality and the target's generation."""
    if tp_k:
        return SWAPPED
    return ("V2" if generation == "gen2" else "") + _FORMS[is_causal]


def cte_facts(call: SimpleNamespace) -> dict[str, Any]:
    """Facts of `attention_cte`."""
    facts = _shapes(call)
    heads, q_seq = facts["heads"], facts["q_seq"]
    prior = None if call.v_prior is None else call.v_prior.shape[1]
    columns = facts["kv_seq"] + (prior or 0)
    row = (q_seq, 1)
    wanted = dict(
        k_prior=_prior_keys(facts, prior, call.tp_k),
        v_prior=(facts["kv_heads"], prior, facts["value_dim"]),
        prior_used_len=(1,),
        sink=(heads, 1),
        cp_offset=(1, 1),
        bound_min=row,
        bound_max=row,
    )
    scores = (heads, q_seq, columns)
    return facts | dict(
        is_causal=call.causal_mask,
        prior=prior,
        columns=columns,
        misfit=misfit(call, wanted),
        mask_misfit=mask_misfit(call.mask, scores),
        bias_misfit=mask_misfit(call.bias, scores),
        scores=scores,
        used=one_value(call.prior_used_len),
        offset=one_value(call.cp_offset),
        options=_given(call),
        target=settings().target,
    )


def _prior_keys(facts: dict[str, Any], prior: Any, tp_k: bool) -> tuple:
    width = (prior, facts["d"]) if tp_k else (facts["d"], prior)
    return (facts["kv_heads"], *width)


def one_value(x: Any) -> int | None:
    """The one value of `x`, where it is known."""
    held = known(x)
    return None if held is None or held.size != 1 else int(held.reshape(()))


_OFF = dict(
    k_prior=None,
    v_prior=None,
    prior_used_len=None,
    sink=None,
    sliding_window=0,
    cp_offset=None,
    bound_min=None,
    bound_max=None,
    mask=None,
    bias=None,
    logits_soft_cap=0,
    dropout_rate=0,
)


def _given(call: SimpleNamespace) -> str:
    """The options that are on: what tiles do not take."""
    on = [key for key, off in _OFF.items() if not _is_off(getattr(call, key), off)]
    dtypes = "softmax_dtype", "mm_out_dtype"
    on += [key for key in dtypes if not _is_float32(getattr(call, key))]
    return ", ".join(on)


def _is_float32(dtype: Any) -> bool:
    try:
        return jnp.dtype(dtype) == jnp.float32
    except TypeError:
        return False


def _is_off(value: Any, off: Any) -> bool:
    return value is None or (off is not None and value == off)


def misfit(call: SimpleNamespace, wanted: dict[str, tuple]) -> str:
    """The arguments that are given in another shape than `wanted`, described."""
    found = []
    for name, shape in wanted.items():
        x = getattr(call, name)
        if x is not None and tuple(x.shape) != shape:
            found.append(f"{name} must have shape {shape}, got {tuple(x.shape)}")
    return "; ".join(found)


def kernel_facts(call: SimpleNamespace) -> dict[str, Any]:
    """Facts of `attention_kernel`."""
    facts = _shapes(call)
    mask = call.active_mask if call.mask is None else call.mask
    destination = call.attn_out if call.out is None else call.out
    scale = call.softmax_scale if call.scale is None else call.scale
    rows = (facts["heads"], facts["q_seq"], facts["value_dim"])
    shape = (rows[0], rows[2], rows[1]) if call.tp_out else rows
    return facts | dict(
        name=attention_name(bool(call.is_causal), False, settings().target),
        one_mask=mask,
        mask_misfit=mask_misfit(mask, (*rows[:2], facts["kv_seq"])),
        misfit=misfit(call, dict(sink=(facts["heads"], 1))),
        foreign=_foreign(call),
        destination=destination,
        out_shape=shape,
        one_scale=1.0 if scale is None else scale,
        twice=_twice(call),
    )


def _shapes(call: SimpleNamespace) -> dict[str, Any]:
    q, k, v = call.q, call.k, call.v
    heads, *rows = q.shape
    kv_heads, *cols = k.shape
    q_seq, d = rows if call.tp_q else rows[::-1]
    kv_seq, k_width = cols if call.tp_k else cols[::-1]
    return dict(
        heads=heads,
        kv_heads=kv_heads,
        q_seq=q_seq,
        kv_seq=kv_seq,
        d=d,
        k_width=k_width,
        value_dim=v.shape[2],
        tiled=isinstance(q, MemrefTile),
        off_axis=_off_axis(call),
    )


def _off_axis(call: SimpleNamespace) -> str:
    """The first tile that does not lie where the leaf contracts, described."""
    axes = dict(q=2 if call.tp_q else 1, k=2 if call.tp_k else 1, v=1)
    for name, axis in axes.items():
        tile = getattr(call, name)
        if not isinstance(tile, MemrefTile):
            continue
        if tile.axis != axis:
            return f"{name} must lie on its axis {axis}, got axis {tile.axis}"
        if tile.data.shape[0] != min(tile.shape[axis], PARTITIONS):
            return f"{name} must fill its partitions, got data of {tile.data.shape}"
    size = call.q.shape[1 if call.tp_q else 2]
    if isinstance(call.q, MemrefTile) and size > PARTITIONS and size % PARTITIONS:
        return (
            f"q_seq of q must be at most {PARTITIONS} or a multiple of it, since the "
            f"result is a tile on it, got {size}"
        )
    return ""


def mask_misfit(mask: Any, scores: tuple[int, ...]) -> bool:
    """Whether a mask or bias does not broadcast to the scores, axis by axis."""
    if mask is None:
        return False
    if len(mask.shape) != 3:
        return True
    return any(got not in (1, n) for got, n in zip(mask.shape, scores, strict=True))


# What the vendor's emitter takes too, and whose it is here.
_ELSEWHERE = dict(
    k_active="attention_tkg_fwd_kernel",
    v_active="attention_tkg_fwd_kernel",
    rope_pos_ids="attention_tkg_fwd_kernel",
    k_prior="attention_prefix_caching_fwd_kernel",
    prefix_mask="attention_prefix_caching_fwd_kernel",
)


def _foreign(call: SimpleNamespace) -> str:
    """The first operand that another emitter takes, described."""
    for name, emitter in _ELSEWHERE.items():
        if getattr(call, name) is not None:
            return f"{name} is an operand of {emitter}"
    return ""


def _twice(call: SimpleNamespace) -> str:
    """The first option that is given under both of its words."""
    for pair in (
        ("mask", "active_mask"),
        ("out", "attn_out"),
        ("scale", "softmax_scale"),
    ):
        if all(getattr(call, word) is not None for word in pair):
            return " and ".join(pair)
    return ""

"""What the rules of prefill attention read, and the choice of the NAME."""

from types import SimpleNamespace
from typing import Any

from neuronjax.context import settings
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
    return _shapes(call) | dict(is_causal=call.causal_mask)


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
        mask_misfit=_mask_misfit(mask, facts),
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


def _mask_misfit(mask: Any, facts: dict[str, Any]) -> bool:
    if mask is None:
        return False
    wanted = (facts["heads"], facts["q_seq"], facts["kv_seq"])
    if len(mask.shape) != 3 or mask.shape[2] != wanted[2]:
        return True
    return any(
        got not in (1, size) for got, size in zip(mask.shape, wanted, strict=True)
    )


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

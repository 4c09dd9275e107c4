"""What the rules of the attention backward read."""

from types import SimpleNamespace
from typing import Any

from neuronjax.primitives.attention.prefill_facts import mask_misfit, misfit


def bwd_facts(call: SimpleNamespace) -> dict[str, Any]:
    """Facts of `attention_bwd`."""
    batch, heads, d, q_seq = call.q_ref.shape
    kv_heads, kv_seq = call.k_ref.shape[1], call.k_ref.shape[3]
    keys = (batch, kv_heads, d, kv_seq)
    wanted = dict(
        k_ref=keys,
        v_ref=keys,
        o_ref=(batch, heads, d, q_seq),
        dy_ref=(batch, heads, d, q_seq),
        bound_min=(q_seq,),
        bound_max=(q_seq,),
    )
    sinks, bias = call.sinks_ref, call.bias_ref
    scores = (batch * heads, q_seq, kv_seq)
    return dict(
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        d=d,
        q_seq=q_seq,
        kv_seq=kv_seq,
        misfit=misfit(call, wanted),
        lse_misfit=_lse_misfit(call.lse_ref.shape, (batch, heads, q_seq)),
        sinks_misfit=sinks is not None and not _fits_sinks(sinks.shape, (batch, heads)),
        bias_misfit=mask_misfit(bias, scores),
        scores=scores,
        tiled=False,
    )


def _fits_sinks(shape: tuple[int, ...], rows: tuple[int, int]) -> bool:
    return shape[:2] == rows and len(shape) in (2, 3) and 0 not in shape


def _lse_misfit(shape: tuple[int, ...], rows: tuple[int, int, int]) -> bool:
    batch, heads, q_seq = rows
    layouts = [(batch, heads, q_seq, 1)]
    if q_seq % 128 == 0:
        layouts.append((batch, heads, 128, q_seq // 128))
    return tuple(shape) not in layouts


def kernel_facts(call: SimpleNamespace) -> dict[str, Any]:
    """Facts of `backwards_attention_kernel`."""
    heads, *rows = call.q.shape
    kv_heads, *cols = call.k.shape
    q_seq, d = rows if call.tp_q else rows[::-1]
    kv_seq, _ = cols if call.tp_k else cols[::-1]
    width = call.v.shape[2]
    out = (heads, width, q_seq) if call.tp_out else (heads, q_seq, width)
    wanted = dict(
        k=(kv_heads, kv_seq, d) if call.tp_k else (kv_heads, d, kv_seq),
        v=(kv_heads, kv_seq, width),
        out=out,
        d_out=out,
        **dict.fromkeys(
            ("neg_max", "recip", "d_neg_max", "d_recip"), (heads, q_seq, 1)
        ),
        sink=(heads, 1),
    )
    scores = (heads, q_seq, kv_seq)
    masks = {name: getattr(call, name) for name in ("mask", "bias")}
    spread = [n for n, x in masks.items() if mask_misfit(x, scores)]
    return dict(
        heads=heads,
        kv_heads=kv_heads,
        misfit=misfit(call, wanted),
        spread=" and ".join(f"{n} of {tuple(masks[n].shape)}" for n in spread),
        scores=scores,
        tiled=False,
    )

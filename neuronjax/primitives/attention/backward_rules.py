"""The rules of the attention backward."""

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np

from neuronjax.primitives.contracts import Contract, Size, add

BWD, KERNEL = ("attention_bwd",), ("backwards_attention_kernel",)
UNIT_SCALE = "Backwards Attention BIR kernel only supports softmax scale = 1.0"
NO_DROPOUT = (
    "Backwards Attention BIR kernel does not currently support non zero dropout prob"
)
_ARRAYS = ("q_ref", "k_ref", "v_ref", "o_ref", "dy_ref")


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
        lse_ref=(batch, heads, 128, q_seq // 128),
    )
    return dict(
        heads=heads,
        kv_heads=kv_heads,
        d=d,
        q_seq=q_seq,
        kv_seq=kv_seq,
        misfit=_misfit(call, wanted),
        tiled=False,
    )


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
    )
    return dict(
        heads=heads, kv_heads=kv_heads, misfit=_misfit(call, wanted), tiled=False
    )


def _misfit(call: SimpleNamespace, wanted: dict[str, tuple[int, ...]]) -> str:
    found = []
    for name, shape in wanted.items():
        x = getattr(call, name)
        if x is not None and tuple(x.shape) != shape:
            found.append(f"{name} must have shape {shape}, got {tuple(x.shape)}")
    return "; ".join(found)


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
            or not jnp.issubdtype(c.q_ref.dtype, jnp.floating)
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
        "attention_bwd.q_seq",
        BWD,
        "{function}: q_seq of q_ref must fill the 128 rows of lse_ref, got {value}",
        size=Size("q_seq", lambda c: c.q_seq, multiple=128, minimum=128),
        example=_arguments(q_ref=(1, 4, 8, 100)),
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
        lambda c: {x.ndim for x in (c.q, c.k, c.v)} != {3},
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
)

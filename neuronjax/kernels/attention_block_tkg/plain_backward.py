"""The backward of the decode block from its plain form, on the stored statistics.

This is the twin that `neuronjax.plain()` runs, not a leaf: it pulls back the plain form
of each stage, and shares its straight-through roundings and clips.

With the statistics held as inputs of their own, the plain form of the heads is pulled
back once for each norm and once more: a pass settles the cotangents of the statistics
of one more norm, which then join those of what it was given:
`d rstd / dt = -rstd**3 * t / count`.
"""

from types import SimpleNamespace
from typing import Any

import jax
from jaxtyping import Array

from neuronjax.kernels.attention.decode_plain import attention_decode_bwd_plain
from neuronjax.kernels.attention_block_tkg import ranks
from neuronjax.kernels.attention_block_tkg.operands import Operands, output_names
from neuronjax.kernels.attention_block_tkg.plain import (
    attended,
    decode_config,
    heads_plain,
    kept_plain,
    out_plain,
    own,
    own_heads_plain,
    scaled_plain,
    stored_plain,
)
from neuronjax.kernels.dtypes import is_differentiable

# The operands of the heads, and the order in which the norms are settled.
_HEADS = (
    "x x_gain w_qkv bias_qkv q_pre_gain k_pre_gain cos sin q_post_gain k_post_gain"
).split()
_SETTLED = (
    ("q_post_rstd", "k_post_rstd"),
    ("q_pre_rstd", "k_pre_rstd"),
    ("rstd",),
)


def attention_block_bwd_plain(
    *args: Array | None, name: str, live: tuple[str, ...], **config: Any
) -> tuple[Array, ...]:
    """The same as `attention_block_bwd`."""
    count, c = len(Operands._fields), SimpleNamespace(**config)
    o, rest, names = Operands(*args[:count]), args[count:], output_names(**config)
    outs: dict[str, Any] = dict(zip(names, rest[: len(names)], strict=True))
    pulled = {
        key: ranks.zeros_like(outs[key]) if ct is None else ct
        for key, ct in zip(names, rest[len(names) :], strict=True)
    }
    heads, pull = jax.vjp(*_of_statistics(o, c, outs))
    grads = _behind_heads(heads, o, outs, pulled, c)
    d_heads = {key: grads.pop(key).astype(heads[key].dtype) for key in "qkv"}
    grads |= _through_norms(heads["inputs"], d_heads, pull, outs, pulled, c)
    return tuple(grads[key].astype(getattr(o, key).dtype) for key in live)


def _of_statistics(o, c, outs):
    """The heads as a function of their operands and of the statistics."""
    floats = {key: getattr(o, key) for key in _HEADS}
    live = {
        key: x
        for key, x in floats.items()
        if x is not None and is_differentiable(x.dtype)
    }
    stored = {key: x for key, x in outs.items() if key.endswith("rstd")}

    def heads(live, stored):
        found = heads_plain(o._replace(**live), c, stored)
        return {key: found[key] for key in ("q", "k", "v", "inputs")}

    return heads, live, stored


def _through_norms(inputs, d_heads, pull, outs, pulled, c):
    """The cotangents of the operands of the heads."""
    d_inputs = jax.tree.map(lambda t: ranks.zeros_like(t), inputs)
    for keys in ([key for key in keys if key in inputs] for keys in _SETTLED):
        d_stored = pull(dict(d_heads, inputs=d_inputs))[1] if keys else {}
        for key in keys:
            t, count = inputs[key], inputs[key].shape[-1]
            count = (c.hidden_actual or count) if key == "rstd" else count
            total = d_stored[key] + pulled[key]
            d_inputs[key] = d_inputs[key] - total * outs[key] ** 3 * t / count
    return pull(dict(d_heads, inputs=d_inputs))[0]


def _behind_heads(heads, o, outs, pulled, c):
    """The cotangents of query, key and value heads, and of what lies behind them."""
    q, k, v = (heads[key] for key in "qkv")

    def keep(k, v):
        k, v = own(k, 0, c), own(v, 0, c)
        return kept_plain(k, o.k_scale, o, c), kept_plain(v, o.v_scale, o, c)

    def store(k, v, k_cache, v_cache):
        return stored_plain(k, v, k_cache, v_cache, o, c)

    (new_k, new_v), unkeep = jax.vjp(keep, k, v)
    _, unstore = jax.vjp(store, new_k, new_v, o.k_cache, o.v_cache)
    dk, dv, *d_caches = unstore((pulled["k_out"], pulled["v_out"]))
    if c.skip_attention:
        grads = _skipped(q, o, pulled, c)
    else:
        grads = _attention(q, new_k, new_v, o, outs, pulled, c)
        dk, dv = dk + grads["k"], dv + grads["v"]
    for key, extra in zip(("k_cache", "v_cache"), d_caches, strict=True):
        if is_differentiable(extra.dtype):
            grads[key] = grads[key] + extra if key in grads else extra
    return dict(grads, **dict(zip("kv", unkeep((dk, dv)), strict=True)))


def _out(o, c, heads, run, d_out):
    """The cotangents of the heads in front of `run`, of weight and bias."""
    more = {} if o.w_out is None else dict(w_out=o.w_out, bias_out=o.bias_out)
    live = {k: x for k, x in more.items() if x is not None}
    live = {k: x for k, x in live.items() if is_differentiable(x.dtype)}

    def project(heads, live):
        w_out, bias = (live.get(k, getattr(o, k)) for k in ("w_out", "bias_out"))
        return out_plain(run(heads), w_out, bias, o, c)

    d_heads, grads = jax.vjp(project, heads, live)[1](d_out)
    return d_heads, grads


def _skipped(q, o, pulled, c):
    def run(q):
        return q.astype(o.x.dtype).swapaxes(2, 3)

    dq, grads = _out(o, c, q, run, pulled["x_out"])
    return dict(grads, q=dq)


def _attention(q, k, v, o, outs, pulled, c):
    d_heads, grads = _out(
        o, c, outs["attention"], lambda a: own_heads_plain(a, c), pulled["x_out"]
    )
    floats = {key: getattr(o, key) for key in ("softmax_scale", "sink")}
    live = {key: x for key, x in floats.items() if x is not None}

    def spread(q, live):
        scaled = scaled_plain(q, live.get("softmax_scale"), o, c)
        found = attended(scaled, k, v, o._replace(**live), c)
        return found[0], found[9]

    (rows, sink), unspread = jax.vjp(spread, q, live)
    found = attended(scaled_plain(q, o.softmax_scale, o, c), k, v, o, c)
    operands = (rows, *found[1:9], sink, *found[10:])
    held = [outs[key] for key in ("attention", "neg_max", "recip")]
    d_held = (d_heads + pulled["attention"], pulled["neg_max"], pulled["recip"])
    back = iter(
        attention_decode_bwd_plain(*operands, *held, *d_held, **decode_config(o, c))
    )
    dq, dk, dv = (next(back) for _ in range(3))
    for key in ("k_cache", "v_cache"):
        d_cache = next(back).reshape(getattr(o, key).shape)
        if is_differentiable(getattr(o, key).dtype):
            grads[key] = d_cache
    d_sink = None if sink is None else next(back)
    dq, more = unspread((dq, d_sink))
    return dict(grads, **more, q=dq, k=dk, v=dv)

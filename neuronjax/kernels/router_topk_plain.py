"""The router written straight from its equations: what runs under `plain()`."""

from typing import Any

import jax
import jax.numpy as jnp

from neuronjax.kernels.dtypes import accumulator


def _rows(x: jax.Array, w: jax.Array, form: str) -> tuple[jax.Array, jax.Array]:
    acc = accumulator(x.dtype, w.dtype)
    x, w = x.astype(acc), w.astype(acc)
    if form == "tiled":
        return x.reshape(-1, x.shape[-1]).T, w.reshape(-1, w.shape[-1])
    return (x if form == "TH" else x.T), w


def _activation(z: jax.Array, act: str) -> jax.Array:
    if act == "SIGMOID":
        return 1 / (1 + jnp.exp(-z))
    e = jnp.exp(z - jax.lax.stop_gradient(z.max(-1, keepdims=True)))
    return e / e.sum(-1, keepdims=True)


def router_topk_plain(
    x,
    w,
    w_bias,
    selection_bias,
    token_mask,
    *,
    name: str,
    form: str,
    k: int,
    act: str,
    pre_norm: bool,
    norm_topk: bool,
    is_tiled: bool = False,
    **hints: Any,
) -> tuple[jax.Array, ...]:
    """What `router_topk_fwd` returns: sort, gather, activate, one-hot product."""
    rows, weight = _rows(x, w, form)
    keep = jnp.ones(rows.shape[0], bool) if token_mask is None else token_mask.ravel()
    keep = keep[:, None]
    logits = jnp.where(keep, rows, 0) @ weight
    if w_bias is not None:
        logits = logits + w_bias.ravel().astype(logits.dtype)
    index = _selection(logits, selection_bias, k, act)
    affinities, topk = _affinities(logits, index, act, pre_norm, norm_topk)
    logits, affinities, topk = (
        jnp.where(keep, z, 0) for z in (logits, affinities, topk)
    )
    index = jnp.where(keep, index, jnp.int32(logits.shape[1]))
    outs = logits, index, affinities, topk
    if not is_tiled:
        return outs
    lead = min(len(keep), 128)
    return tuple(z.reshape(lead, len(keep) // lead, -1) for z in outs)


def _selection(logits, selection_bias, k, act):
    keys = jax.lax.stop_gradient(logits)
    if selection_bias is not None:
        bias = jax.lax.stop_gradient(selection_bias).ravel()
        keys = _activation(keys, act) + bias.astype(keys.dtype)
    return jnp.argsort(-keys, axis=-1, stable=True)[:, :k].astype(jnp.int32)


def _affinities(logits, index, act, pre_norm, norm_topk):
    """All affinities and those at `index`; an index past the experts names none."""
    one_hot = jax.nn.one_hot(index, logits.shape[1], dtype=logits.dtype)
    scores = _activation(logits, act)
    if pre_norm:
        topk = jnp.einsum("te,tke->tk", scores, one_hot)
        topk = topk / topk.sum(-1, keepdims=True) if norm_topk else topk
    else:
        topk = _activation(jnp.einsum("te,tke->tk", logits, one_hot), act)
    if pre_norm and not norm_topk:
        return scores, topk
    return jnp.einsum("tk,tke->te", topk, one_hot), topk


def router_topk_plain_bwd(
    x,
    w,
    w_bias,
    token_mask,
    logits,
    index,
    *cotangents,
    name: str,
    form: str,
    act: str,
    pre_norm: bool,
    norm_topk: bool,
    has_bias: bool,
    **settings: Any,
):
    """What `router_topk_bwd` returns: each step pulled back in turn."""
    rows, weight = _rows(x, w, form)
    keep = jnp.ones(rows.shape[0], bool) if token_mask is None else token_mask.ravel()
    keep = keep[:, None]
    logits, index, *cotangents = (
        None if z is None else z.reshape(len(keep), -1)
        for z in (logits, index, *cotangents)
    )
    index = jnp.minimum(index, jnp.int32(logits.shape[1] - 1))

    def outputs(logits):
        return logits, *_affinities(logits, index, act, pre_norm, norm_topk)

    outs, pull = jax.vjp(outputs, logits)
    given = zip(outs, cotangents, strict=True)
    seeds = [
        jnp.zeros_like(o) if c is None else jnp.where(keep, c, 0) for o, c in given
    ]
    (total,) = pull(tuple(seeds))
    d_rows, dw = total @ weight.T, jnp.where(keep, rows, 0).T @ total
    dx = d_rows if form == "TH" else d_rows.T
    grads = [dx.reshape(x.shape).astype(x.dtype), dw.reshape(w.shape).astype(w.dtype)]
    if has_bias:
        grads.append(total.sum(0).reshape(w_bias.shape).astype(w_bias.dtype))
    return tuple(grads)

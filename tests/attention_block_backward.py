"""The gradients of the decode block's operands in float64, from its equations.

Each stage is undone by hand, in NumPy; a rounding passes a cotangent on and a clip does
not where it clips.
"""

import numpy as np

from tests.attention_block_case import (
    head,
    kept,
    norm,
    product,
    slots,
    wide,
)

CLIP = 240


def gradients(arrays, options, cotangents):
    """By argument name, those of `sum(out * cotangent)` over the three outputs."""
    a = {k: wide(x) for k, x in arrays.items()}
    grads = {k: np.zeros(x.shape) for k, x in a.items()}
    width, (batch, seq, hidden) = a["V_cache"].shape[-1], a["X"].shape
    count = options.get("X_hidden_dim_actual") or hidden
    settings = a.get("rmsnorm_X_gamma"), options.get("rmsnorm_X_eps"), count
    is_normed = options.get("rmsnorm_X_enabled")
    rows = norm(a["X"], *settings) if is_normed else a["X"]
    y = product(rows, a, arrays, options, "qkv", width)
    raw = y.reshape(batch, seq, -1, width)
    raw = raw[:, :, :-2], raw[:, :, -2:-1], raw[:, :, -1:]
    q, k = (head(t, a, options, kind) for t, kind in zip(raw[:2], "QK", strict=True))
    scales = a.get("k_scale"), a.get("v_scale")
    new = [kept(t, s, options) for t, s in zip((k, raw[2]), scales, strict=True)]
    d_new = _stored(new, a, options, cotangents[1:], grads)
    if options.get("skip_attention"):
        out = q.transpose(0, 2, 3, 1)
        dq = _projected(out, a, arrays, options, cotangents[0], grads)
        dq = dq.transpose(0, 3, 1, 2)
    else:
        given = (a, arrays, options, cotangents[0])
        dq = _attention(q, new[0], new[1], *given, d_new, grads)
    d_new = [
        d if s is None else d * s[0, 0] * (abs(t * s[0, 0]) <= CLIP)
        for d, t, s in zip(d_new, (k, raw[2]), scales, strict=True)
    ]
    dq, dk = (
        _unheaded(d, t, a, options, kind, grads)
        for d, t, kind in zip((dq, d_new[0]), raw[:2], "QK", strict=True)
    )
    dy = np.concatenate([dq, dk, d_new[1]], 2).reshape(batch, seq, -1)
    d_rows = _unproduct(dy, rows, a, arrays, options, "qkv", width, grads)
    if is_normed:
        d_rows = _unnormed(d_rows, a["X"], *settings, grads, "rmsnorm_X_gamma")
    return grads | dict(X=d_rows)


def _unnormed(d, t, gain, eps, count, grads, name):
    """The cotangent of what a norm was given; that of its gain is added."""
    eps = 1e-6 if eps is None else eps
    r = 1 / np.sqrt((t**2).sum(-1, keepdims=True) / count + eps)
    if gain is not None:
        grads[name] += (d * t * r).reshape(-1, t.shape[-1]).sum(0)
        d = d * gain[0]
    return r * d - t * r**3 * (d * t).sum(-1, keepdims=True) / count


def _unheaded(d, raw, a, options, kind, grads):
    """Norm, rotation, norm of `[B, S, heads, D]`, undone."""
    sides, turned = {}, raw
    for side in ("pre", "post"):
        name = f"rmsnorm_QK_{side}_rope_W_{kind}"
        eps = options.get(f"rmsnorm_QK_{side}_rope_eps")
        sides[side] = a.get(name), eps, raw.shape[-1], grads, name
    pre = options.get("rmsnorm_QK_pre_rope_enabled")
    normed = norm(raw, *sides["pre"][:2]) if pre else raw
    turned = head(raw, a, options | dict(rmsnorm_QK_post_rope_enabled=False), kind)
    if options.get("rmsnorm_QK_post_rope_enabled"):
        d = _unnormed(d, turned, *sides["post"])
    if "cos" in a and "sin" in a:
        d = _unturned(d, normed, a, options, grads)
    return _unnormed(d, raw, *sides["pre"]) if pre else d


def _unturned(d, t, a, options, grads):
    found, half = np.zeros_like(d), d.shape[-1] // 2
    for i in range(half):
        first, second = i, i + half
        if not options.get("rope_contiguous_layout", True):
            first, second = 2 * i, 2 * i + 1
        cos, sin = a["cos"][i][:, :, None], a["sin"][i][:, :, None]
        da, db, x, y = d[..., first], d[..., second], t[..., first], t[..., second]
        found[..., first] = da * cos + db * sin
        found[..., second] = db * cos - da * sin
        grads["cos"][i] += (da * x + db * y).sum(-1)
        grads["sin"][i] += (db * x - da * y).sum(-1)
    return found


def _unproduct(dy, rows, a, arrays, options, side, width, grads):
    """The cotangent of the rows; those of weight and bias are added."""
    kind, w = options.get(f"quantization_type_{side}", "NONE"), a[f"W_{side}"]
    if f"bias_{side}" in a:
        grads[f"bias_{side}"] += dy.reshape(-1, w.shape[1]).sum(0)
    if kind == "NONE":
        flat = rows.reshape(-1, w.shape[0]), dy.reshape(-1, w.shape[1])
        grads[f"W_{side}"] += flat[0].T @ flat[1]
        return dy @ w.T
    scale = a[f"weight_dequant_scale_{side}"][0]
    if kind == "ROW":
        return (dy * scale) @ w.T
    if side == "qkv":
        heads = w.shape[1] // width - 2
        scale = np.repeat(scale[[*[0] * heads, 1, 2]], width)
    # What divides the rows multiplies the product.
    inside = abs(rows / a[f"input_dequant_scale_{side}"][0, 0]) <= CLIP
    return inside * ((dy * scale) @ w.T)


def _projected(heads, a, arrays, options, d, grads):
    """The cotangent of heads `[B, N, D, S]` from that of `X_out`."""
    batch, count, width, seq = heads.shape
    if "W_out" not in a:
        if options.get("out_in_sb"):
            return d.reshape(width, batch, count, seq).transpose(1, 2, 0, 3)
        return d
    if options.get("transposed_out"):
        d = d.transpose(3, 1, 0, 2).reshape(batch * seq, -1)
    rows = heads.transpose(0, 3, 1, 2).reshape(batch * seq, count * width)
    d_rows = _unproduct(d, rows, a, arrays, options, "out", width, grads)
    return d_rows.reshape(batch, seq, count, width).transpose(0, 2, 3, 1)


def _stored(new, a, options, cotangents, grads):
    """The cotangents of new keys and values; those of the caches are added."""
    found = [np.zeros_like(t) for t in new]
    coded = options.get("fp8") and options.get("round_activations", True)
    if not options.get("update_cache", True):
        if not coded:
            found[0][:, :, 0] = cotangents[0].transpose(1, 2, 0)
            found[1][:] = cotangents[1].transpose(0, 2, 1, 3)
        return found
    starts = np.asarray(a["kv_cache_update_idx"])[:, 0].tolist()
    for name, d_new, cotangent in zip("KV", found, cotangents, strict=True):
        if coded:
            continue
        d_cache = cotangent.copy()
        # The last to write a slot has its cotangent: from the last on, each takes all.
        for b in reversed(range(len(starts))):
            rows = _rows(d_cache, b, a, options, name)
            if 0 <= starts[b] <= len(rows) - d_new.shape[1]:
                slots = slice(starts[b], starts[b] + d_new.shape[1])
                d_new[b, :, 0] = rows[slots]
                rows[slots] = 0
        grads[f"{name}_cache"] += d_cache
    return found


def _rows(cache, b, a, options, name):
    """The slots that an update index counts, `[slots, D]`, as a view."""
    if "active_blocks_table" in a:
        return cache.reshape(-1, cache.shape[-1])
    rows = cache[b, 0] if cache.ndim == 4 else cache[b]
    return rows.T if name == "K" and options.get("K_cache_transposed") else rows


def _add_slots(grads, b, d, a, options, name):
    """Adds the cotangents of a sequence's first visible slots to its cache's."""
    whole = grads[f"{name}_cache"]
    if "active_blocks_table" not in a:
        _rows(whole, b, a, options, name)[: len(d)] += d
        return
    for slot, row in enumerate(d):
        block, offset = divmod(slot, whole.shape[1])
        whole[a["active_blocks_table"][b, block], offset] += row


def _attention(q, k, v, a, arrays, options, d_out, d_new, grads):
    """The cotangent of the queries; others are added where they belong."""
    batch, seq, heads, width = q.shape
    old, scale = a["attention_mask"].shape[0] - seq, options.get("softmax_scale")
    scale = width**-0.5 if scale is None else scale
    scale = float(a["softmax_scale"]) if "softmax_scale" in a else scale
    out, saved = np.zeros((batch, heads, width, seq)), {}
    for b, h, t in np.ndindex(batch, heads, seq):
        keys, values = (
            np.concatenate([slots(a[f"{n}_cache"], b, a, options, n == "K")[:old], x])
            for n, x in (("K", k[b, :, 0]), ("V", v[b, :, 0]))
        )
        seen = a["attention_mask"][:, b, h, t] != 0
        e = np.where(seen, scale * keys @ q[b, t, h], -np.inf)
        sink = a["sink"][h, 0] if "sink" in a else -np.inf
        top = max(e.max(), sink)
        e, sink = (np.exp(x - top) if top > -np.inf else 0 * seen for x in (e, sink))
        total = e.sum() + np.sum(sink)
        p, rest = (e / total, np.sum(sink) / total) if np.any(total) else (e * 0.0, 0.0)
        out[b, h, :, t] = p @ values
        saved[b, h, t] = keys, values, p, rest
    d_heads = _projected(out, a, arrays, options, d_out, grads)
    dq = np.zeros_like(q)
    for (b, h, t), (keys, values, p, rest) in saved.items():
        g = d_heads[b, h, :, t]
        mean = p @ (values @ g)
        dz = p * (values @ g - mean)
        dq[b, t, h] = scale * dz @ keys
        dk, dv = scale * np.outer(dz, q[b, t, h]), np.outer(p, g)
        if "sink" in a:
            grads["sink"][h] -= rest * mean
        if "softmax_scale" in a:
            grads["softmax_scale"] += dz @ keys @ q[b, t, h]
        for name, d, new in (("K", dk, d_new[0]), ("V", dv, d_new[1])):
            new[b, :, 0] += d[old:]
            _add_slots(grads, b, d[:old], a, options, name)
    return dq

"""Operands, option combinations and the float64 reference of the decode block's tests.

The reference follows the vendor's stages one by one, token by token, in NumPy.
"""

import jax.numpy as jnp
import ml_dtypes
import numpy as np

import neuronjax
from tests.arrays import array

E4M3 = ml_dtypes.float8_e4m3
STAGES = (
    "rmsnorm_X_enabled",
    "rmsnorm_QK_pre_rope_enabled",
    "rmsnorm_QK_post_rope_enabled",
)


def sizes(batch=2, seq=2, heads=2, width=4, hidden=6, slots=9, visible=7, block=0):
    """One call's sizes; `block` is the length of a cache block, 0 for a flat cache."""
    return dict(
        B=batch,
        S=seq,
        N=heads,
        D=width,
        H=hidden,
        slots=slots,
        ctx=visible,
        block=block,
    )


def operands(n, options, *, dtype="float32", seed=0, without=()):
    """Every array that the options use, by argument name."""
    rng = np.random.default_rng(seed)
    columns = (n["N"] + 2) * n["D"]
    shapes = dict(
        X=(n["B"], n["S"], n["H"]),
        W_qkv=(n["H"], columns),
        bias_qkv=(1, columns),
        rmsnorm_X_gamma=(1, n["H"]),
        cos=(n["D"] // 2, n["B"], n["S"]),
        sin=(n["D"] // 2, n["B"], n["S"]),
        sink=(n["N"], 1),
        W_out=(n["N"] * n["D"], n["H"]),
        bias_out=(1, n["H"]),
    )
    for side in ("pre", "post"):
        for kind in "QK":
            shapes[f"rmsnorm_QK_{side}_rope_W_{kind}"] = (1, n["D"])
    shapes |= _cache_shapes(n, options)
    named = {k: array(rng.standard_normal(s), dtype) for k, s in shapes.items()}
    if options.get("X_hidden_dim_actual"):
        named["X"] = named["X"].at[..., options["X_hidden_dim_actual"] :].set(0)
    named |= _integers(n, rng) | _scales(n, options, rng)
    for name in ("W_qkv", "W_out"):
        kind = options.get(f"quantization_type_{name[2:]}", "NONE")
        if kind != "NONE" and options.get("fp8_weights", True):
            named[name] = (8 * named[name]).astype(E4M3)
    if options.get("fp8") and options.get("round_activations", True):
        for name in ("K_cache", "V_cache"):
            named[name] = (8 * named[name]).astype(E4M3)
    return {k: x for k, x in named.items() if k not in _unused(options, without)}


def _cache_shapes(n, options):
    if n["block"]:
        shape = (n["slots"], n["block"], n["D"])
        return dict(K_cache=shape, V_cache=shape)
    head = (1,) if options.get("head_axis") else ()
    rows = n["slots"], n["D"]
    keys = rows[::-1] if options.get("K_cache_transposed") else rows
    return dict(K_cache=(n["B"], *head, *keys), V_cache=(n["B"], *head, *rows))


def _integers(n, rng):
    mask = rng.integers(0, 2, (n["ctx"], n["B"], n["N"], n["S"]))
    mask[-n["S"] :] = np.tri(n["S"], dtype=int).T[:, None, None]
    found = dict(attention_mask=jnp.asarray(mask, jnp.int32))
    if not n["block"]:
        start = rng.integers(0, n["slots"] - n["S"] + 1, (n["B"], 1))
        return found | dict(kv_cache_update_idx=jnp.asarray(start, jnp.uint32))
    blocks = rng.permutation(n["slots"])[: n["B"] * n["ctx"] // n["block"]]
    table = blocks.reshape(n["B"], -1)
    # Apart by more than a write, the last one over the end of a block.
    start = np.arange(n["B"])[:, None] * (n["S"] + 1) + n["block"] - 1
    return found | dict(
        active_blocks_table=jnp.asarray(table, jnp.uint32),
        kv_cache_update_idx=jnp.asarray(start, jnp.uint32),
    )


def _scales(n, options, rng):
    found = {}
    for side, columns in (("qkv", (n["N"] + 2) * n["D"]), ("out", n["H"])):
        kind = options.get(f"quantization_type_{side}", "NONE")
        if kind == "NONE":
            continue
        width = columns if kind == "ROW" else 3 if side == "qkv" else 1
        scale = rng.uniform(0.05, 0.15, (1, width))
        scale = np.repeat(scale, 128, 0) if options.get("scale_rows") else scale
        found[f"weight_dequant_scale_{side}"] = jnp.asarray(scale, jnp.float32)
        if kind == "STATIC":
            one = jnp.full((1, 1), 0.02, jnp.float32)
            found[f"input_dequant_scale_{side}"] = one
    if options.get("fp8"):
        # Large enough to clip some.
        found["k_scale"] = jnp.full((128, 1), 90.0, jnp.float32)
        found["v_scale"] = jnp.full((1, 1), 110.0, jnp.float32)
    return found


def _unused(options, without):
    names = set(without)
    for side, stage in zip(("X", "QK_pre_rope", "QK_post_rope"), STAGES, strict=True):
        if not options.get(stage):
            names |= {"rmsnorm_X_gamma"} if side == "X" else set()
            names |= {f"rmsnorm_{side}_W_{kind}" for kind in "QK"}
    if "W_out" in names:
        names |= {"bias_out", "weight_dequant_scale_out", "input_dequant_scale_out"}
    return names


# What only this file reads of the options.
_OURS = ("fp8", "fp8_weights", "head_axis", "scale_rows")


def call(arrays, options):
    """`attention_block_tkg` on a combination."""
    given = {k: x for k, x in options.items() if k not in _OURS}
    return neuronjax.attention_block_tkg(**arrays, **given)


def reference(arrays, options):
    """`(X_out, K_out, V_out)` in float64."""
    a = {k: wide(x) for k, x in arrays.items()}
    x = a["X"]
    batch, seq, hidden = x.shape
    width = a["V_cache"].shape[-1]
    rows = x
    if options.get("rmsnorm_X_enabled"):
        count = options.get("X_hidden_dim_actual") or hidden
        rows = norm(x, a.get("rmsnorm_X_gamma"), options.get("rmsnorm_X_eps"), count)
    y = product(rows, a, arrays, options, "qkv", width)
    heads = y.reshape(batch, seq, -1, width)
    q, k, v = heads[:, :, :-2], heads[:, :, -2:-1], heads[:, :, -1:]
    q, k = (head(t, a, options, kind) for t, kind in ((q, "Q"), (k, "K")))
    k, v = kept(k, a.get("k_scale"), options), kept(v, a.get("v_scale"), options)
    if options.get("skip_attention"):
        out = q.transpose(0, 2, 3, 1)
    else:
        out = _attention(q, k, v, a, options)
    x_out = _projected(out, a, arrays, options)
    if not options.get("update_cache", True):
        return x_out, k[:, :, 0].transpose(2, 0, 1), v.transpose(0, 2, 1, 3)
    turned = bool(options.get("K_cache_transposed"))
    caches = [
        _written(np.asarray(arrays[f"{name}_cache"]), new, a, flip)
        for name, new, flip in (("K", k, turned), ("V", v, False))
    ]
    return x_out, *caches


def wide(x):
    x = np.asarray(x)
    with np.errstate(invalid="ignore"):  # a signalling NaN becomes a quiet one
        return x.astype(np.float64) if x.dtype.kind in "fV" else x


def norm(t, gain, eps, count=None):
    mean = (t**2).sum(-1, keepdims=True) / (count or t.shape[-1])
    t = t / np.sqrt(mean + (1e-6 if eps is None else eps))
    return t if gain is None else t * gain[0]


def _fp8(x):
    return np.clip(x, -240, 240).astype(E4M3).astype(np.float64)


def product(rows, a, arrays, options, side, width):
    """Rows times the weight, dequantized, plus the bias."""
    kind, w = options.get(f"quantization_type_{side}", "NONE"), a[f"W_{side}"]
    scale = a.get(f"weight_dequant_scale_{side}")
    if kind == "STATIC":
        one = a[f"input_dequant_scale_{side}"][0, 0]
        rows = np.clip(rows / one, -240, 240)
        rows = _fp8(rows) if arrays[f"W_{side}"].dtype == E4M3 else rows
        per = (
            scale[0]
            if side == "out"
            else np.repeat(scale[0][[*[0] * (w.shape[1] // width - 2), 1, 2]], width)
        )
        y = rows @ w * per * one
    else:
        y = rows @ w * (scale[0] if kind == "ROW" else 1)
    bias = a.get(f"bias_{side}")
    return y if bias is None else y + bias[0]


def head(t, a, options, kind):
    """Norm, rotation, norm of `[B, S, heads, D]`."""
    if options.get("rmsnorm_QK_pre_rope_enabled"):
        gain = a.get(f"rmsnorm_QK_pre_rope_W_{kind}")
        t = norm(t, gain, options.get("rmsnorm_QK_pre_rope_eps"))
    if "cos" in a and "sin" in a:
        turned, half = t.copy(), t.shape[-1] // 2
        for i in range(half):
            first, second = i, i + half
            if not options.get("rope_contiguous_layout", True):
                first, second = 2 * i, 2 * i + 1
            cos, sin = a["cos"][i][:, :, None], a["sin"][i][:, :, None]
            turned[..., first] = t[..., first] * cos - t[..., second] * sin
            turned[..., second] = t[..., first] * sin + t[..., second] * cos
        t = turned
    if options.get("rmsnorm_QK_post_rope_enabled"):
        gain = a.get(f"rmsnorm_QK_post_rope_W_{kind}")
        t = norm(t, gain, options.get("rmsnorm_QK_post_rope_eps"))
    return t


def kept(t, scale, options):
    if scale is None:
        return t
    t = np.clip(t * scale[0, 0], -240, 240)
    return _fp8(t) if options.get("round_activations", True) else t


def slots(cache, b, a, options, key):
    """The slots `[S_ctx, D]` of a sequence, the new tokens not yet among them."""
    if "active_blocks_table" in a:
        return np.concatenate([cache[i] for i in a["active_blocks_table"][b]])
    rows = cache[b, 0] if cache.ndim == 4 else cache[b]
    return rows.T if key and options.get("K_cache_transposed") else rows


def _attention(q, k, v, a, options):
    batch, seq, heads, width = q.shape
    visible, scale = a["attention_mask"].shape[0], options.get("softmax_scale")
    scale = width**-0.5 if scale is None else scale
    scale = float(a["softmax_scale"]) if "softmax_scale" in a else scale
    out = np.zeros((batch, heads, width, seq))
    for b, h, t in np.ndindex(batch, heads, seq):
        keys = slots(a["K_cache"], b, a, options, True)[:visible].copy()
        values = slots(a["V_cache"], b, a, options, False)[:visible].copy()
        keys[visible - seq :], values[visible - seq :] = k[b, :, 0], v[b, :, 0]
        seen = a["attention_mask"][:, b, h, t] != 0
        z = keys[seen] @ (scale * q[b, t, h])
        z = np.append(z, a["sink"][h]) if "sink" in a else z
        if z.size:
            p = np.exp(z - z.max())
            out[b, h, :, t] = (p / p.sum())[: seen.sum()] @ values[seen]
    return out


def _projected(heads, a, arrays, options):
    batch, count, width, seq = heads.shape
    if "W_out" not in a:
        first = heads.transpose(2, 0, 1, 3).reshape(width, -1)
        return first if options.get("out_in_sb") else heads
    rows = heads.transpose(0, 3, 1, 2).reshape(batch * seq, count * width)
    out = product(rows, a, arrays, options, "out", width)
    if not options.get("transposed_out"):
        return out
    cores = options.get("lnc") or (2 if out.shape[1] % 256 == 0 else 1)
    laid = out.reshape(batch * seq, cores, 128, -1)
    return laid.transpose(2, 1, 3, 0)


def _written(cache, new, a, turned):
    """The cache with each token that fits in its slot; the last one to come stays."""
    held, wide = cache.copy(), new[:, :, 0]
    for b, (start,) in enumerate(np.asarray(a["kv_cache_update_idx"]).tolist()):
        if "active_blocks_table" in a:
            rows = held.reshape(-1, held.shape[-1])
        else:
            rows = held[b, 0] if held.ndim == 4 else held[b]
            rows = rows.T if turned else rows
        if 0 <= start <= len(rows) - wide.shape[1]:
            rows[start : start + wide.shape[1]] = wide[b].astype(cache.dtype)
    return held


NORMED = dict.fromkeys(STAGES, True)
BLOCKS = sizes(slots=8, visible=8, block=4)
# Combinations of options, in sizes of their own: (sizes, options, absent operands).
COMBINATIONS = {
    "bare": (sizes(), {}, ("bias_qkv", "cos", "sink", "W_out")),
    "one token": (sizes(seq=1, heads=1), {}, ("sink",)),
    "every norm": (sizes(), NORMED, ()),
    "norms without gain": (
        sizes(heads=3, seq=3),
        NORMED,
        [f"rmsnorm_QK_{s}_rope_W_{k}" for s in ("pre", "post") for k in "QK"],
    ),
    "one gain": (sizes(), NORMED, ("rmsnorm_X_gamma", "rmsnorm_QK_pre_rope_W_K")),
    "epsilons": (
        sizes(),
        NORMED
        | dict(
            rmsnorm_X_eps=0.1, rmsnorm_QK_pre_rope_eps=0.2, rmsnorm_QK_post_rope_eps=0
        ),
        (),
    ),
    "interleaved": (sizes(width=6), dict(rope_contiguous_layout=False), ()),
    "no rotation, odd width": (sizes(width=5), {}, ("sin", "cos")),
    "one table": (sizes(), {}, ("sin",)),
    "keys transposed": (sizes(), dict(K_cache_transposed=True, head_axis=True), ()),
    "head axis": (sizes(), dict(head_axis=True), ("bias_out",)),
    "all slots": (sizes(slots=7, visible=7), {}, ()),
    "new tokens alone": (sizes(slots=5, visible=2), {}, ()),
    "blocks": (BLOCKS, dict(rmsnorm_X_enabled=True), ()),
    "blocks, no update": (BLOCKS, dict(update_cache=False), ("sink",)),
    "no update": (sizes(), dict(update_cache=False, K_cache_transposed=True), ()),
    "hidden_actual": (
        sizes(),
        dict(rmsnorm_X_enabled=True, X_hidden_dim_actual=4),
        ("rmsnorm_X_gamma",),
    ),
    "on-chip output": (sizes(), dict(out_in_sb=True), ("W_out",)),
    "on-chip projection": (sizes(), dict(out_in_sb=True), ()),
    "transposed": (sizes(hidden=256), dict(transposed_out=True), ()),
    "transposed, one core": (sizes(hidden=256), dict(transposed_out=True, lnc=1), ()),
    "no scale": (sizes(), dict(softmax_scale=0), ()),
    "scale": (sizes(), dict(softmax_scale=0.7), ()),
    "skipped": (sizes(), dict(skip_attention=True) | NORMED, ("attention_mask",)),
    "skipped heads": (
        sizes(),
        dict(skip_attention=True, update_cache=False),
        ("W_out",),
    ),
    "row": (
        sizes(),
        dict(quantization_type_qkv="ROW", quantization_type_out="ROW", scale_rows=True),
        (),
    ),
    "row, wide weights": (
        sizes(),
        dict(quantization_type_qkv="ROW", fp8_weights=False),
        (),
    ),
    "static": (
        sizes(heads=4),
        dict(quantization_type_qkv="STATIC", quantization_type_out="STATIC"),
        (),
    ),
    "static, wide weights": (
        sizes(),
        dict(
            quantization_type_qkv="STATIC",
            quantization_type_out="STATIC",
            fp8_weights=False,
        ),
        (),
    ),
    "fp8": (sizes(), dict(fp8=True, softmax_scale=1e-3), ()),
    "fp8, no update": (
        sizes(),
        dict(fp8=True, softmax_scale=1e-3, update_cache=False),
        (),
    ),
    "fp8 blocks": (BLOCKS, dict(fp8=True, softmax_scale=1e-3), ()),
    "clipped": (
        sizes(),
        dict(fp8=True, softmax_scale=1e-3, round_activations=False),
        (),
    ),
}


def combination(name, dtype="float32", seed=0):
    """The arrays and the options of one of the combinations."""
    n, options, without = COMBINATIONS[name]
    arrays = operands(n, options, dtype=dtype, seed=seed, without=without)
    return arrays, options

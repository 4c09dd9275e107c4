"""Operands, meshes and the float64 reference of the decode transformer's tests.

The reference goes layer by layer, token by token and head by head through the
equations, in NumPy.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import PartitionSpec as P

import neuronjax
from neuronjax.sharding.mesh import make_mesh
from tests.arrays import array

E4M3 = ml_dtypes.float8_e4m3
PER_LAYER = (
    "W_qkvs W_outs W_gates W_ups W_downs W_gamma_qkvs W_gamma_mlps K_caches V_caches "
    "W_gate_scales W_up_scales W_down_scales"
).split()
# How the whole model's arrays lie over the ranks ("tensor") and their cores ("lnc").
SPECS = dict(
    X=P(),
    W_qkvs=P(None, "tensor"),
    W_outs=P("tensor", "lnc"),
    W_gates=P(None, ("tensor", "lnc")),
    W_ups=P(None, ("tensor", "lnc")),
    W_downs=P(("tensor", "lnc")),
    W_gamma_qkvs=P(),
    W_gamma_mlps=P(),
    K_caches=P(None, "tensor"),
    V_caches=P(None, "tensor"),
    RoPE_cos=P(),
    RoPE_sin=P(),
    mask_cache=P(None, None, "tensor"),
    mask_active=P(None, None, "tensor"),
    position_ids=P(),
    W_gate_scales=P(None, ("tensor", "lnc")),
    W_up_scales=P(None, ("tensor", "lnc")),
    W_down_scales=P(),
)


def sizes(**changes: Any) -> dict[str, Any]:
    """The whole model's sizes: `G` key/value heads, `n` query heads for each."""
    found: dict[str, Any] = dict(
        L=2, B=2, S=2, H=8, G=2, n=2, D=4, I=8, slots=9, ctx=7, quantized=()
    )
    return found | changes


def operands(z, *, dtype="float32", seed=0, eps=1e-6) -> dict[str, Any]:
    """Every argument of a call by name, of lists of layers.

    float64 needs x64, at the call as well.
    """
    rng = np.random.default_rng(seed)
    heads = z["G"] * z["n"]
    shapes = dict(
        W_qkvs=(z["H"], z["G"] * (z["n"] + 2) * z["D"]),
        W_outs=(heads * z["D"], z["H"]),
        W_gates=(z["H"], z["I"]),
        W_ups=(z["H"], z["I"]),
        W_downs=(z["I"], z["H"]),
        W_gamma_qkvs=(1, z["H"]),
        W_gamma_mlps=(1, z["H"]),
        K_caches=(z["B"], z["G"], z["D"], z["slots"]),
        V_caches=(z["B"], z["G"], z["slots"], z["D"]),
    )

    def normal(shape):
        scale = shape[0] ** -0.5 if len(shape) == 2 else 1.0
        return array(scale * rng.standard_normal(shape), dtype)

    found: dict[str, Any] = {
        k: [normal(s) for _ in range(z["L"])] for k, s in shapes.items()
    }
    found["X"] = normal((z["B"], z["S"], z["H"]))
    angle = rng.uniform(-3, 3, (z["D"] // 2, z["B"], z["S"]))
    found |= dict(RoPE_cos=array(np.cos(angle), dtype))
    found |= dict(RoPE_sin=array(np.sin(angle), dtype))
    mask = rng.integers(0, 2, (z["ctx"], z["B"], heads, z["S"]))
    mask[-z["S"] :] = np.tri(z["S"], dtype=int).T[:, None, None]
    start = rng.integers(0, z["slots"] - z["S"] + 1, (z["B"], 1))
    found |= dict(
        mask_cache=jnp.asarray(mask, jnp.int32),
        mask_active=None,
        position_ids=jnp.asarray(start, jnp.int32),
        num_layers=z["L"],
        eps=eps,
    )
    return found | (_quantized(found, z, rng) if z["quantized"] else {})


def _quantized(found, z, rng):
    """The layers `quantized` with fp8 weights and scales of their columns."""
    lists = {name: [*found[name]] for name in ("W_gates", "W_ups", "W_downs")}
    scales = {f"{name[:-1]}_scales": [None] * z["L"] for name in lists}
    for i in z["quantized"]:
        for name, weights in lists.items():
            weights[i] = (16 * weights[i].astype(jnp.float32)).astype(E4M3)
            row = rng.uniform(0.03, 0.09, (1, weights[i].shape[1]))
            row = np.repeat(row, 128, 0)
            scales[f"{name[:-1]}_scales"][i] = array(row, jnp.float32)
    return lists | scales


def stacked(call) -> dict[str, Any]:
    """The same call with an array for each list."""
    return call | {k: jnp.stack(call[k]) for k in PER_LAYER if _is_list(call.get(k))}


def _is_list(x):
    return isinstance(x, list)


def split(call) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arrays of a call, and its settings."""
    arrays = {k: x for k, x in call.items() if k in SPECS and x is not None}
    return arrays, {k: x for k, x in call.items() if k not in arrays}


def on_mesh(arrays, rest, *, tensor=1, lnc=1, **options):
    """The call over a mesh, from the whole model's arrays: what one device returns."""
    mesh = make_mesh(tensor=tensor, lnc=lnc)
    groups = dict(axis="tensor", replica_groups=[[*range(tensor)]])
    options = groups | options | (dict(lnc_axis="lnc") if lnc == 2 else {})
    specs = {k: spec_of(k, x, lnc) for k, x in arrays.items()}
    caches = tuple(specs[k] for k in ("K_caches", "V_caches"))

    def local(arrays):
        return neuronjax.transformer_tkg(**arrays, **rest, **options)

    run = jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=(P(), *caches))
    return run(arrays)


def spec_of(name, x, lnc):
    """How an argument lies over a mesh of ranks of `lnc` cores."""

    def kept(entry):
        names = [a for a in np.atleast_1d(entry) if a == "tensor" or lnc == 2]
        names = [a for a in names if a is not None]
        return tuple(names) or None

    spec = P(*map(kept, SPECS[name]))
    if name == "mask_cache" or name == "mask_active":
        spec = spec if x.shape[2] > 1 else P()
    if name in PER_LAYER and not _is_list(x):
        return P(None, *spec)
    return spec if not _is_list(x) else [None if one is None else spec for one in x]


def error(got, wanted):
    """The largest difference, of each array in units of its largest value."""
    got, wanted = ([wide(x) for x in (h, *k, *v)] for h, k, v in (got, wanted))
    assert all(a.shape == b.shape for a, b in zip(got, wanted, strict=True))
    pairs = zip(got, wanted, strict=True)
    return np.max([np.abs(a - b).max() / np.abs(b).max() for a, b in pairs])


def require_close(got, wanted, tolerance):
    """Within `tolerance` of the largest value of each array."""
    assert error(got, wanted) <= tolerance


def wide(x):
    return np.asarray(x).astype(np.float64)


def norm(x, gain, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * gain


def turned(x, cos, sin):
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def silu(x):
    return x / (1 + np.exp(-x))


def reference(call, feed_forward=None):
    """`(output, K_caches, V_caches)` of the whole model in float64.

    `feed_forward(h, layer)` stands for the dense one where it is given.
    """
    layers = range(call["num_layers"])
    h, k_caches, v_caches = wide(call["X"]), [], []
    for i in layers:
        own = {k: call[k][i] for k in PER_LAYER if call.get(k) is not None}
        part, k, v = _attention(h, own, call)
        h = h + part
        h = h + (feed_forward(h, i) if feed_forward else _feed_forward(h, own, call))
        k_caches.append(k)
        v_caches.append(v)
    return h, k_caches, v_caches


def _seen(call):
    mask = np.asarray(call["mask_cache"]) != 0
    if call["mask_active"] is not None:
        active = np.asarray(call["mask_active"]) != 0
        shape = [
            max(a, b) for a, b in zip(mask.shape[1:], active.shape[1:], strict=True)
        ]
        mask, active = (np.broadcast_to(x, (len(x), *shape)) for x in (mask, active))
        mask = np.concatenate([mask[: len(mask) - len(active)], active])
    return mask


def _attention(h, own, call):
    k_cache, v_cache = wide(own["K_caches"]), wide(own["V_caches"])
    batch, groups, width, slots = k_cache.shape
    seq = h.shape[1]
    w_out, seen = wide(own["W_outs"]), _seen(call)
    normed = norm(h, wide(own["W_gamma_qkvs"])[0], call["eps"])
    blocks = (normed @ wide(own["W_qkvs"])).reshape(batch, seq, groups, -1, width)
    per_group, out = blocks.shape[3] - 2, np.zeros_like(h)
    cos, sin = wide(call["RoPE_cos"]), wide(call["RoPE_sin"])
    new_k, new_v = k_cache.copy(), v_cache.copy()
    ctx = seen.shape[0] - seq
    for b in range(batch):
        for g in range(groups):
            turn = functools.partial(turned, cos=cos[:, b].T, sin=sin[:, b].T)
            keys, values = turn(blocks[b, :, g, -2]), blocks[b, :, g, -1]
            all_k = np.concatenate([k_cache[b, g].T[:ctx], keys])
            all_v = np.concatenate([v_cache[b, g][:ctx], values])
            for j in range(per_group):
                head = g * per_group + j
                scores = turn(blocks[b, :, g, j]) @ all_k.T * width**-0.5
                mask = seen[:, b, head if seen.shape[2] > 1 else 0].T
                scores = np.where(mask, scores, -np.inf)
                weights = np.exp(scores - scores.max(-1, keepdims=True))
                weights = weights / weights.sum(-1, keepdims=True)
                rows = w_out[head * width : (head + 1) * width]
                out[b] += weights @ all_v @ rows
            if call["position_ids"] is not None:
                at = int(np.asarray(call["position_ids"])[b, 0])
                if 0 <= at <= slots - seq:
                    new_k[b, g, :, at : at + seq] = keys.T
                    new_v[b, g, at : at + seq] = values
    return out, new_k, new_v


def _feed_forward(h, own, call):
    x = norm(h, wide(own["W_gamma_mlps"])[0], call["eps"])
    gate, up, down = (wide(own[k]) for k in ("W_gates", "W_ups", "W_downs"))
    scales = [own.get(f"W_{side}_scales") for side in ("gate", "up", "down")]
    bound = np.inf
    if scales[0] is not None:
        gate, up, down = (
            w * wide(s)[:1] for w, s in zip((gate, up, down), scales, strict=True)
        )
        bound = call.get("clamp_bound") or np.inf
    x = np.clip(x, -bound, bound)
    middle = silu(x @ gate) * (x @ up)
    return np.clip(middle, -bound, bound) @ down

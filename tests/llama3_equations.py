"""Operands and the float64 reference of the prefill stack's tests.

The reference goes layer by layer, position by position and head by head through the
equations, in NumPy: Touvron et al. 2023, https://arxiv.org/abs/2302.13971, section 2.2,
with key/value heads that neighbouring query heads share.
"""

from typing import Any

import numpy as np

from tests.arrays import array

STACKS = (
    "W_qkvs W_outs W_gates W_ups W_downs W_gamma_qkvs W_gamma_mlps".split()
)  # with an axis of layers


def sizes(**changes: Any) -> dict[str, int]:
    """`G` key/value heads, `n` query heads for each."""
    found = dict(L=2, B=2, S=5, H=8, G=2, n=2, D=4, I=6)
    return found | changes


def operands(z, *, dtype="float32", seed=0) -> dict[str, Any]:
    """The array arguments by name, stacked; float64 needs x64."""
    rng = np.random.default_rng(seed)
    heads, layers = z["G"] * z["n"], z["L"]
    shapes = dict(
        X=(z["B"], z["S"], z["H"]),
        W_qkvs=(layers, z["H"], (heads + 2 * z["G"]) * z["D"]),
        W_outs=(layers, heads * z["D"], z["H"]),
        W_gates=(layers, z["H"], z["I"]),
        W_ups=(layers, z["H"], z["I"]),
        W_downs=(layers, z["I"], z["H"]),
        W_gamma_qkvs=(layers, 1, z["H"]),
        W_gamma_mlps=(layers, 1, z["H"]),
    )

    def normal(name, shape):
        scale = shape[1] ** -0.5 if name in STACKS[:5] else 1.0
        return array(scale * rng.standard_normal(shape), dtype)

    found: dict[str, Any] = {
        name: normal(name, shape) for name, shape in shapes.items()
    }
    angle = rng.uniform(-3, 3, (z["D"] // 2, z["B"], z["S"]))
    tables = dict(RoPE_cos=np.cos(angle), RoPE_sin=np.sin(angle))
    return found | {name: array(x, dtype) for name, x in tables.items()}


def columns(z, order) -> list[tuple[str, int]]:
    """The head behind each block of `D` columns of `W_qkvs`: its kind and number."""
    groups, each = range(z["G"]), z["n"]
    if order == "kind":
        queries = [("q", i) for i in range(z["G"] * each)]
        return queries + [(kind, g) for kind in "kv" for g in groups]
    return [
        head
        for g in groups
        for head in [("q", g * each + i) for i in range(each)] + [("k", g), ("v", g)]
    ]


def reference(given, z, *, order="group", eps=1e-6):
    """`(output, K, V)` in float64, K as `[L, B, G, D, S]`, V as `[L, B, G, S, D]`."""
    o = {name: np.asarray(x).astype(np.float64) for name, x in given.items()}
    h, keys, values = o["X"], [], []
    for i in range(o["W_qkvs"].shape[0]):
        w = {name: o[name][i] for name in STACKS}
        y = _norm(h, w["W_gamma_qkvs"][0], eps) @ w["W_qkvs"]
        heads = _heads(y, o, z, order)
        h = h + _attended(heads, z) @ w["W_outs"]
        n = _norm(h, w["W_gamma_mlps"][0], eps)
        gate = n @ w["W_gates"]
        h = h + (gate / (1 + np.exp(-gate)) * (n @ w["W_ups"])) @ w["W_downs"]
        each = range(z["G"])
        keys.append(np.stack([heads["k", g].swapaxes(1, 2) for g in each], 1))
        values.append(np.stack([heads["v", g] for g in each], 1))
    return h, np.stack(keys), np.stack(values)


def _norm(x, gain, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * gain


def _heads(y, o, z, order):
    """Each head `[B, S, D]` by kind and number; queries and keys turned."""
    found, width = {}, z["D"]
    for i, (kind, number) in enumerate(columns(z, order)):
        head = y[..., i * width : (i + 1) * width]
        found[kind, number] = head if kind == "v" else _turned(head, o)
    return found


def _turned(head, o):
    """Channels `i` and `i + D/2` turned by the angle `i` of their position."""
    out, half = np.empty_like(head), head.shape[-1] // 2
    for i in range(half):
        cos, sin = o["RoPE_cos"][i], o["RoPE_sin"][i]
        a, b = head[..., i], head[..., half + i]
        out[..., i], out[..., half + i] = a * cos - b * sin, a * sin + b * cos
    return out


def _attended(heads, z):
    """`[B, S, N*D]`: every query over the keys up to its own position."""
    parts = []
    for i in range(z["G"] * z["n"]):
        q, k, v = heads["q", i], heads["k", i // z["n"]], heads["v", i // z["n"]]
        part = np.empty_like(q)
        for s in range(q.shape[1]):
            score = np.einsum("bd,btd->bt", q[:, s], k[:, : s + 1]) / z["D"] ** 0.5
            weight = np.exp(score - score.max(1, keepdims=True))
            weight = weight / weight.sum(1, keepdims=True)
            part[:, s] = np.einsum("bt,btd->bd", weight, v[:, : s + 1])
        parts.append(part)
    return np.concatenate(parts, -1)


def error(got, wanted):
    """The largest difference of any array, in units of its largest value."""
    pairs = zip(got, wanted, strict=True)
    found = []
    for a, b in pairs:
        a, b = (np.asarray(x).astype(np.float64) for x in (a, b))
        assert a.shape == b.shape
        found.append(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30))
    return max(found)

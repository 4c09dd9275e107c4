"""A decode step's experts in float64 NumPy, from the equations, for the tests.

A call is a dictionary of the arguments of `moe_tkg`, by their names.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from neuronjax import moe_tkg
from tests.arrays import array
from tests.moe_equations import act
from tests.mx_equations import packed_weight, rounded_rows, saturated_rows

Case = dict[str, Any]
LIMITS: dict[str, float | None] = dict(
    gate_clamp_upper_limit=0.6,
    gate_clamp_lower_limit=-0.7,
    up_clamp_upper_limit=0.8,
    up_clamp_lower_limit=-0.5,
)
FLOATS: tuple[str, ...] = (
    "hidden_input",
    "expert_gate_up_weights",
    "expert_down_weights",
    "expert_affinities",
    "expert_gate_up_bias",
    "expert_down_bias",
)


ALL: Case = dict(is_all_expert=True, experts=12, rank_id=1)
FORMS: dict[str, Case] = {
    "selective": {},
    "selective, of a rank": dict(experts=8, rank_id=1),
    "all": ALL,
    "all, masked": dict(ALL, mask_unselected_experts=True),
    "all, dynamic": dict(ALL, is_all_expert_dynamic=True, block_size=2),
}


def call(tokens=5, width=8, d_ff=6, local=4, experts=4, k=2, seed=0, **options) -> Case:
    """Random operands: biases, clamps and POST_SCALE unless `options` differ."""
    rng = np.random.default_rng(seed)
    shapes = dict(
        hidden_input=(tokens, width),
        expert_gate_up_weights=(local, width, 2, d_ff),
        expert_down_weights=(local, d_ff, width),
        expert_affinities=(tokens, experts),
        expert_gate_up_bias=(local, 2, d_ff),
        expert_down_bias=(local, width),
    )
    found: Case = {
        key: array(rng.normal(size=shape) / 2, jnp.float32)
        for key, shape in shapes.items()
    }
    index = rng.integers(0, experts, (tokens, k)).astype(np.int32)
    given: Case = dict(LIMITS, expert_index=jnp.asarray(index), is_all_expert=False)
    given |= dict(expert_affinities_scaling_mode="POST_SCALE") | options
    return found | given


def block_scaled(given: Case, kind: str, seed=0) -> tuple[Case, Case]:
    """The same call with block-scaled weights, and one with the values they hold."""
    width, d_ff = given["hidden_input"].shape[1], given["expert_down_weights"].shape[1]
    local = given["expert_down_weights"].shape[0]
    rng = np.random.default_rng(seed)
    names = ("gate_up", "gate_up_scale", "down", "down_scale", "gate_up_w", "down_w")
    parts = {key: [] for key in names}
    for _ in range(local):
        sides = rng.normal(size=(2, width, d_ff)) / 8
        down = rng.normal(size=(d_ff, width)) / 4
        packed = [packed_weight(w.astype(np.float32), "hidden", kind) for w in sides]
        parts["gate_up"].append(np.stack([codes for codes, _ in packed], 1))
        parts["gate_up_scale"].append(np.stack([scale for _, scale in packed], 1))
        codes, scale = packed_weight(down.astype(np.float32), "intermediate", kind)
        parts["down"].append(codes)
        parts["down_scale"].append(scale)
        dense = [rounded_rows(w.T.astype(np.float32), "hidden", kind).T for w in sides]
        parts["gate_up_w"].append(np.stack(dense, 1))
        rows = rounded_rows(down.T.astype(np.float32), "intermediate", kind)
        parts["down_w"].append(rows.T)
    arrays = {key: np.stack(x) for key, x in parts.items()}
    quantized = given | dict(
        expert_gate_up_weights=jnp.asarray(arrays["gate_up"]),
        expert_down_weights=jnp.asarray(arrays["down"]),
        expert_gate_up_weights_scale=jnp.asarray(arrays["gate_up_scale"]),
        expert_down_weights_scale=jnp.asarray(arrays["down_scale"]),
        weight_dtype=kind,
    )
    plain = given | dict(
        expert_gate_up_weights=arrays["gate_up_w"],
        expert_down_weights=arrays["down_w"],
    )
    return quantized, plain


def run(given: Case, **changes):
    """The call, with `changes`."""
    return moe_tkg(**(given | changes))


def without(given: Case, *names: str) -> Case:
    """The call without these arguments."""
    return {key: x for key, x in given.items() if key not in names}


def gradients(given, seed, names=FLOATS):
    """Of the arguments `names`, by `jax.vjp` under jit."""
    live = {key: given[key] for key in names if key in given}

    def pulled(live, seed):
        out, pull = jax.vjp(lambda live: run(given, **live), live)
        return pull(seed.astype(out.dtype))[0]

    return jax.jit(pulled)(live, seed)


def close(got, wanted, tolerance=2e-5):
    """Within `tolerance` of the largest value wanted."""
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted)
    scale = max(np.abs(wanted).max(initial=0), 1e-3)
    assert got.shape == wanted.shape
    assert np.abs(got - wanted).max(initial=0) <= tolerance * scale


def plain(given: Case):
    """The equation in jax.numpy, each step in the dtype of the operands: SiLU, scaled.

    With all experts those that no token names are masked.
    """
    x, gate_up, down, a, gate_up_b, down_b = (given[key] for key in FLOATS)
    local = len(down)
    first = 0 if given.get("rank_id") is None else int(given["rank_id"]) * local
    z = jnp.einsum("th,ehci->teci", x, gate_up) + gate_up_b
    limits = [given[key] for key in LIMITS]  # upper before lower, gate before up
    gate = jnp.clip(z[:, :, 0], limits[1], limits[0])
    up = jnp.clip(z[:, :, 1], limits[3], limits[2])
    y = jnp.einsum("tei,eih->teh", gate / (1 + jnp.exp(-gate)) * up, down) + down_b
    named = given["expert_index"][:, :, None] == first + jnp.arange(local)
    times = named.sum(1)
    times = times > 0 if given["is_all_expert"] else times
    share = times.astype(a.dtype) * a[:, first : first + local]
    return (share[:, :, None] * y).sum(1)


class Decode:
    """One call; `mx` rounds activations to blocks of `float8_e4m3fn`.

    With `quantized_hidden` the hidden states are values of blocks already.
    """

    def __init__(self, given, mx=False, quantized_hidden=False):
        self.given, self.mx, self.quantized_hidden = given, mx, quantized_hidden
        wide = {
            key: np.asarray(x, np.float64)
            for key, x in given.items()
            if key in FLOATS or key.endswith("_scale")
        }
        self.x, self.a = wide["hidden_input"], wide.get("expert_affinities")
        self.gate_up = wide["expert_gate_up_weights"]
        self.down = wide["expert_down_weights"]
        self.local, self.inner, self.width = self.down.shape
        none = np.zeros((self.local, 1, 1))
        self.gate_up_b = wide.get("expert_gate_up_bias", none)
        self.down_b = wide.get("expert_down_bias", none[:, 0])
        self.gate_up_s = wide.get("expert_gate_up_weights_scale", none + 1)
        self.down_s = wide.get("expert_down_weights_scale", none[:, 0] + 1)
        rank = given.get("rank_id")
        self.first = 0 if rank is None else int(np.ravel(rank)[0]) * self.local

    def limits(self):
        ends = []
        for side, none in (("upper", np.inf), ("lower", -np.inf)):
            given = (self.given.get(f"{w}_clamp_{side}_limit") for w in ("gate", "up"))
            ends.append(np.array([[none if x is None else x] for x in given]))
        return ends

    def pairs(self):
        """Token, local expert and how often it counts, for all that have a share."""
        index = np.asarray(self.given["expert_index"])
        for t in range(len(self.x)):
            for e in range(self.local):
                times = int((index[t] == self.first + e).sum())
                if self.given["is_all_expert"]:
                    masks = self.given.get("mask_unselected_experts")
                    times = min(times, 1) if masks else 1
                if times:
                    yield t, e, times

    def share(self, t, e):
        """The affinity of a token for a local expert."""
        if self.given["expert_affinities_scaling_mode"] == "NO_SCALE":
            return 1.0
        return self.a[t, self.first + e]

    def expert(self, t, e):
        """`x`, gate and up before and after the clamps, `m`, and `y`."""
        x = self.x[t]
        if self.mx and not self.quantized_hidden:
            x = rounded_rows(x, "hidden")
        z = np.einsum("h,hci->ci", x, self.gate_up[e])
        z = z * self.gate_up_s[e] + self.gate_up_b[e]
        upper, lower = self.limits()
        clamped = np.clip(z, lower, upper)
        m = act(clamped[0], self.given.get("activation_fn", "SiLU"))[0] * clamped[1]
        kept = rounded_rows(m, "intermediate") if self.mx else m
        y = kept @ self.down[e] * self.down_s[e] + self.down_b[e]
        return x, z, clamped, kept, m, y

    def out(self):
        total = np.zeros((len(self.x), self.width))
        for t, e, times in self.pairs():
            total[t] += times * self.share(t, e) * self.expert(t, e)[-1]
        return total

    def grads(self, d_out):
        """The gradient of each of `FLOATS`, given that of the result."""
        dx, da = np.zeros_like(self.x), np.zeros_like(self.a)
        d_gate_up, d_down = np.zeros_like(self.gate_up), np.zeros_like(self.down)
        d_gate_up_b = np.zeros((self.local, 2, self.inner))
        d_down_b = np.zeros((self.local, self.width))
        upper, lower = self.limits()
        scaled = self.given["expert_affinities_scaling_mode"] == "POST_SCALE"
        for t, e, times in self.pairs():
            x, z, clamped, kept, m, y = self.expert(t, e)
            if scaled:
                da[t, self.first + e] += times * d_out[t] @ y
            dy = times * self.share(t, e) * d_out[t]
            d_down_b[e] += dy
            dy = dy * self.down_s[e]
            d_down[e] += np.outer(kept, dy)
            dm = self.down[e] @ dy
            if self.mx:
                dm = np.where(saturated_rows(m, "intermediate"), 0, dm)
            opened, slope = act(clamped[0], self.given.get("activation_fn", "SiLU"))
            dz = np.stack([dm * clamped[1] * slope, dm * opened])
            dz = np.where((z < upper) & (z > lower), dz, 0)
            d_gate_up_b[e] += dz
            dz = dz * self.gate_up_s[e]
            d_gate_up[e] += np.einsum("h,ci->hci", x, dz)
            row = np.einsum("ci,hci->h", dz, self.gate_up[e])
            if self.mx:
                row = np.where(saturated_rows(self.x[t], "hidden"), 0, row)
            dx[t] += row
        found = dx, d_gate_up, d_down, da, d_gate_up_b, d_down_b
        return dict(zip(FLOATS, found, strict=True))

"""Mixture of experts in float64 NumPy, slot by slot from the equations, for the tests.

A call is a dictionary of the arguments of `moe_cte`, by their names. Slots, blocks and
experts are read as the specification says: a slot whose id is the padding's (the last
row, or -1 with `skip_token`) or outside of the tokens is empty.
"""

import math
from typing import Any

import numpy as np

from tests.mx_equations import rounded_rows, saturated_rows

PRE = "PRE_SCALE", "PRE_SCALE_DELAYED"
# Arguments with a gradient, in the order in which the backward returns them.
FLOATS = (
    "hidden_states",
    "expert_affinities_masked",
    "gate_up_proj_weight",
    "down_proj_weight",
    "gate_and_up_proj_bias",
    "down_proj_bias",
)
SCALES = "gate_up_proj_scale", "down_proj_scale"


def act(x, kind):
    """The activation and its derivative."""
    if kind in ("SiLU", "Swish"):
        rate = 1.702 if kind == "Swish" else 1.0
        s = 1 / (1 + np.exp(-rate * x))
        return x * s, s * (1 + rate * x * (1 - s))
    if kind == "GELU":
        below = (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2
        return x * below, below + x * np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    assert kind == "GELU_Tanh_Approx", kind
    root = math.sqrt(2 / math.pi)
    t = np.tanh(root * (x + 0.044715 * x**3))
    slope = root * (1 + 3 * 0.044715 * x**2)
    return x * (1 + t) / 2, (1 + t) / 2 + x * (1 - t**2) / 2 * slope


def live_slots(call, tokens):
    """`[N, B]`: slots that serve a token.

    Blocks from the first 0 of the conditions on serve none, but for the static ones.
    Without accumulation a later slot of the same token leaves its earlier ones empty.
    """
    ids = np.asarray(call["token_position_to_id"]).reshape(-1, call["block_size"])
    live = (0 <= ids) & (ids < tokens)
    if call.get("conditions") is not None:
        given = np.asarray(call["conditions"]).ravel()[: len(ids)]
        active = np.cumprod(given != 0).astype(bool)
        active[: call.get("num_static_block") or 0] = True
        live &= active[:, None]
    if not call.get("is_tensor_update_accumulating", True):
        last = {ids[at]: at for at in zip(*np.nonzero(live), strict=True)}
        live[:] = False
        for at in last.values():
            live[at] = True
    return live


class Moe:
    """The blocks of one call. `mx` rounds activations to block-scaled `float8_e4m3fn`.

    With `mx` the weights are the values that their containers hold, in the plain
    layouts `[E, H, 2, I]` and `[E, I, H]`; a gradient goes straight through rounding,
    except where a value saturates.
    """

    def __init__(self, call, mx=False):
        self.call, self.mx = call, mx
        wide = {
            name: np.asarray(call[name], np.float64)
            for name in (*FLOATS, *SCALES)
            if call.get(name) is not None
        }
        self.x, self.a = wide["hidden_states"], wide["expert_affinities_masked"]
        self.gate_up, self.down = wide[FLOATS[2]], wide[FLOATS[3]]
        self.rows, self.width = self.x.shape
        self.experts, self.inner = self.down.shape[:2]
        self.tokens = self.rows - (not call.get("skip_token"))
        self.size = call["block_size"]
        self.ids = np.asarray(call["token_position_to_id"]).reshape(-1, self.size)
        self.of_block = np.asarray(call["block_to_expert"]).ravel()

        def each(name, shape, otherwise):
            if name not in wide:
                return np.full((self.experts, *shape), float(otherwise))
            value = wide[name].reshape(-1, *shape)  # one for each expert, or for all
            return np.broadcast_to(value, (self.experts, *shape))

        self.gate_up_bias = each("gate_and_up_proj_bias", (2, self.inner), 0)
        self.down_bias = each("down_proj_bias", (self.width,), 0)
        self.gate_up_scale = each("gate_up_proj_scale", (2, self.inner), 1)
        self.down_scale = each("down_proj_scale", (self.width,), 1)
        self.kind = call.get("activation_function", "SiLU")
        self.scaling = call.get("expert_affinities_scaling_mode", "POST_SCALE")

    def limits(self):
        """`[2, 1]` each: the largest gate and up, then the smallest; infinite if none.

        Rounded to the dtype of the activations: that is what the stored values equal.
        """
        dtype = np.asarray(self.call["hidden_states"]).dtype
        ends = []
        for side, none in (("upper", np.inf), ("lower", -np.inf)):
            given = (self.call.get(f"{w}_clamp_{side}_limit") for w in ("gate", "up"))
            values = [none if x is None else x for x in given]
            ends.append(np.asarray(values).astype(dtype).astype(np.float64)[:, None])
        return ends

    def live(self):
        """`[N, B]`: slots that serve a token."""
        return live_slots(self.call, self.tokens)

    def visited(self):
        """`[N]`: blocks with a slot that serves a token."""
        return self.live().any(1)

    def slots(self):
        """Block, slot, token, expert of each slot that serves a token, in order."""
        for n, b in zip(*np.nonzero(self.live()), strict=True):
            yield n, b, self.ids[n, b], self.of_block[n]

    def expert(self, x, e):
        """Gate and up `[2, I]` after the clamps, and the result `[H]`, of one row."""
        x = rounded_rows(x, "hidden") if self.mx else x
        z = np.einsum("h,hci->ci", x, self.gate_up[e])
        z = z * self.gate_up_scale[e] + self.gate_up_bias[e]
        upper, lower = self.limits()
        z = np.maximum(np.minimum(z, upper), lower)
        m = act(z[0], self.kind)[0] * z[1]
        m = rounded_rows(m, "intermediate") if self.mx else m
        return z, (m @ self.down[e]) * self.down_scale[e] + self.down_bias[e]

    def outputs(self):
        """`out [R, H]`, `gate_up [N, 2, I, B]`, `down [N, B, H]`.

        Empty slots of a block with tokens hold what a row of zeros gives.
        """
        blocks = len(self.ids)
        out = np.zeros((self.rows, self.width))
        gate_up = np.zeros((blocks, 2, self.inner, self.size))
        down = np.zeros((blocks, self.size, self.width))
        for n in np.flatnonzero(self.visited()):
            z, y = self.expert(np.zeros(self.width), self.of_block[n])
            gate_up[n], down[n] = z[..., None], y
        for n, b, t, e in self.slots():
            a = self.a[t * self.experts + e, 0]
            x = self.x[t] * (a if self.scaling in PRE else 1)
            gate_up[n, :, :, b], down[n, b] = self.expert(x, e)
            y = down[n, b] * (a if self.scaling == "POST_SCALE" else 1)
            out[t] += y
        return out, gate_up, down

    def gradients(
        self,
        d_out: Any,
        gate_up: Any = None,
        down: Any = None,
        d_gate_up: Any = 0.0,
        d_down: Any = 0.0,
    ):
        """By argument: the equations of the backward from the stored values."""
        if gate_up is None:
            _, gate_up, down = self.outputs()
        d_gate_up = np.broadcast_to(d_gate_up, np.shape(gate_up))
        d_down = np.broadcast_to(d_down, np.shape(down))
        arrays = self.x, self.a, self.gate_up, self.down
        arrays += self.gate_up_bias, self.down_bias
        arrays += self.gate_up_scale, self.down_scale
        total = {
            name: np.zeros(x.shape)
            for name, x in zip((*FLOATS, *SCALES), arrays, strict=True)
        }
        for n, b, t, e in self.slots():
            d = np.asarray(d_out[t], np.float64)
            stored = np.asarray(gate_up[n, :, :, b], np.float64)
            y = np.asarray(down[n, b], np.float64)
            self._slot(total, t, e, d, stored, y, d_gate_up[n, :, :, b], d_down[n, b])
        for name in SCALES:  # a scale that all experts share
            if name in self.call and len(self.call[name]) == 1:
                total[name] = total[name].sum(0, keepdims=True)
        return {
            name: x.reshape(np.shape(self.call[name]))
            for name, x in total.items()
            if self.call.get(name) is not None
        }

    def _free(self, x, order):
        """Where a gradient passes the rounding of `x`."""
        return ~saturated_rows(x, order) if self.mx else 1

    def _slot(self, total, t, e, d, stored, y, d_stored, d_y):
        """Adds what one slot gives to the gradients."""
        place = t * self.experts + e, 0
        a, pre = self.a[place], self.scaling in PRE
        x = self.x[t] * (a if pre else 1)
        if self.scaling == "POST_SCALE":
            total["expert_affinities_masked"][place] += d @ y
            d = a * d
        d_y = d_y + d
        value, slope = act(stored[0], self.kind)
        m = value * stored[1]
        d_m = self.down[e] @ (self.down_scale[e] * d_y) * self._free(m, "intermediate")
        upper, lower = self.limits()
        inside = (lower < stored) & (stored < upper)
        d_z = (d_stored + np.stack([d_m * stored[1] * slope, d_m * value])) * inside
        d_p = d_z * self.gate_up_scale[e]
        total["down_proj_weight"][e] += np.outer(m, self.down_scale[e] * d_y)
        total["down_proj_bias"][e] += d_y
        total["down_proj_scale"][e] += d_y * (m @ self.down[e])
        total["gate_up_proj_weight"][e] += x[:, None, None] * d_p
        total["gate_and_up_proj_bias"][e] += d_z
        product = np.einsum("h,hci->ci", x, self.gate_up[e])
        total["gate_up_proj_scale"][e] += d_z * product
        d_x = np.einsum("hci,ci->h", self.gate_up[e], d_p) * self._free(x, "hidden")
        if pre:
            total["expert_affinities_masked"][place] += d_x @ self.x[t]
            d_x = a * d_x
        total["hidden_states"][t] += d_x


def slots_of(index, experts, block_size, padding, blocks=None):
    """Tokens sorted into blocks by expert: ids `[N * B]` and experts `[N]`.

    `index [T, k]` holds each token's experts; one outside of `[0, experts)` takes no
    slot. Blocks left over go to the last expert and hold padding.
    """
    ids, of_block = [], []
    for e in range(experts):
        tokens = [t for t, row in enumerate(index) for i in row if i == e]
        count = -(-len(tokens) // block_size)
        ids += tokens + [padding] * (count * block_size - len(tokens))
        of_block += [e] * count
    most = most_blocks(np.size(index), experts, block_size)
    more = (most if blocks is None else blocks) - len(of_block)
    assert more >= 0
    ids, of_block = (
        ids + [padding] * (more * block_size),
        of_block + [experts - 1] * more,
    )
    return np.asarray(ids, np.int32), np.asarray(of_block, np.int32)


def most_blocks(pairs, experts, block_size):
    """How many blocks any routing of so many pairs of token and expert needs."""
    return max(-(-(pairs - (experts - 1)) // block_size), 0) + experts - 1

"""Attention in float64 numpy, row by row from the equations, for the tests."""

import dataclasses
from typing import Any

import numpy as np


def visible(
    q_seq,
    kv_seq,
    causal,
    mask=None,
    heads=1,
    *,
    window=None,
    prior=0,
    used=0,
    offset=0,
    stride=1,
    bounds=None,
):
    """`[heads, q_seq, prior + kv_seq]`: which keys each row sees.

    The first `prior` columns are slots of a prefix, of which `used` hold a key; those
    stand at positions `-used, .., -1`, key 0 of the call at 0, and query `i` at
    `offset + stride * i`. `bounds` are the first column and the end of each row.
    """
    column = np.arange(prior + kv_seq)
    key = np.where(column < prior, column - used, column - prior)
    query = (offset + stride * np.arange(q_seq))[:, None]
    seen = np.ones((heads, q_seq, prior + kv_seq), bool)
    seen &= (column < used) | (column >= prior)
    if causal:
        seen &= key <= query
    if window:
        seen &= key > query - window
    if bounds is not None:
        first, end = (np.reshape(x, (q_seq, 1)) for x in bounds)
        seen &= (first <= column) & (column < end)
    return seen if mask is None else seen & np.asarray(mask).astype(bool)


@dataclasses.dataclass
class Attention:
    """Attention of `q [heads, q_seq, d]` to `k [kv_heads, kv_seq, d]`.

    Scores are `scale * <q, k>`, then `cap * tanh(score / cap)`, then `+ bias`; a bias
    of -inf hides its key. `sink [heads, n]` are `n` more scores, without a value. Of
    the weights those in `keep` are divided by `1 - rate`, the others are dropped.
    """

    q: Any
    k: Any
    v: Any
    seen: Any
    scale: float = 1.0
    cap: float | None = None
    bias: Any = None
    sink: Any = None
    keep: Any = None
    rate: float = 0.0

    def __post_init__(self):
        for name in ("q", "k", "v", "bias", "sink"):
            value = getattr(self, name)
            if value is not None:
                setattr(self, name, np.asarray(value, np.float64))
        self.heads, self.rows = self.q.shape[:2]
        self.group = self.heads // self.k.shape[0]
        self.whole = self.heads, self.rows, self.k.shape[1]
        self.seen = np.broadcast_to(self.seen, self.whole)

    def _row(self, h, i):
        """The keys of a row, its scores (sinks last), d score / d <q, k>, factors."""
        n = h // self.group
        keys = np.flatnonzero(self.seen[h, i])
        bias = np.zeros(self.whole[2])
        if self.bias is not None:
            bias = np.broadcast_to(self.bias, self.whole)[h, i]
            keys = keys[bias[keys] != -np.inf]
        z = self.scale * (self.k[n][keys] @ self.q[h, i])
        slope = np.full(keys.size, float(self.scale))
        if self.cap is not None:
            squashed = np.tanh(z / self.cap)
            z, slope = self.cap * squashed, slope * (1 - squashed**2)
        sinks = [] if self.sink is None else self.sink[h]
        factor = np.ones(keys.size)
        if self.keep is not None:
            factor = self.keep[h, i, keys] / (1 - self.rate)
        return keys, np.concatenate([z + bias[keys], sinks]), slope, factor

    def outputs(self):
        """`out`, `neg_max`, `recip`, `lse`; where nothing is seen 0, inf, 1, -inf."""
        out = np.zeros((self.heads, self.rows, self.v.shape[2]))
        neg_max = np.full((self.heads, self.rows, 1), np.inf)
        recip = np.ones((self.heads, self.rows, 1))
        for h, i in np.ndindex(self.heads, self.rows):
            keys, z, _, factor = self._row(h, i)
            if z.size:
                e = np.exp(z - z.max())
                p = e[: keys.size] / e.sum()
                out[h, i] = (p * factor) @ self.v[h // self.group][keys]
                neg_max[h, i], recip[h, i] = -z.max(), 1 / e.sum()
        return out, neg_max, recip, -neg_max - np.log(recip)

    def gradients(
        self,
        d_out: Any = 0.0,
        d_lse: Any = 0.0,
        d_neg_max: Any = 0.0,
        d_recip: Any = 0.0,
    ):
        """The cotangents of `q`, `k`, `v`, `bias`, `sink` by name, as Jacobian rows."""
        d_out = np.broadcast_to(d_out, (self.heads, self.rows, self.v.shape[2]))
        d_out = d_out.astype(np.float64)
        seeds = [
            np.broadcast_to(np.reshape(x, np.shape(x)[:2]), (self.heads, self.rows))
            for x in (d_lse, d_neg_max, d_recip)
        ]
        total = {name: np.zeros_like(getattr(self, name)) for name in "qkv"}
        d_bias = np.zeros(self.whole)
        d_sink = np.zeros((self.heads, 0 if self.sink is None else self.sink.shape[1]))
        for h, i in np.ndindex(self.heads, self.rows):
            n, (keys, z, slope, factor) = h // self.group, self._row(h, i)
            if not z.size:
                continue
            p = np.exp(z - z.max())
            recip = 1 / p.sum()
            p *= recip
            d_p = np.zeros(z.size)
            d_p[: keys.size] = factor * (self.v[n][keys] @ d_out[h, i])
            top = (z == z.max()) / np.sum(z == z.max())
            of_lse, of_neg_max, of_recip = (x[h, i] for x in seeds)
            d_z = (np.diag(p) - np.outer(p, p)) @ d_p
            d_z += of_lse * p - of_neg_max * top + of_recip * recip * (top - p)
            d_key, d_sink[h] = d_z[: keys.size], d_sink[h] + d_z[keys.size :]
            total["q"][h, i] += (slope * d_key) @ self.k[n][keys]
            total["k"][n][keys] += np.outer(slope * d_key, self.q[h, i])
            total["v"][n][keys] += np.outer(p[: keys.size] * factor, d_out[h, i])
            d_bias[h, i, keys] += d_key
        if self.bias is not None:
            shape = self.bias.shape
            alone = tuple(a for a in range(3) if shape[a] == 1)
            total["bias"] = d_bias.sum(alone, keepdims=True)
        return total if self.sink is None else dict(total, sink=d_sink)


def attend(q, k, v, seen, scale=1.0, **options):
    """`out`, `neg_max`, `recip`, `lse` of an `Attention`."""
    return Attention(q, k, v, seen, scale, **options).outputs()


def gradients(q, k, v, seen, d_out, scale=1.0, d_lse=0.0, **options):
    """`dq, dk, dv` of `sum(out * d_out) + sum(lse * d_lse)`."""
    whole = Attention(q, k, v, seen, scale, **options).gradients(d_out, d_lse)
    return whole["q"], whole["k"], whole["v"]

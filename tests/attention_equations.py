"""Attention in float64 numpy, from the equations, for the tests."""

import numpy as np


def visible(q_seq, kv_seq, causal, mask=None, heads=1):
    """`[heads, q_seq, kv_seq]`: which keys each row sees."""
    seen = np.ones((heads, q_seq, kv_seq), bool)
    if causal:
        seen &= np.arange(kv_seq) <= np.arange(q_seq)[:, None]
    return seen if mask is None else seen & np.asarray(mask).astype(bool)


def attend(q, k, v, seen, scale=1.0):
    """Row by row: `out`, `neg_max`, `recip`, `lse`; a row without keys gives 0.

    `q [heads, q_seq, d]`, `k [kv_heads, kv_seq, d]`, `v [kv_heads, kv_seq, value_dim]`.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    heads, rows, group = q.shape[0], q.shape[1], q.shape[0] // k.shape[0]
    out = np.zeros((heads, rows, v.shape[2]))
    neg_max, recip = np.full((heads, rows, 1), np.inf), np.ones((heads, rows, 1))
    for h, i in np.ndindex(heads, rows):
        keys = np.flatnonzero(seen[h, i])
        if keys.size:
            z = scale * (k[h // group][keys] @ q[h, i])
            e = np.exp(z - z.max())
            out[h, i] = e @ v[h // group][keys] / e.sum()
            neg_max[h, i], recip[h, i] = -z.max(), 1 / e.sum()
    return out, neg_max, recip, -neg_max - np.log(recip)


def gradients(q, k, v, seen, d_out, scale=1.0, d_lse=0.0):
    """`dq, dk, dv` of `sum(out * d_out) + sum(lse * d_lse)`, by softmax's Jacobian."""
    q, k, v, d_out = (np.asarray(x, np.float64) for x in (q, k, v, d_out))
    group = q.shape[0] // k.shape[0]
    d_lse = np.broadcast_to(d_lse, q.shape[:2])
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for h, i in np.ndindex(q.shape[:2]):
        n, keys = h // group, np.flatnonzero(seen[h, i])
        if not keys.size:
            continue
        z = scale * (k[n][keys] @ q[h, i])
        p = np.exp(z - z.max())
        p /= p.sum()
        jacobian = np.diag(p) - np.outer(p, p)
        dz = jacobian @ (v[n][keys] @ d_out[h, i]) + p * d_lse[h, i]
        dq[h, i] += scale * dz @ k[n][keys]
        dk[n][keys] += scale * np.outer(dz, q[h, i])
        dv[n][keys] += np.outer(p, d_out[h, i])
    return dq, dk, dv

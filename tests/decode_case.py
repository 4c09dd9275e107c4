"""Decode attention from its equations, one query at a time, in float64."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.arrays import array

# batch, query heads, key heads, new tokens, slots, width of keys, width of values
SHAPES = [(2, 4, 2, 1, 12, 4, 4), (3, 3, 1, 3, 9, 6, 2), (2, 6, 2, 2, 5, 2, 3)]


def draw(shape, dtype=jnp.float32, seed=0):
    """Queries, new keys and values, flat caches `[.., slots, d]`, and a sink."""
    batch, heads, kv_heads, seq, slots, d, dv = shape
    rng = np.random.default_rng(seed)
    sizes = [(batch, heads, seq, d), (batch, kv_heads, seq, d)]
    sizes += [(batch, kv_heads, seq, dv), (batch, kv_heads, slots, d)]
    sizes += [(batch, kv_heads, slots, dv), (heads, 1)]
    return [array(rng.normal(size=size), dtype) for size in sizes]


def into_blocks(cache, table, num_blocks, fill=0.0):
    """A flat cache `[batch, heads, slots, d]` as blocks; what no table lists is `fill`.

    The table's blocks must be whole; an entry outside of the cache is skipped.
    """
    cache, table = np.asarray(cache), np.asarray(table)
    batch, heads, slots, d = cache.shape
    length = slots // table.shape[1]
    blocks = np.full((num_blocks, heads, length, d), fill, cache.dtype)
    for b, j in np.ndindex(table.shape):
        if 0 <= table[b, j] < num_blocks:
            blocks[table[b, j]] = cache[b, :, j * length : (j + 1) * length]
    return jnp.asarray(blocks)


def visible(lengths, starts, seq, slots, tree=None):
    """`[batch, seq, slots + seq]`: rules 4 and 5 of the specification, slot by slot."""
    seen = np.zeros((len(lengths), seq, slots + seq), bool)
    for b, t, slot in np.ndindex(len(lengths), seq, slots):
        end = lengths[b] if np.ndim(lengths) == 1 else lengths[b][t]
        start = 0 if starts is None else starts[b][t]
        if start <= end:
            seen[b, t, slot] = start <= slot < end
        else:
            seen[b, t, slot] = slot >= start or slot < end
    seen[:, :, slots:] = np.tri(seq, dtype=bool) if tree is None else tree
    return seen


def attend(arrays, seen, sink=None):
    """The output `[batch, heads, width of values, seq]`.

    `seen` is `[batch, seq, slots + seq]`, or with a head axis after the batch's.
    """
    return _run(arrays, seen, sink, None)[0]


def gradients(arrays, seen, sink, d_out):
    """The gradients of all arrays, and that of the sink."""
    return _run(arrays, seen, sink, d_out)[1]


def _run(arrays, seen, sink, d_out):
    q, k_new, v_new, k_old, v_old = (np.asarray(x, np.float64) for x in arrays)
    batch, heads, seq, _ = q.shape
    group, slots = heads // k_new.shape[1], k_old.shape[2]
    if seen.ndim == 3:
        seen = np.broadcast_to(seen[:, None], (batch, heads, *seen.shape[1:]))
    out = np.zeros((batch, heads, v_new.shape[-1], seq))
    grads = [np.zeros_like(x) for x in (q, k_new, v_new, k_old, v_old)]
    d_sink = np.zeros((heads, 1))
    for b, h, t in np.ndindex(batch, heads, seq):
        n, shown = h // group, seen[b, h, t]
        keys = np.concatenate([k_old[b, n], k_new[b, n]])
        values = np.concatenate([v_old[b, n], v_new[b, n]])
        z = keys[shown] @ q[b, h, t]
        extra = -np.inf if sink is None else float(np.asarray(sink, np.float64)[h, 0])
        top = max([*z, extra])
        if top == -np.inf:
            continue
        total = np.exp(z - top).sum() + np.exp(extra - top)
        p = np.exp(z - top) / total
        out[b, h, :, t] = p @ values[shown]
        if d_out is None:
            continue
        dy = np.asarray(d_out, np.float64)[b, h, :, t]
        dp = values[shown] @ dy
        mean = p @ dp
        dz = p * (dp - mean)
        where = np.flatnonzero(shown)
        grads[0][b, h, t] = dz @ keys[shown]
        for j, slot in enumerate(where):
            old = slot < slots
            dk, dv = (grads[3], grads[4]) if old else (grads[1], grads[2])
            at = slot if old else slot - slots
            dk[b, n, at] += dz[j] * q[b, h, t]
            dv[b, n, at] += p[j] * dy
        d_sink[h, 0] -= np.exp(extra - top) / total * mean
    return out, [*grads, d_sink]


def plain(q, k_new, v_new, k_old, v_old, sink=None, *, seen):
    """The output in the operands' dtype throughout, every key and score there."""
    if seen.ndim == 3:
        seen = seen[:, None]
    pairs = (k_old, k_new), (v_old, v_new)
    group = q.shape[1] // k_new.shape[1]
    k, v = (jnp.repeat(jnp.concatenate(pair, 2), group, 1) for pair in pairs)
    z = jnp.einsum("bhtd,bhsd->bhts", q, k)
    z = jnp.where(seen, z, jnp.asarray(-1e9, z.dtype))
    if sink is not None:
        column = jnp.broadcast_to(sink[None, :, :, None], (*z.shape[:3], 1))
        z = jnp.concatenate([z, column], -1)
    p = jnp.where(seen, jax.nn.softmax(z, -1)[..., : k.shape[2]], 0)
    return jnp.einsum("bhts,bhsd->bhdt", p, v)


def require_as_good_as_plain(run, arrays, seen, sink=None):
    """Values and gradients in a narrow dtype: errors at most twice the plain ones."""
    live = arrays if sink is None else [*arrays, sink]

    def results(function):
        out, pull = jax.vjp(function, *live)
        wave = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
        return out, *pull(wave.astype(out.dtype))

    def simple(*live):
        return plain(*live, seen=jnp.asarray(seen))

    got, other = (jax.jit(results, static_argnums=0)(f) for f in (run, simple))
    wave = np.cos(np.arange(got[0].size, dtype=np.float32)).reshape(got[0].shape)
    wave = np.asarray(jnp.asarray(wave).astype(got[0].dtype), np.float64)
    exact = attend(arrays, seen, sink), *gradients(arrays, seen, sink, wave)
    for i, (x, y) in enumerate(zip(got, other, strict=True)):
        assert x.dtype == y.dtype == arrays[0].dtype
        errors = [np.abs(np.asarray(a, np.float64) - exact[i]).max() for a in (x, y)]
        assert errors[0] <= 2 * errors[1], (i, errors)

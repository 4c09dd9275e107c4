"""The stack line by line from its equations, all scores at once, in wide precision.

RMSNorm: Zhang and Sennrich 2019, equation 4. Rotation: Su et al. 2021, equation 34.
Attention: Vaswani et al. 2017, equation 1. Gated MLP: Shazeer 2020, equation 6.
"""

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from neuronjax.kernels.dtypes import accumulator, promoted
from neuronjax.kernels.llama3_transformer.operands import Layer, Operands, head_counts
from neuronjax.kernels.shard_common import Group, all_reduce, uniform


def llama3_transformer_plain(
    *operands: Array,
    name: str,
    output_kv: bool,
    stored: bool = False,
    **config: Any,
) -> tuple[Array, ...]:
    """The same as `llama3_transformer_fwd`."""
    o, c = Operands(*operands), SimpleNamespace(**config)
    x, inputs, keys, values = o.x, [], [], []
    for i in range(o.w_qkv.shape[0]):
        inputs.append(x)
        x, key, value = _layer(x, Layer(*(w[i] for w in o.layers)), o.cos, o.sin, c)
        keys.append(key)
        values.append(value)
    kept = [keys, values] if output_kv else []
    kept += [inputs] if stored else []
    return (x, *map(jnp.stack, kept))


def llama3_transformer_plain_bwd(
    *args: Array | None, name: str, **config: Any
) -> tuple[Array, ...]:
    """The same as `llama3_transformer_bwd`: each layer pulled back at its own input."""
    count, c = len(Operands._fields), SimpleNamespace(**config)
    o, (inputs, dx, d_key, d_value, d_inputs) = Operands(*args[:count]), args[count:]
    layer, rows, tables = functools.partial(_layer, c=c), [], []
    assert inputs is not None
    for i in reversed(range(inputs.shape[0])):
        own = Layer(*(w[i] for w in o.layers))
        outs, pull = jax.vjp(layer, inputs[i], own, o.cos, o.sin)
        seeds = [dx, *(d if d is None else d[i] for d in (d_key, d_value))]
        dx, grads, *d_tables = pull(tuple(map(_seed, seeds, outs)))
        dx = dx if d_inputs is None else dx + d_inputs[i]
        rows.insert(0, grads)
        tables.append(d_tables)
    d_layers = (jnp.stack(column) for column in zip(*rows, strict=True))
    d_tables = [functools.reduce(jnp.add, t) for t in zip(*tables, strict=True)]
    assert dx is not None
    return (dx, *d_layers, *d_tables)


def _seed(cotangent: Array | None, out: Array) -> Array:
    zeros = uniform(jnp.zeros_like(out), out)[0]
    return zeros if cotangent is None else cotangent


def _layer(x, layer, cos, sin, c):
    """One layer's output, and its keys `[b, G, d, s]` and values `[b, G, s, d]`."""
    head_dim, seq = 2 * cos.shape[0], x.shape[1]
    num_heads, num_kv_heads = head_counts(layer, head_dim)
    y = _linear(_norm(x, layer.gamma_qkv, c.eps), layer.w_qkv, x)
    heads = y.reshape(*y.shape[:2], -1, head_dim)
    places = _places(num_heads, num_kv_heads, c.order)
    q, k, v = (jnp.moveaxis(heads[:, :, at], 2, 1) for at in places)
    q, k = (_turned(t, cos, sin).astype(x.dtype) for t in (q, k))
    v = v.astype(x.dtype)
    shared = jnp.arange(num_heads, dtype=jnp.int32) // (num_heads // num_kv_heads)
    scores = _product("bnqd,bnkd->bnqk", q, k[:, shared]) * head_dim**-0.5
    later = jnp.triu(jnp.ones((seq, seq), bool), 1)
    weights = jax.nn.softmax(jnp.where(later, -jnp.inf, scores), -1)
    mixed = _product("bnqk,bnkd->bqnd", weights.astype(x.dtype), v[:, shared])
    mixed = mixed.astype(x.dtype).reshape(*x.shape[:2], -1)
    h = _added(x, _linear(mixed, layer.w_out, x), c)
    n = _norm(h, layer.gamma_mlp, c.eps)
    gate, up = (_linear(n, w, x) for w in (layer.w_gate, layer.w_up))
    middle = (gate / (1 + jnp.exp(-gate)) * up).astype(x.dtype)
    return _added(h, _linear(middle, layer.w_down, x), c), jnp.swapaxes(k, 2, 3), v


def _norm(x, gamma, eps):
    wide = x.astype(accumulator(x.dtype))
    root = jnp.sqrt(jnp.mean(wide**2, -1, keepdims=True) + eps)
    return (wide / root * gamma[0].astype(wide.dtype)).astype(x.dtype)


def _linear(x, w, like):
    return _product("...i,ij->...j", x.astype(like.dtype), w)


def _product(spec, a, b):
    """Factors in the dtype that holds both, sums wide."""
    dtype = promoted(a.dtype, b.dtype)
    a, b = a.astype(dtype), b.astype(dtype)
    return jnp.einsum(spec, a, b, preferred_element_type=accumulator(dtype))


def _places(num_heads, num_kv_heads, order):
    """Where the query, key and value heads stand among the heads of the columns."""
    if order == "kind":
        first = num_heads + num_kv_heads
        counts = (0, num_heads), (num_heads, first), (first, first + num_kv_heads)
        return [jnp.arange(*ends, dtype=jnp.int32) for ends in counts]
    block = num_heads // num_kv_heads + 2
    every = jnp.arange(num_kv_heads * block, dtype=jnp.int32).reshape(-1, block)
    return every[:, :-2].reshape(-1), every[:, -2], every[:, -1]


def _turned(t, cos, sin):
    """Pairs `(i, i + d/2)` of `[b, heads, s, d]` turned by their angles."""
    half = t.shape[-1] // 2
    cos, sin = (jnp.moveaxis(a, 0, -1)[:, None].astype(t.dtype) for a in (cos, sin))
    first, second = t[..., :half], t[..., half:]
    turned = first * cos - second * sin, first * sin + second * cos
    return jnp.concatenate(turned, -1)


def _added(x, part, c):
    part = part.astype(x.dtype)
    part = part if c.axis is None else all_reduce(part, Group(c.axis))
    return x + part

"""Attention of one new token over a cache of 4096, with grouped key/value heads.

Each side gets its cache in the layout that it documents; outputs are compared as
`[batch, num_heads, head_dim]`. The new token sits in the cache's last slot.
"""

from collections.abc import Callable
from typing import Any

from benchmarks.workload import (
    Case,
    Side,
    Target,
    Work,
    Workload,
    jax_work,
    slow_bfloat16,
    torch_work,
)

CASES = {
    f"batch{batch}_{dtype}": {
        "batch": batch,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "seq": 4096,
        "dtype": dtype,
    }
    for dtype in ("float32", "bfloat16")
    for batch in (8, 1)
}


def ideal(case: Case) -> dict[str, float]:
    """Reads the cache once; two products for every query head."""
    cache = case["batch"] * case["num_kv_heads"] * case["seq"] * case["head_dim"]
    group = case["num_heads"] // case["num_kv_heads"]
    size = 2 if case["dtype"] == "bfloat16" else 4
    return {"flops": 4.0 * cache * group, "bytes": 2.0 * size * cache}


def _inputs(case: Case) -> list[Any]:
    """`q [batch, num_heads, head_dim]`; `k, v [batch, num_kv_heads, seq, head_dim]`."""
    import numpy as np

    rng = np.random.default_rng(0)
    cache = (case["batch"], case["num_kv_heads"], case["seq"], case["head_dim"])
    query = (case["batch"], case["num_heads"], case["head_dim"])
    return [rng.standard_normal(s, dtype=np.float32) for s in (query, cache, cache)]


def _jax_side(attention: Callable, *, seq_major: bool) -> Callable[[Case], Work]:
    def build(case: Case) -> Work:
        import jax.numpy as jnp

        q, k, v = _inputs(case)
        if seq_major:
            k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
        return jax_work(attention, *(jnp.array(x, case["dtype"]) for x in (q, k, v)))

    return build


def _jax_nn(q, k, v):
    import jax

    return jax.nn.dot_product_attention(q[:, None], k, v)[:, 0]


def _tokamax(q, k, v):
    import tokamax

    return tokamax.dot_product_attention(q[:, None], k, v, implementation="xla")[:, 0]


def _softmax_sum(scores, values, spec: str):
    import jax
    import jax.numpy as jnp

    weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
    out = jnp.einsum(spec, weights, values, preferred_element_type=jnp.float32)
    return out.astype(values.dtype)


def _jnp_repeated(q, k, v):
    """Every key/value head repeated for its group of query heads."""
    import jax.numpy as jnp

    group = q.shape[1] // k.shape[1]
    k, v = jnp.repeat(k, group, 1), jnp.repeat(v, group, 1)
    scores = jnp.einsum("bhd,bhsd->bhs", q, k, preferred_element_type=jnp.float32)
    return _softmax_sum(scores * q.shape[-1] ** -0.5, v, "bhs,bhsd->bhd")


def _jnp_grouped(q, k, v):
    """The group as one more axis of the query; nothing is repeated."""
    import jax.numpy as jnp

    batch, num_kv_heads, _, head_dim = k.shape
    grouped = q.reshape(batch, num_kv_heads, -1, head_dim)
    scores = jnp.einsum(
        "bkgd,bksd->bkgs", grouped, k, preferred_element_type=jnp.float32
    )
    out = _softmax_sum(scores * head_dim**-0.5, v, "bkgs,bksd->bkgd")
    return out.reshape(q.shape)


def _torch(case: Case) -> Work:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    dtype = getattr(torch, case["dtype"])
    q, k, v = (torch.from_numpy(x).to(dtype) for x in _inputs(case))

    def attention(q, k, v):
        out = scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True)
        return out[:, :, 0]

    return torch_work(attention, [q, k, v, None], backward=False)


def _torch_matmul(case: Case) -> Work:
    import torch

    dtype = getattr(torch, case["dtype"])
    q, k, v = (torch.from_numpy(x).to(dtype) for x in _inputs(case))
    grouped = (case["batch"], case["num_kv_heads"], -1, case["head_dim"])

    def attention(q, k, v):
        scores = q.view(grouped) @ k.transpose(2, 3) * case["head_dim"] ** -0.5
        return (torch.softmax(scores, -1) @ v).reshape(q.shape)

    return torch_work(attention, [q, k, v, None], backward=False)


def _neuronjax(case: Case) -> Work:
    """The emitter of `AttentionTkgFwd`: cached keys `[..., head_dim, seq]`.

    The new token comes beside the cache, whose last slot it will fill.
    """
    import jax.numpy as jnp

    from neuronjax.emit import attention_tkg_fwd_kernel

    q, k, v = (jnp.array(x, case["dtype"]) for x in _inputs(case))
    lengths = jnp.full(case["batch"], case["seq"] - 1, jnp.int32)
    new_key, new_value = k[:, :, -1:], v[:, :, -1:]

    def attention(q, new_key, new_value, keys, values, lengths):
        scaled = q[:, :, None] * jnp.asarray(case["head_dim"] ** -0.5, q.dtype)
        out = attention_tkg_fwd_kernel(
            scaled, new_key, new_value, keys, values, lengths=lengths
        )
        return out.reshape(q.shape)

    keys = jnp.array(k.swapaxes(2, 3))
    return jax_work(attention, q, new_key, new_value, keys, v, lengths)


WORKLOAD = Workload(
    name="decode_attention",
    title="Decode attention",
    cases=CASES,
    sides={
        "torch_sdpa": Side(_torch, "torch", skip=slow_bfloat16),
        "torch_matmul": Side(_torch_matmul, "torch", skip=slow_bfloat16),
        "jax_nn": Side(_jax_side(_jax_nn, seq_major=True)),
        "tokamax": Side(_jax_side(_tokamax, seq_major=True), "peers"),
        "jnp_repeated": Side(_jax_side(_jnp_repeated, seq_major=False)),
        "jnp_grouped": Side(_jax_side(_jnp_grouped, seq_major=False)),
        "neuronjax": Side(_neuronjax),
    },
    ideal=ideal,
    targets=(
        Target("neuronjax", "batch8_float32", "ms", 0.5, "torch_sdpa"),
        Target("neuronjax", "batch8_float32", "ms", 0.16, "jax_nn"),
    ),
)

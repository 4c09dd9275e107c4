"""Operands of prefill attention, and its NAMEs, for the tests of the family."""

import jax.numpy as jnp
import numpy as np

CAUSAL = "CausalAttentionMMSoftmaxMMWithoutSwap"
FULL = "AttentionMMSoftmaxMMWithoutSwap"
BACKWARD = "BackwardsAttention"


def draw(q_seq, kv_seq, heads=6, kv_heads=2, d=8, dv=6, dtype=jnp.float32):
    """Queries, keys and values, sequence second: 6 heads share 2 key heads."""
    rng = np.random.default_rng(q_seq + kv_seq)
    shapes = (heads, q_seq, d), (kv_heads, kv_seq, d), (kv_heads, kv_seq, dv)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def one_head(*values):
    """One head of width 1."""
    return jnp.asarray(values, jnp.float32).reshape(1, -1, 1)

"""A mixture of experts in plain jax.numpy: every expert for every token.

Shazeer et al. 2017, https://arxiv.org/abs/1701.06538, equation 1, with gated experts:
Shazeer 2020, https://arxiv.org/abs/2002.05202, equation 6.
"""

import jax
import jax.numpy as jnp


def plain_affinities(logits, k, *, act="SOFTMAX", normalize=True, bias=None, mask=None):
    """`[T, E]`: the weight of each expert, 0 for one that is not chosen."""
    scores = jax.nn.sigmoid(logits) if act == "SIGMOID" else jax.nn.softmax(logits, -1)
    keys = logits if bias is None else scores + bias.astype(scores.dtype)
    best = jnp.argsort(-keys, axis=-1, stable=True)[:, :k]
    chosen = (best[:, :, None] == jnp.arange(logits.shape[1])).any(1)
    if mask is not None:
        chosen = chosen & mask[:, None]
    kept = jnp.where(chosen, scores, 0)
    if not normalize:
        return kept
    total = kept.sum(-1, keepdims=True)
    return kept / jnp.where(total == 0, 1, total)


def plain_experts(x, affinities, gate_up, down, gate_up_b=None, down_b=None):
    """`[T, H]`: the weighted sum over all experts."""
    z = jnp.einsum("th,ehci->teci", x, gate_up)
    z = z if gate_up_b is None else z + gate_up_b
    gate, up = z[:, :, 0], z[:, :, 1]
    y = jnp.einsum("tei,eih->teh", gate / (1 + jnp.exp(-gate)) * up, down)
    y = y if down_b is None else y + down_b
    return (affinities[:, :, None] * y).sum(1)


def plain_moe(x, router, gate_up, down, k, *, biases=(None,) * 3, **rule):
    """Router and experts; `biases` are those of the router, gate and up, and down."""
    logits = x @ router
    logits = logits if biases[0] is None else logits + biases[0]
    affinities = plain_affinities(logits, k, **rule)
    return plain_experts(x, affinities, gate_up, down, *biases[1:])

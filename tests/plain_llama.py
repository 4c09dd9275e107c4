"""Llama in plain jax.numpy, from the equations; the reference for the models.

Touvron et al. 2023, https://arxiv.org/abs/2302.13971: RMSNorm before each block, rotary
embedding, SwiGLU. Weights under Hugging Face names, matrices `[out, in]`.
"""

import jax
import jax.numpy as jnp


def plain_llama(config, weights, tokens):
    """Logits `[batch, seq, vocab]`."""

    def w(name):
        return weights[f"{name}.weight"]

    x = w("model.embed_tokens")[tokens]
    pairs = jnp.arange(0.0, config.head_dim, 2) / config.head_dim
    angles = jnp.arange(1.0 * tokens.shape[1])[:, None] * config.rope_theta**-pairs
    for i in range(config.num_layers):
        at = f"model.layers.{i}"
        h = _norm(x, w(f"{at}.input_layernorm"), config.norm_eps)
        q, k, v = (
            _heads(h @ w(f"{at}.self_attn.{n}_proj").T, config.head_dim) for n in "qkv"
        )
        mixed = _attend(_turn(q, angles), _turn(k, angles), v)
        x = x + mixed @ w(f"{at}.self_attn.o_proj").T
        h = _norm(x, w(f"{at}.post_attention_layernorm"), config.norm_eps)
        gate, up = h @ w(f"{at}.mlp.gate_proj").T, h @ w(f"{at}.mlp.up_proj").T
        x = x + (gate / (1 + jnp.exp(-gate)) * up) @ w(f"{at}.mlp.down_proj").T
    head = "model.embed_tokens" if config.tie_embeddings else "lm_head"
    return _norm(x, w("model.norm"), config.norm_eps) @ w(head).T


def plain_loss(config, weights, tokens):
    """Mean cross-entropy of each next token, nats."""
    logits = plain_llama(config, weights, tokens)[:, :-1]
    log_p = logits - jax.scipy.special.logsumexp(logits, -1, keepdims=True)
    return -jnp.take_along_axis(log_p, tokens[:, 1:, None], -1).mean()


def _norm(x, gain, eps):
    return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * gain


def _heads(x, head_dim):
    return x.reshape(*x.shape[:2], -1, head_dim).transpose(0, 2, 1, 3)


def _turn(x, angles):
    a, b = jnp.split(x, 2, -1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def _attend(q, k, v):
    k, v = (jnp.repeat(t, q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ k.swapaxes(-1, -2) / jnp.sqrt(jnp.asarray(q.shape[-1], q.dtype))
    n = q.shape[2]
    seen = jnp.arange(n)[:, None] >= jnp.arange(n)
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), -1)
    return (weights @ v).transpose(0, 2, 1, 3).reshape(q.shape[0], n, -1)

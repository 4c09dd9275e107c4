"""Query and key heads between projection and attention: norm, rotation, norm.

Both norms are RMSNorm over the head dimension, each with or without a gain; the
rotation is that of `kernels.rope`. Arrays are `[batch, num_heads, seq, head_dim]` in
wide precision.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from neuronjax.kernels.attention_block_tkg.operands import Operands
from neuronjax.kernels.rms_norm import rms_norm_bwd, rms_norm_fwd
from neuronjax.kernels.rope import rope_bwd, rope_fwd


class Gains(NamedTuple):
    """The gains of both norms, `[1, head_dim]` or absent."""

    pre: Any
    post: Any


def split_heads(
    columns: jax.Array, head_dim: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Query, key and value heads of the projected columns."""
    heads = columns.reshape(*columns.shape[:2], -1, head_dim).transpose(0, 2, 1, 3)
    return heads[:, :-2], heads[:, -2:-1], heads[:, -1:]


def join_heads(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """The inverse of `split_heads`."""
    heads = jnp.concatenate([q, k, v], 1).transpose(0, 2, 1, 3)
    return jax.lax.collapse(heads, 2, 4)


def heads_fwd(
    raw: jax.Array, gains: Gains, o: Operands, c: Any
) -> tuple[jax.Array, tuple[Any, Any]]:
    """The heads that attention sees, and the statistics of both norms."""
    pre = post = None
    if c.pre_eps is not None:
        raw, pre = rms_norm_fwd(raw, gains.pre, eps=c.pre_eps)
    if o.cos is not None:
        raw = _rotated(raw, o, c)
    if c.post_eps is not None:
        raw, post = rms_norm_fwd(raw, gains.post, eps=c.post_eps)
    return raw, (pre, post)


def heads_again(
    raw: jax.Array, gains: Gains, statistics: tuple[Any, Any], o: Operands, c: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """From stored statistics: the heads before the rotation, behind it, and at last."""
    pre, post = statistics
    normed = raw if pre is None else _scaled(raw * pre, gains.pre)
    turned = normed if o.cos is None else _rotated(normed, o, c)
    return (
        normed,
        turned,
        turned if post is None else _scaled(turned * post, gains.post),
    )


def heads_bwd(
    d_heads: jax.Array,
    raw: jax.Array,
    again: tuple[jax.Array, jax.Array, jax.Array],
    gains: Gains,
    statistics: tuple[Any, Any],
    d_statistics: tuple[Any, Any],
    o: Operands,
    c: Any,
) -> tuple[jax.Array, Gains, tuple[Any, Any]]:
    """The cotangents of the raw heads, of both gains, and of both tables."""
    normed, turned, _ = again
    (pre, post), (d_pre, d_post) = statistics, d_statistics
    pre_gain = post_gain = None
    tables = None, None
    if post is not None:
        d_heads, post_gain = rms_norm_bwd(
            d_heads, turned, gains.post, post, d_rstd=d_post
        )
    if o.cos is not None:
        firsts = (_channels_first(normed), o.cos, o.sin, _channels_first(d_heads))
        found, *tables = rope_bwd(*firsts, name="RoPEBwd", full=False, **_pairs(c))
        d_heads = _channels_last(found)
    if pre is not None:
        d_heads, pre_gain = rms_norm_bwd(d_heads, raw, gains.pre, pre, d_rstd=d_pre)
    return d_heads, Gains(pre_gain, post_gain), (tables[0], tables[1])


def _scaled(x, gain):
    return x if gain is None else x * gain[0].astype(x.dtype)


def _rotated(x, o, c):
    (turned,) = rope_fwd(
        _channels_first(x), o.cos, o.sin, name="RoPE", full=False, **_pairs(c)
    )
    return _channels_last(turned)


def _pairs(c) -> dict[str, Any]:
    return dict(interleaved=c.interleaved)


def _channels_first(x):
    return x.transpose(3, 0, 1, 2)


def _channels_last(x):
    return x.transpose(1, 2, 3, 0)

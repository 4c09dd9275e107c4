"""What one device of a mesh computes in a step of `MeshDecoder`, inside `shard_map`."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from neuronjax.kernels.linear import linear_fwd
from neuronjax.kernels.shard_common import Group
from neuronjax.models.config import DecoderConfig
from neuronjax.models.moe_config import MoEConfig
from neuronjax.nn.cache import LayerCache
from neuronjax.nn.rotary import rotary_tables
from neuronjax.primitives.reduce import rms_norm
from neuronjax.primitives.transformer_tkg import transformer_tkg
from neuronjax.primitives.transformer_tkg.feed_forward import (
    ExpertsFeedForward,
    options,
)
from neuronjax.primitives.transformer_tkg.layer import DecodeLayer, Tokens
from neuronjax.primitives.transformer_tkg.layers import decode_layers
from neuronjax.primitives.transformer_tkg.residual import Links

Caches = tuple[LayerCache, ...] | LayerCache


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the parts of a decoder lie.

    Attributes:
        axis: the mesh axis of the ranks.
        ranks: how many they are.
        lnc: the mesh axis of a rank's cores, or `None`.
        table_axes: what splits the rows of the embedding.
        in_sbuf: which path the residual takes.
    """

    axis: str
    ranks: int
    lnc: str | None
    table_axes: tuple[str, ...]
    in_sbuf: bool


def embedded_tokens(
    table: Float[Array, "rows d_model"],
    tokens: Int[Array, "batch seq"],
    axes: tuple[str, ...],
) -> Float[Array, "batch seq d_model"]:
    """The rows of `tokens`; each device has some rows, and one all-reduce joins them.

    All but one of the addends are zero, so that nothing is rounded.
    """
    # Without the barrier XLA on a CPU widens a narrow table for both of its uses.
    table = lax.optimization_barrier(table)
    if not axes:
        return table[tokens]
    own = tokens - lax.axis_index(axes) * table.shape[0]
    held = (own >= 0) & (own < table.shape[0])
    rows = table[jnp.where(held, own, 0)]
    return lax.psum(jnp.where(held[..., None], rows, 0), axes)


def next_logits(
    x: Float[Array, "batch seq d_model"],
    gain: Float[Array, " d_model"],
    table: Float[Array, "rows d_model"],
    eps: float,
) -> Float[Array, "batch seq rows"]:
    """The logits of this device's rows of the vocabulary."""
    x = rms_norm(x, gain, eps=eps).astype(table.dtype)
    return linear_fwd(x, table.T, dtype=table.dtype)


def _seen(
    start: Int[Array, " batch"], seq: int, prior: int
) -> Bool[Array, "slots batch 1 seq"]:
    """What `seq` new tokens see: `prior` slots before `start[b]`, and one another.

    In the layout of `attention_block_tkg`, for all heads.
    """
    slot = jnp.arange(prior, dtype=jnp.int32)[:, None] < start
    before = jnp.broadcast_to(slot[:, :, None, None], (*slot.shape, 1, seq))
    new = jnp.arange(seq, dtype=jnp.int32)
    causal = new[:, None, None, None] <= new
    causal = jnp.broadcast_to(causal, (seq, *before.shape[1:]))
    return jnp.concatenate([before, causal])


def hidden_states(
    weights: Any,
    x: Float[Array, "batch seq d_model"],
    start: Int[Array, " batch"],
    caches: Caches,
    *,
    config: DecoderConfig,
    layout: Layout,
    slots: int,
    prior: int,
) -> tuple[Float[Array, "batch seq d_model"], Caches]:
    """The hidden states of new tokens behind all layers, and the caches with them.

    Args:
        weights: the device's parts, by the names of `mesh_packing`; one mapping a
            layer, or one with a leading axis of layers.
        x: the embedded tokens.
        start: `[batch]`, the slot of each row's first new token.
        caches: of the device's key heads.
        config: sizes of the whole decoder.
        layout: where its parts lie.
        slots: how many tokens a row may hold; where the new ones do not fit none of
            them is written.
        prior: how many slots may be seen, from the first on.
    """
    seq = x.shape[1]
    positions = start[:, None] + jnp.arange(seq, dtype=jnp.int32)
    tables = rotary_tables(positions, config.head_dim, theta=config.rope_theta)
    half = config.head_dim // 2
    cos, sin = (t[..., :half].transpose(2, 0, 1) for t in tables)
    fits = start + seq <= slots
    position = jnp.where(fits, start, -1).astype(jnp.int32)[:, None]
    tokens = Tokens(cos, sin, _seen(start, seq, prior), position)
    held = slots_of(caches)
    caches = with_slots(caches, max(held, prior + seq))
    layers = _experts if isinstance(config, MoEConfig) else _dense
    x, caches = layers(weights, x, caches, tokens, config, layout)
    return x, with_slots(caches, held)


def _dense(weights, x, caches, tokens, config, layout):
    """The layers of a `Llama`."""
    stacked = isinstance(caches, LayerCache)

    def each(name):
        return weights[name] if stacked else [layer[name] for layer in weights]

    out, keys, values = transformer_tkg(
        x,
        *(each(name) for name in ("W_qkv", "W_out", "W_gate", "W_up", "W_down")),
        *(each(name) for name in ("W_gamma_qkv", "W_gamma_mlp")),
        *_parted(caches),
        tokens.cos,
        tokens.sin,
        tokens.mask,
        None,
        tokens.position,
        config.num_layers,
        eps=config.norm_eps,
        replica_groups=[list(range(layout.ranks))],
        sbuf_residual_and_cc=layout.in_sbuf,
        axis=layout.axis,
        lnc_axis=layout.lnc,
    )
    return out, _joined(keys, values, stacked)


def _experts(weights, x, caches, tokens, config, layout):
    """The layers of a `MoELM`.

    No public function takes experts, and `decode_layers` checks nothing: sizes, mask
    and positions are those that `hidden_states` makes.
    """
    stacked = isinstance(caches, LayerCache)

    def layer(own):
        return DecodeLayer(
            own["W_gamma_qkv"],
            own["W_qkv"],
            own["W_out"],
            _feed_forward(own, config),
            eps=config.norm_eps,
        )

    layers = layer(weights) if stacked else [layer(own) for own in weights]
    links = Links(Group(layout.axis), layout.lnc, layout.in_sbuf)
    out, stored = decode_layers(x, layers, _parted(caches), tokens, links)
    return out, _joined(*stored, stacked)


def _feed_forward(own, config: MoEConfig) -> ExpertsFeedForward:
    names = dict(
        gamma="W_gamma_mlp",
        router_weights="router",
        expert_gate_up_weights="expert_gate_up",
        expert_down_weights="expert_down",
    )
    if config.shared_d_ff:
        names |= {f"shared_expert_{k}_w": f"W_{k}" for k in ("gate", "up", "down")}
    return ExpertsFeedForward(
        {theirs: own[ours] for theirs, ours in names.items()},
        options=options(
            eps=config.norm_eps,
            top_k=config.experts_per_token,
            router_act_fn=config.act_fn,
            norm_topk_prob=config.norm_topk_prob,
            expert_affinities_scaling_mode="POST_SCALE",
            hidden_act_fn=config.activation,
        ),
    )


def slots_of(caches: Caches) -> int:
    """How many slots the arrays of a cache have."""
    return jax.tree.leaves(_parted(caches)[0])[0].shape[-1]


def with_slots(caches: Caches, slots: int) -> Caches:
    """The caches with zeros behind, or without their last slots."""
    more = slots - slots_of(caches)
    if not more:
        return caches

    def resized(x, axis):
        if more < 0:
            return lax.slice_in_dim(x, 0, slots, axis=axis)
        spare = [(0, 0)] * x.ndim
        spare[axis] = (0, more)
        return jnp.pad(x, spare)

    return jax.tree.map(
        lambda c: LayerCache(
            resized(c.key, c.key.ndim - 1), resized(c.value, c.value.ndim - 2)
        ),
        caches,
        is_leaf=lambda c: isinstance(c, LayerCache),
    )


def _parted(caches: Caches) -> tuple[Any, Any]:
    """Keys and values apart: two arrays, or two lists of them."""
    if isinstance(caches, LayerCache):
        return caches.key, caches.value
    return [c.key for c in caches], [c.value for c in caches]


def _joined(keys: Any, values: Any, stacked: bool) -> Caches:
    """The inverse of `_parted`."""
    if stacked:
        return LayerCache(keys, values)
    return tuple(map(LayerCache, keys, values))

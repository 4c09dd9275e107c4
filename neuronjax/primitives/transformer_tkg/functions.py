"""`transformer_tkg`: every layer of a decode step in one program.

It has no macro of its own: it emits `AttentionBlockTkg` and `MLP` for every layer, or
once in a scan over layers.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Integer, Shaped

from neuronjax.kernels.shard_common import Group
from neuronjax.primitives import contracts
from neuronjax.primitives.known import in_int32
from neuronjax.primitives.mesh_axes import group_of
from neuronjax.primitives.transformer_tkg import rules  # noqa: F401  enters the rows
from neuronjax.primitives.transformer_tkg.facts import (
    SCALES,
    facts,
    is_stacked,
    of_layer,
)
from neuronjax.primitives.transformer_tkg.feed_forward import DenseFeedForward, Scales
from neuronjax.primitives.transformer_tkg.layer import DecodeLayer, Tokens
from neuronjax.primitives.transformer_tkg.layers import decode_layers
from neuronjax.primitives.transformer_tkg.residual import Links

Layers = Sequence[Shaped[Array, "..."]] | Shaped[Array, "layers ..."]
Scaled = Sequence[Float[Array, "rows _"] | None] | Float[Array, "layers rows _"] | None
Mask = Bool[Array, "..."] | Int[Array, "..."]


@contracts.contracted(facts)
def transformer_tkg(
    X: Float[Array, "batch seq d_model"],
    W_qkvs: Layers,
    W_outs: Layers,
    W_gates: Layers,
    W_ups: Layers,
    W_downs: Layers,
    W_gamma_qkvs: Layers,
    W_gamma_mlps: Layers,
    K_caches: Layers,
    V_caches: Layers,
    RoPE_cos: Float[Array, "half batch seq"],
    RoPE_sin: Float[Array, "half batch seq"],
    mask_cache: Mask,
    mask_active: Mask | None,
    position_ids: Integer[Array, "batch _"] | None,
    num_layers: int,
    eps: float = 1e-6,
    replica_groups: Sequence[Sequence[int]] | None = None,
    sbuf_residual_and_cc: bool = False,
    clamp_bound: float = 0.0,
    W_gate_scales: Scaled = None,
    W_up_scales: Scaled = None,
    W_down_scales: Scaled = None,
    *,
    axis: str | None = None,
    lnc_axis: str | None = None,
) -> tuple[Array, Any, Any]:
    r"""The layers of a dense decoder for `S` new tokens of each sequence.

    $$h \leftarrow h + \sum_{ranks} \mathrm{attention}(\mathrm{norm}(h)), \qquad
      h \leftarrow h + \sum_{ranks}
        (\mathrm{silu}(n W_g) \cdot n W_u)\, W_d, \quad n = \mathrm{norm}(h)$$

    Attention is that of `attention_block_tkg` with `K_cache_transposed`: half-split
    rotation, scale `D ** -0.5`, no biases. Both norms are RMSNorms over `H` with gains,
    inside the macros. No norm follows the last layer.

    A list for each kind of weight unrolls the layers while tracing. An array for each,
    all of them with a leading axis of `num_layers`, is scanned: same results, one layer
    to compile. The caches are lists or arrays likewise, and come back as they came.

    A layer is quantized when its gate scale is given: weights are fp8, activations are
    not rounded, and with `clamp_bound` $c > 0$

    $$n W \to (\mathrm{clip}(n, \pm c)\, W_q) \cdot s_w, \qquad
      m W_d \to (\mathrm{clip}(m, \pm c)\, W_q) \cdot s_w$$

    Over ranks: called inside `shard_map`, each call is one rank, with its own query
    heads, key/value heads and columns of `I`; `replica_groups` says who adds up. The
    residual is alike on all ranks, and is added once. Two all-reduces a layer. A
    macro's result is rounded to the dtype of `X` before it crosses the wire: half the
    bytes of float32. In bfloat16 two layers of 8 heads err by 4.1e-3 of the largest
    value on one device, and by 5.0e-3 on eight.

    Over the two cores of a rank (`lnc_axis`): `W_out` is a core's own half of the
    columns, `W_gate`, `W_up` and `W_down` are its half of `I`; everything else is alike
    on both. Both compute the attention; each projects to its half of `H`. Halves are
    exchanged over `lnc_axis`: in front of the all-reduce, which then takes all of `H`,
    or with `sbuf_residual_and_cc` behind it, and it takes half.

    Differentiation: to `X`, weights, gains, tables and caches; quantized weights, all
    scales, masks and positions are constants.

    Args:
        X: `[B, S, H]`, any floating dtype of at least 16 bits. The residual is rounded
            to it behind every half layer.
        W_qkvs: a layer's `[H, G*(n + 2)*D]`: for one of the rank's `G` key/value heads
            after another its `n` query heads, the key head and the value head.
            (aws-neuron/nki-library has `G = 1`.)
        W_outs: `[G*n*D, H]`, rows in the order of the query heads; with two cores
            `[G*n*D, H/2]`.
        W_gates: `[H, I]`, any floating dtype, or float8_e4m3 or float8_e4m3fn with a
            scale.
        W_ups: `[H, I]`.
        W_downs: `[I, H]`.
        W_gamma_qkvs: `[1, H]`, the gain of the norm in front of attention.
        W_gamma_mlps: `[1, H]`, that of the norm in front of the MLP.
        K_caches: `[B, G, D, S_max]`.
        V_caches: `[B, G, S_max, D]`. Donate both to `jit` to have them updated in
            place.
        RoPE_cos: `[D/2, B, S]`, of the positions of the new tokens.
        RoPE_sin: the same.
        mask_cache: `[S_ctx, B, N, S]`, boolean or integer, nonzero = attend, with
            `N = G*n` heads, or 1 for all of them. Slot `s` of the caches is row `s`,
            the last `S` rows are the new tokens, wherever a sequence ends. A query that
            attends none gets zeros.
        mask_active: `[S, B, N, S]`, 1 = the query (last axis) attends the new token
            (first axis): in place of the last `S` rows of `mask_cache`. `None` leaves
            them.
        position_ids: integers `[B, 1]`, the slot of the first new token, or `[B, S]`,
            all of them, one after another. -1 (0xFFFFFFFF) writes nothing for its
            sequence, nor do others that do not follow one another; `None` writes
            nothing at all.
        num_layers: how many layers are run; lists may be longer.
        eps: added to the mean squares; finite, at least 0.
        replica_groups: lists of the ranks of `axis` that add up. One list of all of
            them is an all-reduce; several are a reduce-scatter and an all-gather.
            `None`: no rank adds up.
        sbuf_residual_and_cc: all-reduce each core's half of `H` and exchange the halves
            then. Same results; with one core the half is the whole, and the program is
            the same.
        clamp_bound: what activations of quantized layers are clipped to, at least 0;
            0 clips none.
        W_gate_scales: a layer's scales of `W_gate`, float32, one a column, on 1 row or
            on 128 equal ones: `[128, I]`; `None` for a layer that is not quantized, or
            for all of them.
        W_up_scales: the same of `W_up`.
        W_down_scales: the same of `W_down`, `[128, H]`.
        axis: the mesh axis of the ranks in `replica_groups`.
        lnc_axis: the mesh axis of the two cores of a rank; `None` for one core.

    Returns:
        `(output [B, S, H], K_caches, V_caches)`. Alike on both cores; `output` is alike
        on the ranks of a group.

    Raises:
        ValueError: lists are too short, shapes, dtypes or groups do not fit together,
            or a layer breaks a rule of `attention_block_tkg` or `mlp`; the message has
            every broken rule. Positions that are not there, or not one after another,
            are an error where they are known while tracing, and otherwise write
            nothing. Limits of the chip are
            reported by `neuronjax.can` alone.

    Source:
        aws-neuron/nki-library, `experimental/transformer/transformer_tkg`, whose SBUF
        path names a mask that is not there and whose `mask_active` is read nowhere;
        Touvron et al. 2023, https://arxiv.org/abs/2302.13971, section 2.2.

    Example:
        >>> import jax.numpy as jnp
        >>> X, gain, table = jnp.ones((1, 1, 2)), jnp.ones((1, 2)), jnp.ones((1, 1, 1))
        >>> qkv, w = jnp.tile(jnp.eye(2), 3), jnp.eye(2)
        >>> K, V = jnp.zeros((1, 1, 2, 4)), jnp.zeros((1, 1, 4, 2))
        >>> seen = jnp.array([0, 1]).reshape(2, 1, 1, 1)  # no slot, the token itself
        >>> output, _, (V,) = transformer_tkg(
        ...     X,
        ...     [qkv],
        ...     [w],
        ...     [w],
        ...     [w],
        ...     [w],
        ...     [gain],
        ...     [gain],
        ...     [K],
        ...     [V],
        ...     table,
        ...     table * 0,
        ...     seen,
        ...     None,
        ...     jnp.array([[1]]),
        ...     num_layers=1,
        ... )
        >>> [f"{x:.3f}" for x in output.ravel()], V[0, 0, :, 0].round().tolist()
        (['2.731', '2.731'], [0.0, 1.0, 0.0, 0.0])
    """
    call = SimpleNamespace(**locals())
    layers, caches = _layers(call)
    h, held = decode_layers(jnp.asarray(X), layers, caches, _tokens(call), _links(call))
    if is_stacked(call):
        return h, *held
    more = (given[num_layers:] for given in (K_caches, V_caches))
    k_caches, v_caches = ([*own, *rest] for own, rest in zip(held, more, strict=True))
    return h, k_caches, v_caches


def _layers(call: SimpleNamespace) -> tuple[Any, tuple[Any, Any]]:
    """The layers that are run and their caches, stacked or listed."""
    if is_stacked(call):
        layer = _layer(call, dict(of_layer(call, None)))
        return layer, (call.K_caches, call.V_caches)
    count = call.num_layers
    layers = [_layer(call, dict(of_layer(call, i))) for i in range(count)]
    return layers, ([*call.K_caches[:count]], [*call.V_caches[:count]])


def _layer(call: SimpleNamespace, own: dict[str, Any]) -> DecodeLayer:
    scales = [own[name] for name in SCALES]
    quantized = scales[0] is not None
    feed_forward = DenseFeedForward(
        gamma=own["W_gamma_mlps"],
        gate=own["W_gates"],
        up=own["W_ups"],
        down=own["W_downs"],
        scales=Scales(*scales) if quantized else None,
        eps=float(call.eps),
        clamp_bound=float(call.clamp_bound) if quantized else 0.0,
    )
    attention = own["W_gamma_qkvs"], own["W_qkvs"], own["W_outs"]
    return DecodeLayer(*attention, feed_forward, eps=float(call.eps))


def _tokens(call: SimpleNamespace) -> Tokens:
    mask, position = jnp.asarray(call.mask_cache).astype(bool), call.position_ids
    if call.mask_active is not None:
        active = jnp.asarray(call.mask_active).astype(bool)
        heads = max(mask.shape[2], active.shape[2])
        mask, active = (
            jnp.broadcast_to(x, (*x.shape[:2], heads, x.shape[3]))
            for x in (mask, active)
        )
        mask = jnp.concatenate([mask[: mask.shape[0] - active.shape[0]], active])
    if position is not None and position.shape[1] > 1:
        position = _first(position, call.V_caches[0].shape[-2])
    return Tokens(call.RoPE_cos, call.RoPE_sin, mask, position)


def _first(positions: Any, slots: int) -> Array:
    """The slot of the first new token; -1 where the others do not follow it."""
    rows = in_int32(positions, -1, slots)
    first = rows[:, :1]
    following = first + jnp.arange(rows.shape[1], dtype=jnp.int32)
    return jnp.where((rows == following).all(1, keepdims=True), first, -1)


def _links(call: SimpleNamespace) -> Links:
    groups, ranks = call.replica_groups, Group()
    if groups is not None:
        # The sum over a whole axis, were it of one rank, is typed alike on all of it.
        whole = len(groups) == 1
        ranks = Group(call.axis) if whole else group_of(call.axis, groups)
    return Links(ranks, call.lnc_axis, bool(call.sbuf_residual_and_cc))

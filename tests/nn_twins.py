"""What each layer of `neuronjax.nn` is the twin of: the functions on its parameters."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import neuronjax
from neuronjax import nn
from neuronjax.nn.attention_options import segment_bounds

WIDTH, D_FF, HEAD_DIM, SEQ = 8, 6, 4, 3


def draw(*shape, seed=0, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def row(parameter):
    return None if parameter is None else parameter[...][None]


def tables(batch=2, seq=SEQ, start=0):
    positions = start + jnp.arange(seq, dtype=jnp.int32)
    return nn.rotary_tables(jnp.broadcast_to(positions, (batch, seq)), HEAD_DIM)


def half(table):
    return jnp.moveaxis(table[..., : HEAD_DIM // 2], -1, 0)


def mlp(layer, x):
    weights = layer.gate[...], layer.up[...], layer.down[...]
    norm = dict(normalization_type="RMS_NORM")
    norm |= dict(normalization_weights_tensor=row(layer.norm))
    return neuronjax.mlp(x, *weights, **norm)[0]


def heads(layer, x, cos, sin):
    rotation = dict(fused_rope=True, cos_cache=cos, sin_cache=sin)
    fused = neuronjax.qkv(
        x,
        layer.qkv[...],
        fused_norm_type="RMS_NORM",
        gamma_norm_weights=row(layer.norm),
        d_head=HEAD_DIM,
        num_q_heads=2,
        num_kv_heads=1,
        **(rotation if cos is not None else {}),
    )
    heads = jnp.split(fused.reshape(*x.shape[:2], 4, HEAD_DIM), [2, 3], 2)
    return [t.swapaxes(1, 2) for t in heads]


def attended(layer, heads, **options):
    q, k, v = (t.reshape(-1, *t.shape[2:]) for t in heads)
    options = dict(scale=HEAD_DIM**-0.5, tp_k=True, tp_out=True) | options
    out = neuronjax.attention_cte(q, k, v, **options)
    out = out.reshape(-1, 2, HEAD_DIM, out.shape[-1])
    return neuronjax.output_projection_cte(out, layer.out[...])


def attention(layer, x, cos, sin):
    return attended(layer, heads(layer, x, cos, sin))


def options(layer, x, cos, sin):
    sink = jnp.tile(layer.sink[...][:, None], (x.shape[0], 1))
    options = dict(sink=sink, sliding_window=2, logits_soft_cap=1.5)
    return attended(layer, heads(layer, x, cos, sin), **options)


def packed(layer, x, cos, sin, segments):
    bounds = segment_bounds(segments)
    options = dict(scale=HEAD_DIM**-0.5, tp_out=True)

    def row(q, k, v, low, high):
        ends = dict(bound_min=low, bound_max=high)
        return neuronjax.attention_cte(q, k.mT, v, **options, **ends)

    out = jax.vmap(row)(*heads(layer, x, cos, sin), *bounds)
    return neuronjax.output_projection_cte(out, layer.out[...])


def attention_decode(layer, x, cos, sin, cache, lengths):
    query, key, value = heads(layer, x, cos, sin)
    causal = jnp.array([[True, True], [False, True]])[:, None, None]
    out = neuronjax.emit.attention_tkg_fwd_kernel(
        query * HEAD_DIM**-0.5,
        key,
        value,
        cache.key,
        cache.value,
        lengths=lengths,
        mask=jnp.broadcast_to(causal, (2, 2, 2, 2)),
        start_pos_ids=jnp.array([[0, 0], [1, 2]], jnp.int32),
        sink=layer.sink[...][:, None],
    )
    out = neuronjax.output_projection_cte(out, layer.out[...])
    return out, cache.write(key, value, lengths)


def decoder_layer(layer, x, cos, sin):
    h = x + layer.attention(x, cos, sin)
    return layer.mlp(h, residual=h)


def moe(layer, x):
    rows = neuronjax.rms_norm(x, layer.norm[...]).reshape(-1, WIDTH)
    rule = dict(act_fn="SOFTMAX", k=2, x_hbm_layout=1, norm_topk_prob=True)
    _, index, affinities = neuronjax.router_topk(rows, layer.router[...], **rule)
    ids, experts, _ = neuronjax.route_to_blocks(index, 4, 2, skip_token=True)
    out = neuronjax.moe_cte(
        rows,
        neuronjax.mask_affinities(affinities, index, skip_token=True),
        layer.gate_up[...],
        layer.down[...],
        *(ids, experts, 2, "shard_on_block"),
        skip_dma=neuronjax.SkipMode(skip_token=True),
        compute_dtype=jnp.float32,
    )
    return out.reshape(x.shape)


def moe_block(layer, x, residual):
    out, *rest = neuronjax.moe_block_tkg(
        x,
        row(layer.norm),
        layer.router[...],
        layer.gate_up[...],
        layer.down[...],
        *(layer.shared.gate[...], layer.shared.up[...], layer.shared.down[...]),
        top_k=2,
        router_act_fn="SOFTMAX",
        norm_topk_prob=True,
        expert_affinities_scaling_mode="POST_SCALE",
        residual=residual,
    )
    return out.reshape(x.shape), *rest


def cache(layers=(), kv_heads=1, slots=5):
    shape = (*layers, 2, kv_heads)
    key = draw(*shape, HEAD_DIM, slots, seed=7)
    return nn.LayerCache(key, draw(*shape, slots, HEAD_DIM, seed=8))


LENGTHS = jnp.array([1, 3], jnp.int32)


def seen(heads, seq=2, slots=5):
    """What two new tokens see behind `LENGTHS` cached ones."""
    seen = np.zeros((slots, 2, heads, seq), bool)
    for row, length in enumerate(LENGTHS.tolist()):
        seen[:length, row] = True
        for query in range(seq):
            seen[slots - seq : slots - seq + query + 1, row, :, query] = True
    # What a layer computes from lengths is no constant that XLA may fold.
    return lax.optimization_barrier(jnp.asarray(seen))


def block(layer, x, cos, sin, cache, lengths):
    norm = dict(rmsnorm_QK_post_rope_enabled=True)
    norm |= dict(rmsnorm_QK_post_rope_W_Q=row(layer.query_norm))
    norm |= dict(rmsnorm_QK_post_rope_W_K=row(layer.key_norm))
    out, key, value = neuronjax.attention_block_tkg(
        x,
        rmsnorm_X_enabled=True,
        rmsnorm_X_gamma=row(layer.norm),
        W_qkv=layer.qkv[...],
        bias_qkv=row(layer.qkv_bias),
        cos=half(cos),
        sin=half(sin),
        **norm,
        K_cache_transposed=True,
        K_cache=cache.key,
        V_cache=cache.value,
        attention_mask=seen(2),
        sink=layer.sink[...][:, None],
        kv_cache_update_idx=lengths[:, None],
        W_out=layer.out[...],
        bias_out=row(layer.out_bias),
    )
    return out.reshape(x.shape), nn.LayerCache(key, value)


def stack_weights(layer):
    names = ("qkv", "out", "gate", "up", "down")
    gains = (layer.attention_norm, layer.mlp_norm)
    weights = [getattr(layer, name)[...] for name in names]
    return *weights, *(gain[...][:, None] for gain in gains)


def stack(layer, x, cos, sin):
    weights = stack_weights(layer)
    return neuronjax.llama3_transformer(x, *weights, half(cos), half(sin))


def stack_decode(layer, x, cos, sin, cache, lengths):
    out, key, value = neuronjax.transformer_tkg(
        x,
        *stack_weights(layer),
        cache.key,
        cache.value,
        half(cos),
        half(sin),
        seen(1),
        None,
        lengths[:, None],
        2,
    )
    return out, nn.LayerCache(key, value)


def decode(layer, *inputs):
    return layer.decode(*inputs)


def rotated(layer, x, positions):
    tables = nn.rotary_tables(positions, HEAD_DIM, theta=500.0)
    x = jnp.moveaxis(x, -1, 0)
    turned = neuronjax.RoPE(x, *map(half, tables), contiguous_layout=False)
    return jnp.moveaxis(turned, 0, -1)


def routed(layer, x):
    bias, balance = layer.bias[...], layer.selection_bias[...]
    rule = dict(act_fn="SIGMOID", k=2, x_hbm_layout=1, norm_topk_prob=True)
    return neuronjax.router_topk(
        x, layer.kernel[...], bias, **rule, selection_bias=balance
    )


def qkv(layer, x, cos, sin, mlp_prev, attention_prev):
    return neuronjax.qkv(
        x,
        layer.kernel[...],
        "NBSd",
        row(layer.bias),
        fused_residual_add=True,
        mlp_prev=mlp_prev,
        attention_prev=attention_prev,
        fused_norm_type="LAYER_NORM",
        gamma_norm_weights=row(layer.gamma),
        layer_norm_bias=row(layer.beta),
        fused_rope=True,
        cos_cache=cos,
        sin_cache=sin,
        d_head=HEAD_DIM,
        num_q_heads=2,
        num_kv_heads=1,
    )


def loss(layer, x, targets, weights):
    options = dict(ignore_index=-1, label_smoothing=0.1)
    if hasattr(layer, "kernel"):
        operands = x, layer.kernel[...], targets
        return neuronjax.linear_cross_entropy(*operands, weights=weights, **options)
    return neuronjax.cross_entropy(x, targets, weights=weights, **options)

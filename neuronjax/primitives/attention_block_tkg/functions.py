"""The public function of the decode block."""

from types import SimpleNamespace

from jaxtyping import Array, Float, Integer, Shaped

from neuronjax.primitives.attention_block_tkg.facts import facts
from neuronjax.primitives.attention_block_tkg.macro import (
    attention_block_tkg_kernel,
    require_values,
)
from neuronjax.primitives.contracts import contracted
from neuronjax.primitives.options import QuantizationType, refuses

Gain = Float[Array, "1 head_dim"]
Scale = Float[Array, "rows 1"]
Cache = Shaped[Array, "*slots _"]


@refuses(sbm=None)
@contracted(facts)
def attention_block_tkg(
    X: Float[Array, "batch seq d_model"],
    X_hidden_dim_actual: int | None = None,
    rmsnorm_X_enabled: bool = False,
    rmsnorm_X_eps: float | None = None,
    rmsnorm_X_gamma: Float[Array, "1 d_model"] | None = None,
    W_qkv: Shaped[Array, "d_model columns"] | None = None,
    bias_qkv: Float[Array, "1 columns"] | None = None,
    quantization_type_qkv: QuantizationType | str = QuantizationType.NONE,
    weight_dequant_scale_qkv: Float[Array, "rows _"] | None = None,
    input_dequant_scale_qkv: Scale | None = None,
    rmsnorm_QK_pre_rope_enabled: bool = False,
    rmsnorm_QK_pre_rope_eps: float | None = None,
    rmsnorm_QK_pre_rope_W_Q: Gain | None = None,
    rmsnorm_QK_pre_rope_W_K: Gain | None = None,
    cos: Float[Array, "half batch seq"] | None = None,
    sin: Float[Array, "half batch seq"] | None = None,
    rope_contiguous_layout: bool = True,
    rmsnorm_QK_post_rope_enabled: bool = False,
    rmsnorm_QK_post_rope_eps: float | None = None,
    rmsnorm_QK_post_rope_W_Q: Gain | None = None,
    rmsnorm_QK_post_rope_W_K: Gain | None = None,
    K_cache_transposed: bool = False,
    active_blocks_table: Integer[Array, "batch blocks"] | None = None,
    K_cache: Cache | None = None,
    V_cache: Cache | None = None,
    attention_mask: Shaped[Array, "slots batch num_heads seq"] | None = None,
    sink: Float[Array, "num_heads 1"] | None = None,
    update_cache: bool = True,
    kv_cache_update_idx: Integer[Array, "batch 1"] | None = None,
    W_out: Shaped[Array, "rows d_model"] | None = None,
    bias_out: Float[Array, "1 d_model"] | None = None,
    quantization_type_out: QuantizationType | str = QuantizationType.NONE,
    weight_dequant_scale_out: Float[Array, "rows _"] | None = None,
    input_dequant_scale_out: Scale | None = None,
    transposed_out: bool = False,
    out_in_sb: bool = False,
    softmax_scale: float | Array | None = None,
    enable_fa_s_prior_tiling: bool = True,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
    sbm: None = None,
    skip_attention: bool = False,
    KVDP: int = 1,
    KVDP_replica_group: str | None = None,
    *,
    round_activations: bool = True,
    lnc: int | None = None,
) -> tuple[Array, Array, Array]:
    r"""One attention layer of a decode step, from hidden states to hidden states.

    $$q, k, v = \operatorname{norm}(X) W_{qkv} + b, \qquad
      q, k \mapsto \operatorname{norm}(R(\operatorname{norm}(q))),
      \operatorname{norm}(R(\operatorname{norm}(k))), \qquad
      X_{out} = \operatorname{softmax}(s\, q K^T) V\, W_{out} + b_{out}$$

    `N` query heads share one key and one value head of width `D`. Of the `S_ctx`
    visible slots the last `S` stand for the new tokens, wherever a sequence ends; the
    caches are read before they are updated. Each stage is left out where its operands
    or its flag say so. No residual is added.

    With `k_scale` and `v_scale` keys and values are fp8:
    $k = \mathrm{fp8}(\mathrm{clip}(k\, s_k, \pm 240))$, and so the values; nothing is
    divided again: fold $1/s_k$ into `softmax_scale` and $1/s_v$ into `W_out`.

    Differentiation: a rounding passes straight through, beyond a clip the derivative
    is zero; quantized weights, all scales and fp8 caches are constants. The updated
    caches and the new tokens have derivatives like every output.

    Args:
        X: `[B, S, H]`, any floating dtype of at least 16 bits.
        X_hidden_dim_actual: columns that count in the norm's mean; the rest hold zeros:
            they enter all sums like any column, so what is not finite there spreads.
        rmsnorm_X_enabled: RMSNorm of `X` over `H`.
        rmsnorm_X_eps: added to the mean square. `None` is 1e-6 here and in both norms
            below, as in the vendor's reference (its kernel takes 1e-3 for `X`).
        rmsnorm_X_gamma: that norm's gain, `[1, H]`; `None` for none.
        W_qkv: `[H, (N + 2)*D]`: query heads, then the key head, then the value head.
        bias_qkv: `[1, (N + 2)*D]`, added after the scales.
        quantization_type_qkv: `NONE`, `STATIC` or `ROW`, as in `qkv`.
        weight_dequant_scale_qkv: float32; `ROW` one value a column, `STATIC` three,
            for query, key and value; on 1 row, or on 128 equal ones.
        input_dequant_scale_qkv: float32, `[1, 1]` or `[128, 1]`, for `STATIC`;
            positive.
        rmsnorm_QK_pre_rope_enabled: RMSNorm of each query and key head over `D`, in
            front of the rotation.
        rmsnorm_QK_pre_rope_eps: as `rmsnorm_X_eps`.
        rmsnorm_QK_pre_rope_W_Q: its gain for queries, `[1, D]`; `None` for none.
        rmsnorm_QK_pre_rope_W_K: its gain for keys.
        cos: `[D/2, B, S]`, as in `RoPE`; without it or `sin` nothing is rotated.
        sin: like `cos`.
        rope_contiguous_layout: True for half-split pairs, False for interleaved ones.
        rmsnorm_QK_post_rope_enabled: the same norm behind the rotation.
        rmsnorm_QK_post_rope_eps: as `rmsnorm_X_eps`.
        rmsnorm_QK_post_rope_W_Q: its gain for queries, `[1, D]`.
        rmsnorm_QK_post_rope_W_K: its gain for keys.
        K_cache_transposed: a flat `K_cache` is `[B, D, S_max]`.
        active_blocks_table: integers `[B, S_ctx/block_len]`: the caches are block
            caches, and these blocks, in this order, hold the slots of each sequence.
            A slot of a block that does not exist is never seen.
        K_cache: `[B, S_max, D]`, or `[num_blocks, block_len, D]`; an axis of size 1 at
            position 1 is accepted and returned. Donate it to `jit` to have it updated
            in place.
        V_cache: `[B, S_max, D]`, or as `K_cache` in blocks.
        attention_mask: `[S_ctx, B, N, S]` in token order, nonzero = attend; the last
            `S` rows are the new tokens. `mask_to_token_order` brings the chip's orders
            here.
        sink: `[N, 1]`: one more logit of each head, without a value and not scaled.
        update_cache: return the caches with the new tokens in them, else the tokens.
        kv_cache_update_idx: integers `[B, 1]`: the slot of the first new token; in a
            block cache a physical slot, `block*block_len + offset`, and the tokens
            after it go to the slots after it. 0xFFFFFFFF (or -1) writes nothing. A
            write that does not fit is an error when it is known while tracing, under
            `jit` it is left out; nothing is clamped. Of two sequences that name one
            slot the later one counts.
        W_out: `[N*D, H]`; `None` leaves the projection out.
        bias_out: `[1, H]`.
        quantization_type_out: `NONE`, `STATIC` or `ROW`, as in `output_projection_tkg`;
            not read without `W_out`.
        weight_dequant_scale_out: as there.
        input_dequant_scale_out: as there.
        transposed_out: `X_out` is `[128, L, H/(128*L), B*S]`, as there.
        out_in_sb: where the output lies; without `W_out` it is `[D, B*N*S]` then.
        softmax_scale: `s`, multiplied into queries after norms and rotation; `None` is
            `1/sqrt(D)`, 0 is 0. A scalar array has a derivative.
        enable_fa_s_prior_tiling: how the chip tiles the cache; changes no value.
        k_scale: float32, `[1, 1]` or `[128, 1]`, one value: keys are multiplied by it.
        v_scale: the same for values.
        sbm: the vendor's buffer manager; must be `None`.
        skip_attention: project the rotated queries, unscaled, instead of the heads.
        KVDP: ranks that share the caches by sequence. Each has its own `N` heads and
            all `B` sequences; caches, table, index and mask cover `B/KVDP` sequences,
            the mask the `KVDP*N` heads of all ranks. `X_out` is the rank's own part of
            the sum over heads.
        KVDP_replica_group: the mesh axis of those ranks: call inside its `shard_map`,
            or see `neuronjax.sharding.sharded_attention_block_tkg`.
        round_activations: with `k_scale` round keys and values to float8_e4m3, which
            the caches must be. False is the vendor's reference, which clips alone: the
            caches are of a wider dtype.
        lnc: `L`, the cores of a logical core, for `transposed_out`; two when `H` is a
            multiple of 256, else 1.

    Returns:
        `(X_out, K_out, V_out)`: `[B*S, H]` or the transposed layout, without `W_out`
        `[B, N, D, S]`, in the dtype of `X`; and both caches in their shape and dtype,
        or without `update_cache` the new keys `[D, B, S]` and values `[B, 1, S, D]`.
        A query that sees nothing gets 0.

    Raises:
        ValueError: the arguments break a rule; one error lists all of them. Or a scale
            that divides is not positive and finite.
        NotImplementedError: a buffer manager is given.

    Source:
        aws-neuron/nki-library, `experimental/transformer/attention_block_tkg.py`.

    Example:
        >>> import jax.numpy as jnp
        >>> X, W_qkv = jnp.ones((1, 1, 2)), jnp.eye(2, 6) + jnp.eye(2, 6, 4)
        >>> cache, seen = jnp.zeros((1, 3, 2)), jnp.array([0, 1]).reshape(2, 1, 1, 1)
        >>> X_out, K_out, V_out = attention_block_tkg(
        ...     X,
        ...     W_qkv=W_qkv,
        ...     K_cache=cache,
        ...     V_cache=cache,
        ...     attention_mask=seen,
        ...     kv_cache_update_idx=jnp.array([[1]]),
        ... )
        >>> X_out.ravel().tolist(), V_out.ravel().tolist()
        ([1.0, 1.0], [0.0, 0.0, 1.0, 1.0, 0.0, 0.0])
    """
    given = dict(locals())
    del given["sbm"]
    require_values("attention_block_tkg", SimpleNamespace(**given))
    return attention_block_tkg_kernel(**given)

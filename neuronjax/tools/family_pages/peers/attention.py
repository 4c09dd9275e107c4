"""Attention: prefill, decode, and the projections' layers around it."""

from neuronjax.tools.family_pages.peers.peer import Peer

_HEADS = "`[B, T, N, H]` there; here heads come first and the batch is folded in"
_KEYS = "`[B*K, H, S]`, or `[B*K, S, H]` with `tp_k=True`"
_ORDER = (
    "Layouts differ. Here `[heads, ...]` holds `B*N` query heads and `B*K` key heads: "
    "`x.swapaxes(1, 2).reshape(B * N, T, H)` from `[B, T, N, H]`, a plain `reshape` "
    "from `[B, N, T, H]`. A query head attends with key head `h // (N / K)` on all "
    "sides."
)
_SCALE = "None is `1/sqrt(H)` on both sides, and the default there; here the default is"
_JAX_ROWS = (
    ("query", "q", f"{_HEADS}, `[B*N, T, H]`"),
    ("key", "k", _KEYS),
    ("value", "v", "`[B*K, S, H]`; its width may differ from that of the keys"),
    (
        "bias",
        "bias",
        "`[B or 1, N or 1, T or 1, S or 1]` there; three axes here, heads and batch "
        "folded",
    ),
    ("mask", "mask", "True = keep on both sides; folded as `bias` is"),
    ("scale", "scale", f"{_SCALE} 1"),
    (
        "is_causal",
        "causal_mask",
        "aligned top-left on both sides; False by default there, True here",
    ),
    (
        "query_seq_lengths",
        "mask",
        "rows past a length are the caller's to ignore; a mask makes them 0",
    ),
    ("key_value_seq_lengths", "mask", "`keys < length` of each sequence"),
    (
        "local_window_size",
        "sliding_window",
        "`(left, 0)` there is `left + 1` here, with `causal_mask`: the query's own "
        "key counts; to the right there is no window, but `mask`",
    ),
)

PEERS = {
    "attention_prefill": (
        Peer(
            "jax.nn.dot_product_attention",
            "attention_cte",
            (
                *_JAX_ROWS,
                ("implementation", "", "the macro is chosen by layout and target"),
                (
                    "return_residual",
                    "cache_softmax",
                    "the log-sum-exp there; here `-out_neg_max - log(out_sum_recip)`",
                ),
            ),
            _ORDER,
        ),
        Peer(
            "flax.nnx.dot_product_attention",
            "attention_cte",
            (
                ("query", "q", f"{_HEADS}; always scaled there: pass `scale=None`"),
                ("key", "k", _KEYS),
                ("value", "v", "`[B*K, S, H]`"),
                ("bias", "bias", "`[B, N, T, S]` there; folded to three axes here"),
                ("mask", "mask", "True = keep on both sides"),
                ("dropout_rng", "dropout_key", "a key of `jax.random` on both sides"),
                ("dropout_rate", "dropout_rate", ""),
                (
                    "broadcast_dropout",
                    "",
                    "each weight is dropped by itself: by key, head and position",
                ),
                ("deterministic", "dropout_rate", "0 for True"),
                ("is_causal", "causal_mask", "True by default here"),
                (
                    "dtype, promote_dtype",
                    "",
                    "operands have one dtype; sums are float32, or float64",
                ),
                ("precision", "", "`jax.default_matmul_precision`"),
                ("module", "", "checkpoint names are `attention_out` and its kin"),
            ),
        ),
        Peer(
            "torch.nn.functional.scaled_dot_product_attention",
            "attention_cte",
            (
                ("query", "q", "`[B, N, T, H]` there: one `reshape`"),
                ("key", "k", "with `tp_k=True` one `reshape`"),
                ("value", "v", "one `reshape`"),
                (
                    "attn_mask",
                    "mask, bias",
                    "a boolean one is `mask`, True = keep on both sides; a float one "
                    "is `bias`",
                ),
                ("dropout_p", "dropout_rate, dropout_key", "the key is explicit here"),
                ("is_causal", "causal_mask", "top-left on both sides"),
                ("scale", "scale", f"{_SCALE} 1"),
                ("enable_gqa", "", "always: fewer key heads than query heads will do"),
            ),
        ),
        Peer(
            "torch.nn.MultiheadAttention.forward",
            "attention_cte",
            (
                ("query", "q", "before its projection there"),
                ("key", "k", "the same"),
                ("value", "v", "the same"),
                (
                    "key_padding_mask",
                    "mask",
                    "INVERSE there: True = ignore. `mask = ~key_padding_mask`",
                ),
                (
                    "attn_mask",
                    "mask, bias",
                    "INVERSE there: a boolean one hides where it is True",
                ),
                ("need_weights, average_attn_weights", "", "weights never exist whole"),
                ("is_causal", "causal_mask", "a hint there, the mask itself here"),
            ),
        ),
        Peer(
            "tokamax.dot_product_attention",
            "attention_cte",
            (
                *_JAX_ROWS,
                (
                    "logits_soft_cap",
                    "logits_soft_cap",
                    "the cap covers the bias there; here it comes before the bias",
                ),
                ("precision", "", "`jax.default_matmul_precision`"),
                ("implementation", "", "the macro is chosen by layout and target"),
                ("q_sharding", "", "`neuronjax.sharding.sharded_attention`"),
            ),
        ),
        Peer(
            "jax.experimental.pallas.ops.tpu.flash_attention.flash_attention",
            "attention_cte",
            (
                ("q", "q", "`[B, N, T, H]` there: one `reshape`"),
                ("k", "k", "with `tp_k=True` one `reshape`"),
                ("v", "v", "one `reshape`"),
                ("ab", "bias", "added to the scores; `[B, N, T, S]` there"),
                (
                    "segment_ids",
                    "bound_min, bound_max",
                    "for segments that follow one another and are alike in all "
                    "sequences: where a query's segment begins and ends; else `mask`",
                ),
                ("causal", "causal_mask", "False by default there"),
                ("sm_scale", "scale", "1 by default on both sides"),
                ("block_sizes", "", "blocks are the leaf's matter"),
                ("debug", "", "`neuronjax.plain()`"),
            ),
        ),
        Peer(
            "flax.nnx.MultiHeadAttention",
            "nn.Attention",
            (
                ("in_features, out_features", "d_model", "one width here"),
                ("num_heads", "num_heads", ""),
                (
                    "qkv_features",
                    "head_dim",
                    "the width of all heads there, of one here",
                ),
                ("num_kv_heads", "num_kv_heads", "given always"),
                ("dtype", "dtype", ""),
                ("param_dtype", "param_dtype", ""),
                ("rngs", "rngs", ""),
                (
                    "normalize_qk",
                    "norm",
                    "other norms: of queries and keys there, of the layer's input here",
                ),
                ("in_kv_features", "", "self-attention alone"),
                ("use_bias, bias_init, out_bias_init", "", "no bias"),
                (
                    "kernel_init, out_kernel_init",
                    "",
                    "normal, with the root of the inverse width",
                ),
                ("decode", "", "`neuronjax.attention_tkg` and `nn.LayerCache`"),
                ("precision", "", "`jax.default_matmul_precision`"),
                ("keep_rngs", "", "weights are made once, at construction"),
                (
                    "attention_fn, qkv_dot_general, out_dot_general, "
                    "qkv_dot_general_cls, out_dot_general_cls, qkv_promote_dtype, "
                    "out_promote_dtype, ln_promote_dtype",
                    "",
                    "the macros compute",
                ),
                (
                    "kernel_metadata, out_kernel_metadata, bias_metadata, "
                    "out_bias_metadata, query_ln_scale_metadata, "
                    "key_ln_scale_metadata",
                    "",
                    "partition names are set: `nnx.get_partition_spec`",
                ),
                ("dropout_rate", "dropout_rate", "of the weights"),
                (
                    "broadcast_dropout",
                    "",
                    "each weight is dropped by itself: by key, head and position",
                ),
                ("deterministic", "", "`eval()` and `train()` of the module"),
            ),
            "Rotation and causal mask are part of the layer here. The call takes "
            "`(x, cos, sin)`.",
        ),
    ),
    "attention_decode": (
        Peer(
            "jax.experimental.pallas.ops.tpu.paged_attention.paged_attention",
            "attention_tkg_fwd_kernel",
            (
                ("q", "q", "`[B, N, H]` there; here one axis more, `[B, N, 1, H]`"),
                (
                    "k_pages",
                    "k_prior",
                    "`[K, pages, page_size, H]` there; here "
                    "`[pages, K, page_size, H]`, with `tp_k_prior=True`",
                ),
                ("v_pages", "v_prior", "the same"),
                ("lengths", "lengths", "how many slots count, on both sides"),
                (
                    "page_indices",
                    "active_blocks_table",
                    "`[B, pages of a sequence]` on both sides; -1 is none here",
                ),
                ("mask_value", "", "what is not seen never enters a sum"),
                ("attn_logits_soft_cap", "", ""),
                (
                    "pages_per_compute_block, megacore_mode, inline_seq_dim",
                    "",
                    "how the work is cut is the leaf's matter",
                ),
            ),
            "The new token is in its page already there; pass `k_active=None` and "
            "`v_active=None` for the same. No scale is applied on either side. "
            "`neuronjax.attention_tkg` is the same with one key head.",
        ),
    ),
    "rope": (
        Peer(
            "transformers.models.llama.modeling_llama.apply_rotary_pos_emb",
            "rope_hf",
            (
                ("q", "q", "`[B, N, S, H]` on both sides"),
                ("k", "k", "the same"),
                ("cos", "cos", "`[B, S, H]` on both sides, both halves"),
                ("sin", "sin", "the same"),
                ("position_ids", "", "not read there; choose the rows of the tables"),
                ("unsqueeze_dim", "", "1 always: heads in front of positions"),
            ),
            "`neuronjax.RoPE` takes half of each table, and the head dimension in "
            "front, `[H, B, N, S]`; pairs are the same (`contiguous_layout=True`). "
            "Meta's own checkpoints of Llama pair neighbours: "
            "`contiguous_layout=False`.",
        ),
    ),
}

"""Projections: linear layers, the feed-forward block, block-scaled products."""

from neuronjax.tools.family_pages.peers.peer import Peer

_TORCH_WEIGHT = "`[out, in]` there: transpose it"
_ACTIVATIONS = (
    "Activations: `jax.nn.silu`, `torch.nn.functional.silu` and the checkpoints' "
    '`"silu"` are `SiLU`; `jax.nn.gelu(approximate=False)`, '
    '`torch.nn.functional.gelu` and `"gelu"` are `GELU`; `jax.nn.gelu`, whose default '
    'is the approximation, and `"gelu_pytorch_tanh"` are `GELU_Tanh_Approx`; '
    '`"quick_gelu"` is `Swish`, `x * sigmoid(1.702 x)`.'
)
_LAYER = (
    ("in_features", "d_in", ""),
    ("out_features", "d_out", ""),
    ("use_bias", "bias", ""),
    ("dtype", "dtype", ""),
    ("param_dtype", "param_dtype", ""),
    ("rngs", "rngs", ""),
    ("precision", "", "`jax.default_matmul_precision`"),
    ("kernel_init, bias_init", "", "the same: `lecun_normal`, and zeros"),
    ("dot_general, promote_dtype", "", "the macro multiplies"),
    ("preferred_element_type", "", "sums are float32, or float64"),
    ("kernel_metadata, bias_metadata", "names", "the partition names of both axes"),
)

PEERS = {
    "qkv": (
        Peer(
            "transformers LlamaDecoderLayer",
            "qkv",
            (
                ("input_layernorm.weight", "gamma_norm_weights", "as `[1, H]`"),
                (
                    "self_attn.q_proj.weight, self_attn.k_proj.weight, "
                    "self_attn.v_proj.weight",
                    "fused_qkv_weights",
                    "each `[out, H]` there: transposed, side by side, in this order",
                ),
                (
                    "self_attn.q_proj.bias, self_attn.k_proj.bias, "
                    "self_attn.v_proj.bias",
                    "bias",
                    "side by side, `[1, I]`; Qwen2 has them",
                ),
            ),
            'Pass `fused_norm_type="RMS_NORM"` and `norm_eps`, the `rms_norm_eps` of '
            "the checkpoint's configuration, and for the rotation `fused_rope=True`, "
            "`cos_cache` and `sin_cache` in both halves, `num_q_heads` and "
            "`num_kv_heads`. `models.load_pretrained` does all this.",
            weights=True,
        ),
    ),
    "output_projection": (
        Peer(
            "flax.nnx.LinearGeneral.__call__",
            "output_projection_cte",
            (
                (
                    "inputs",
                    "attention",
                    "`[B, S, N, D]` there, with `axis=(-2, -1)`; here `[B, N, D, S]`",
                ),
                ("out_sharding", "", "`neuronjax.sharding.sharded_output_projection`"),
            ),
            "Its kernel `[N, D, H]` is `weight` as `[N*D, H]`, its bias `[1, H]`.",
        ),
        Peer(
            "torch.nn.functional.linear",
            "output_projection_cte",
            (
                ("input", "attention", "`[B, S, N*D]` there; here `[B, N, D, S]`"),
                ("weight", "weight", _TORCH_WEIGHT),
                ("bias", "bias", "as `[1, H]`"),
            ),
        ),
    ),
    "mlp": (
        Peer(
            "transformers LlamaDecoderLayer",
            "mlp",
            (
                (
                    "post_attention_layernorm.weight",
                    "normalization_weights_tensor",
                    "as `[1, H]`",
                ),
                ("mlp.gate_proj.weight", "gate_proj_weights_tensor", _TORCH_WEIGHT),
                ("mlp.up_proj.weight", "up_proj_weights_tensor", _TORCH_WEIGHT),
                ("mlp.down_proj.weight", "down_proj_weights_tensor", _TORCH_WEIGHT),
            ),
            _ACTIVATIONS,
            weights=True,
        ),
        Peer(
            "tokamax.gated_linear_unit",
            "mlp",
            (
                ("x", "hidden_tensor", "`[B, S, H]` or `[T, H]`"),
                (
                    "weights",
                    "gate_proj_weights_tensor, up_proj_weights_tensor",
                    "`[H, 2, I]` or a pair there, the gate first",
                ),
                ("activation", "activation_fn", "a function there, a name here"),
                ("precision", "", "`jax.default_matmul_precision`"),
                ("implementation", "", "the macro is chosen by tiles or tensors"),
            ),
            "It stops in front of the down projection.",
        ),
    ),
    "fused_linear": (
        Peer("flax.nnx.Linear", "nn.FusedLinear", _LAYER),
        Peer(
            "torch.nn.functional.linear",
            "fused_linear",
            (
                ("input", "x", ""),
                ("weight", "w", _TORCH_WEIGHT),
                ("bias", "bias", ""),
            ),
            _ACTIVATIONS,
        ),
    ),
    "mx": (
        Peer(
            "jax.nn.scaled_matmul",
            "mx_matmul",
            (
                (
                    "lhs",
                    "stationary",
                    "`[B, M, K]` there, contracted over its last axis; here packed "
                    "containers `[P, I]`, contracted over `P` and the four in each",
                ),
                ("rhs", "moving", "`[B, N, K]` there; here `[P, J]`"),
                (
                    "lhs_scales",
                    "stationary_scale",
                    "float8_e8m0fnu `[B, M, K/32]` there; here its bits in uint8, "
                    "`[P/8, I]`",
                ),
                ("rhs_scales", "moving_scale", "the same"),
                ("preferred_element_type", "", "float32"),
            ),
            "`neuronjax.unpack_mx` gives the codes of a container apart.",
        ),
    ),
}

"""Norms, reductions, and running sums."""

from neuronjax.tools.family_pages.peers.peer import Peer

_FLAX = (
    ("num_features", "d_model", ""),
    ("epsilon", "eps", "1e-6 by default on both sides"),
    ("dtype", "dtype", ""),
    ("param_dtype", "param_dtype", ""),
    ("rngs", "rngs", ""),
    ("use_scale", "", "always; `scale=None` of the function leaves it out"),
    ("scale_init", "", "ones"),
    ("reduction_axes, feature_axes", "", "the last axis"),
    (
        "axis_name, axis_index_groups",
        "",
        "a row lies on one device; `shard_map` divides the rows",
    ),
    ("use_fast_variance", "", "the mean is subtracted first"),
    ("promote_dtype", "", "statistics are float32, or float64"),
    ("scale_metadata", "", "partition names are set: `nnx.get_partition_spec`"),
)

PEERS = {
    "reduce": (
        Peer("flax.nnx.RMSNorm", "nn.RMSNorm", _FLAX),
        Peer(
            "flax.nnx.LayerNorm",
            "nn.LayerNorm",
            (
                *_FLAX,
                ("use_bias", "bias", "True by default on both sides"),
                ("bias_init", "", "zeros"),
                ("bias_metadata", "", "as `scale_metadata`"),
            ),
        ),
        Peer(
            "torch.nn.functional.rms_norm",
            "rms_norm",
            (
                ("input", "x", ""),
                ("normalized_shape", "", "the last axis"),
                ("weight", "scale", ""),
                (
                    "eps",
                    "eps",
                    "None there is the dtype's spacing at 1; 1e-6 by default here",
                ),
            ),
        ),
        Peer(
            "torch.nn.functional.layer_norm",
            "layer_norm",
            (
                ("input", "x", ""),
                ("normalized_shape", "", "the last axis"),
                ("weight", "scale", ""),
                ("bias", "bias", ""),
                ("eps", "eps", "1e-5 by default there, 1e-6 here"),
            ),
        ),
        Peer(
            "transformers.models.llama.modeling_llama.LlamaRMSNorm",
            "rms_norm",
            (
                ("hidden_size", "scale", "its length"),
                ("eps", "eps", ""),
            ),
            "It rounds to the input's dtype in front of the gain: "
            "`cast_before_scale=True`. Gemma stores the gain minus one: `offset=1.0`.",
        ),
        Peer(
            "tokamax.layer_norm",
            "layer_norm",
            (
                ("x", "x", ""),
                ("scale", "scale", ""),
                ("offset", "bias", "not `offset` of `rms_norm`"),
                ("axis", "", "the last one"),
                ("epsilon", "eps", "1e-6 by default on both sides"),
                ("scale_offset", "rms_norm.offset", "added to the gain"),
                ("subtract_mean", "", "False is `rms_norm`"),
                ("implementation", "", ""),
            ),
        ),
        Peer(
            "jax.nn.standardize",
            "layer_norm",
            (
                ("x", "x", ""),
                ("axis", "", "the last one"),
                ("epsilon", "eps", "1e-5 by default there, 1e-6 here"),
                ("mean, variance", "", "always those of the row"),
                (
                    "where",
                    "rms_norm.hidden_actual",
                    "columns that count, from the left",
                ),
                ("algorithm", "", "the mean is subtracted first"),
            ),
            "Pass `scale=None`.",
        ),
    ),
    "cumsum": (
        Peer(
            "jax.lax.cumsum",
            "cumsum",
            (
                ("operand", "x", ""),
                ("axis", "axis", "0 by default there; here the last one alone"),
                ("reverse", "", "`jnp.flip` both sides"),
            ),
            "Sums are float32 here and rounded once.",
        ),
        Peer(
            "jax.numpy.cumsum",
            "cumsum",
            (
                ("a", "x", ""),
                ("axis", "axis", "None flattens there; here the last one alone"),
                ("dtype", "", "that of `x`"),
                ("out", "", ""),
            ),
        ),
        Peer(
            "torch.cumsum",
            "cumsum",
            (
                ("input", "x", ""),
                ("dim", "axis", "the last one alone"),
                ("dtype", "", "that of `x`"),
                ("out", "", ""),
            ),
        ),
    ),
}

"""Convolutions, transposes, top-k and index lists."""

from neuronjax.tools.family_pages.peers.peer import Peer

PEERS = {
    "conv": (
        Peer(
            "jax.lax.conv_general_dilated",
            "conv1d",
            (
                ("lhs", "x_in", "`[B, C_in, L]`, which is `NCH` there"),
                ("rhs", "filters", "`[K, C_in, C_out]`, which is `HIO` there"),
                ("window_strides", "stride", "a sequence there, one number here"),
                ("padding", "padding", "`[(left, right)]` there; no words here"),
                ("rhs_dilation", "dilation", ""),
                ("lhs_dilation", "", "1"),
                (
                    "dimension_numbers",
                    "",
                    'always `("NCH", "HIO", "NCH")`; `OIH` by default there',
                ),
                (
                    "feature_group_count",
                    "",
                    "1; as many as channels: `depthwise_conv1d_implicit_gemm`",
                ),
                ("batch_group_count", "", "1"),
                ("precision", "", "`jax.default_matmul_precision`"),
                ("preferred_element_type", "", "sums are float32, or float64"),
                ("out_sharding", "", "`neuronjax.sharding.sharded_conv1d`"),
            ),
            "No tap is flipped on either side.",
        ),
        Peer(
            "flax.nnx.Conv",
            "nn.Conv1D",
            (
                ("in_features", "channels_in", ""),
                ("out_features", "channels_out", ""),
                ("kernel_size", "taps", ""),
                ("strides", "stride", ""),
                (
                    "padding",
                    "padding",
                    '`"SAME"` by default there; here `(left, right)`, `(0, 0)` unless '
                    "given",
                ),
                ("kernel_dilation", "dilation", ""),
                ("use_bias", "bias", ""),
                ("dtype", "dtype", ""),
                ("param_dtype", "param_dtype", ""),
                ("rngs", "rngs", ""),
                ("input_dilation", "", "1"),
                ("feature_group_count", "", "1, or `nn.DepthwiseConv1D`"),
                ("mask", "", ""),
                ("precision", "", "`jax.default_matmul_precision`"),
                ("kernel_init, bias_init", "", "the same: `lecun_normal`, and zeros"),
                (
                    "conv_general_dilated, promote_dtype, preferred_element_type",
                    "",
                    "the macro convolves",
                ),
                (
                    "kernel_metadata, bias_metadata",
                    "",
                    "partition names are set: `nnx.get_partition_spec`",
                ),
            ),
            "Channels are the last axis there, axis 1 here.",
        ),
        Peer(
            "torch.nn.functional.conv1d",
            "conv1d",
            (
                ("input", "x_in", "`[B, C_in, L]` on both sides"),
                ("weight", "filters", "`[C_out, C_in, K]` there: `transpose(2, 1, 0)`"),
                ("bias", "bias", ""),
                ("stride", "stride", ""),
                ("padding", "padding", "`p` there is `(p, p)` here"),
                ("dilation", "dilation", ""),
                ("groups", "", "1; as many as channels: the depthwise one"),
            ),
        ),
    ),
    "transpose": (
        Peer(
            "jax.numpy.matrix_transpose",
            "transpose",
            (("x", "x", "at least two axes; the last two are exchanged"),),
        ),
        Peer(
            "jax.numpy.transpose",
            "transpose",
            (
                ("a", "x", ""),
                ("axes", "", "the last two alone; None reverses all there"),
            ),
        ),
    ),
    "indices": (
        Peer(
            "jax.lax.top_k",
            "topk",
            (
                ("operand", "inp", "at least two axes here"),
                ("k", "k", ""),
                ("axis", "", "the last one"),
                ("is_stable", "", "among equals the lowest index comes first"),
            ),
            newer=("is_stable",),
        ),
        Peer(
            "torch.topk",
            "topk",
            (
                ("input", "inp", ""),
                ("k", "k", ""),
                ("dim", "", "the last one"),
                ("largest", "", "True"),
                ("sorted", "sorted", "False may return the same order here"),
                ("out", "", ""),
            ),
            "Indices are int32 here unless `index_dtype` says otherwise, int64 there.",
        ),
        Peer(
            "jax.numpy.nonzero",
            "find_nonzero_indices",
            (
                ("a", "input_tensor", "`[T, C]`: each column has its own list here"),
                ("size", "", "`T`"),
                ("fill_value", "", "-1"),
            ),
        ),
    ),
}

"""Mixtures of experts: routing, grouped products, rows that come back."""

from neuronjax.tools.family_pages.peers.peer import Peer

_GROUPS = (
    "There rows are sorted by expert and a group has any number of rows. Here "
    "`neuronjax.route_to_blocks` lays tokens out in blocks of one expert, and one call "
    "is the gate, the up and the down product with the activation between them."
)
_RAGGED = (
    ("lhs", "hidden_states", "rows sorted by expert there; here in any order"),
    (
        "rhs",
        "gate_up_proj_weight, down_proj_weight",
        "`[E, K, N]` there; here `[E, H, 2, I]` and `[E, I, H]`",
    ),
    (
        "group_sizes",
        "token_position_to_id, block_to_expert",
        "`neuronjax.expert_counts` gives the sizes of the groups",
    ),
    ("preferred_element_type", "compute_dtype", "sums are float32, or float64"),
    (
        "group_offset",
        "",
        "experts over devices: `neuronjax.sharding.expert_parallel_moe`",
    ),
)
_EXPERTS = (
    (
        "mlp.experts.gate_up_proj",
        "gate_up_proj_weight",
        "`[E, 2*I, H]` there: `w.reshape(E, 2, I, H).transpose(0, 3, 1, 2)`",
    ),
    (
        "mlp.experts.down_proj",
        "down_proj_weight",
        "`[E, H, I]` there: swap the last two",
    ),
)

PEERS = {
    "router_topk": (
        Peer(
            "jax.lax.top_k",
            "router_topk",
            (
                ("operand", "x, w", "the logits there; here their factors"),
                ("k", "k", ""),
                ("axis", "", "experts are the last axis"),
                ("is_stable", "", "among equals the lowest index comes first"),
            ),
            "`neuronjax.topk` is the plain top-k.",
            newer=("is_stable",),
        ),
        Peer(
            "transformers MixtralSparseMoeBlock, Qwen3MoeSparseMoeBlock",
            "router_topk",
            (
                ("gate.weight", "w", "`[E, H]` there: transpose it"),
                ("num_experts_per_tok", "k", ""),
                (
                    "norm_topk_prob",
                    "norm_topk_prob",
                    'with `act_fn="SOFTMAX"`; Mixtral has it always',
                ),
            ),
            weights=True,
        ),
    ),
    "blockwise_mm": (
        Peer(
            "jax.lax.ragged_dot",
            "moe_cte",
            (
                *_RAGGED,
                ("precision", "", "`jax.default_matmul_precision`"),
                ("out_sharding", "", "`neuronjax.sharding.sharded_moe_cte`"),
            ),
            _GROUPS,
        ),
        Peer(
            "tokamax.ragged_dot",
            "moe_cte",
            (
                *_RAGGED,
                ("precision", "", "`jax.default_matmul_precision`"),
                ("activation", "activation_function", "a function there, a name here"),
                ("implementation", "spec", "all compute the same"),
            ),
        ),
        Peer(
            "jax.experimental.pallas.ops.tpu.megablox.gmm",
            "moe_cte",
            (
                *_RAGGED,
                ("tiling", "block_size", "rows of a block; the rest is the leaf's"),
                ("existing_out", "", "nothing is added to"),
                ("transpose_rhs", "", ""),
                ("interpret", "", "`neuronjax.plain()`"),
            ),
        ),
        Peer(
            "torch.nn.functional.grouped_mm",
            "moe_cte",
            (
                ("mat_a", "hidden_states", "rows sorted by expert there"),
                ("mat_b", "gate_up_proj_weight, down_proj_weight", "`[E, K, N]` there"),
                (
                    "offs",
                    "token_position_to_id, block_to_expert",
                    "where the groups end there",
                ),
                ("bias", "gate_and_up_proj_bias, down_proj_bias", ""),
                ("out_dtype", "compute_dtype", ""),
            ),
        ),
        Peer(
            "transformers Qwen3MoeDecoderLayer",
            "moe_cte",
            _EXPERTS,
            "Checkpoints on disk have `mlp.experts.E.gate_proj.weight`, `up_proj` and "
            "`down_proj`, `[out, in]`, one expert each; `models.load_pretrained` "
            "stacks them.",
            weights=True,
        ),
    ),
    "expert_mlps": (
        Peer(
            "transformers Qwen3MoeDecoderLayer",
            "moe_tkg",
            (
                (
                    "mlp.experts.gate_up_proj",
                    "expert_gate_up_weights",
                    _EXPERTS[0][2],
                ),
                ("mlp.experts.down_proj", "expert_down_weights", _EXPERTS[1][2]),
            ),
            weights=True,
        ),
    ),
    "topk_reduce": (
        Peer(
            "jax.ops.segment_sum",
            "topk_reduce",
            (
                ("data", "input", "the first `H` columns"),
                ("segment_ids", "input", "the bits of the last two columns"),
                ("num_segments", "T", ""),
                (
                    "indices_are_sorted, unique_indices, bucket_size, mode",
                    "",
                    "rows come in any order; an index that is no token is not read",
                ),
                ("out_sharding", "", "`jax.shard_map` divides the columns"),
            ),
        ),
    ),
}

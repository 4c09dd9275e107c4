"""Whole decoders, by the names of their checkpoints' weights."""

from neuronjax.tools.family_pages.peers.peer import Peer

_T = "transposed, `[in, out]`"
_ROWS = (
    (
        "self_attn.q_proj.weight, self_attn.k_proj.weight, self_attn.v_proj.weight",
        "W_qkvs",
        f"{_T}, side by side in the order that the docstring names",
    ),
    ("self_attn.o_proj.weight", "W_outs", _T),
    ("mlp.gate_proj.weight", "W_gates", _T),
    ("mlp.up_proj.weight", "W_ups", _T),
    ("mlp.down_proj.weight", "W_downs", _T),
    ("input_layernorm.weight", "W_gamma_qkvs", "as `[1, H]`"),
    ("post_attention_layernorm.weight", "W_gamma_mlps", "as `[1, H]`"),
)
_NOTE = (
    "One entry a layer. Embedding, last norm and head are not part of the macro; "
    "`models.Llama` has them."
)

PEERS = {
    "llama3_transformer": (
        Peer(
            "transformers LlamaModel", "llama3_transformer", _ROWS, _NOTE, weights=True
        ),
    ),
    "transformer_tkg": (
        Peer("transformers LlamaModel", "transformer_tkg", _ROWS, _NOTE, weights=True),
    ),
}

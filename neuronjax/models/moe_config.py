"""The shape of a decoder whose layers are mixtures of experts."""

import dataclasses
from typing import Any

from neuronjax.models.config import DecoderConfig

# Mixtral 8x7B: Jiang et al. 2024, https://arxiv.org/abs/2401.04088, table 1.
_MIXTRAL: dict[str, Any] = dict(
    vocab_size=32000,
    d_model=4096,
    d_ff=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rope_theta=1e6,
    norm_eps=1e-5,
    max_seq=32768,
    bos_id=1,
    eos_ids=(2,),
    num_experts=8,
    experts_per_token=2,
)
# Qwen3-30B-A3B: Yang et al. 2025, https://arxiv.org/abs/2505.09388, table 2.
_QWEN3: dict[str, Any] = dict(
    vocab_size=151936,
    d_model=2048,
    d_ff=768,
    num_layers=48,
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    rope_theta=1e6,
    norm_eps=1e-6,
    max_seq=40960,
    eos_ids=(151645,),
    num_experts=128,
    experts_per_token=8,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig(DecoderConfig):
    """Sizes and constants of a decoder of experts; hashable.

    `d_ff` is the width of one expert. The fields that it shares with a dense decoder
    are those of `LlamaConfig`.

    Attributes:
        num_experts: experts of a layer.
        experts_per_token: how many of them a token gets.
        shared_d_ff: width of an expert that every token has besides; 0 for none.
        norm_topk_prob: the weights of a token's experts sum to 1.
        act_fn: `"SOFTMAX"` or `"SIGMOID"`: what turns the router's logits into weights.
        activation: of the gate: `"SiLU"`, `"GELU"`, `"GELU_Tanh_Approx"` or `"Swish"`.
        block_size: slots of a block; unless named it follows the number of tokens.
        checkpoint: `"store"`, or `"recompute"` to save memory in training.
    """

    num_experts: int
    experts_per_token: int
    shared_d_ff: int = 0
    norm_topk_prob: bool = True
    act_fn: str = "SOFTMAX"
    activation: str = "SiLU"
    block_size: int | None = None
    checkpoint: str = "store"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise ValueError(
                "MoEConfig: experts_per_token must lie between 1 and num_experts = "
                f"{self.num_experts}, got {self.experts_per_token}"
            )
        if self.shared_d_ff < 0:
            raise ValueError(
                f"MoEConfig: shared_d_ff must be at least 0, got {self.shared_d_ff}"
            )

    @classmethod
    def mixtral(cls, **changes: Any) -> "MoEConfig":
        """The sizes of Mixtral 8x7B: 8 wide experts, 2 a token.

        Args:
            **changes: fields with another value.
        """
        return cls(**(_MIXTRAL | changes))

    @classmethod
    def qwen3_moe(cls, **changes: Any) -> "MoEConfig":
        """The sizes of Qwen3-30B-A3B: 128 narrow experts, 8 a token.

        Qwen3 also normalizes each head's queries and keys, which `nn.Attention` does
        not.

        Args:
            **changes: fields with another value.
        """
        return cls(**(_QWEN3 | changes))

"""A decoder whose layers are mixtures of experts.

Jiang et al. 2024, https://arxiv.org/abs/2401.04088: a Llama decoder with experts in the
place of its feed-forward blocks.
"""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from neuronjax.models.llama import Llama
from neuronjax.models.moe_config import MoEConfig
from neuronjax.nn.moe import MoEDecoderLayer


class MoELM(Llama):
    """A decoder of experts: `Llama` with `nn.MoE` for its `nn.MLP`.

    Prefill, decoding and `generate` are those of `Llama`. No token is ever dropped, so
    decoding one by one gives what a whole sequence gives. Whole sequences and prefill
    emit `BlockwiseMM`, decoding `ExpertMLPs`.

    Args:
        config: its sizes, a `MoEConfig`.
        scan_layers: as for `Llama`.
        dtype: dtype of the computation; `None` keeps that of the parameters.
        param_dtype: dtype of the parameters.
        rngs: where the initial values come from.
    """

    config: MoEConfig

    @staticmethod
    def new_layer(config: Any, rngs: nnx.Rngs, types: dict[str, Any]):
        """One layer with its initial values."""
        return MoEDecoderLayer(
            config.d_model,
            config.d_ff,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.num_experts,
            config.experts_per_token,
            shared_d_ff=config.shared_d_ff,
            norm_topk_prob=config.norm_topk_prob,
            norm_eps=config.norm_eps,
            rngs=rngs,
            **types,
        )

    def with_balance(
        self, tokens: Int[Array, "batch seq"]
    ) -> tuple[Float[Array, "batch seq vocab"], Float[Array, ""]]:
        """Logits as by a call, and the mean load-balance loss of the layers.

        In training a small part of it (0.01 in Switch Transformers) is added to the
        loss. An even load of every layer gives 1.

        Args:
            tokens: `[batch, seq]`; position 0 is the first column.
        """
        x, cos, sin = self._embed(tokens, jnp.zeros(tokens.shape[0], jnp.int32))
        if self.scan_layers:
            graph, state = nnx.split(self.layers)
            x, losses = lax.scan(
                lambda x, layer: nnx.merge(graph, layer).with_balance(x, cos, sin),
                x,
                state,
            )
            return self._logits(x), jnp.mean(losses)
        losses = []
        for layer in self.layers:
            x, loss = layer.with_balance(x, cos, sin)
            losses.append(loss)
        return self._logits(x), jnp.mean(jnp.stack(losses))

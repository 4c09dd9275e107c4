"""A decoder whose layers are mixtures of experts.

Jiang et al. 2024, https://arxiv.org/abs/2401.04088: a Llama decoder with experts in the
place of its feed-forward blocks.
"""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from neuronjax.models.llama import Llama
from neuronjax.models.moe_config import MoEConfig
from neuronjax.nn.moe_decoder_layer import MoEDecoderLayer


class MoELM(Llama):
    r"""A decoder of experts: `Llama` with `nn.MoE` for its `nn.MLP`.

    $$h = x + \mathrm{Attention}(x), \qquad x \leftarrow h + \mathrm{MoE}(h)$$

    in each layer. Prefill, decoding and `generate` are those of `Llama`. No token is
    ever dropped, so decoding one by one gives what a whole sequence gives. Whole
    sequences and prefill emit `BlockwiseMM`, decoding `ExpertMLPs`; over a mesh all
    emit `BlockwiseMM`.

    Args:
        config: its sizes, a `MoEConfig`.
        scan_layers: as for `Llama`.
        mesh: devices that share the tokens and experts of each layer, as in `nn.MoE`.
        axis: the mesh axis that splits them.
        batch: a mesh axis that splits tokens too, each part with all experts.
        dtype: dtype of the computation; `None` keeps that of the parameters.
        param_dtype: dtype of the parameters.
        rngs: where the initial values come from.

    Source:
        Jiang et al. 2024, https://arxiv.org/abs/2401.04088, section 2.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> sizes = dict(vocab_size=9, d_model=8, d_ff=6, num_layers=1, num_heads=2,
        ...              num_kv_heads=1, head_dim=4)
        >>> config = MoEConfig(**sizes, num_experts=4, experts_per_token=2)
        >>> MoELM(config, rngs=nnx.Rngs(0))(jnp.array([[1, 2, 3]])).shape
        (1, 3, 9)
    """

    config: MoEConfig

    def __init__(
        self,
        config: MoEConfig,
        *,
        scan_layers: bool = False,
        mesh: Mesh | None = None,
        axis: str = "expert",
        batch: str | None = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.mesh, self.axis, self.batch = mesh, axis, batch
        types: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype)
        super().__init__(config, scan_layers=scan_layers, **types, rngs=rngs)

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
            act_fn=config.act_fn,
            activation=config.activation,
            block_size=config.block_size,
            checkpoint=config.checkpoint,
            norm_eps=config.norm_eps,
            rngs=rngs,
            **types,
        )

    def _layers(self, scan_layers: bool, rngs: nnx.Rngs, types: dict[str, Any]):
        over = dict(mesh=self.mesh, axis=self.axis, batch=self.batch)
        return super()._layers(scan_layers, rngs, types | over)

    def with_balance(
        self, tokens: Int[Array, "batch seq"]
    ) -> tuple[Float[Array, "batch seq vocab"], Float[Array, ""]]:
        """Logits as by a call, and the mean load-balance loss of the layers.

        In training a small part of it (0.01 in Switch Transformers) is added to the
        loss. An even load of every layer gives 1.

        Args:
            tokens: `[batch, seq]`; position 0 is the first column.
        """
        x, loss = self.hidden_with_balance(tokens)
        return self._scores(x), loss

    def hidden_with_balance(
        self, tokens: Int[Array, "batch seq"]
    ) -> tuple[Float[Array, "batch seq d_model"], Float[Array, ""]]:
        """The same before the output projection; see `Llama.hidden`.

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
            return self._finished(x), jnp.mean(losses)
        losses = []
        for layer in self.layers:
            x, loss = layer.with_balance(x, cos, sin)
            losses.append(loss)
        return self._finished(x), jnp.mean(jnp.stack(losses))

"""The key/value cache of a whole decoder."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from neuronjax.models.config import DecoderConfig
from neuronjax.nn.cache import LayerCache


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """What a decoder remembers of the tokens so far; it donates cleanly.

    Attributes:
        layers: one `LayerCache` a layer, or a single one with a leading layer axis.
        lengths: `[batch]`, how many slots of each row are filled.
    """

    layers: tuple[LayerCache, ...] | LayerCache
    lengths: Int[Array, " batch"]

    @classmethod
    def zeros(
        cls,
        config: DecoderConfig,
        batch: int,
        slots: int,
        *,
        dtype: Any = jnp.float32,
        stacked: bool = False,
    ) -> "Cache":
        """An empty cache of `slots` tokens a row."""
        sizes = (batch, config.num_kv_heads, config.head_dim, slots, dtype)
        layers = tuple(LayerCache.zeros(*sizes) for _ in range(config.num_layers))
        if stacked:
            layers = jax.tree.map(lambda *rows: jnp.stack(rows), *layers)
        return cls(layers, jnp.zeros(batch, jnp.int32))

    @property
    def slots(self) -> int:
        """How many tokens a row can hold."""
        last = self.layers[-1] if isinstance(self.layers, tuple) else self.layers
        return last.key.shape[-1]
